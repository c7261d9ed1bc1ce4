"""The built-in studies, by name or by a table or figure that they produce."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from plateaux.config.builtin_recipes import folders_of_packages
from plateaux.config.toml import parse_toml, read_text
from plateaux.core.errors import RecipeError, suggest


def study_file(path: str) -> Path:
    """Return the file of a study: an existing path, the name of a built-in study, or of one of its tables or figures.

    `lu2024_table2` finds the study of the same paper that lists "Table 2" among its products.
    """
    if Path(path).is_file() or "/" in path:
        return Path(path)
    files, name = builtin_studies(), path.removesuffix(".toml")
    if name in files:
        return files[name]
    if name in (products := _files_by_product()):
        return products[name]
    known = sorted({*files, *products})
    raise RecipeError(f"There is no study file and no built-in study {path!r}; {suggest(name, known)}")


def builtin_studies() -> dict[str, Path]:
    """Return the files of the built-in studies by name."""
    return {file.stem: file for folder in folders_of_packages("studies") for file in sorted(folder.rglob("*.toml"))}


def product_name(paper: str, product: str) -> str:
    """Return the name of a table or figure of a paper.

    >>> product_name("lu2024", "Figure 7")
    'lu2024_figure7'
    """
    return f"{paper}_{re.sub(r'[^a-z0-9]+', '', product.lower())}"


@cache
def _files_by_product() -> dict[str, Path]:
    products: dict[str, Path] = {}
    for name, file in builtin_studies().items():
        tree = parse_toml(read_text(file, "study"), str(file))
        for product in tree.get("produces", ()):
            products.setdefault(product_name(name.partition("_")[0], str(product)), file)
    return products
