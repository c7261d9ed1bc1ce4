"""The whole experiment as frozen, validated data: a TOML file in, a TOML file out, `--set a.b=c` the only override."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args

import tomlkit
from pydantic import Field, ValidationError, ValidationInfo, field_validator

from plateaux.config.builtin import recipe_file
from plateaux.config.schema import ConfigKeyError, ConfigSection, PluginSection, value_for_member
from plateaux.config.search_space import SearchConfig, sample
from plateaux.core.errors import RecipeError, suggest
from plateaux.core.types import derive_seed

Names = str | tuple[str, ...]
Numbers = float | tuple[float, ...]
BACKBONE_KEYS = ("head", "head_width", "resize", "cache_features", "cache_dtype", "rounds")  # keys of [model]


class DataConfig(PluginSection):
    """Which samples, in what order, and how they are varied; further keys go to the data set."""

    name: str
    batch: int = Field(128, ge=1)
    order: Literal["auto", "own", "shared"] = "auto"
    validation: float = Field(0.0, ge=0)  # share of the training samples below 1, else a count
    workers: int = Field(0, ge=0)
    drop_last: bool = False
    crop: int = Field(0, ge=0)
    flip: bool = False
    mixup: float = Field(0.0, ge=0)
    cutmix: float = Field(0.0, ge=0)
    bag: float | None = Field(None, gt=0)  # share of the training samples that every member draws, with replacement
    unlabelled: str | None = None  # another data set, or so many of its samples: "tinyimagenet32@1000"
    unlabelled_batch: int | None = Field(None, ge=1)  # of them in a batch; as many as labelled ones if unset


class LoraConfig(ConfigSection):
    """Low-rank adapters on chosen linear layers: the rest is held once for all members, and nobody trains it."""

    rank: int | tuple[int, ...] = 4
    alpha: Numbers = 8.0  # what an adapter says counts alpha / rank
    layers: tuple[str, ...] = Field(min_length=1)  # names, with wildcards
    train: tuple[str, ...] | None = None  # parts that are trained whole; the last layer if unset

    @field_validator("rank")
    @classmethod
    def _positive(cls, rank: int | tuple[int, ...]) -> int | tuple[int, ...]:
        if min(rank if isinstance(rank, tuple) else (rank,), default=0) < 1:
            raise ValueError("a rank is 1 or more")
        return rank


class ModelConfig(PluginSection):
    """Which network; further keys go to the model."""

    name: Names
    weights: str | None = None  # a safetensors file to start from
    prefix: Names = ""  # of the keys in that file
    partial: bool = False  # let the file lack what does not fit, such as another classifier
    freeze: tuple[str, ...] = ()  # submodules that nobody trains: held once for all members
    sparsity: float = Field(0.0, ge=0, lt=1)
    trunk: str | None = None  # nobody trains what comes up to this part: held once, members are what stands on it
    head: Literal["rest", "linear", "mlp"] = "rest"  # what members are: the model's own last parts, or a new head
    head_width: int | tuple[int, ...] = 512  # units in the middle of an mlp
    resize: int | None = Field(None, ge=1)  # images are brought to so many pixels before the trunk
    cache_features: bool = False  # the trunk sees every image once, and never again
    cache_dtype: Literal["float32", "float16"] = "float32"
    rounds: int = Field(1, ge=1)  # features are kept of so many augmentations of every image
    adapters: LoraConfig | None = None

    @field_validator("adapters")
    @classmethod
    def _alone(cls, adapters: LoraConfig | None, info: ValidationInfo) -> LoraConfig | None:
        for other in ("freeze", "trunk"):
            if adapters is not None and info.data.get(other):
                raise ValueError(f"beside adapters everything is frozen but adapters.train; leave {other} out")
        return adapters


class MethodConfig(PluginSection):
    """How members are trained; further keys go to the method."""

    name: str = "deep_ensemble"


class LossConfig(PluginSection):
    """What is minimised; further keys go to the loss."""

    name: str = "cross_entropy"


class OptimizerConfig(PluginSection):
    """A `torch.optim` optimiser by name; further keys go to it."""

    name: str = "SGD"
    lr: Numbers = 0.1
    weight_decay: Numbers = 0.0
    decay: Literal["all", "weights"] = "all"  # weights: not biases, not normalisation
    clip: Numbers | None = None  # largest norm of the direction
    accumulate: int = Field(1, ge=1)  # work a batch through in so many pieces


class LRSchedulerConfig(PluginSection):
    """A `torch.optim.lr_scheduler` by name, for so many epochs; further keys go to it."""

    name: str
    epochs: float | None = None  # the last one may leave it out
    per: Literal["epoch", "step"] = "epoch"


class TrainConfig(ConfigSection):
    """How long, how exact, and which weights are kept."""

    epochs: int = Field(10, ge=1)
    validate_every: int = Field(1, ge=1)
    keep: str = "last"  # or best:<measure>, chosen on validation samples
    average_from: int | None = Field(None, ge=1)  # use the mean of the weights after this step and all later ones
    patience: int | None = Field(None, ge=1)  # stop after so many validations without a better one
    precision: Literal["fp32", "bf16", "fp16", "fp64", "auto"] = "fp32"
    memory_format: Literal["contiguous", "channels_last", "auto"] = "contiguous"
    compile: bool = False
    deterministic: bool = False
    randomness: Literal["error", "different"] = "error"  # what vmap does about dropout

    @field_validator("keep")
    @classmethod
    def _last_or_best(cls, keep: str) -> str:
        if keep != "last" and not keep.startswith("best:"):
            raise ValueError("allowed: 'last' or 'best:<measure>', such as 'best:accuracy'")
        return keep


class ExecutorConfig(ConfigSection):
    """Where members live. Nothing here changes what is trained."""

    name: str = "local"
    manner: Literal["loop", "vmap", "parked"] = "loop"
    processes: int = Field(1, ge=1)
    devices: tuple[str, ...] = ()
    threads: int | None = Field(None, ge=1)
    data: int = Field(1, ge=1)  # mesh: copies of each member that share a batch
    batchnorm: Literal["synced", "local"] = "synced"  # mesh: statistics of the whole batch, or of each copy's share
    address: str | None = None  # ray: the cluster to join; unset: one of our own on this machine
    cpus: float = Field(1.0, gt=0)  # ray: of one process
    gpus: float = Field(0.0, ge=0)  # ray: of one process; a fraction lets several share a device
    retries: int = Field(5, ge=0)  # ray: how often a job whose process or node died is begun again


class RunConfig(ConfigSection):
    """What is written, and how often. Nothing here changes what is trained."""

    checkpoint_epochs: int = Field(1, ge=1)
    checkpoint_minutes: float | None = Field(10.0, gt=0)
    keep_resume: Literal["last", "none"] = "none"  # once a member has finished
    log_every: int = Field(50, ge=1)
    min_members: int | None = Field(None, ge=1)  # a meeting goes ahead with so many, should the others be given up
    tensorboard: bool = False
    features: str | None = None  # where features of a trunk are kept, for all runs


class ProbeConfig(ConfigSection):
    """Which probes are asked of members while they train, and how often. Nothing here changes what is trained."""

    names: tuple[str, ...] = ()  # with options in brackets, as in worst_l2(steps=10)
    every: int = Field(5, ge=1)  # epochs; after the last one too
    samples: int = Field(256, ge=1)  # of the training samples, drawn by the seed


class Recipe(ConfigSection):
    """An experiment, whole."""

    members: int = Field(3, ge=1)
    seed: int = 0
    data: DataConfig
    model: ModelConfig
    method: MethodConfig = MethodConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: tuple[LRSchedulerConfig, ...] = ()
    train: TrainConfig = TrainConfig()
    executor: ExecutorConfig = ExecutorConfig()
    run: RunConfig = RunConfig()
    probe: ProbeConfig = ProbeConfig()
    search: SearchConfig | None = None

    @classmethod
    def load(cls, path: str | Path, changes: Iterable[str] = ()) -> Recipe:
        """Read a TOML file, or a recipe that comes along by its name, with `a.b=c` changes laid over it."""
        file = recipe_file(str(path))
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as problem:
            raise RecipeError(f"Cannot read the recipe {str(path)!r}: {problem.strerror}") from None
        return cls.parse(text, changes, where=str(path))

    @classmethod
    def parse(cls, text: str, changes: Iterable[str] = (), *, where: str = "recipe") -> Recipe:
        """Read TOML text; a wrong key names the nearest right one and its line."""
        try:
            tree = tomlkit.parse(text).unwrap()
        except tomlkit.exceptions.TOMLKitError as problem:
            raise RecipeError(f"{where}: {problem}") from None
        for change in changes:
            _change(tree, change)
        try:
            return cls.from_dict(tree)
        except ConfigKeyError as problem:
            raise with_line_number(problem, text, where) from None

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Recipe:
        """Validate nested plain data."""
        try:
            return cls.model_validate(dict(tree))
        except ValidationError as problem:
            raise _explain(cls, problem) from None

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain data, without what is unset."""
        return self.model_dump(mode="json", exclude_none=True)

    def to_toml(self) -> str:
        """Return the recipe, defaults included, as TOML."""
        return tomlkit.dumps(self.to_dict())

    def replaced(self, **sections: Mapping[str, Any] | Any) -> Recipe:
        """Return a recipe with some values changed: `recipe.changed(members=5, optimizer={"lr": 0.2})`."""
        tree = self.to_dict()
        for name, value in sections.items():
            tree[name] = {**tree[name], **value} if isinstance(value, Mapping) and name in tree else value
        return Recipe.from_dict(tree)

    def for_member(self, number: int) -> Recipe:
        """Return the recipe with what [search] draws for one member put in place, whatever the ensemble's size."""
        if self.search is None:
            return self
        found: dict[str, dict[str, Any]] = {}
        for section, name, what in self.search.all():
            found.setdefault(section, {})[name] = sample(what, derive_seed(self.seed, "search", number, section, name))
        return self.replaced(search=None, **found)

    def identity(self) -> dict[str, Any]:
        """Return what decides a member's weights: not the ensemble's size, nor where and how often it is written."""
        beside = ("members", "executor", "run", "probe")
        found = {name: part for name, part in self.to_dict().items() if name not in beside}
        if self.model.trunk is None:  # a network without one is the same as before there were any
            found["model"] = {name: value for name, value in found["model"].items() if name not in BACKBONE_KEYS}
        return found


def fingerprint(tree: Mapping[str, Any]) -> str:
    """Return a short hash of nested plain data, whatever the order of its keys."""
    return blake2b(json.dumps(tree, sort_keys=True).encode(), digest_size=8).hexdigest()


def member_value(name: str, value: Any, number: int, members: int) -> Any:
    """Return member `number`'s value of a field that may list one per member."""
    return value_for_member(name, value, number, members) if isinstance(value, list | tuple) else value


def diff(old: Mapping[str, Any], new: Mapping[str, Any], at: str = "") -> list[str]:
    """Return a line for every value in which two recipes differ."""
    lines: list[str] = []
    for name in sorted({*old, *new}):
        left, right, path = old.get(name), new.get(name), f"{at}{name}"
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            lines += diff(left, right, f"{path}.")
        elif left != right:
            lines.append(f"{path}: {_show(left)} -> {_show(right)}")
    return lines


def with_line_number(problem: ConfigKeyError, text: str, where: str) -> RecipeError:
    """Return the problem with the file and line it is about."""
    line = _find_line(text, problem.section, problem.name, problem.nth)
    return RecipeError(f"{where}{f', line {line}' if line else ''}: {problem}")


def _show(value: Any) -> str:
    return "(unset)" if value is None else repr(value)


def _change(tree: dict[str, Any], change: str) -> None:
    path, sign, value = change.partition("=")
    if not sign or not path.strip():
        raise RecipeError(f"--set {change!r}: write it as section.key=value, such as --set optimizer.lr=0.05")
    *sections, last = path.strip().split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise RecipeError(f"--set {change!r}: {section} is not a section")
    try:
        tree[last] = tomlkit.parse(f"value = {value.strip()}").unwrap()["value"]
    except tomlkit.exceptions.TOMLKitError:
        tree[last] = value.strip()  # a bare word is a string


def _explain(cls: type[ConfigSection], problem: ValidationError) -> ConfigKeyError:
    first = problem.errors()[0]
    # A validator of a whole class puts its own name into the place.
    place = [part for part in first["loc"] if isinstance(part, str) and "[" not in part]
    nth = next((part for part in first["loc"][1:2] if isinstance(part, int)), 0)
    section, name = (place[0], place[1]) if len(place) > 1 else ("", place[0] if place else "")
    if section == "search":  # the one section with sections of its own
        name = ".".join(place[1:])
    head = f"[{section}] " if section else ""
    known = _keys(cls.model_fields[section].annotation if section else cls)
    key, whole = name, f"{head}{name}"
    if len(place) > 2 and name in known and (inside := _keys(known[name].annotation)):  # within a table of a section
        head, key, whole, known = f"{whole} ", place[2], f"{whole}.{place[2]}", inside
    if first["type"] == "extra_forbidden":
        text = f"{head}has no key {key!r}; {suggest(key, known)}".replace("has", "The recipe has", not section)
    elif first["type"] == "missing":
        why = ": every recipe names its data and its model" if key in ("data", "model") else ""
        text = f"{head or 'The recipe '}lacks {key!r}{why}"
    else:
        text = f"{whole} = {first['input']!r}: {first['msg']}"
    return ConfigKeyError(section, name, text, nth=nth)


def _keys(annotation: Any) -> dict[str, Any]:
    """Return the fields of the section that an annotation names, alone or among others."""
    parts = [each for each in (annotation, *get_args(annotation)) if isinstance(each, type) and each is not NoneType]
    return dict(parts[0].model_fields) if parts and issubclass(parts[0], ConfigSection | PluginSection) else {}


def _find_line(text: str, section: str, name: str, nth: int = 0) -> int | None:
    at, fallback, met = "", None, 0
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        if bare.startswith("["):
            at = bare.strip("[] ").split("#")[0].strip("[] ")
            met += at == section
            if (at == section and met == nth + 1) or (not section and at == name):
                fallback = number
        elif at == section and met in (0, nth + 1) and bare.split("=")[0].strip().strip("\"'") == name:
            return number
    return fallback
