"""A member asked about its landscape: on which samples, in what mode, and what is recorded beside every answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import torch
from torch import Tensor, nn

from plateaux.config.builders.model import in_order
from plateaux.config.recipe import Recipe
from plateaux.core.errors import PlateauxError
from plateaux.core.method import View
from plateaux.core.runtime import seeded
from plateaux.core.types import Batch, Value, key
from plateaux.data.sources import Data
from plateaux.evaluation.metric_loop import evaluating
from plateaux.evaluation.results import Measurement
from plateaux.loss_landscape.loss_surface import Ground, Probe
from plateaux.loss_landscape.probe_specs import probes_named
from plateaux.models.surgery import batch_norms

Pulse = Callable[[], None]
"""Hears of every forward pass."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """Under what members are asked; recorded with every number."""

    batchnorm: Literal["eval", "train"] = "eval"
    augment: bool = False
    unit_logits: bool = False

    def of(self, module: nn.Module) -> dict[str, Any]:
        """Return what is recorded of them about a network: one without BatchNorm has none of its modes."""
        mode = self.batchnorm if batch_norms(module) else "none"
        return {"batchnorm": mode, "unit_logits": self.unit_logits}


USUAL = Conditions()


@dataclass(frozen=True, slots=True)
class Sample:
    """Samples that landscapes are looked at on, as networks take them: the first so many of a seeded order."""

    ids: Tensor
    batches: tuple[Batch, ...]

    def first(self, count: int) -> Sample:
        """Return the first so many of them, or all there are."""
        found: list[Batch] = []
        left = count
        for batch in self.batches:
            if left > 0:
                found.append(batch if len(batch) <= left else batch.part(slice(0, left)))
            left -= len(batch)
        return Sample(self.ids[:count], tuple(found))

    def about(self) -> dict[str, Any]:
        """Return how many they are, and a hash of which."""
        content = self.ids.cpu().to(torch.int64).numpy().tobytes()
        return {"samples": len(self.ids), "ids": blake2b(content, digest_size=8).hexdigest()}


def drawn(ids: Tensor, seed: int, count: int) -> Tensor:
    """Return so many of the ids, drawn without replacement by the run's seed alone; fewer are the first of more."""
    chance = torch.Generator().manual_seed(key(seed, "landscape"))
    return ids[torch.randperm(len(ids), generator=chance)[:count]]


def ground_of(
    module: nn.Module,
    sample: Sample,
    conditions: Conditions,
    *,
    seed: int,
    number: int,
    pulse: Pulse = lambda: None,
) -> Ground:
    """Return the ground of one member of a run; its weights are used in their own precision."""
    own = key(seed, "landscape", number)

    def forward() -> AbstractContextManager[Any]:
        pulse()
        # What a network draws in training mode must not come from the global generator.
        return seeded(own, sample.batches[0].index.device) if module.training else nullcontext()

    view = View(module, forward=forward)
    return Ground(view, sample.batches, key=own, unit_logits=conditions.unit_logits)


@contextmanager
def posed(module: nn.Module, batchnorm: Literal["eval", "train"]) -> Iterator[None]:
    """Hold a network in evaluation mode, its BatchNorm maybe in training mode, and put every layer back."""
    with evaluating([module]):
        layers = batch_norms(module) if batchnorm == "train" else []
        for layer in layers:
            layer.train()  # a frozen one knows better
        module.training = bool(layers)  # so that a ground puts the buffers back
        yield


def _measured(name: str, rows: Mapping[str, Value], about: Mapping[str, Any]) -> dict[str, Any]:
    return Measurement(name, "train", rows, "neither", {}, about).to_dict()


class Recorder:
    """Asks members in training every few epochs, on the same samples and with the same draws, and moves nothing."""

    def __init__(
        self, recipe: Recipe, data: Data, ids: Tensor, device: torch.device, *, allow: tuple[str, ...] = ()
    ) -> None:
        self.recipe, self.data, self.ids, self.device = recipe, data, ids, device
        self.probes: Mapping[str, Probe] = probes_named(recipe.probe.names, allow=allow)
        self._sample: Sample | None = None

    def due(self, epoch: int) -> bool:
        """Say whether members are asked after so many epochs."""
        part = self.recipe.probe
        return bool(self.probes) and (epoch % part.every == 0 or epoch == self.recipe.train.epochs)

    def sample(self) -> Sample:
        """Return the samples, read when they are first needed."""
        if self._sample is None:
            ids = drawn(self.ids, self.recipe.seed, self.recipe.probe.samples)
            batches = in_order(
                self.recipe, self.data, self.data.train, ids, batch=self.recipe.data.batch, device=self.device
            )
            self._sample = Sample(ids, tuple(batches))
        return self._sample

    def ask(
        self, module: nn.Module, number: int, epoch: int, track: Callable[[int, Mapping[str, Any]], None] | None = None
    ) -> Sequence[dict[str, Any]]:
        """Return a line of the log for every probe; one that cannot be asked of this network says why."""
        sample, seed, lines = self.sample(), self.recipe.seed, []
        for name, probe in self.probes.items():
            line: dict[str, Any] = {"epoch": epoch, "probe": name}
            with posed(module, "eval"):
                ground = ground_of(module, sample, USUAL, seed=seed, number=number)
                about = {**sample.about(), **USUAL.of(module)}
                try:
                    found = _measured(name, probe.ask(ground), about)
                    line |= {"rows": found["rows"], "data": found["data"]}
                except PlateauxError as problem:
                    line["problem"] = str(problem)
            lines.append(line)
            if track is not None and "rows" in line:
                track(epoch, {f"probe {name}": line["rows"].get("", {}).get("value")})
        return lines
