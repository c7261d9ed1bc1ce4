"""Recipes that come with the package, by name."""

from __future__ import annotations

from pathlib import Path

from plateaux.core.errors import RecipeError, suggest


def recipe_file(given: str) -> Path:
    """Return the file a recipe is read from: a path, or the name of a recipe that comes with the package."""
    if Path(given).is_file():
        return Path(given)
    found = builtin_recipes()
    name = given.removesuffix(".toml").removeprefix("papers/")
    if name in found:
        return found[name]
    raise RecipeError(f"There is no recipe file {given!r}, and none of that name comes along; {suggest(name, found)}")


def builtin_recipes() -> dict[str, Path]:
    """Return the recipes that come along, by name."""
    return {file.stem: file for folder in _folders() for file in sorted(folder.rglob("*.toml"))}


def _folders() -> list[Path]:
    here = Path(__file__).resolve().parents[1]
    return [folder for folder in (here / "recipes", here.parents[1] / "recipes") if folder.is_dir()]
