"""A run made of weights that somebody else trained, so that everything a run can do can be done with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plateaux.config.builders.data import data_of
from plateaux.config.builders.model import network
from plateaux.config.components import NOTHING_GIVEN, Given
from plateaux.config.recipe import Recipe
from plateaux.core.errors import RecipeError
from plateaux.core.types import TensorTree
from plateaux.data.sources import describe_data
from plateaux.models.surgery import load_weights
from plateaux.storage.run import Progress, Run


def adopt(out: str | Path, recipe: Recipe, files: Sequence[str], *, given: Given = NOTHING_GIVEN) -> Run:
    """Make a run of weight files, `FILE` or `FILE:prefix` each; every one is checked against its model first."""
    if len(files) != recipe.members:
        raise RecipeError(f"{len(files)} weight files for {recipe.members} members: give one for each")
    data = data_of(recipe, given)
    modules = []
    for number, given_file in enumerate(files):
        module = network(recipe, data, number, given)
        file, prefix = split_file(given_file)
        load_weights(module, file, prefix)
        modules.append(module)
    run = Run.begin(out, recipe, {"data": describe_data(data), "adopted": list(files)})
    keep_weights(run, [module.state_dict() for module in modules], [f"adopted from {file}" for file in files])
    return run


def keep_weights(run: Run, trees: Sequence[TensorTree], words: Sequence[str]) -> None:
    """Make members of finished weights; the words say where they are from."""
    for number, (tree, origin) in enumerate(zip(trees, words, strict=True)):
        with run.lock(number):
            name = run.put_weights(number, tree, epoch=0)
            done = Progress(epoch=run.recipe.train.epochs, finished=True, weights=name, weights_from=origin)
            run.commit(number, done)


def split_file(given: str) -> tuple[str, str]:
    """Return file and prefix of `FILE[:prefix]`; a colon inside an existing file's name is part of it."""
    if Path(given).exists() or ":" not in given:
        return given, ""
    file, _, prefix = given.rpartition(":")
    return file, prefix
