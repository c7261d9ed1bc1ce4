"""Estimated cost of a study: passes from its recipes, time from finished runs, a given speed, or a short benchmark.

    device seconds = (passes x training samples + passes of single samples for the evaluation) / samples per second

where samples per second is the speed of plain training of one member on one device. A given speed is that of the
network of the first run; other networks are slower or faster by their operations on one sample. Data sets that are not
on this machine have their published size. Members on a shared backbone train only their heads: a pass counts by the
operations of the head, a forward pass of the backbone is added where its features are not cached, and otherwise once
for every cached image. This is a lower bound: a step of a small head takes longer than its operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from plateaux.config.builders.data import build_data, train_val_split
from plateaux.config.builders.model import build_members
from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.experiment import Experiment
from plateaux.config.recipe import Recipe, fingerprint
from plateaux.core import registry
from plateaux.core.errors import DataError, PlateauxError
from plateaux.core.process_info import num_cores
from plateaux.core.row_names import MEAN_OF_MEMBERS
from plateaux.core.runtime import get_device
from plateaux.core.types import Inputs
from plateaux.data.published_sizes import TEST_IMAGES, published_stand_in
from plateaux.data.sources import DataSplits
from plateaux.evaluation.splits import eval_splits
from plateaux.loss_landscape.probe import get_probes
from plateaux.models.backbone import BackboneWithHead
from plateaux.models.surgery import size_in_bytes
from plateaux.storage.local_store import LocalStore
from plateaux.storage.run import MemberProgress, Run
from plateaux.storage.run_info import DataInfo
from plateaux.studies.planning import RunSpec
from plateaux.studies.runner import StudyRunner
from plateaux.studies.study import Study
from plateaux.training.autotune import throughput
from plateaux.training.cost import count_passes

AUGMENTATIONS = ("crop", "flip", "resized_crop")  # settings that select what the cached features are of
FORWARD_COST = 1 / 3  # of a forward-and-backward pass
CPU_BATCH_SIZE = 16  # of the benchmark: images per second of a CPU hardly depend on it, and a step is short
AUTO_CANDIDATES = (
    {"precision": "fp32", "memory_format": "contiguous"},
    {"precision": "bf16", "memory_format": "channels_last"},
)  # for settings that are "auto"


@dataclass(frozen=True, slots=True)
class RunCost:
    """One run of a study and its remaining cost."""

    run: str
    conditions: tuple[str, ...]
    state: Literal["done", "started", "missing"]
    members: int
    epochs: int
    passes: float  # remaining passes over the training samples, of all members
    evaluation: float  # remaining passes of single samples for the evaluation
    seconds: float  # on this machine, or with the processes of the recipe
    branches_from: str | None = None
    device_seconds: float = 0.0  # of all devices together
    bytes: int = 0  # weights of all members, which are kept


@dataclass(frozen=True, slots=True)
class NetworkCost:
    """The weights and the operations of a member. Members on a backbone share most of both."""

    own_bytes: int
    shared_bytes: int
    shared: float  # of the operations of a pass, the fraction in the backbone

    def weight_bytes(self, members: int) -> int:
        """Return the size of the weights of all members; what they share is stored once."""
        return members * self.own_bytes + self.shared_bytes

    def pass_cost(self, recipe: Recipe) -> float:
        """Return the cost of a pass of one member, relative to training the whole network."""
        backbone = 0.0 if recipe.model.cache_features else FORWARD_COST * self.shared
        return 1 - self.shared + backbone

    def evaluation_cost(self, recipe: Recipe, *, fills_cache: bool) -> float:
        """Return the cost of the evaluation of all members, relative to one pass of the whole network."""
        if not recipe.model.cache_features:
            return recipe.members
        return recipe.members * (1 - self.shared) + (self.shared if fills_cache else 0.0)


def network_cost(module: nn.Module, data: DataSplits) -> NetworkCost:
    """Return the share of the backbone in the operations of a network, and the sizes of its two parts."""
    shared_bytes = sum(param.nbytes for param in module.parameters() if not param.requires_grad)
    own_bytes = size_in_bytes([module]) - shared_bytes
    if not isinstance(module, BackboneWithHead):
        return NetworkCost(own_bytes, shared_bytes, 0.0)
    features = torch.zeros(1, *module.backbone.shape)
    head = count_operations(module.head, features)
    return NetworkCost(own_bytes, shared_bytes, 1 - head / count_operations(module, first_sample(data)))


def first_sample(data: DataSplits) -> Inputs:
    """Return the first training sample as a batch of floats or tokens."""
    x, _ = data.train.fetch(torch.zeros(1, dtype=torch.int64))
    return x.float() if isinstance(x, Tensor) and not x.is_floating_point() else x


def count_operations(module: nn.Module, x: Inputs) -> float:
    """Return the floating-point operations of a forward pass."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module.eval()(**x) if isinstance(x, Mapping) else module.eval()(x)
    return float(counter.get_total_flops())


class CostEstimate:
    """Estimates the cost of a study; datasets and throughputs are cached."""

    def __init__(self, runner: StudyRunner, *, images_per_second: float | None = None) -> None:
        self.runner = runner
        self.images_per_second = images_per_second
        self.missing_data: dict[str, str] = {}  # data sets with their published size, and why
        self.data: dict[str, DataSplits] = {}
        self.throughputs: dict[str, float] = {}
        self.operations: dict[str, float] = {}
        self.networks: dict[str, NetworkCost] = {}
        self.cached: set[str] = set()  # feature caches that an earlier run has filled

    def all(self) -> list[RunCost]:
        """Return the remaining cost of every run; nothing is trained or written."""
        missing = {spec.folder for spec, _ in self.runner.missing()}
        return [self.one(spec, spec.folder in missing) for spec in self.runner.runs if self._is_wanted(spec)]

    def one(self, spec: RunSpec, missing: bool) -> RunCost:
        """Return the remaining cost of one run."""
        recipe, names = spec.recipe, tuple(map(str, spec.trials))
        fills_cache = self._fills_cache(recipe)
        if not missing:
            return RunCost(spec.folder, names, "done", recipe.members, recipe.train.epochs, 0.0, 0.0, 0.0)
        members = self._member_progress(spec)
        has_started = any(each != MemberProgress() for each in members)
        start = 0 if has_started else self._shared_epochs(spec)
        passes = sum(self._remaining_passes(recipe, number, each, start) for number, each in enumerate(members))
        data, network = self._data(recipe), self._network(recipe)
        evaluation = evaluation_passes(self.runner.study, recipe, data, self.runner.components)
        evaluation *= network.evaluation_cost(recipe, fills_cache=fills_cache)
        samples = len(train_val_split(recipe, data)[0])
        at_once = min(self.runner.training_recipe(spec).executor.processes, recipe.members, num_cores())
        rate = self._throughput(recipe, samples)
        training = passes * samples * network.pass_cost(recipe)
        features = FORWARD_COST * samples * _num_cached(recipe) * network.shared if fills_cache else 0.0
        seconds = (training / at_once + features + evaluation) / rate
        state: Literal["started", "missing"] = "started" if has_started else "missing"
        left = (recipe.members, recipe.train.epochs, passes, evaluation, seconds)
        kept = network.weight_bytes(recipe.members) if self.runner.study.keep_weights else 0
        parent = spec.prefix if start else None
        return RunCost(spec.folder, names, state, *left, parent, (training + features + evaluation) / rate, kept)

    def _is_wanted(self, spec: RunSpec) -> bool:
        return any(trial.run in self.runner.wanted for trial in spec.trials)

    def _remaining_passes(self, recipe: Recipe, number: int, progress: MemberProgress, start: int) -> float:
        if progress.finished:
            return 0.0
        components = self.runner.components
        before = count_passes(Experiment(recipe, components), number, epochs=max(progress.epoch, start))
        return count_passes(Experiment(recipe, components), number) - before

    def _member_progress(self, spec: RunSpec) -> list[MemberProgress]:
        root = self.runner.root / "runs" / spec.folder
        if not LocalStore(root).has("run.json"):
            return [MemberProgress()] * spec.recipe.members
        run = Run.open(root)
        return [run.progress(number) for number in range(spec.recipe.members)]

    def _shared_epochs(self, spec: RunSpec) -> int:
        """Return the epochs that this run takes over from its parent."""
        parent = next((each for each in self.runner.runs if each.folder == spec.prefix), None)
        if parent is None:
            return 0
        partition = Experiment(parent.recipe, self.runner.components).method().partition
        assert partition is not None
        return partition.after[0]

    def _data(self, recipe: Recipe) -> DataSplits:
        name = fingerprint(recipe.to_dict()["data"])
        if name not in self.data:
            try:
                self.data[name] = build_data(recipe, self.runner.components)
            except DataError as problem:
                stand_in = published_stand_in(recipe.data.name, recipe.data.options)
                if stand_in is None:
                    raise
                self.missing_data[recipe.data.name] = str(problem)
                self.data[name] = stand_in
        return self.data[name]

    def _network(self, recipe: Recipe) -> NetworkCost:
        key = _architecture_key(recipe.to_dict())
        if key not in self.networks:
            plain = Recipe.from_dict(_without_weights(recipe))
            (module,) = build_members(plain, self._data(recipe), [0], self.runner.components)
            self.networks[key] = network_cost(module, self._data(recipe))
        return self.networks[key]

    def _fills_cache(self, recipe: Recipe) -> bool:
        """Return whether this run caches features of the backbone that no earlier run has cached."""
        if not recipe.model.cache_features:
            return False
        model = {name: value for name, value in recipe.to_dict()["model"].items() if not name.startswith("head")}
        data = {name: getattr(recipe.data, name) for name in ("name", "options", *AUGMENTATIONS)}
        key = fingerprint({"model": model, "data": data})
        is_new = key not in self.cached
        self.cached.add(key)
        return is_new

    def _throughput(self, recipe: Recipe, samples: int) -> float:
        """Return the throughput of one member in samples per second, from finished runs or a benchmark."""
        if self.images_per_second is not None:
            first, own = (self.network_operations(each) for each in (self.runner.runs[0].recipe, recipe))
            return self.images_per_second * (first / own if first and own else 1.0)  # none are counted: as fast
        key = _architecture_key(recipe.to_dict())
        if key not in self.throughputs:
            # Finished runs on a backbone have the speed of their heads, not of the whole network.
            measured = None if recipe.model.backbone else self._measured_throughput(key, samples)
            self.throughputs[key] = measured or self._benchmark_throughput(recipe)
        return self.throughputs[key]

    def network_operations(self, recipe: Recipe) -> float:
        """Return the floating-point operations of a forward pass of a whole network for one sample."""
        data = self._data(recipe)
        tree = _whole_network(recipe)
        parts = {"model": tree["model"], "data": [recipe.data.name, recipe.data.options, data.shape]}
        if (key := fingerprint(parts)) not in self.operations:
            (module,) = build_members(Recipe.from_dict(tree), data, [0], self.runner.components)
            self.operations[key] = count_operations(module, first_sample(data))
        return self.operations[key]

    def _measured_throughput(self, key: str, samples: int) -> float | None:
        for entry in self.runner.results().get("runs", {}).values():
            cost = entry["costs"].get(MEAN_OF_MEMBERS)
            if cost and cost["seconds"] > 0 and _architecture_key(entry["recipe"]) == key:
                return float(cost["passes"] * samples / cost["seconds"])
        return None

    def _benchmark_throughput(self, recipe: Recipe) -> float:
        """Return the throughput of plain gradient descent, with the fastest candidate for `auto` settings."""
        tree = _whole_network(recipe)
        train, data = tree["train"], self._data(recipe)
        components, size = self.runner.components, recipe.data.batch_size
        if get_device(recipe.executor.devices[0] if recipe.executor.devices else None).type == "cpu":
            size = min(size, CPU_BATCH_SIZE)
        if recipe.data.name in self.missing_data:
            components = replace(components, data=data)
        rates = []
        for candidate in AUTO_CANDIDATES:
            auto = {name: value for name, value in candidate.items() if train[name] == "auto"}
            plain = {**tree, "data": {**tree["data"], "batch_size": size}, "method": {"name": "deep_ensemble"}}
            plain["train"] = {**train, **auto}
            rates.append(throughput(Experiment(Recipe.from_dict(plain), components)))
            if not auto:
                break
        return max(rates)


def evaluation_passes(study: Study, recipe: Recipe, data: DataSplits, components: Components = NO_COMPONENTS) -> float:
    """Return the passes of single samples to evaluate one member, without the generation of corrupted images."""
    evaluate, landscape = study.evaluate, study.landscape
    info = DataInfo.from_splits(data)
    total = 0.0
    for name in (*(evaluate.splits if evaluate.metrics else ()), *evaluate.corruptions):
        try:
            splits = eval_splits(recipe, info, [name], components=components)
        except DataError:  # a set of images that is not on this machine
            total += FORWARD_COST * TEST_IMAGES.get(name.partition("@")[0].partition(":")[0], len(data.test))
            continue
        for split in splits:
            available = len(data.train) if split.family in ("train", "validation") else len(data.test)
            available = available if split.is_own else len(split.open(recipe, data)[1])
            total += FORWARD_COST * min(split.limit or available, available)
    for name in (name for suite in evaluate.ood for name in suite.partition("=")[2].split(",") if name):
        total += FORWARD_COST * _ood_samples(recipe, info, name, len(data.test))
    probes = get_probes(landscape.probes, trust=components.trust)
    return total + sum(probe.passes(landscape.samples or probe.samples) for probe in probes.values())


def _ood_samples(recipe: Recipe, info: DataInfo, name: str, default: int) -> int:
    """Return the number of samples of an OOD set, its published number if it is not here, or `default`."""
    if name.split(":")[0] == "corrupted":
        return default * len(eval_splits(recipe, info, [name]))
    try:
        return len(registry.dataset.get(name)().test)
    except PlateauxError:
        return TEST_IMAGES.get(name, default)


def _num_cached(recipe: Recipe) -> int:
    """Return the number of cached features of a training image: one without augmentation."""
    is_augmented = any(getattr(recipe.data, name) for name in AUGMENTATIONS)
    return recipe.model.cached_augmentations if is_augmented else 1


def _whole_network(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe that trains the whole network, from no weights: they may be elsewhere, and the speed is equal."""
    tree = _without_weights(recipe)
    return {**tree, "model": {**tree["model"], "backbone": None, "head": "own", "cache_features": False}}


def _without_weights(recipe: Recipe) -> dict[str, Any]:
    tree = recipe.to_dict()
    return {**tree, "model": {**tree["model"], "weights": None}}


def _architecture_key(recipe: Mapping[str, Any]) -> str:
    return fingerprint({name: recipe[name] for name in ("model", "data", "loss", "optimizer")})
