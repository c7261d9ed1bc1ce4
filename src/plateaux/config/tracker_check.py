"""Check the trackers of a recipe without importing them: their names, their packages, and the consent of the user."""

from __future__ import annotations

from importlib.util import find_spec

from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.recipe import Recipe
from plateaux.core.errors import RecipeError, UnknownNameError, UntrustedCodeError, suggest
from plateaux.core.registry import is_on_path
from plateaux.core.tracker import BUILT_IN


def tracker_target(name: str) -> str:
    """Return the module and the class of a tracker, as `module:class`."""
    return BUILT_IN[name].target if name in BUILT_IN else name


def check_trackers(recipe: Recipe, components: Components = NO_COMPONENTS) -> None:
    """Raise an error if a tracker does not exist, is not installed, or needs the consent of the user.

    Trackers send the recipe and its numbers to a server, or are code of their own. An untrusted recipe can name them.
    """
    names = recipe.run.trackers
    if len(set(names)) < len(names):
        raise RecipeError(f"run.trackers = {list(names)} names a tracker twice")
    for name in names:
        if name in BUILT_IN:
            _check_built_in(name, components)
        else:
            _check_external(name, components)


def _check_built_in(name: str, components: Components) -> None:
    tracker = BUILT_IN[name]
    if tracker.connects and name not in components.trust:
        raise UntrustedCodeError(
            f"The recipe sends its settings and results to {name} (run.trackers). If that is what you want, add: "
            f"--trust {name} (in Python: trust=[{name!r}]). Otherwise remove it from run.trackers"
        )
    if find_spec(tracker.package) is None:
        raise RecipeError(
            f'The tracker {name!r} is not installed; run: pip install "plateaux[{name}]", or remove it from '
            "run.trackers"
        )


def _check_external(name: str, components: Components) -> None:
    module, colon, attribute = name.partition(":")
    if not colon or not attribute:
        raise UnknownNameError(
            f"There is no tracker called {name!r}; {suggest(name, [*BUILT_IN, 'package.module:Class'])}"
        )
    if module not in components.trust:
        raise UntrustedCodeError(
            f"The tracker {name!r} is code outside of Plateaux, so a recipe cannot start it. If you trust the code, "
            f"add: --trust {module} (in Python: trust=[{module!r}])"
        )
    if not is_on_path(module):
        raise UnknownNameError(
            f"There is no module {module!r} on the Python path, so the tracker {name!r} cannot be imported. "
            "If the module is in the current folder, run: PYTHONPATH=. plateaux ..."
        )
