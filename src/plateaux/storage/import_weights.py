"""Import trained weights as a run, so that they can be evaluated like a run that was trained here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plateaux.config.builders.data import build_data
from plateaux.config.builders.model import build_member
from plateaux.config.components import Components, Model
from plateaux.config.recipe import Recipe
from plateaux.core.errors import RecipeError
from plateaux.core.method import LossFn
from plateaux.core.types import TensorTree
from plateaux.data.checks import check_data
from plateaux.data.sources import DataSplits
from plateaux.integrations.huggingface_models import model_configs
from plateaux.integrations.peft_adapters import is_adapter, load_adapter
from plateaux.models.surgery import load_weights
from plateaux.storage.run import MemberProgress, Run
from plateaux.storage.run_info import DataInfo, RunInfo


def import_weights(
    out: str | Path,
    recipe: Recipe,
    files: Sequence[str],
    *,
    data: DataSplits | None = None,
    model: Model | None = None,
    loss: LossFn | None = None,
    trust: Sequence[str] = (),
    download: bool = False,
) -> Run:
    """Create a run from weight files (`FILE` or `FILE:prefix`). All are checked against their models first.

    With `[model.lora]` in the recipe, a file can be a folder of a PEFT adapter.

    Args:
        out: The run folder to create.
        recipe: The recipe of the run: the dataset, the models, and the number of members.
        files: One file for each member; `FILE:prefix` reads only the entries that start with the prefix.
        data: Replaces the dataset named in the recipe.
        model: Replaces the model named in the recipe.
        loss: Replaces the loss named in the recipe.
        trust: Modules whose functions the recipe may call.
        download: Allow downloads from the Hugging Face hub for names `hf:user/name`.
    """
    components = Components(data, model, loss, trust=tuple(trust), download=download)
    if len(files) != recipe.members:
        raise RecipeError(f"{len(files)} weight files for {recipe.members} members: give one file for each member")
    splits = build_data(recipe, components)
    modules = []
    for number, spec in enumerate(files):
        module = build_member(recipe, splits, number, components)
        file, prefix = split_file(spec)
        if is_adapter(file):
            load_adapter(module, file)
        else:
            load_weights(module, file, prefix)
        modules.append(module)
    names = [_without_folder(spec) for spec in files]  # a run folder does not name folders of this machine
    info = RunInfo(
        DataInfo.from_splits(splits),
        imported_from=tuple(names),
        model=components.model_name,
        inputs=check_data(splits, custom_loss=components.loss is not None).summary,
        preprocessing=splits.preprocessing,
        model_configs=None if model else model_configs(recipe.model.name, download=download),
    )
    run = Run.begin(out, recipe, info)
    store_weights(run, [module.state_dict() for module in modules], [f"imported from {name}" for name in names])
    return run


def store_weights(run: Run, trees: Sequence[TensorTree], origins: Sequence[str]) -> None:
    """Store weights as finished members. The origins are recorded as the source of the weights."""
    for number, (tree, origin) in enumerate(zip(trees, origins, strict=True)):
        with run.lock(number):
            name = run.put_weights(number, tree, epoch=0)
            progress = MemberProgress(epoch=run.recipe.train.epochs, finished=True, weights=name, weights_source=origin)
            run.commit(number, progress)


def _without_folder(spec: str) -> str:
    file, prefix = split_file(spec)
    return Path(file).name + (f":{prefix}" if prefix else "")


def split_file(spec: str) -> tuple[str, str]:
    """Split `FILE[:prefix]`. A colon in the name of an existing file is part of the name."""
    if Path(spec).exists() or ":" not in spec:
        return spec, ""
    file, _, prefix = spec.rpartition(":")
    return file, prefix
