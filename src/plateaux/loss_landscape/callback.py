"""Run probes during training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plateaux.config.builders.data import eval_batches
from plateaux.config.components import Components
from plateaux.config.recipe import Recipe
from plateaux.core.errors import PlateauxError
from plateaux.core.types import Estimate
from plateaux.data.sources import DataSplits
from plateaux.evaluation.results import stored_estimate
from plateaux.loss_landscape.loss_surface import DEFAULT_OPTIONS, ProbeBatch, make_loss_surface, probe_mode, sample_ids
from plateaux.loss_landscape.probe import Probe, get_probes


class ProbeCallback:
    """Runs probes every few epochs, on the same samples and with the same seeds, without any effect on training."""

    def __init__(
        self, recipe: Recipe, data: DataSplits, ids: Tensor, device: torch.device, components: Components
    ) -> None:
        self.recipe, self.data, self.ids, self.device, self.loss = recipe, data, ids, device, components.loss
        self.probes: Mapping[str, Probe] = get_probes(recipe.probe.probes, trust=components.trust)
        self._sample: ProbeBatch | None = None

    def due(self, epoch: int) -> bool:
        """Return whether the probes run after this epoch: every `probe.every` epochs, and after the last."""
        config = self.recipe.probe
        return bool(self.probes) and (epoch % config.every == 0 or epoch == self.recipe.train.epochs)

    def sample(self) -> ProbeBatch:
        """Return the samples. They are loaded at the first call."""
        if self._sample is None:
            ids = sample_ids(self.ids, self.recipe.seed, self.recipe.probe.samples)
            batches = eval_batches(
                self.recipe, self.data, self.data.train, ids, batch_size=self.recipe.data.batch_size, device=self.device
            )
            self._sample = ProbeBatch(ids, tuple(batches))
        return self._sample

    def run(self, module: nn.Module, number: int, epoch: int) -> list[dict[str, Any]]:
        """Run all probes on one member and return one log record per probe.

        If a probe does not support the network, its record has the error message under `problem`.
        """
        sample, seed, records = self.sample(), self.recipe.seed, []
        for name, probe in self.probes.items():
            record: dict[str, Any] = {"epoch": epoch, "probe": name}
            with probe_mode(module, "eval"):
                surface = make_loss_surface(
                    module, sample, DEFAULT_OPTIONS, seed=seed, member_id=number, loss=self.loss
                )
                metadata = {**sample.metadata(), **DEFAULT_OPTIONS.metadata(module)}
                try:
                    record |= _log_fields(probe.run(surface), metadata)
                except PlateauxError as error:
                    record["problem"] = str(error)
            records.append(record)
        return records


def probe_values(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the numbers of log records, by name; a probe that failed or has no total has none."""
    rows = {f"probe {record['probe']}": record.get("rows", {}).get("", {}).get("value") for record in records}
    return {name: value for name, value in rows.items() if value is not None}


def _log_fields(rows: Mapping[str, Estimate], metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {"rows": {row: stored_estimate(value) for row, value in rows.items()}, "data": dict(metadata)}
