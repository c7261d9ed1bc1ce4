"""Run probes for every member of a run, on one seeded sample of data.

    for result in probe_landscape("runs/demo", probes=["worst_l2", "fisher_rao"]):
        print(result.metric, result.rows["member 0"])

The outer loop is over probes and the inner loop over members. The result of a probe is written as soon as it has
finished for all members, so an interruption loses only the probe in progress.
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
from plateaux.config.specs import user_code
from plateaux.core.errors import Interrupted, PlateauxError, RunError
from plateaux.core.formatting import format_duration, pluralize
from plateaux.core.progress import Progress, WorkDone, log_messages
from plateaux.core.row_names import MEAN_OF_MEMBERS, RowName
from plateaux.core.stats.estimates import mean_of_independent
from plateaux.core.types import Batch, Estimate
from plateaux.data.sources import Source
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.results import MetricResult
from plateaux.evaluation.splits import eval_split
from plateaux.loss_landscape.loss_surface import (
    ForwardCallback,
    LossSurface,
    ProbeBatch,
    ProbeOptions,
    make_loss_surface,
    probe_mode,
    sample_ids,
)
from plateaux.loss_landscape.probe import Probe, get_probes
from plateaux.storage.run import RunLike

logger = logging.getLogger(__name__)


def probe_landscape(
    run: RunLike,
    *,
    probes: Sequence[str] = ("all",),
    split: str = "train",
    limit: int | None = None,
    members: Sequence[int] | None = None,
    batchnorm: Literal["eval", "train"] = "eval",
    augment: bool = False,
    normalize_logits: bool = False,
    device: str | None = None,
    progress: Progress = log_messages,
) -> list[MetricResult]:
    """Run probes for every member of a run on a seeded sample of its data, and write the results to the run folder.

    All settings are recorded with every value.

    Args:
        run: A run, its folder, or its URL.
        probes: Names of probes, with options such as "worst_l2(steps=50)"; "all" for the default probes.
        split: "train", "test", or "validation".
        limit: Number of samples. None: set by each probe.
        members: Ids of the members. None: all trained members.
        batchnorm: Use running statistics ("eval"), or the statistics of each batch ("train").
        augment: Augment the samples as in training, in the same way for every member.
        normalize_logits: Center the logits of every sample and scale them to norm one before the loss.
        device: "cpu", "cuda", "cuda:1", ... None: the best available device.
        progress: Receives `WorkDone` events, in forward-and-backward passes of one sample.
    """
    evaluator = Evaluator(run, members=members, device=device)
    selected = get_probes(probes, trust=evaluator.components.trust)
    counts = {name: limit or probe.samples for name, probe in selected.items()}
    options = ProbeOptions(batchnorm, augment, normalize_logits)
    session = ProbeSession(evaluator, split, options, limit=max(counts.values(), default=1))
    passes = {name: probe.passes(len(session.sample.first(counts[name]).ids)) for name, probe in selected.items()}
    costs = dict.fromkeys(evaluator.numbers, sum(passes.values()))
    meter = session.start_meter(costs, pluralize(len(selected), "probe"), progress)
    results: list[MetricResult] = []
    errors: list[PlateauxError] = []
    for name, probe in selected.items():
        try:
            results.append(_run_probe(session, name, probe, counts[name], passes[name], meter))
        except Interrupted as stop:
            done = f"{len(results)} of {len(selected)} probes"
            raise Interrupted(f"{stop}; {done} are complete and written to {evaluator.run.store.root}") from None
        except PlateauxError as error:
            errors.append(error)
            logger.info("%s is skipped: %s", name, error)
    if errors and not results:
        raise errors[0]
    return results


def _run_probe(
    session: ProbeSession, name: str, probe: Probe, count: int, passes: float, meter: ProgressMeter
) -> MetricResult:
    """Run one probe for every member and write the result; on Ctrl-C, write the result of the completed members."""
    values: dict[int, Mapping[str, Estimate]] = {}
    sample, started = session.sample.first(count), time.monotonic()
    try:
        for member_id in session.evaluator.numbers:
            with (
                meter.track(passes, session.seconds_per_pass[member_id]),
                session.loss_surface(member_id, sample, meter.on_forward) as surface,
            ):
                values[member_id] = probe.run(surface)
    except KeyboardInterrupt:
        if values:
            session.evaluator.write(_make_result(session, name, probe, sample, values))
        done = f"{len(values)} of {len(session.evaluator.numbers)} members"
        raise Interrupted(f"Interrupted during probe {name}, after {done}") from None
    result = _make_result(session, name, probe, sample, values)
    session.evaluator.write(result)
    mean = result.rows.get(MEAN_OF_MEMBERS) or next(iter(result.rows.values()), Estimate(float("nan")))
    logger.info("%s: %.4g (%s)", name, mean.value, format_duration(time.monotonic() - started))
    return result


class ProbeSession:
    """The members of a run, and the sample of data on which their loss surfaces are evaluated."""

    def __init__(self, evaluator: Evaluator, split: str, options: ProbeOptions, *, limit: int) -> None:
        self.evaluator, self.options = evaluator, options
        self.loss = evaluator.components.loss
        if self.loss is None and "loss" in evaluator.run.info.code:
            raise RunError(
                f"{evaluator.run} was trained with a loss that was passed in Python. Pass it again: "
                "plateaux.open_run(path, loss=...)"
            )
        self.split = eval_split(evaluator.recipe, evaluator.data_info, split)
        source, ids = self.split.open(evaluator.recipe, evaluator.data)
        self.data_hashes = {"fingerprint": evaluator.split_fingerprint(self.split)}
        evaluator.check_same_data(self.split, source, self.data_hashes)
        self.augmentation = self._augmentation()
        ids = sample_ids(ids[: self.split.limit], evaluator.recipe.seed, limit)
        self.sample = ProbeBatch(ids, tuple(self._batches(source, ids)))
        self.seconds_per_pass: dict[int, float] = {}

    def _augmentation(self) -> dict[str, Any]:
        config = self.evaluator.recipe.data
        augmentation = {
            name: getattr(config, name) for name in ("crop", "flip", "mixup", "cutmix") if getattr(config, name)
        }
        if self.options.augment and not augmentation:
            logger.info("The recipe has no augmentation, so the samples are not augmented.")
        return augmentation if self.options.augment else {}

    def _batches(self, source: Source, ids: torch.Tensor) -> Iterator[Batch]:
        evaluator = self.evaluator
        batch_size = evaluator.recipe.data.batch_size
        if not self.augmentation:
            data, source = evaluator.model_inputs(source, ids)
            return eval_batches(evaluator.recipe, data, source, ids, batch_size=batch_size, device=evaluator.device)
        # All members get the same augmented samples: those of the first epoch of the shared data order.
        train_ids = torch.arange(len(evaluator.data.train))
        loader = build_loader(evaluator.recipe, evaluator.data, 0, shared=True, device=evaluator.device, ids=train_ids)
        _, split_ids = self.split.open(evaluator.recipe, evaluator.data)
        return replace(loader, source=source, ids=split_ids).batches(ids, 0, batch_size=batch_size)

    def module(self, member_id: int) -> nn.Module:
        """Return the network of a member."""
        module = self.evaluator.modules[self.evaluator.numbers.index(member_id)].module
        assert isinstance(module, nn.Module)
        return module

    @contextmanager
    def loss_surface(
        self, member_id: int, sample: ProbeBatch, on_forward: ForwardCallback = lambda: None
    ) -> Iterator[LossSurface]:
        """Yield the loss surface of one member, with its network in the requested mode."""
        module = self.module(member_id)
        with probe_mode(module, self.options.batchnorm):
            seed = self.evaluator.recipe.seed
            yield make_loss_surface(
                module, sample, self.options, seed=seed, member_id=member_id, loss=self.loss, on_forward=on_forward
            )

    def metadata(self, sample: ProbeBatch) -> dict[str, Any]:
        """Return the facts about the data and the options that are stored with a result."""
        mode = self.options.metadata(self.module(self.evaluator.numbers[0]))
        batch = {"batch": self.evaluator.recipe.data.batch_size} if mode["batchnorm"] == "train" else {}
        precision = "fp64" if self.evaluator.recipe.train.precision == "fp64" else "fp32"
        inputs = {"augmentation": self.augmentation or "none", "precision": precision}
        inputs |= {} if self.loss is None else {"loss": getattr(self.loss, "__qualname__", type(self.loss).__name__)}
        return {**self.split.metadata, **self.data_hashes, **sample.metadata(), **mode, **batch, **inputs}

    def start_meter(self, costs: Mapping[int, float], what: str, progress: Progress) -> ProgressMeter:
        """Time one pass per architecture, log the estimated run time, and return a progress meter.

        `costs` are the costs per member, in forward-and-backward passes of one sample.
        """
        seconds: dict[str, float] = {}
        for member_id in costs:
            architecture = architecture_hash(self.evaluator.recipe, member_id, self.evaluator.components)
            if architecture not in seconds:
                seconds[architecture] = self._time_pass(member_id)
            self.seconds_per_pass[member_id] = seconds[architecture]
        estimate = format_duration(sum(cost * self.seconds_per_pass[member_id] for member_id, cost in costs.items()))
        members = pluralize(len(costs), "member")
        logger.info("%s of %s on %s samples: about %s", what, members, self.split.name, estimate)
        return ProgressMeter(sum(costs.values()), progress)

    def _time_pass(self, member_id: int) -> float:
        """Return the seconds per sample of a forward-and-backward pass, timed after one warm-up pass."""
        batch = self.sample.batches[0]
        with self.loss_surface(member_id, self.sample) as surface:
            surface.gradient(batch)
            started = time.perf_counter()
            surface.gradient(batch)
            return (time.perf_counter() - started) / len(batch)


class ProgressMeter:
    """Reports the number of completed passes.

    While a probe is running, progress is extrapolated from the elapsed time. The reported number never decreases.
    """

    def __init__(self, total: float, progress: Progress) -> None:
        self.total, self.progress = total, progress
        self.done, self.reported = 0.0, 0
        self.passes, self.seconds_per_pass, self.started = 0.0, 1.0, 0.0

    @contextmanager
    def track(self, passes: float, seconds_per_pass: float) -> Iterator[None]:
        """Count the work inside the context as a number of passes of a known duration."""
        self.passes, self.seconds_per_pass, self.started = passes, seconds_per_pass, time.monotonic()
        yield
        self.done += passes
        self._report(self.done)

    def on_forward(self) -> None:
        """Update the extrapolated progress; called at the start of a forward pass."""
        estimate = (time.monotonic() - self.started) / max(self.seconds_per_pass, 1e-12)
        self._report(self.done + min(estimate, 0.95 * self.passes))

    def _report(self, done: float) -> None:
        if int(done) > self.reported:
            self.reported = int(done)
            self.progress(WorkDone(self.reported, max(int(self.total), self.reported)))


def _make_result(
    session: ProbeSession, name: str, probe: Probe, sample: ProbeBatch, values: Mapping[int, Mapping[str, Estimate]]
) -> MetricResult:
    evaluator = session.evaluator
    names = {member_id: f"member {member_id}" for member_id in values}
    invariance = "scale-invariant" if probe.scale_invariant else "not scale-invariant"
    return MetricResult(
        name,
        session.split.name,
        _make_rows(values),
        probe.higher_is_better,
        {name: evaluator.run.progress(member_id).weights_source for member_id, name in names.items()},
        session.metadata(sample),
        {name: evaluator.hashes[evaluator.numbers.index(member_id)] for member_id, name in names.items()},
        group="sharpness",
        definition="; ".join(text for text in (probe.definition, invariance) if text),
        code=user_code(name, evaluator.components.trust),
    )


def _make_rows(values: Mapping[int, Mapping[str, Estimate]]) -> dict[RowName, Estimate]:
    """Return the estimates of every member, then the means over members."""
    rows: dict[RowName, Estimate] = {}
    for member_id, estimates in values.items():
        for part, estimate in estimates.items():
            rows[RowName.member(member_id).with_part(part)] = estimate
    parts = dict.fromkeys(part for estimates in values.values() for part in estimates)
    for part in parts if len(values) > 1 else []:
        name = MEAN_OF_MEMBERS.with_part(part)
        rows[name] = mean_of_independent([estimates[part].value for estimates in values.values() if part in estimates])
    return rows
