"""The exceptions of Plateaux.

    PlateauxError
    ├── RecipeError (ValueError)            a recipe is invalid
    │   └── UnknownNameError (KeyError)     there is no plug-in of that name; the message suggests close names
    ├── DataError                           a data set is missing, damaged, or not the expected one
    ├── RunError                            a run folder cannot be used: other recipe, newer format, or locked
    │   └── StorageError (OSError)          the disk is full, or a file cannot be read or written
    ├── DivergedError                       a loss became NaN or infinite
    ├── TrainingLoopError (RuntimeError)    a custom training loop uses an optimizer in a way that is not SAM
    ├── UntrustedCodeError                  a recipe names code that is neither a plug-in nor trusted
    └── Interrupted                         the work was stopped on request, with a checkpoint

Every message says what was given, what is allowed, and what to do next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches


class PlateauxError(Exception):
    """The base class of all exceptions that Plateaux raises deliberately."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__


class RecipeError(PlateauxError, ValueError):
    """A recipe is invalid."""


class UnknownNameError(RecipeError, KeyError):
    """No plug-in is registered under that name."""


class DataError(PlateauxError):
    """A data set is missing, damaged, or not the expected one."""


class RunError(PlateauxError):
    """A run folder cannot be used for this request."""


class StorageError(RunError, OSError):
    """The disk is full, or a file cannot be read or written."""


class DivergedError(PlateauxError):
    """The loss of a member became NaN or infinite."""


class TrainingLoopError(PlateauxError, RuntimeError):
    """A custom training loop uses an optimizer in a way that would not train as requested."""


class UntrustedCodeError(PlateauxError):
    """A recipe names code that is neither marked as a plug-in nor trusted by name."""


class Interrupted(PlateauxError):
    """The work was stopped on request, after writing a checkpoint."""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message without the final period; its class name if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def suggest(name: str, allowed: Iterable[str]) -> str:
    """Return a sentence with the allowed names that are close to `name`, or with all of them."""
    names = sorted(allowed)
    close = get_close_matches(name, names, n=3, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(repr(n) for n in close) + "?"
    return "allowed: " + ", ".join(names) if names else "there are none"


def check_names(what: str, given: Iterable[str], allowed: Collection[str]) -> None:
    """Raise an error for a setting that does not exist."""
    for name in given:
        if name not in allowed:
            raise RecipeError(f"{what} has no setting {name!r}; {suggest(name, allowed)}")
