"""Recipes by name: those of Plateaux and of installed packages."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from plateaux.core.errors import RecipeError, suggest


def recipe_file(path: str) -> Path:
    """Return the file of a recipe: an existing path, or the name of a built-in recipe."""
    if Path(path).is_file():
        return Path(path)
    files = builtin_recipes()
    name = path.removesuffix(".toml")
    if name in files:
        return files[name]
    raise RecipeError(f"There is no recipe file and no built-in recipe {path!r}; {suggest(name, files)}")


def builtin_recipes() -> dict[str, Path]:
    """Return the files of the built-in recipes by name."""
    return {file.stem: file for folder in _folders() for file in sorted(folder.rglob("*.toml"))}


def _folders() -> list[Path]:
    package = Path(__file__).resolve().parents[1]
    own = [folder for folder in (package / "recipes", package.parents[1] / "recipes") if folder.is_dir()]
    return [*folders_of_packages("recipes"), *own]  # of recipes with one name the last counts: that of Plateaux


def folders_of_packages(kind: str) -> list[Path]:
    """Return the folders with recipes or studies of installed packages.

    An entry point of the group `plateaux.files` with the name `recipes` or `studies` has a sequence of folders as
    its value.
    """
    folders: list[Path] = []
    for point in entry_points(group="plateaux.files", name=kind):
        try:
            folders += map(Path, point.load())
        except Exception as problem:
            source = point.dist.name if point.dist else point.value
            raise RecipeError(f"Cannot load the {kind} of {source}: {problem!r}; update or uninstall it") from None
    return folders
