"""Recipes that come with the package, by name."""

from __future__ import annotations

from pathlib import Path

from plateaux.errors import RecipeError, nearest


def recipe_file(given: str) -> Path:
    """Return the file a recipe is read from: a path, or the name of a recipe that comes with the package."""
    if Path(given).is_file():
        return Path(given)
    found = {file.stem: file for folder in _folders() for file in folder.rglob("*.toml")}
    stem = Path(given).stem
    if given in (stem, f"{stem}.toml") and stem in found:
        return found[stem]
    raise RecipeError(f"There is no recipe file {given!r}, and none of that name comes along; {nearest(stem, found)}")


def _folders() -> list[Path]:
    here = Path(__file__).resolve().parent
    return [folder for folder in (here / "recipes", here.parents[1] / "recipes") if folder.is_dir()]
