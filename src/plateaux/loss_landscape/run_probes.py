"""The walk over a run's landscapes: named probes, asked of every member on one recorded sample.

    for found in landscape("runs/demo", probes=["worst_l2", "fisher_rao"]):
        print(found.measure, found.rows["member 0"])

Probes come one after the other, and members within each, so that what is finished is written when the walk is stopped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from plateaux.config.builders.data import build_loader, eval_batches
from plateaux.config.builders.model import architecture_hash
from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.core.callbacks import Say, Seen, nothing
from plateaux.core.errors import Interrupted, PlateauxError
from plateaux.core.formatting import format_duration
from plateaux.core.row_names import MEAN_OF_MEMBERS, RowName
from plateaux.core.stats.estimates import mean_of_independent
from plateaux.core.types import Batch, Estimate
from plateaux.data.sources import Source
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.options import EvalOptions
from plateaux.evaluation.results import MetricResult
from plateaux.evaluation.splits import eval_split
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.probe import Probe, get_probes
from plateaux.loss_landscape.session import (
    ForwardCallback,
    ProbeBatch,
    ProbeSettings,
    make_loss_surface,
    probe_mode,
    sample_ids,
)
from plateaux.storage.run import Run, RunLike

logger = logging.getLogger(__name__)
RESCALED = {"same": "stays the same", "moves": "moves"}


def probe_landscape(
    root: RunLike,
    *,
    probes: Sequence[str] = ("all",),
    split: str = "train",
    limit: int | None = None,
    members: Sequence[int] | None = None,
    batchnorm: Literal["eval", "train"] = "eval",
    augment: bool = False,
    normalize_logits: bool = False,
    components: Components = NO_COMPONENTS,
    device: str | None = None,
    seen: Seen = nothing,
    say: Say = nothing,
) -> list[MetricResult]:
    """Ask probes of every member of a run on a seeded sample of its data; what is found is written to the run.

    Each probe has its own number of samples, which `samples` replaces. BatchNorm uses its running statistics unless
    told to use those of the batch (`train`); `augment` varies samples as the recipe does in training; `unit_logits`
    scales every sample's logits to length one. All of it is recorded with every number.
    """
    chosen = get_probes(probes, trust=components.trust)
    panel = Evaluator(
        Run.open(root), components=components, options=EvalOptions(members=members, device=device, cache_logits="off")
    )
    counts = {name: limit or probe.samples for name, probe in chosen.items()}
    scene = ProbeSession(
        panel, split, ProbeSettings(batchnorm, augment, normalize_logits), most=max(counts.values(), default=1)
    )
    passes = {name: probe.passes(len(scene.sample.first(counts[name]).ids)) for name, probe in chosen.items()}
    costs = dict.fromkeys(panel.numbers, sum(passes.values()))
    meter = scene.meter(costs, f"{len(chosen)} probe{'s' * (len(chosen) != 1)}", seen)
    found: list[MetricResult] = []
    problems: list[PlateauxError] = []
    for name, probe in chosen.items():
        try:
            found.append(_run_probe(scene, name, probe, counts[name], passes[name], meter))
        except Interrupted as stop:
            raise Interrupted(f"{stop}; {len(found)} of {len(chosen)} probes are done and written to {root}") from None
        except PlateauxError as problem:
            problems.append(problem)
            say(f"{name} is left out: {problem}")
    if problems and not found:
        raise problems[0]
    return found


def _run_probe(
    scene: ProbeSession, name: str, probe: Probe, count: int, passes: float, meter: ProgressMeter
) -> MetricResult:
    """Ask one probe of every member, and write what is found; when stopped, what was found until then."""
    answers: dict[int, Mapping[str, Estimate]] = {}
    sample, begun = scene.sample.first(count), time.monotonic()
    try:
        for number in scene.evaluator.numbers:
            with (
                meter.track(passes, scene.throughputs[number]),
                scene.loss_surface(number, sample, meter.on_forward) as ground,
            ):
                answers[number] = probe.run(ground)
    except KeyboardInterrupt:
        if answers:
            scene.evaluator.write(_measurement(scene, name, probe, sample, answers))
        done = f"{len(answers)} of {len(scene.evaluator.numbers)} members"
        raise Interrupted(f"Stopped while asking {name}, which {done} had answered") from None
    found = _measurement(scene, name, probe, sample, answers)
    scene.evaluator.write(found)
    mean = found.rows.get(MEAN_OF_MEMBERS) or next(iter(found.rows.values()), Estimate(float("nan")))
    logger.info(f"{name}: {mean.value:.4g} ({format_duration(time.monotonic() - begun)})")
    return found


class ProbeSession:
    """The members of a run, and a recorded sample to look at their landscapes on."""

    def __init__(self, evaluator: Evaluator, on: str, settings: ProbeSettings, *, most: int) -> None:
        self.evaluator, self.settings = evaluator, settings
        self.split = eval_split(evaluator.recipe, evaluator.data_info, on)
        source, ids = self.split.open(evaluator.recipe, evaluator.data)
        self.known = {"fingerprint": evaluator.split_fingerprint(self.split)}
        evaluator.check_same_data(self.split, source, self.known)
        self.augmentation = self._augmentation()
        ids = sample_ids(ids[: self.split.limit], evaluator.recipe.seed, most)
        self.sample = ProbeBatch(ids, tuple(self._batches(source, ids)))
        self.throughputs: dict[int, float] = {}

    def _augmentation(self) -> dict[str, Any]:
        part = self.evaluator.recipe.data
        found = {name: getattr(part, name) for name in ("crop", "flip", "mixup", "cutmix") if getattr(part, name)}
        if self.settings.augment and not found:
            logger.info("the recipe varies nothing in training, so neither does the sample")
        return found if self.settings.augment else {}

    def _batches(self, source: Source, ids: torch.Tensor) -> Iterator[Batch]:
        panel = self.evaluator
        size = panel.recipe.data.batch_size
        if not self.augmentation:
            data, source = panel.model_inputs(source, ids)
            return eval_batches(panel.recipe, data, source, ids, batch_size=size, device=panel.device)
        # All members see the same variations: those of the first epoch in the order that members can share.
        every = torch.arange(len(panel.data.train))
        feed = build_loader(panel.recipe, panel.data, 0, shared=True, device=panel.device, ids=every)
        _, every = self.split.open(panel.recipe, panel.data)
        return replace(feed, source=source, ids=every).some(ids, 0, batch=size)

    def module(self, number: int) -> nn.Module:
        """Return the network of a member."""
        found = self.evaluator.modules[self.evaluator.numbers.index(number)].module
        assert isinstance(found, nn.Module)
        return found

    @contextmanager
    def loss_surface(
        self, number: int, sample: ProbeBatch, pulse: ForwardCallback = lambda: None
    ) -> Iterator[LossSurface]:
        """Lend the ground of one member, its network in the mode that was asked for."""
        module = self.module(number)
        with probe_mode(module, self.settings.batchnorm):
            seed = self.evaluator.recipe.seed
            yield make_loss_surface(module, sample, self.settings, seed=seed, number=number, on_forward=pulse)

    def metadata(self, sample: ProbeBatch) -> dict[str, Any]:
        """Return what is recorded of the samples and of how they are looked at."""
        mode = self.settings.of(self.module(self.evaluator.numbers[0]))
        batch = {"batch": self.evaluator.recipe.data.batch_size} if mode["batchnorm"] == "train" else {}
        precision = "fp64" if self.evaluator.recipe.train.precision == "fp64" else "fp32"
        varied = {"augmentation": self.augmentation or "none", "precision": precision}
        return {**self.split.metadata, **self.known, **sample.metadata(), **mode, **batch, **varied}

    def meter(self, costs: Mapping[int, float], what: str, seen: Seen) -> ProgressMeter:
        """Time a pass of every kind of network, say how long the walk will take, and return what tells how far it is.

        Costs are of members by number, in forward-and-backward passes of one sample.
        """
        kinds: dict[str, float] = {}
        for number in costs:
            kind = architecture_hash(self.evaluator.recipe, number, self.evaluator.components)
            if kind not in kinds:
                kinds[kind] = self._pace(number)
            self.throughputs[number] = kinds[kind]
        wanted = format_duration(sum(cost * self.throughputs[number] for number, cost in costs.items()))
        many = f"{len(costs)} member{'s' * (len(costs) > 1)}"
        logger.info(f"{what} of {many} on {self.split.name} samples: about {wanted}")
        return ProgressMeter(sum(costs.values()), seen)

    def _pace(self, number: int) -> float:
        """Return the seconds of one sample's forward-and-backward pass, timed after one that warms up."""
        batch = self.sample.batches[0]
        with self.loss_surface(number, self.sample) as ground:
            ground.gradient(batch)
            begun = time.perf_counter()
            ground.gradient(batch)
            return (time.perf_counter() - begun) / len(batch)


class ProgressMeter:
    """How many passes of how many are done; between two answers the clock guesses, and the guess never goes back."""

    def __init__(self, total: float, seen: Seen) -> None:
        self.total, self.seen = total, seen
        self.done, self.told = 0.0, 0
        self.passes, self.pace, self.begun = 0.0, 1.0, 0.0

    @contextmanager
    def track(self, passes: float, pace: float) -> Iterator[None]:
        """Count a question of so many passes, each of so many seconds."""
        self.passes, self.pace, self.begun = passes, pace, time.monotonic()
        yield
        self.done += passes
        self._tell(self.done)

    def on_forward(self) -> None:
        """Hear that a forward pass begins."""
        guess = (time.monotonic() - self.begun) / max(self.pace, 1e-12)
        self._tell(self.done + min(guess, 0.95 * self.passes))

    def _tell(self, done: float) -> None:
        if int(done) > self.told:
            self.told = int(done)
            self.seen(self.told, max(int(self.total), self.told))


def _measurement(
    scene: ProbeSession, name: str, probe: Probe, sample: ProbeBatch, answers: Mapping[int, Mapping[str, Estimate]]
) -> MetricResult:
    panel = scene.evaluator
    names = {number: f"member {number}" for number in answers}
    weights = {names[number]: panel.run.progress(number).weights_source for number in answers}
    hashes = {names[number]: panel.hashes[panel.numbers.index(number)] for number in answers}
    words = [probe.definition, f"when neighbouring layers are rescaled it {RESCALED[probe.scale_invariant]}"]
    return MetricResult(
        name,
        scene.split.name,
        _rows(answers),
        probe.higher_is_better,
        weights,
        scene.metadata(sample),
        hashes,
        group="sharpness",
        definition="; ".join(word for word in words if word),
    )


def _rows(answers: Mapping[int, Mapping[str, Estimate]]) -> dict[RowName, Estimate]:
    """Return every member's numbers, and the mean of the members' after them."""
    rows: dict[RowName, Estimate] = {}
    for number, found in answers.items():
        rows |= {RowName.member(number).with_part(part): value for part, value in found.items()}
    parts = dict.fromkeys(part for found in answers.values() for part in found)
    for part in parts if len(answers) > 1 else []:
        name = MEAN_OF_MEMBERS.with_part(part)
        rows[name] = mean_of_independent([found[part].value for found in answers.values() if part in found])
    return rows
