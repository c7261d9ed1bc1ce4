"""The walk over a run's landscapes: named probes, asked of every member on one recorded sample.

    for found in landscape("runs/demo", probes=["worst_l2", "fisher_rao"]):
        print(found.measure, found.rows["member 0"])

Probes come one after the other, and members within each, so that what is finished is written when the walk is stopped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from plateaux.config.builders.data import build_loader, eval_batches
from plateaux.config.builders.model import architecture_hash
from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.core.callbacks import Say, Seen, nothing
from plateaux.core.errors import Interrupted, PlateauxError
from plateaux.core.formatting import format_duration
from plateaux.core.stats.estimates import mean_of_independent
from plateaux.core.types import Batch, Estimate
from plateaux.data.sources import Source
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.results import MetricResult
from plateaux.evaluation.row_names import MEMBERS_MEAN, row_name
from plateaux.evaluation.splits import eval_split
from plateaux.loss_landscape.loss_surface import Ground
from plateaux.loss_landscape.probe import Probe, probes_named
from plateaux.loss_landscape.session import Conditions, Pulse, Sample, drawn, ground_of, posed
from plateaux.storage.run import Run

RESCALED = {"same": "stays the same", "moves": "moves"}


def landscape(
    root: str | Path,
    *,
    probes: Sequence[str] = ("all",),
    on: str = "train",
    samples: int | None = None,
    members: Sequence[int] | None = None,
    batchnorm: Literal["eval", "train"] = "eval",
    augment: bool = False,
    unit_logits: bool = False,
    given: Components = NO_COMPONENTS,
    device: str | None = None,
    seen: Seen = nothing,
    say: Say = nothing,
) -> list[MetricResult]:
    """Ask probes of every member of a run on a seeded sample of its data; what is found is written to the run.

    Each probe has its own number of samples, which `samples` replaces. BatchNorm uses its running statistics unless
    told to use those of the batch (`train`); `augment` varies samples as the recipe does in training; `unit_logits`
    scales every sample's logits to length one. All of it is recorded with every number.
    """
    chosen = probes_named(probes, allow=given.trust)
    panel = Evaluator(Run.open(root), members, given=given, device=device, cache_logits="no", say=say)
    counts = {name: samples or probe.samples for name, probe in chosen.items()}
    scene = Scene(panel, on, Conditions(batchnorm, augment, unit_logits), most=max(counts.values(), default=1))
    passes = {name: probe.passes(len(scene.sample.first(counts[name]).ids)) for name, probe in chosen.items()}
    costs = dict.fromkeys(panel.numbers, sum(passes.values()))
    meter = scene.meter(costs, f"{len(chosen)} probe{'s' * (len(chosen) != 1)}", seen)
    found: list[MetricResult] = []
    problems: list[PlateauxError] = []
    for name, probe in chosen.items():
        try:
            found.append(_asked(scene, name, probe, counts[name], passes[name], meter))
        except Interrupted as stop:
            raise Interrupted(f"{stop}; {len(found)} of {len(chosen)} probes are done and written to {root}") from None
        except PlateauxError as problem:
            problems.append(problem)
            say(f"{name} is left out: {problem}")
    if problems and not found:
        raise problems[0]
    return found


def _asked(scene: Scene, name: str, probe: Probe, count: int, passes: float, meter: Meter) -> MetricResult:
    """Ask one probe of every member, and write what is found; when stopped, what was found until then."""
    answers: dict[int, Mapping[str, Estimate]] = {}
    sample, begun = scene.sample.first(count), time.monotonic()
    try:
        for number in scene.panel.numbers:
            with meter.asking(passes, scene.paces[number]), scene.standing_on(number, sample, meter.pulse) as ground:
                answers[number] = probe.ask(ground)
    except KeyboardInterrupt:
        if answers:
            scene.panel.write(_measurement(scene, name, probe, sample, answers))
        done = f"{len(answers)} of {len(scene.panel.numbers)} members"
        raise Interrupted(f"Stopped while asking {name}, which {done} had answered") from None
    found = _measurement(scene, name, probe, sample, answers)
    scene.panel.write(found)
    mean = found.rows.get(MEMBERS_MEAN) or next(iter(found.rows.values()), Estimate(float("nan")))
    scene.panel.say(f"{name}: {mean.value:.4g} ({format_duration(time.monotonic() - begun)})")
    return found


class Scene:
    """The members of a run, and a recorded sample to look at their landscapes on."""

    def __init__(self, panel: Evaluator, on: str, conditions: Conditions, *, most: int) -> None:
        self.panel, self.conditions = panel, conditions
        self.target = eval_split(panel.recipe, panel.data_info, on)
        source, ids = self.target.open(panel.recipe, panel.data)
        self.known = panel.known(self.target)
        panel.check_same_data(self.target, source, self.known)
        self.varies = self._augmentation()
        ids = drawn(ids[: self.target.limit], panel.recipe.seed, most)
        self.sample = Sample(ids, tuple(self._batches(source, ids)))
        self.paces: dict[int, float] = {}

    def _augmentation(self) -> dict[str, Any]:
        part = self.panel.recipe.data
        found = {name: getattr(part, name) for name in ("crop", "flip", "mixup", "cutmix") if getattr(part, name)}
        if self.conditions.augment and not found:
            self.panel.say("the recipe varies nothing in training, so neither does the sample")
        return found if self.conditions.augment else {}

    def _batches(self, source: Source, ids: torch.Tensor) -> Iterator[Batch]:
        panel = self.panel
        size = panel.recipe.data.batch
        if not self.varies:
            data, source = panel.ready(source, ids)
            return eval_batches(panel.recipe, data, source, ids, batch_size=size, device=panel.device)
        # All members see the same variations: those of the first epoch in the order that members can share.
        every = torch.arange(len(panel.data.train))
        feed = build_loader(panel.recipe, panel.data, 0, shared=True, device=panel.device, ids=every)
        _, every = self.target.open(panel.recipe, panel.data)
        return replace(feed, source=source, ids=every).some(ids, 0, batch=size)

    def module(self, number: int) -> nn.Module:
        """Return the network of a member."""
        found = self.panel.modules[self.panel.numbers.index(number)].module
        assert isinstance(found, nn.Module)
        return found

    @contextmanager
    def standing_on(self, number: int, sample: Sample, pulse: Pulse = lambda: None) -> Iterator[Ground]:
        """Lend the ground of one member, its network in the mode that was asked for."""
        module = self.module(number)
        with posed(module, self.conditions.batchnorm):
            seed = self.panel.recipe.seed
            yield ground_of(module, sample, self.conditions, seed=seed, number=number, pulse=pulse)

    def about(self, sample: Sample) -> dict[str, Any]:
        """Return what is recorded of the samples and of how they are looked at."""
        mode = self.conditions.of(self.module(self.panel.numbers[0]))
        batch = {"batch": self.panel.recipe.data.batch} if mode["batchnorm"] == "train" else {}
        precision = "fp64" if self.panel.recipe.train.precision == "fp64" else "fp32"
        varied = {"augmentation": self.varies or "none", "precision": precision}
        return {**self.target.metadata, **self.known, **sample.about(), **mode, **batch, **varied}

    def meter(self, costs: Mapping[int, float], what: str, seen: Seen) -> Meter:
        """Time a pass of every kind of network, say how long the walk will take, and return what tells how far it is.

        Costs are of members by number, in forward-and-backward passes of one sample.
        """
        kinds: dict[str, float] = {}
        for number in costs:
            kind = architecture_hash(self.panel.recipe, number, self.panel.given)
            if kind not in kinds:
                kinds[kind] = self._pace(number)
            self.paces[number] = kinds[kind]
        wanted = format_duration(sum(cost * self.paces[number] for number, cost in costs.items()))
        many = f"{len(costs)} member{'s' * (len(costs) > 1)}"
        self.panel.say(f"{what} of {many} on {self.target.name} samples: about {wanted}")
        return Meter(sum(costs.values()), seen)

    def _pace(self, number: int) -> float:
        """Return the seconds of one sample's forward-and-backward pass, timed after one that warms up."""
        batch = self.sample.batches[0]
        with self.standing_on(number, self.sample) as ground:
            ground.gradient(batch)
            begun = time.perf_counter()
            ground.gradient(batch)
            return (time.perf_counter() - begun) / len(batch)


class Meter:
    """How many passes of how many are done; between two answers the clock guesses, and the guess never goes back."""

    def __init__(self, total: float, seen: Seen) -> None:
        self.total, self.seen = total, seen
        self.done, self.told = 0.0, 0
        self.passes, self.pace, self.begun = 0.0, 1.0, 0.0

    @contextmanager
    def asking(self, passes: float, pace: float) -> Iterator[None]:
        """Count a question of so many passes, each of so many seconds."""
        self.passes, self.pace, self.begun = passes, pace, time.monotonic()
        yield
        self.done += passes
        self._tell(self.done)

    def pulse(self) -> None:
        """Hear that a forward pass begins."""
        guess = (time.monotonic() - self.begun) / max(self.pace, 1e-12)
        self._tell(self.done + min(guess, 0.95 * self.passes))

    def _tell(self, done: float) -> None:
        if int(done) > self.told:
            self.told = int(done)
            self.seen(self.told, max(int(self.total), self.told))


def _measurement(
    scene: Scene, name: str, probe: Probe, sample: Sample, answers: Mapping[int, Mapping[str, Estimate]]
) -> MetricResult:
    panel = scene.panel
    names = {number: f"member {number}" for number in answers}
    weights = {names[number]: panel.run.progress(number).weights_source for number in answers}
    hashes = {names[number]: panel.hashes[panel.numbers.index(number)] for number in answers}
    words = [probe.convention, f"when neighbouring layers are rescaled it {RESCALED[probe.rescaled]}"]
    return MetricResult(
        name,
        scene.target.name,
        _rows(answers),
        probe.better,
        weights,
        scene.about(sample),
        hashes,
        group="flat",
        definition="; ".join(word for word in words if word),
    )


def _rows(answers: Mapping[int, Mapping[str, Estimate]]) -> dict[str, Estimate]:
    """Return every member's numbers, and the mean of the members' after them."""
    rows: dict[str, Estimate] = {}
    for number, found in answers.items():
        rows |= {row_name(f"member {number}", *([part] if part else [])): value for part, value in found.items()}
    parts = dict.fromkeys(part for found in answers.values() for part in found)
    for part in parts if len(answers) > 1 else []:
        name = row_name(MEMBERS_MEAN, *([part] if part else []))
        rows[name] = mean_of_independent([found[part].value for found in answers.values() if part in found])
    return rows
