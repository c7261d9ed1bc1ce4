"""Write docs/recipe.md from the models that validate recipes and from the plug-ins' own signatures.

python docs/make_recipe_page.py            # write the page
python docs/make_recipe_page.py --check    # exit code 1 if the page is not what it would write

Names, types and defaults come from the code; what a key means stands below, and a key without a meaning is an error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from plateaux.config.recipe import Recipe
from plateaux.config.schema import fields
from plateaux.core.registry import Registry, dataset, method, model
from plateaux.optim.losses import LOSSES

PAGE = Path(__file__).parent / "recipe.md"

HEAD = """\
# The recipe

<!-- Written by docs/make_recipe_page.py: change the code, or the script, and run it again. -->

A recipe is a TOML file that holds the whole experiment. `[data]` and `[model]` must be there; everything else has a
default. `plateaux train RECIPE --set section.key=value` is the only override; `plateaux recipe check RECIPE` checks a
recipe without training, and `plateaux recipe schema` prints a JSON schema for editors.

A section that names a plug-in (`[data]`, `[model]`, `[method]`, `[loss]`, `[optimizer]`, `[[schedule]]`) takes that
plug-in's options as further keys. **A number may be a list with one value per member**: `rho = [0.05, 0.1, 0.2]` is SAM
with a radius of its own for each of three members, and `lr = [0.05, 0.1, 0.2]` a hyper-parameter ensemble. `model.name`
may be such a list too.

`[executor]`, `[run]`, `[probe]` and the number of members do not decide what a member becomes, so a run may be
continued with other values there (beyond the last digits, `batchnorm = "local"` on a mesh is the one exception; and
where the method makes members meet, none can join or leave after the meeting). A run folder whose recipe differs
anywhere else is refused, with the difference shown.
"""

MEANINGS = {
    "members": "networks in the ensemble",
    "seed": "what every random choice is derived from; runs with different seeds share nothing",
    "data.name": "a data set: see below, or `package.module:function`",
    "data.batch": "samples in a batch; on a mesh, over all copies of a member together",
    "data.order": "`own`: each member has its own shuffling and augmentation; `shared`: all see the same batches; "
    "`auto`: shared only where members see each other in every batch",
    "data.validation": "training samples held out for validation: a share below 1, else a count; drawn by the seed",
    "data.workers": "processes that read samples not held in memory; batches are the same for any number",
    "data.drop_last": "leave out the last batch of an epoch if it is smaller than the others",
    "data.crop": "pad images by so many pixels and cut a piece of the old size out at random",
    "data.flip": "mirror half of the images, at random",
    "data.mixup": "alpha of mixup; 0 switches it off",
    "data.cutmix": "alpha of cutmix; 0 switches it off",
    "data.bag": "bagging: every member learns from a bag of its own, so large a share of the training samples drawn "
    "with replacement (1.0: as many draws as samples); see [ways to differ](differ.md)",
    "data.unlabelled": "another data set whose samples, without their labels, go along with every batch, or so many of "
    "them: `tinyimagenet32@1000`; see [training together](joint.md)",
    "data.unlabelled_batch": "how many of them go along; as many as labelled ones if unset",
    "model.name": "a model: see below, `timm:<name>`, or `package.module:function`; may be one for each member",
    "model.weights": "a safetensors file, or a torch checkpoint that holds nothing but weights, to start from; looked "
    "for here, then under PLATEAUX_DATA",
    "model.prefix": "take only the weights under this name from that file; may be one for each member",
    "model.partial": "let the file lack the last layer, and skip weights of another shape",
    "model.freeze": "parts of the network that nobody trains; all members share them, and they are held once",
    "model.sparsity": "share of the weights that magnitude pruning sets to zero at the start; training keeps them zero",
    "model.adapters": "low-rank adapters on chosen linear layers, such as "
    '`{ rank = 4, alpha = 8, layers = ["*.query", "*.value"] }`; all else is shared as if frozen, but for the last '
    "layer or the parts named in `train`; see [adapters](adapters.md)",
    "model.trunk": "all up to this part, `layer2` say, is frozen and shared, and members are what stands on it; "
    "`features`: all but the last layer; see [one trunk](trunk.md)",
    "model.head": "what stands on the trunk: `rest`, the model's own further parts; `linear` or `mlp`, a new head over "
    "its features, which are averaged over the places of an image",
    "model.head_width": "units in the middle of an `mlp`; may be one for each member",
    "model.resize": "bring images to so many pixels a side before the trunk",
    "model.cache_features": "keep the trunk's features on disk: it sees every image once, and never after that",
    "model.cache_dtype": "how they are kept; `float16` takes half the room and rounds to three digits",
    "model.rounds": "with `data.crop` or `data.flip`: keep features of so many variations of every image; each epoch "
    "draws one of them for each",
    "method.name": "a method: see below, or `package.module:function`",
    "loss.name": "a loss: see below; one of your own goes through `plateaux.Given(loss=...)` from Python",
    "optimizer.name": "any optimiser of `torch.optim` that works step by step; its options, such as `momentum`, "
    "are further keys",
    "optimizer.lr": "learning rate",
    "optimizer.weight_decay": "weight decay, as that optimiser understands it",
    "optimizer.decay": "`all`: every parameter decays; `weights`: not biases, not normalisation",
    "optimizer.clip": "largest norm of the direction a step may follow (SAM: of the second gradient)",
    "optimizer.accumulate": "work each batch through in so many pieces, for memory",
    "schedule.name": "`cosine`, `multistep`, `step`, `linear`, `constant`, `exponential`, `polynomial`, or a class of "
    "`torch.optim.lr_scheduler`; options that count time (`milestones`, `step_size`, ...) count epochs",
    "schedule.epochs": "how long it lasts; only the last `[[schedule]]` may leave it out",
    "schedule.per": "move the rate after every epoch, or after every step; the same for all",
    "train.epochs": "passes over the training samples",
    "train.validate_every": "measure on the validation samples after every so many epochs",
    "train.keep": "`last`, or `best:<measure>`: the weights with the best value on the validation samples",
    "train.average_from": "use every member at the moving average of its weights after this step and all later ones, "
    "BatchNorm's statistics taken anew; `keep` then chooses among averages; see [ways to differ](differ.md)",
    "train.patience": "end a member after so many validations without a better one",
    "train.precision": "`auto` tries fp32 and bf16 for 50 steps and takes the fastest whose loss stays within 2 % of "
    "fp32; chosen once, recorded in the run",
    "train.memory_format": "how images lie in memory; `auto` is tried together with the precision",
    "train.compile": "pass every network through `torch.compile`",
    "train.deterministic": "set torch's flag that refuses operations without a deterministic form",
    "train.randomness": "what vmap does about dropout: refuse it, or let it differ from a loop",
    "executor.name": "an executor: `local`, `mesh` or `ray`",
    "executor.manner": "how `local` holds members; see [executors](executors.md)",
    "executor.processes": "`local`: a pool of so many processes; `mesh`: processes to start; `ray`: those of "
    "members that learn together",
    "executor.devices": 'devices to use, such as `["0", "1"]` or `["cpu"]`; without it the best there is',
    "executor.threads": "CPU threads of each process; without it the cores, shared among the processes",
    "executor.data": "`mesh`, `ray`: copies of each member that share a batch",
    "executor.batchnorm": "`mesh`: BatchNorm over the whole batch, or over each copy's share",
    "executor.address": "`ray`: the [cluster](cluster.md) to join; without it RAY_ADDRESS, or one of our own on this "
    "machine",
    "executor.cpus": "`ray`: CPUs of each process",
    "executor.gpus": "`ray`: GPUs of each process; 0.25 lets four share a device",
    "executor.retries": "`ray`: how often a job whose process or node died is begun again",
    "run.checkpoint_epochs": "write a checkpoint after every so many epochs",
    "run.checkpoint_minutes": "and after so many minutes, in the middle of an epoch",
    "run.keep_resume": "what to do with the resume states of a finished member: `last` keeps the newest and that of "
    "the first meeting, where another run may begin (`--span-from`)",
    "run.log_every": "a line in the log after every so many steps",
    "run.min_members": "a meeting goes ahead with so many members, should the others be given up; without it, with all",
    "run.tensorboard": "also write curves for TensorBoard (`plateaux[track]`)",
    "run.features": "where `model.cache_features` keeps features, for any number of runs; unset: below the folder that "
    "PLATEAUX_CACHE names, or ~/.cache/plateaux",
    "probe.names": "[probes](landscape.md) to ask of every member while it trains, options in brackets",
    "probe.every": "ask after so many epochs each time, and after the last",
    "probe.samples": "training samples to ask about, drawn by the seed and always the same",
    "search.method": "options of the method that every member draws for itself, as in `rho = { low = 0.01, high = 0.5, "
    "log = true }`; `whole = true` draws integers, a list is chosen from; see [ways to differ](differ.md)",
    "search.loss": "options of the loss, likewise",
    "search.optimizer": "keys of the optimiser, likewise: `lr`, `weight_decay`, `clip`, and its options",
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
    parts = [_table("At the top", "", "An experiment, whole.", plain)]
    for name, field in Recipe.model_fields.items():
        part = _model_in(field.annotation)
        if part is not None:
            title = f"[[{name}]]" if get_origin(field.annotation) is tuple else f"[{name}]"
            parts.append(_table(f"`{title}`", name, (part.__doc__ or "").strip(), part.model_fields))
    unused = set(MEANINGS) - _keys()
    assert not unused, f"meanings of keys that a recipe does not have: {sorted(unused)}"
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
        assert path in MEANINGS, f"docs/make_recipe_page.py: say in MEANINGS what {path} means"
        default = "required" if field.is_required() else _show(field.default)
        lines.append(f"| `{name}` | {_type(field.annotation)} | {default} | {MEANINGS[path]} |")
    return "\n".join([*lines, ""])


def _losses() -> str:
    rows = [f"| `{name}` | {_options(factory)} | {_sentence(factory)} |" for name, factory in sorted(LOSSES.items())]
    return "\n".join(["## Losses", "", "| name | options | what it is |", "|---|---|---|", *rows, ""])


def _plugins(kind: str, title: str, registry: Registry) -> str:
    listed = registry.describe()
    rows = []
    for name, words in listed.items():
        prefix = name.removesuffix("<name>")
        factory = registry.prefixes[prefix] if name.endswith("<name>") else registry.get(name)
        rows.append(f"| `{name}` | {_options(factory, hidden=('name',))} | {words} |")
    return "\n".join([f"## {title}", "", f"| `{kind}.name` | options | what it is |", "|---|---|---|", *rows, ""])


def _options(factory: Any, hidden: tuple[str, ...] = ()) -> str:
    shown = []
    for name, (_, default) in fields(factory).items():
        if name not in hidden:
            shown.append(f"`{name}`" if default is ... else f"`{name}` = {_show(default)}")
    return ", ".join(shown) or "none"


def _sentence(factory: Any) -> str:
    return (factory.__doc__ or "").strip().split("\n", 1)[0]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section a field holds, alone or in a list."""
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def _type(annotation: Any) -> str:
    """Return a type in words that TOML users know."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inner)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_type(each) for each in inner if each is not NoneType))
    if origin is dict or _model_in(annotation):
        return "table"
    if origin is tuple:
        return f"list of {_type(inner[0])}s"
    return {int: "whole number", float: "number", str: "text", bool: "true or false"}[annotation]


def _show(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, tuple | list):
        return f"`{json.dumps(list(value))}`"
    return f"`{json.dumps(value)}`"


def main() -> int:
    """Write the page, or check it."""
    text = page()
    if "--check" in sys.argv[1:]:
        if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
            return 0
        print("docs/recipe.md is not what the code says; run: python docs/make_recipe_page.py", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
