"""Import trained weights as a run, so that they can be evaluated like a run that was trained here."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from glob import glob, has_magic
from pathlib import Path

import torch
from torch import Tensor, nn

from plateaux.config.builders.data import build_data, eval_batches
from plateaux.config.builders.model import build_member
from plateaux.config.code import code_hashes
from plateaux.config.components import Components, Model
from plateaux.config.experiment import Experiment
from plateaux.config.recipe import Recipe
from plateaux.core.errors import RecipeError, first_line
from plateaux.core.member import MemberModule
from plateaux.core.method import LossFn
from plateaux.core.types import TensorTree
from plateaux.data.data_check import check_data
from plateaux.data.sources import DataSplits
from plateaux.data.warning_table import log_warnings
from plateaux.integrations.huggingface_models import model_configs
from plateaux.integrations.huggingface_weights import check_class_order, is_model_folder, read_folder_weights
from plateaux.integrations.lightning_checkpoints import SUFFIX, is_sharded_checkpoint, read_lightning_checkpoint
from plateaux.integrations.peft_adapters import has_adapters, is_adapter, load_adapter
from plateaux.models.weight_files import read_weights
from plateaux.models.weight_names import Weights, compare_names, find_prefixes, rename, select_prefix, suggest_renaming
from plateaux.storage.member_writer import write_member
from plateaux.storage.run import MemberProgress, Run
from plateaux.storage.run_info import DataInfo, RunInfo
from plateaux.storage.stored_data import store_data

CHECKED_SAMPLES = 2
logger = logging.getLogger(__name__)


def import_weights(
    out: str | Path,
    recipe: Recipe,
    files: Sequence[str | Path],
    *,
    names: Mapping[str, str | None] | None = None,
    data: DataSplits | None = None,
    model: Model | None = None,
    loss: LossFn | None = None,
    trust: Sequence[str] = (),
    download: bool = False,
) -> Run:
    """Create a run from weights that were trained elsewhere. All are checked against their models first.

    A file is a safetensors file, a torch checkpoint, a Lightning `.ckpt` file, or a folder that `save_pretrained` of
    Hugging Face wrote. Files are read as data: one that contains code is refused. If the model is an attribute of what
    was saved, such as `self.model` of a LightningModule, its prefix is found.

    With `[model.lora]` in the recipe, a file can be a folder of a PEFT adapter.

    Args:
        out: The run folder to create.
        recipe: The recipe of the run: the dataset, the models, and the number of members.
        files: One for each member. `FILE:prefix` reads only the entries that start with the prefix; a pattern such as
            `seeds/*/last.ckpt` means all files that match it.
        names: How entries of the files are called in the model, by the start of their names:
            `{"classifier.": "head.", "teacher.": None}` renames the first and leaves out the second.
        data: Replaces the dataset named in the recipe. Data of `plateaux.from_arrays` are stored in the run folder.
        model: Replaces the model named in the recipe.
        loss: Replaces the loss named in the recipe.
        trust: Modules whose functions the recipe may call.
        download: Allow downloads: of names `hf:user/name`, and of pretrained weights of timm.
    """
    components = Components(data, model, loss, trust=tuple(trust), download=download)
    specs = expand_patterns(files)
    if len(specs) != recipe.members:
        raise RecipeError(f"{len(specs)} weight files for {recipe.members} members: give one file for each member")
    splits = build_data(recipe, components)
    checked = check_data(splits)
    log_warnings(checked.warnings, recipe.run.silence)
    modules = []
    for number, spec in enumerate(specs):
        module = build_member(recipe, splits, number, components)
        _load(module, spec, names or {}, splits.labels)
        _check_forward(module, recipe, splits, spec)
        modules.append(module)
    origins = [_without_folder(spec) for spec in specs]  # a run folder does not name folders of this machine
    info = RunInfo(
        DataInfo.from_splits(splits),
        imported_from=tuple(origins),
        model=components.model_name,
        inputs=checked.summary,
        preprocessing=splits.preprocessing,
        model_configs=None if model else model_configs(recipe.model.name, download=download),
        code=code_hashes(recipe, components, modules),
        warnings=checked.warnings,
    )
    run = Run.begin(out, Experiment(recipe, components), info)
    if data is not None and data.keep_in_run:
        store_data(run, data)
    store_weights(run, [module.state_dict() for module in modules], [f"imported from {origin}" for origin in origins])
    return run


def store_weights(
    run: Run, trees: Sequence[TensorTree], origins: Sequence[str], *, shared: TensorTree | None = None
) -> None:
    """Store weights as finished members. The origins are recorded as the source of the weights."""
    for number, (tree, origin) in enumerate(zip(trees, origins, strict=True)):
        with write_member(run, number) as writer:
            writer.put_shared(shared or {})
            name = writer.put_weights(tree, epoch=0)
            progress = MemberProgress(epoch=run.recipe.train.epochs, finished=True, weights=name, weights_source=origin)
            writer.commit(progress, release=True)


def expand_patterns(files: Sequence[str | Path]) -> list[str]:
    """Return the files that patterns match, with their prefixes; numbers in the names are sorted by value."""
    specs: list[str] = []
    for spec in map(str, files):
        file, prefix = split_file(spec)
        if Path(file).exists() or not has_magic(file):
            specs.append(spec)
            continue
        found = sorted(glob(file, recursive=True), key=_numeric_key)
        if not found:
            raise RecipeError(f"No file matches {file!r}; write a pattern such as 'seeds/*/last.ckpt' in quotes")
        specs += [f"{name}:{prefix}" if prefix else name for name in found]
    return specs


def split_file(spec: str) -> tuple[str, str]:
    """Split `FILE[:prefix]`. A colon in the name of an existing file is part of the name."""
    if Path(spec).exists() or ":" not in spec:
        return spec, ""
    file, _, prefix = spec.rpartition(":")
    return file, prefix


def _load(module: nn.Module, spec: str, names: Mapping[str, str | None], labels: Sequence[str]) -> None:
    file, prefix = split_file(spec)
    if is_adapter(file) and has_adapters(module):  # without them, the file must contain a complete model
        load_adapter(module, file)
        return
    weights = select_prefix(_read(Path(file), labels), prefix, file)
    weights, state = rename(weights, names, file) if names else weights, module.state_dict()
    found = compare_names(weights, state)
    if found.missing and not prefix:
        weights = _strip_prefix(weights, state, file)
        found = compare_names(weights, state)
    if not found.is_equal:
        advice = "Use the model of the file, or select its part with FILE:prefix."
        if (pair := suggest_renaming(found, weights, state)) is not None:
            advice = f"Use the model of the file, or rename entries, such as --rename {pair[0]}={pair[1]}"
        elif found.unexpected and not found.missing:
            advice = f"Leave out entries that the model does not need, such as --ignore {found.unexpected[0]}"
        raise RecipeError(f"{found.describe(file)} {advice}")
    module.load_state_dict(weights, strict=False)  # without the batch counters that files may omit


def _read(path: Path, labels: Sequence[str]) -> Weights:
    if path.is_dir():
        if is_model_folder(path):
            check_class_order(path, labels)
            return read_folder_weights(path)
        advice = (
            "it seems to be a checkpoint of several files; write one file first: python -m "
            f"lightning.pytorch.utilities.consolidate_checkpoint {path}"
            if is_sharded_checkpoint(path)
            else "give a weights file, or a folder that save_pretrained of Hugging Face wrote"
        )
        raise RecipeError(f"{str(path)!r} is a folder without config.json: {advice}.")
    if not path.is_file():
        raise RecipeError(f"There is no weights file at {str(path)!r}. Give the path of a file or a folder of weights.")
    return read_lightning_checkpoint(path) if path.suffix == SUFFIX else read_weights(path)


def _strip_prefix(weights: Weights, state: Mapping[str, Tensor], file: str) -> Weights:
    """Return the only part of the weights that is a complete set of the model; all weights if there is none."""
    prefixes = find_prefixes(weights, state)
    if len(prefixes) > 1:
        listed = ", ".join(repr(prefix.removesuffix(".")) for prefix in prefixes)
        raise RecipeError(
            f"{file!r} contains {len(prefixes)} models with these names and shapes, under {listed}: choose one, as in "
            f"{file}:{prefixes[0].removesuffix('.')}"
        )
    if not prefixes:
        return weights
    used = {name: tensor for name, tensor in weights.items() if name.startswith(prefixes[0])}
    others = sorted(set(weights) - set(used))
    logger.info(
        "%s: removed the prefix %r%s",
        file,
        prefixes[0],
        f"; not used: {', '.join(others[:5])}{', ...' if len(others) > 5 else ''}" if others else "",
    )
    return {name.removeprefix(prefixes[0]): tensor for name, tensor in used.items()}


@torch.no_grad()
def _check_forward(module: nn.Module, recipe: Recipe, data: DataSplits, spec: str) -> None:
    """Raise RecipeError if a network with its weights cannot process two samples, or gives NaN or infinity."""
    ids = torch.arange(min(CHECKED_SAMPLES, len(data.train)))
    batch = next(eval_batches(recipe, data, data.train.without_augmentation(), ids))
    module.eval()
    try:
        outputs = MemberModule(module)(batch.x)
    except Exception as error:  # code of the user can raise anything
        raise RecipeError(
            f"The model with the weights of {spec!r} cannot process two samples of {data.name!r}: "
            f"{type(error).__name__}: {first_line(error)}. Use the data that it was trained for"
        ) from error
    if outputs.shape != (len(ids), data.classes):
        raise RecipeError(
            f"The model with the weights of {spec!r} returned outputs of shape {list(outputs.shape)}. Expected: "
            f"{[len(ids), data.classes]}, for the {data.classes} classes of {data.name!r}"
        )
    if not bool(outputs.isfinite().all()):
        raise RecipeError(
            f"The model with the weights of {spec!r} returned NaN or infinity for samples of {data.name!r}. Check the "
            "weights, and the scale of the inputs (data.mean, data.std)"
        )


def _without_folder(spec: str) -> str:
    file, prefix = split_file(spec)
    return Path(file).name + (f":{prefix}" if prefix else "")


def _numeric_key(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
