"""Run probes during training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plateaux.config.builders.data import eval_batches
from plateaux.config.recipe import Recipe
from plateaux.core.errors import PlateauxError
from plateaux.core.row_names import RowName
from plateaux.core.types import Estimate
from plateaux.data.sources import DataSplits
from plateaux.evaluation.results import MetricResult
from plateaux.loss_landscape.probe import Probe, get_probes
from plateaux.loss_landscape.session import DEFAULT_SETTINGS, ProbeBatch, make_loss_surface, probe_mode, sample_ids


def _measured(name: str, rows: Mapping[str, Estimate], about: Mapping[str, Any]) -> dict[str, Any]:
    named = {RowName.parse(row): value for row, value in rows.items()}
    return MetricResult(name, "train", named, None, {}, about).to_dict()


class ProbeCallback:
    """Asks members in training every few epochs, on the same samples and with the same draws, and moves nothing."""

    def __init__(
        self, recipe: Recipe, data: DataSplits, ids: Tensor, device: torch.device, *, trust: tuple[str, ...] = ()
    ) -> None:
        self.recipe, self.data, self.ids, self.device = recipe, data, ids, device
        self.probes: Mapping[str, Probe] = get_probes(recipe.probe.probes, trust=trust)
        self._sample: ProbeBatch | None = None

    def due(self, epoch: int) -> bool:
        """Say whether members are asked after so many epochs."""
        part = self.recipe.probe
        return bool(self.probes) and (epoch % part.every == 0 or epoch == self.recipe.train.epochs)

    def sample(self) -> ProbeBatch:
        """Return the samples, read when they are first needed."""
        if self._sample is None:
            ids = sample_ids(self.ids, self.recipe.seed, self.recipe.probe.samples)
            batches = eval_batches(
                self.recipe, self.data, self.data.train, ids, batch_size=self.recipe.data.batch_size, device=self.device
            )
            self._sample = ProbeBatch(ids, tuple(batches))
        return self._sample

    def run(
        self, module: nn.Module, number: int, epoch: int, track: Callable[[int, Mapping[str, Any]], None] | None = None
    ) -> Sequence[dict[str, Any]]:
        """Return a line of the log for every probe; one that cannot be asked of this network says why."""
        sample, seed, lines = self.sample(), self.recipe.seed, []
        for name, probe in self.probes.items():
            line: dict[str, Any] = {"epoch": epoch, "probe": name}
            with probe_mode(module, "eval"):
                ground = make_loss_surface(module, sample, DEFAULT_SETTINGS, seed=seed, number=number)
                about = {**sample.metadata(), **DEFAULT_SETTINGS.of(module)}
                try:
                    found = _measured(name, probe.run(ground), about)
                    line |= {"rows": found["rows"], "data": found["data"]}
                except PlateauxError as problem:
                    line["problem"] = str(problem)
            lines.append(line)
            if track is not None and "rows" in line:
                track(epoch, {f"probe {name}": line["rows"].get("", {}).get("value")})
        return lines
