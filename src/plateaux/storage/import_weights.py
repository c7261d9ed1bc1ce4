"""A run made of weights that somebody else trained, so that everything a run can do can be done with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plateaux.config.builders.data import build_data
from plateaux.config.builders.model import build_member
from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.recipe import Recipe
from plateaux.core.errors import RecipeError
from plateaux.core.types import TensorTree
from plateaux.models.surgery import load_weights
from plateaux.storage.run import MemberProgress, Run
from plateaux.storage.run_info import DataInfo, RunInfo


def import_weights(
    out: str | Path, recipe: Recipe, files: Sequence[str], *, components: Components = NO_COMPONENTS
) -> Run:
    """Make a run of weight files, `FILE` or `FILE:prefix` each; every one is checked against its model first."""
    if len(files) != recipe.members:
        raise RecipeError(f"{len(files)} weight files for {recipe.members} members: give one for each")
    data = build_data(recipe, components)
    modules = []
    for number, given_file in enumerate(files):
        module = build_member(recipe, data, number, components)
        file, prefix = split_file(given_file)
        load_weights(module, file, prefix)
        modules.append(module)
    run = Run.begin(out, recipe, RunInfo(DataInfo.from_splits(data), adopted=tuple(files)))
    keep_weights(run, [module.state_dict() for module in modules], [f"adopted from {file}" for file in files])
    return run


def keep_weights(run: Run, trees: Sequence[TensorTree], words: Sequence[str]) -> None:
    """Make members of finished weights; the words say where they are from."""
    for number, (tree, origin) in enumerate(zip(trees, words, strict=True)):
        with run.lock(number):
            name = run.put_weights(number, tree, epoch=0)
            done = MemberProgress(epoch=run.recipe.train.epochs, finished=True, weights=name, weights_source=origin)
            run.commit(number, done)


def split_file(components: str) -> tuple[str, str]:
    """Return file and prefix of `FILE[:prefix]`; a colon inside an existing file's name is part of it."""
    if Path(components).exists() or ":" not in components:
        return components, ""
    file, _, prefix = components.rpartition(":")
    return file, prefix
