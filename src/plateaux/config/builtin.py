"""The built-in recipes, by name."""

from __future__ import annotations

from pathlib import Path

from plateaux.core.errors import RecipeError, suggest


def recipe_file(path: str) -> Path:
    """Return the file of a recipe: an existing path, or the name of a built-in recipe."""
    if Path(path).is_file():
        return Path(path)
    files = builtin_recipes()
    name = path.removesuffix(".toml").removeprefix("papers/")
    if name in files:
        return files[name]
    raise RecipeError(f"There is no recipe file and no built-in recipe {path!r}; {suggest(name, files)}")


def builtin_recipes() -> dict[str, Path]:
    """Return the files of the built-in recipes by name."""
    return {file.stem: file for folder in _folders() for file in sorted(folder.rglob("*.toml"))}


def _folders() -> list[Path]:
    package = Path(__file__).resolve().parents[1]
    return [folder for folder in (package / "recipes", package.parents[1] / "recipes") if folder.is_dir()]
