"""Write docs/reference/recipe.md from the models that validate recipes and from the signatures of the plug-ins.

python docs/make_recipe_page.py            # write the page
python docs/make_recipe_page.py --check    # exit code 1 if the page is out of date

Names, types and defaults come from the code. The meaning of every key is in MEANINGS below; a missing one is an error.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from _generated import write_or_check
from pydantic import BaseModel

from plateaux.config.recipe import Recipe
from plateaux.config.schema import fields
from plateaux.core.registry import Registry, dataset, method, model
from plateaux.optim.losses import LOSSES

PAGE = Path(__file__).parent / "reference" / "recipe.md"
MAX_SHOWN = 10_000

HEAD = """\
# The recipe

<!-- Written by docs/make_recipe_page.py: change the code, or the script, and run it again. -->

A recipe is a TOML file that describes the whole experiment. `[data]` and `[model]` are required; all other sections
have defaults. `plateaux train RECIPE --set section.key=value` is the only override. `plateaux recipe check RECIPE`
checks a recipe without training, and `plateaux recipe schema` prints a JSON schema for editors.

A section that names a plug-in takes the options of that plug-in as additional keys. **A number can be a list with one
value per member**: `rho = [0.05, 0.1, 0.2]` is SAM with a different radius for each of three members. `model.name` can
also be such a list. A key without a default is unset.

`[executor]`, `[run]`, `[probe]` and the number of members do not determine the weights of a member, so a run can be
continued with other values of them, except `sync_batchnorm = false` on a mesh, and the number of members after a data
partition. If the recipe of a run folder differs in any other key, the run is rejected and the difference is printed.
"""

NOTES = {
    "data": "Files are searched in the data root: `root`, or the folder in the environment variable PLATEAUX_DATA, or "
    "`data`. The `path` of `arrays` and `image_folder` is searched there and, if `root` is not set, then in the "
    "current folder. `hf:<name>` is a folder or an id of the hub, which is downloaded only with `--download`; see "
    "[Hugging Face](../guides/hugging-face.md).",
    "model": "`hf:<name>` is as for data. N stands for the number in the name.",
}

MEANINGS = {
    "members": "number of networks in the ensemble",
    "seed": "the seed of all random choices; runs with different seeds share no random numbers",
    "data.name": "a data set: see below, `hf:<name>`, or `package.module:function`",
    "data.batch_size": "samples per batch; on a mesh, in total over all replicas of a member",
    "data.shuffle": "`per_member`: each member has its own order and augmentation; `shared`: all members get the same "
    "batches; `auto`: `shared` only if the method uses the outputs of several members in every batch",
    "data.validation_split": "training samples held out for validation: a fraction if below 1, otherwise a count; "
    "drawn with the seed",
    "data.num_workers": "processes that read samples not held in memory; the batches do not depend on their number",
    "data.drop_last": "skip the last batch of an epoch if it is smaller than the others",
    "data.crop": "pad images by this many pixels and crop them to their original size at random",
    "data.crop_fill": "value of the padding of `crop`, from 0 to 255",
    "data.resized_crop": "crop a random box with an area in this range, such as `[0.08, 1.0]`, and resize it; instead "
    "of `crop`",
    "data.flip": "flip half of the images horizontally, at random",
    "data.mixup": "alpha of mixup; 0 turns it off",
    "data.cutmix": "alpha of cutmix; 0 turns it off",
    "data.label_noise": "this fraction of the training labels is replaced by another class, drawn from the seed; a "
    "validation split has it too, test labels do not",
    "data.bootstrap": "bagging: every member draws this fraction of the training samples, with replacement; see "
    "[sources of diversity](../guides/sources-of-diversity.md)",
    "data.unlabeled": "another data set whose samples are added to every batch without their labels, or N of its "
    "samples: `tinyimagenet32@1000`; see [joint training](../guides/joint-training.md)",
    "data.unlabeled_batch_size": "unlabeled samples per batch; `data.batch_size` if unset",
    "model.name": "a model: see below, `timm:<name>`, `hf:<name>`, or `package.module:function`; can be a list with "
    "one per member",
    "model.weights": "initial weights: a safetensors file, or a torch checkpoint that contains only weights; searched "
    "in the current folder, then in PLATEAUX_DATA",
    "model.weights_prefix": "load only the weights with this prefix from that file; can be a list with one per member",
    "model.strict": "`false`: the file can lack the last layer, and weights of a different shape are skipped",
    "model.freeze": "modules that are not trained; all members share them, and they are stored once",
    "model.sparsity": "fraction of the weights that pruning sets to zero at the start, without the first and the last "
    "layer; see [decision 8](../decisions/0008-pruning-at-initialization.md)",
    "model.lora": "low-rank adapters on selected linear layers, such as "
    '`{ rank = 4, alpha = 8, target_modules = ["*.query", "*.value"] }`; all other weights are frozen and shared, '
    "except the last layer or the modules named in `modules_to_save`; see [LoRA](../guides/lora.md)",
    "model.backbone": "the last module of the backbone, such as `layer2`: everything up to it is frozen and shared, "
    "and members consist of the rest; `features`: everything but the last layer; see "
    "[shared backbone](../guides/backbones.md)",
    "model.head": "what each member adds to the backbone: `own`, the remaining modules of the model; `linear` or "
    "`mlp`, a new head on its features, averaged over positions",
    "model.head_width": "hidden units of an `mlp` head; can be a list with one per member",
    "model.image_size": "resize images to this many pixels per side before the network, in every batch, so that a data "
    "set is not stored at that size; see [larger images](../guides/train.md#resize-images-to-the-size-of-the-network)",
    "model.image_interpolation": "how `image_size` resizes: `bilinear` (default) or `bicubic`, both antialiased",
    "model.cache_features": "cache the features of the backbone on disk, so that it runs only once for every image",
    "model.cache_dtype": "type of the cached features; `float16` halves the size and rounds to three digits",
    "model.cached_augmentations": "with `data.crop` or `data.flip`: number of augmentations of every image whose "
    "features are cached; each epoch draws one of them for each image",
    "method.name": "a method: see below, or `package.module:function`",
    "loss.name": "a loss: see below, where `class_weights` is a number for each class, or `balanced`; from "
    "Python, pass your own with `plateaux.train(..., loss=...)`",
    "optimizer.name": "any optimizer of `torch.optim` that does not need a closure; its options, such as `momentum`, "
    "are additional keys",
    "optimizer.lr": "learning rate; `momentum` is 0.9 if the recipe has no `optimizer.name`",
    "optimizer.weight_decay": "weight decay, as defined by the optimizer",
    "optimizer.decay_filter": "`all`: decay every parameter; `matrices`: no decay for biases and normalization layers",
    "optimizer.max_grad_norm": "maximum norm of the descent direction (SAM: of the second gradient)",
    "optimizer.gradient_accumulation_steps": "number of micro-batches per batch, to save memory",
    "lr_scheduler.name": "`cosine`, the default over all epochs (none: `lr_scheduler = []`), "
    "`multistep`, `step`, `linear`, `constant`, `exponential`, `polynomial`, or a class "
    "of `torch.optim.lr_scheduler`; options that measure time (`milestones`, `step_size`, ...) are in epochs",
    "lr_scheduler.epochs": "length in epochs; only the last `[[lr_scheduler]]` can omit it",
    "lr_scheduler.interval": "update the learning rate after every epoch or after every step; the same for all "
    "schedulers",
    "train.epochs": "passes over the training samples",
    "train.validate_every": "epochs between two evaluations on the validation samples",
    "train.select": "`last`, or `best:<metric>`: the weights with the best value on the validation samples",
    "train.swa_start": "use the running average of the weights after this step and all later ones, with recomputed "
    "BatchNorm statistics; `select` then selects among averages; see "
    "[sources of diversity](../guides/sources-of-diversity.md)",
    "train.early_stopping_patience": "stop a member after this many validations without improvement",
    "train.precision": "`auto` runs 50 steps in fp32 and in bf16 and takes the fastest whose loss is within 2 % of "
    "fp32; selected once and recorded in the run",
    "train.memory_format": "memory format of images; `auto` is tested together with the precision",
    "train.compile": "compile every network with `torch.compile`",
    "train.deterministic": "set torch's flag that rejects nondeterministic operations",
    "train.randomness": "how vmap treats dropout: reject it, or allow results that differ from a loop",
    "executor.name": "an executor: `local`, `mesh` or `ray`",
    "executor.mode": "how `local` runs members; see [executors](../guides/scale-out.md)",
    "executor.processes": "`local`: size of the process pool; `mesh`: number of processes to start; `ray`: processes "
    "of members that train jointly",
    "executor.devices": 'devices to use, such as `["0", "1"]` or `["cpu"]`; default: the best available',
    "executor.threads": "CPU threads per process; default: the cores, divided among the processes",
    "executor.data_parallel": "`mesh`, `ray`: replicas of each member that share a batch",
    "executor.sync_batchnorm": "`mesh`: compute BatchNorm statistics over the whole batch; `false`: per replica",
    "executor.address": "`ray`: address of the [cluster](../guides/scale-out.md), with `--trust ADDRESS`; default: "
    "RAY_ADDRESS, or a new cluster on this machine",
    "executor.num_cpus": "`ray`: CPUs per process",
    "executor.num_gpus": "`ray`: GPUs per process; with 0.25, four processes share a device",
    "executor.max_retries": "`ray`: how often a job is restarted if its process or node died",
    "run.checkpoint_every_epochs": "epochs between two checkpoints",
    "run.checkpoint_every_minutes": "also write a checkpoint after this many minutes, within an epoch",
    "run.keep_checkpoints": "checkpoints of a finished member: `none` deletes them; `last` keeps the newest one and "
    "the one at the first data partition, from which another run can branch (`--branch-from`)",
    "run.log_every": "steps between two lines of the log",
    "run.min_members": "minimum number of members for a data partition if other members failed; default: all members",
    "run.trackers": "[trackers](../guides/trackers.md): `wandb`, `mlflow`, `tensorboard`, or `package.module:Class`; "
    "all but `tensorboard` need `--trust`",
    "run.group": "name under which trackers group this run with others; default: the name of the study",
    "run.silence": "names of [warnings](../reliability.md#warnings) to leave out",
    "run.feature_cache": "folder for `model.cache_features`, shared by any number of runs; default: a folder in "
    "PLATEAUX_CACHE, or ~/.cache/plateaux",
    "probe.probes": "[probes](../guides/loss-landscape.md) to run on every member during training, with options "
    "in parentheses",
    "probe.every": "epochs between two runs of the probes; they also run after the last epoch",
    "probe.samples": "number of training samples, drawn with the seed and always the same",
    "search.method": "options of the method that are sampled for every member, such as `rho = { low = 0.01, high = "
    "0.5, log = true }`; `integer = true` samples integers, and a list is a set of choices; see "
    "[sources of diversity](../guides/sources-of-diversity.md)",
    "search.loss": "options of the loss, sampled in the same way",
    "search.optimizer": "keys of the optimizer, sampled in the same way: `lr`, `weight_decay`, `max_grad_norm`, and "
    "the options of the optimizer",
}

PLUGINS: tuple[tuple[str, str, Registry], ...] = (
    ("data", "Data sets", dataset),
    ("model", "Models", model),
    ("method", "Methods", method),
)


def page() -> str:
    """Return the page as Markdown."""
    parts = [HEAD, *_sections(), _losses(), *(_plugins(*each) for each in PLUGINS)]
    return "\n".join(parts)


def _sections() -> list[str]:
    plain = {name: field for name, field in Recipe.model_fields.items() if not _model_in(field.annotation)}
    parts = [_table("Top level", "", "", plain)]
    for name, field in Recipe.model_fields.items():
        part = _model_in(field.annotation)
        if part is not None:
            title = f"[[{name}]]" if get_origin(field.annotation) is tuple else f"[{name}]"
            parts.append(_table(f"`{title}`", name, (part.__doc__ or "").strip(), part.model_fields))
    unused = set(MEANINGS) - _keys()
    assert not unused, f"MEANINGS has keys that do not exist in a recipe: {sorted(unused)}"
    return parts


def _keys() -> set[str]:
    found = set()
    for name, field in Recipe.model_fields.items():
        part = _model_in(field.annotation)
        found |= {name} if part is None else {f"{name}.{key}" for key in part.model_fields}
    return found


def _table(title: str, section: str, words: str, found: dict[str, Any]) -> str:
    lines = [f"## {title}", "", words, "", "| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in found.items():
        path = f"{section}.{name}".lstrip(".")
        assert path in MEANINGS, f"docs/make_recipe_page.py: add the meaning of {path} to MEANINGS"
        default = "required" if field.is_required() else "" if field.default is None else _show(field.default)
        lines.append(f"| `{name}` | {_type(field.annotation, field.metadata)} | {default} | {MEANINGS[path]} |")
    return "\n".join([*lines, ""])


def _losses() -> str:
    rows = [f"| `{name}` | {_options(factory)} | {_sentence(factory)} |" for name, factory in sorted(LOSSES.items())]
    return "\n".join(["## Losses", "", "| name | options | description |", "|---|---|---|", *rows, ""])


def _plugins(kind: str, title: str, registry: Registry) -> str:
    rows: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, words in registry.describe().items():
        prefix = name.removesuffix("<name>")
        factory = registry.prefixes[prefix] if name.endswith("<name>") else registry.get(name)
        # Networks that differ in their numbers only, such as resnet8 and resnet14, have one row.
        key = (_options(factory, hidden=("name",)), re.sub(r"\d+", "0", words) if kind == "model" else words)
        rows.setdefault(key, []).append((name, words))
    lines = []
    for (options, _), found in rows.items():
        names = ", ".join(f"`{name}`" for name, _ in found)
        words = [each.split() for _, each in found]
        text = " ".join(
            parts[0] if len(set(parts)) == 1 else re.sub(r"\d+", "N", parts[0]) for parts in zip(*words, strict=True)
        )
        lines.append(f"| {names} | {options} | {text} |")
    notes = [NOTES[kind], ""] if kind in NOTES else []
    head = [f"| `{kind}.name` | options | description |", "|---|---|---|"]
    return "\n".join([f"## {title}", "", *notes, *head, *lines, ""])


def _options(factory: Any, hidden: tuple[str, ...] = ()) -> str:
    shown = []
    for name, (_, default) in fields(factory).items():
        if name not in hidden:
            shown.append(f"`{name}`" if default in (..., None) else f"`{name}={json.dumps(_plain(default))}`")
    return ", ".join(shown) or "none"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _sentence(factory: Any) -> str:
    return (factory.__doc__ or "").strip().split("\n", 1)[0]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section of a field, alone or in a list."""
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def _type(annotation: Any, limits: Sequence[Any] = ()) -> str:
    """Return the name of a type for users of TOML, with the range of a number."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(inner[0], [limit for field in inner[1:] for limit in field.metadata])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inner)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_type(each, limits) for each in inner if each is not NoneType))
    if origin is dict or _model_in(annotation):
        return "table"
    if origin is tuple:
        return f"list of {_type(inner[0]).split()[0]}s"
    name = {int: "integer", float: "number", str: "string", bool: "true or false"}[annotation]
    return f"{name}{_range(limits)}" if annotation in (int, float) else name


def _range(limits: Sequence[Any]) -> str:
    """Return the range of a number; limits that only catch mistakes are left out."""
    bounds = {name: value for limit in limits for name, value in asdict(limit).items() if abs(value) <= MAX_SHOWN}
    lower = next((f" {sign} {bounds[name]:g}" for name, sign in (("ge", "≥"), ("gt", ">")) if name in bounds), "")
    upper = next((f" {sign} {bounds[name]:,}" for name, sign in (("le", "≤"), ("lt", "<")) if name in bounds), "")
    return f"{lower}{',' if lower and upper else ''}{upper}"


def _show(value: Any) -> str:
    return f"`{json.dumps(_plain(value))}`"


if __name__ == "__main__":
    sys.exit(write_or_check({PAGE: page()}))
