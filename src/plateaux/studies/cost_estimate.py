"""What a study will cost before it is run: passes from its recipes, time from runs that are finished or a few steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from plateaux.config.builders.data import build_data, train_val_split
from plateaux.config.builders.training import build_method
from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.recipe import Recipe, fingerprint
from plateaux.core import registry
from plateaux.core.errors import PlateauxError
from plateaux.core.row_names import MEAN_OF_MEMBERS
from plateaux.core.runtime import num_cores
from plateaux.data.sources import DataSplits
from plateaux.evaluation.splits import eval_splits
from plateaux.loss_landscape.probe import get_probes
from plateaux.storage.local_store import LocalStore
from plateaux.storage.run import MemberProgress, Run
from plateaux.storage.run_info import DataInfo
from plateaux.studies.planning import RunSpec
from plateaux.studies.runner import StudyRunner
from plateaux.studies.study import Study
from plateaux.training.autotune import throughput
from plateaux.training.cost import count_passes

FORWARD = 1 / 3  # of a pass
CANDIDATES = (
    {"precision": "fp32", "memory_format": "contiguous"},
    {"precision": "bf16", "memory_format": "channels_last"},
)  # for what is left to the machine


@dataclass(frozen=True, slots=True)
class RunCost:
    """One run of a study, and what is left to do of it."""

    run: str
    conditions: tuple[str, ...]
    state: Literal["done", "begun", "missing"]
    members: int
    epochs: int
    passes: float  # over the training samples, of all members, still to be trained
    evaluation: float  # samples' passes still to be measured
    seconds: float
    branches_from: str | None = None


class CostEstimate:
    """Reckons a study; what it has timed or read once it does not time or read again."""

    def __init__(self, conduct: StudyRunner) -> None:
        self.runner = conduct
        self.data: dict[str, DataSplits] = {}
        self.throughputs: dict[str, float] = {}

    def all(self) -> list[RunCost]:
        """Return every run of the study with what is left to do of it; nothing is trained and nothing written."""
        missing = {task.folder for task, _ in self.runner.missing()}
        return [self.one(task, task.folder in missing) for task in self.runner.runs if self._wanted(task)]

    def one(self, task: RunSpec, missing: bool) -> RunCost:
        """Reckon one run."""
        recipe, words = task.recipe, tuple(str(plan) for plan in task.trials)
        if not missing:
            return RunCost(task.folder, words, "done", recipe.members, recipe.train.epochs, 0.0, 0.0, 0.0)
        standing = self._standing(task)
        begun = any(each != MemberProgress() for each in standing)
        start = 0 if begun else self._span(task)
        passes = sum(self._left(recipe, number, each, start) for number, each in enumerate(standing))
        measuring = recipe.members * evaluation_passes(
            self.runner.study, recipe, self._data(recipe), self.runner.components
        )
        samples = len(train_val_split(recipe, self._data(recipe))[0])
        at_once = min(self.runner.trained(task).executor.processes, recipe.members, num_cores())
        seconds = (passes * samples / at_once + measuring) / self._pace(recipe, samples)
        state: Literal["begun", "missing"] = "begun" if begun else "missing"
        left = (recipe.members, recipe.train.epochs, passes, measuring, seconds)
        return RunCost(task.folder, words, state, *left, task.prefix if start else None)

    def _wanted(self, task: RunSpec) -> bool:
        return any(plan.run in self.runner.wanted for plan in task.trials)

    def _left(self, recipe: Recipe, number: int, progress: MemberProgress, start: int) -> float:
        if progress.finished:
            return 0.0
        components = self.runner.components
        before = count_passes(recipe, number, epochs=max(progress.epoch, start), components=components)
        return count_passes(recipe, number, components=components) - before

    def _standing(self, task: RunSpec) -> list[MemberProgress]:
        root = self.runner.root / "runs" / task.folder
        if not LocalStore(root).has("run.json"):
            return [MemberProgress()] * task.recipe.members
        run = Run.open(root)
        return [run.progress(number) for number in range(task.recipe.members)]

    def _span(self, task: RunSpec) -> int:
        """Return the epochs that another run of the study trains for this one."""
        lender = next((each for each in self.runner.runs if each.folder == task.prefix), None)
        if lender is None:
            return 0
        rendezvous = build_method(lender.recipe, 0, self.runner.components).partition
        assert rendezvous is not None
        return rendezvous.after[0]

    def _data(self, recipe: Recipe) -> DataSplits:
        name = fingerprint(recipe.to_dict()["data"])
        if name not in self.data:
            self.data[name] = build_data(recipe, self.runner.components)
        return self.data[name]

    def _pace(self, recipe: Recipe, samples: int) -> float:
        """Return how many samples' passes a second a member makes: as runs with that network did, or by trying."""
        kind = _kind(recipe.to_dict())
        if kind not in self.throughputs:
            self.throughputs[kind] = self._found(kind, samples) or self._tried(recipe)
        return self.throughputs[kind]

    def _found(self, kind: str, samples: int) -> float | None:
        for entry in self.runner.results().get("runs", {}).values():
            cost = entry["costs"].get(MEAN_OF_MEMBERS)
            if cost and cost["seconds"] > 0 and _kind(entry["recipe"]) == kind:
                return float(cost["passes"] * samples / cost["seconds"])
        return None

    def _tried(self, recipe: Recipe) -> float:
        """Return the pace of plain descent; of what is left to the machine, that of the faster candidate."""
        tree = recipe.to_dict()
        train = tree["train"]
        found = []
        for candidate in CANDIDATES:
            auto = {name: value for name, value in candidate.items() if train[name] == "auto"}
            plain = {**tree, "method": {"name": "deep_ensemble"}, "train": {**train, **auto}}
            found.append(throughput(Recipe.from_dict(plain), self.runner.components))
            if not auto:
                break
        return max(found)


def evaluation_passes(study: Study, recipe: Recipe, data: DataSplits, components: Components = NO_COMPONENTS) -> float:
    """Return how many samples' passes it takes to measure one member; making corrupted images is not counted."""
    asked, looked = study.evaluate, study.landscape
    words = [*(asked.splits if asked.metrics else ()), *asked.corruptions]
    found = 0.0
    for target in eval_splits(recipe, DataInfo.from_splits(data), words):
        there = len(data.train) if target.family in ("train", "validation") else len(data.test)
        found += FORWARD * min(target.limit or there, there)
    for name in (name for words in asked.ood for name in words.partition("=")[2].split(",") if name):
        found += FORWARD * _ood_samples(name, len(data.test))
    probes = get_probes(looked.probes, trust=components.trust)
    return found + sum(probe.passes(looked.samples or probe.samples) for probe in probes.values())


def _ood_samples(name: str, usual: int) -> int:
    """Return how many samples another set has; where that cannot be told, as many as the run's own."""
    try:
        return len(registry.dataset.get(name)().test)
    except PlateauxError:
        return usual


def _kind(recipe: Mapping[str, Any]) -> str:
    return fingerprint({name: recipe[name] for name in ("model", "data", "loss", "optimizer")})
