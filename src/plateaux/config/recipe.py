"""A recipe: the complete configuration of an experiment, validated and immutable, read from and written to TOML."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from plateaux.config.builtin_recipes import recipe_file
from plateaux.config.recipe_errors import explain_error, locate_error, split_change
from plateaux.config.schema import ConfigKeyError, ConfigSection, PluginSection
from plateaux.config.search_space import SEED_NAMES, SearchConfig, sample
from plateaux.config.toml import parse_toml, read_text
from plateaux.core.errors import RecipeError, suggest
from plateaux.core.plain_types import derive_seed
from plateaux.core.ranges import MAX_SIZE, Count, CountOrZero, Fraction, NonNegative, Positive, Seed, Size
from plateaux.data.warning_table import WARNINGS

Names = str | tuple[str, ...]
NonNegatives = NonNegative | tuple[NonNegative, ...]  # one, or one per member
Positives = Positive | tuple[Positive, ...]
Sizes = Size | tuple[Size, ...]
MAX_MEMBERS = MAX_PROCESSES = 10_000
MAX_EPOCHS = 1_000_000
BACKBONE_KEYS = (
    "head",
    "head_width",
    "cache_features",
    "cache_dtype",
    "cached_augmentations",
)  # keys of [model] that only apply with a backbone


class DataConfig(PluginSection):
    """The data set, its order and its augmentation. Other keys are options of the data set."""

    name: str
    batch_size: Count = 128
    shuffle: Literal["auto", "per_member", "shared"] = "auto"
    validation_split: NonNegative = 0.0  # below 1: a fraction of the training samples; otherwise a count
    num_workers: int = Field(0, ge=0, le=MAX_PROCESSES)
    drop_last: bool = False
    crop: int = Field(0, ge=0, le=MAX_SIZE)  # padding on every side before a random crop of the original size
    crop_fill: int = Field(0, ge=0, le=255)  # value of the padding
    resized_crop: tuple[Fraction, Fraction] | None = None  # areas of random crops that are resized: [0.08, 1.0]
    flip: bool = False
    mixup: NonNegative = 0.0
    cutmix: NonNegative = 0.0
    label_noise: Fraction = 0.0  # fraction of the training labels that are replaced by another class
    bootstrap: Positive | None = None  # size of the bootstrap sample of each member, as a fraction
    unlabeled: str | None = None  # another data set, or N of its samples: "tinyimagenet32@1000"
    unlabeled_batch_size: Count | None = None  # unlabeled samples per batch; default: data.batch_size


class LoraConfig(ConfigSection):
    """Low-rank adapters on selected linear layers. All other weights are frozen and stored once for all members."""

    rank: Sizes = 4
    alpha: NonNegatives = 8.0  # the output of an adapter is scaled by alpha / rank
    target_modules: tuple[str, ...] = Field(min_length=1)  # module names, with wildcards
    modules_to_save: tuple[str, ...] | None = None  # modules that are trained in full; default: the last layer


class ModelConfig(PluginSection):
    """The network. Other keys are options of the model."""

    name: Names
    weights: str | None = None  # a safetensors file with initial weights
    weights_prefix: Names = ""  # load only the keys with this prefix
    strict: bool = True  # false: skip missing and mismatched weights, such as another classifier
    freeze: tuple[str, ...] = ()  # submodules that are not trained; stored once for all members
    sparsity: float = Field(0.0, ge=0, lt=1)
    backbone: str | None = None  # the last module of the frozen, shared part of the network
    head: Literal["own", "linear", "mlp"] = "own"  # own: the model's remaining modules; linear, mlp: a new head
    head_width: Sizes = 512  # hidden units of an mlp head
    image_size: Size | None = None  # images are resized to this many pixels per side before the network
    image_interpolation: Literal["bilinear", "bicubic"] | None = None  # how; default: bilinear
    cache_features: bool = False  # run the backbone once per image and reuse its features
    cache_dtype: Literal["float32", "float16"] = "float32"
    cached_augmentations: Count = 1  # number of augmentations of every image whose features are cached
    lora: LoraConfig | None = None

    @field_validator("image_interpolation")
    @classmethod
    def _check_resized(cls, interpolation: str | None, info: ValidationInfo) -> str | None:
        if interpolation is not None and info.data.get("image_size") is None:
            raise ValueError("no image is resized without model.image_size; set it too")
        return interpolation

    @field_validator("lora")
    @classmethod
    def _check_alone(cls, lora: LoraConfig | None, info: ValidationInfo) -> LoraConfig | None:
        for other in ("freeze", "backbone"):
            if lora is not None and info.data.get(other):
                raise ValueError(f"LoRA freezes everything except lora.modules_to_save; remove model.{other}")
        return lora


class MethodConfig(PluginSection):
    """The training method. Other keys are options of the method."""

    name: str = "deep_ensemble"


class LossConfig(PluginSection):
    """The loss. Other keys are options of the loss."""

    name: str = "cross_entropy"


class OptimizerConfig(PluginSection):
    """A `torch.optim` optimizer by name. Other keys are options of it; without a name: SGD with momentum = 0.9."""

    name: str = "SGD"
    lr: NonNegatives = 0.1
    weight_decay: NonNegatives = 0.0
    decay_filter: Literal["all", "matrices"] = "all"  # matrices: no decay for biases and normalization layers
    max_grad_norm: Positives | None = None  # maximum norm of the descent direction
    gradient_accumulation_steps: Count = 1  # number of micro-batches per batch

    @model_validator(mode="before")
    @classmethod
    def _add_momentum(cls, values: Any) -> Any:
        """Complete a short recipe. A recipe with all values, such as that of a run, has a name."""
        is_short = isinstance(values, Mapping) and "name" not in values
        return {"momentum": 0.9, **values} if is_short else values


class LRSchedulerConfig(PluginSection):
    """A `torch.optim.lr_scheduler` by name, and its length. Other keys are options of the scheduler."""

    name: str
    epochs: Positive | None = None  # optional for the last scheduler
    interval: Literal["epoch", "step"] = "epoch"


class TrainConfig(ConfigSection):
    """Training length, precision, and selection of weights."""

    epochs: int = Field(30, ge=1, le=MAX_EPOCHS)
    validate_every: Count = 1
    select: str = "last"  # or best:<metric>, selected on validation samples
    swa_start: Count | None = None  # average the weights after this step and all later ones
    early_stopping_patience: Count | None = None  # stop after this many validations without improvement
    precision: Literal["fp32", "bf16", "fp16", "fp64", "auto"] = "fp32"
    memory_format: Literal["contiguous", "channels_last", "auto"] = "contiguous"
    compile: bool = False
    deterministic: bool = False
    randomness: Literal["error", "different"] = "error"  # how vmap treats dropout

    @field_validator("select")
    @classmethod
    def _check_select(cls, select: str) -> str:
        if select != "last" and not select.startswith("best:"):
            raise ValueError("allowed: 'last' or 'best:<metric>', such as 'best:accuracy'")
        return select


class ExecutorConfig(ConfigSection):
    """Devices and processes. These keys do not change the result of training."""

    name: str = "local"
    mode: Literal["loop", "vmap", "offload"] = "loop"
    processes: int = Field(1, ge=1, le=MAX_PROCESSES)
    devices: tuple[str, ...] = ()
    threads: int | None = Field(None, ge=1, le=MAX_PROCESSES)
    data_parallel: int = Field(1, ge=1, le=MAX_PROCESSES)  # mesh, ray: replicas of each member that share a batch
    sync_batchnorm: bool = True  # mesh: statistics over the whole batch; false: per replica
    address: str | None = None  # ray: address of the cluster; default: start one on this machine
    num_cpus: Positive = 1.0  # ray: CPUs per process
    num_gpus: NonNegative = 0.0  # ray: GPUs per process; fractions share a device
    max_retries: CountOrZero = 5  # ray: restarts of a job whose process or node died


class RunConfig(ConfigSection):
    """Checkpoints and logs. These keys do not change the result of training."""

    checkpoint_every_epochs: Count = 1
    checkpoint_every_minutes: Positive | None = 10.0
    keep_checkpoints: Literal["last", "none"] = "none"  # after a member has finished
    log_every: Count = 50
    min_members: int | None = Field(None, ge=1, le=MAX_MEMBERS)  # for a partition if others failed
    trackers: tuple[str, ...] = ()  # wandb, mlflow, tensorboard, or package.module:Class
    group: str | None = None  # name under which trackers group this run with others; a study sets its own
    feature_cache: str | None = None  # folder of cached backbone features, shared by all runs
    silence: tuple[str, ...] | None = None  # names of warnings to leave out

    @field_validator("silence")
    @classmethod
    def _check_silence(cls, silence: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for name in silence or ():
            if name not in WARNINGS:
                raise ValueError(f"there is no warning {name!r}; {suggest(name, WARNINGS)}")
        return silence


class ProbeConfig(ConfigSection):
    """Landscape probes during training. These keys do not change the result of training."""

    probes: tuple[str, ...] = ()  # options in parentheses: worst_l2(steps=10)
    every: Count = 5  # epochs; also after the last epoch
    samples: Count = 256  # number of training samples, selected with the seed


class Recipe(ConfigSection):
    """The complete configuration of an experiment."""

    members: int = Field(3, ge=1, le=MAX_MEMBERS)
    seed: Seed = 0
    data: DataConfig
    model: ModelConfig
    method: MethodConfig = MethodConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_scheduler: tuple[LRSchedulerConfig, ...] = (LRSchedulerConfig(name="cosine"),)
    train: TrainConfig = TrainConfig()
    executor: ExecutorConfig = ExecutorConfig()
    run: RunConfig = RunConfig()
    probe: ProbeConfig = ProbeConfig()
    search: SearchConfig | None = None

    @field_validator("lr_scheduler", mode="before")
    @classmethod
    def _check_tables(cls, value: Any) -> Any:
        if isinstance(value, str | Mapping):
            name = value if isinstance(value, str) else value.get("name", "cosine")
            raise ValueError(f"give a list of tables: [[lr_scheduler]] with name = {name!r}; [] for no schedule")
        return value

    @classmethod
    def load(cls, path: str | Path, changes: Iterable[str] = ()) -> Recipe:
        """Read a TOML file or a built-in recipe by name, and apply `a.b=c` changes."""
        file = recipe_file(str(path))
        return cls.parse(read_text(file, "recipe"), changes, where=str(path))

    @classmethod
    def parse(cls, text: str, changes: Iterable[str] = (), *, where: str = "recipe") -> Recipe:
        """Parse TOML text. The error for an unknown key contains its line and the closest valid key."""
        tree, changes = parse_toml(text, where), list(changes)
        for change in changes:
            _change(tree, change)
        try:
            return cls.from_dict(tree)
        except ConfigKeyError as problem:
            raise locate_error(problem, text, where, changes) from None

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Recipe:
        """Validate a nested dictionary."""
        try:
            return cls.model_validate(dict(tree))
        except ValidationError as problem:
            raise explain_error(cls, problem) from None

    def to_dict(self) -> dict[str, Any]:
        """Return a nested dictionary without unset keys."""
        return self.model_dump(mode="json", exclude_none=True)

    def to_toml(self) -> str:
        """Return the recipe as TOML, including defaults."""
        import tomlkit  # here, because reading a recipe does not need it

        return tomlkit.dumps(self.to_dict())

    def replaced(self, **sections: Mapping[str, Any] | Any) -> Recipe:
        """Return a copy with some values replaced: `recipe.replaced(members=5, optimizer={"lr": 0.2})`."""
        tree = self.to_dict()
        for name, value in sections.items():
            tree[name] = {**tree[name], **value} if isinstance(value, Mapping) and name in tree else value
        return Recipe.from_dict(tree)

    def for_member(self, number: int) -> Recipe:
        """Return the recipe with the values that [search] samples for one member; independent of the ensemble size."""
        if self.search is None:
            return self
        sampled: dict[str, dict[str, Any]] = {}
        for section, name, space in self.search.all():
            seed = derive_seed(self.seed, "search", number, section, SEED_NAMES.get(name, name))
            sampled.setdefault(section, {})[name] = sample(space, seed)
        return self.replaced(search=None, **sampled)

    def identity(self) -> dict[str, Any]:
        """Return the keys that determine a member's weights: all but members, executor, run and probe."""
        excluded = ("members", "executor", "run", "probe")
        tree = {name: section for name, section in self.to_dict().items() if name not in excluded}
        if self.model.backbone is None:  # keep the identity of recipes without a backbone
            tree["model"] = {name: value for name, value in tree["model"].items() if name not in BACKBONE_KEYS}
        return tree


def fingerprint(tree: Mapping[str, Any]) -> str:
    """Return a short hash of a nested dictionary, independent of the order of its keys."""
    return blake2b(json.dumps(tree, sort_keys=True).encode(), digest_size=8).hexdigest()


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested dictionary by dotted key.

    >>> flatten({"optimizer": {"lr": 0.1}, "seed": 3})
    {'optimizer.lr': 0.1, 'seed': 3}
    """
    values: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        values |= flatten(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return values


def short_key(key: str) -> str:
    """Return the last part of a dotted key, or its section if the last part is `name`.

    >>> short_key("optimizer.lr"), short_key("method.name")
    ('lr', 'method')
    """
    *sections, last = key.split(".")
    return sections[-1] if last == "name" and sections else last


def diff(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return one line for every value that differs between two recipes."""
    lines: list[str] = []
    for name in sorted({*old, *new}):
        left, right, path = old.get(name), new.get(name), f"{prefix}{name}"
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            lines += diff(left, right, f"{path}.")
        elif left != right:
            lines.append(f"{path}: {_show(left)} -> {_show(right)}")
    return lines


def _show(value: Any) -> str:
    return "(unset)" if value is None else repr(value)


def _change(tree: dict[str, Any], change: str) -> None:
    (*sections, last), value = split_change(change)
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise RecipeError(f"--set {change!r}: {section} is not a section")
    try:
        tree[last] = parse_toml(f"value = {value}", "")["value"]
    except (RecipeError, KeyError):
        tree[last] = value  # an unquoted word is a string
