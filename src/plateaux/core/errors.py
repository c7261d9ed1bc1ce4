"""What can go wrong for a user, as a tree of exceptions.

    PlateauxError
    ├── RecipeError (ValueError)      a recipe says something that cannot be carried out
    │   └── UnknownName (KeyError)    no plug-in of that name; the nearest names are in the message
    ├── DataError                     a data set is missing, damaged, or not what was promised
    ├── RunError                      the run folder cannot serve: other recipe, newer format, held by another process
    │   └── StorageError (OSError)    the disk is full, a file cannot be read or written
    ├── Diverged                      a loss stopped being a number
    ├── NotAllowed                    a recipe names code that nobody marked or allowed
    └── Stopped                       the work ended early on request, with a checkpoint

Every message says what was given, what is allowed, and what to do next.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class PlateauxError(Exception):
    """The root of everything Plateaux raises on purpose."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__


class RecipeError(PlateauxError, ValueError):
    """A recipe says something that cannot be carried out."""


class UnknownNameError(RecipeError, KeyError):
    """No plug-in is registered under that name."""


class DataError(PlateauxError):
    """A data set is missing, damaged, or not what was promised."""


class RunError(PlateauxError):
    """The run folder cannot serve this request."""


class StorageError(RunError, OSError):
    """Storage refused: full, unreadable or unwritable."""


class DivergedError(PlateauxError):
    """A member's loss stopped being a number."""


class UntrustedCodeError(PlateauxError):
    """A recipe names code that is neither marked as a plug-in nor allowed by name."""


class Interrupted(PlateauxError):
    """The work ended early on request; a checkpoint was written first."""


def suggest(name: str, allowed: Iterable[str]) -> str:
    """Say which allowed names come close, or list them all."""
    names = sorted(allowed)
    close = get_close_matches(name, names, n=3, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(repr(n) for n in close) + "?"
    return "allowed: " + ", ".join(names) if names else "there are none"
