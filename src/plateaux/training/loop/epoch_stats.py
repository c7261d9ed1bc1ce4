"""The progress of one member, and its sums of loss and accuracy over the current epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from plateaux.core.errors import DataError, DivergedError
from plateaux.core.tensor_tree import is_finite
from plateaux.data.loader import MemberLoader
from plateaux.evaluation.finite import nonfinite_inputs
from plateaux.storage.run import MemberProgress
from plateaux.training.loop.state import StepStats, TrainState


@dataclass(slots=True)
class EpochStats:
    """One member in a job: its state, data loader and progress, and the sums of the current epoch."""

    state: TrainState
    loader: MemberLoader
    progress: MemberProgress
    loss: float = 0.0  # sum over the samples of this epoch so far
    correct: float = 0.0
    samples: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)  # of the log, not yet written
    pending: list[tuple[StepStats, int]] = field(default_factory=list)  # steps not yet added, with their sample counts

    def check_finite(self, losses: Sequence[float], epoch: int, step: int) -> None:
        """Raise DivergedError if a loss or a weight is NaN or infinite."""
        scaler = self.state.scaler
        if scaler is not None and scaler.scale > 1:
            return  # under fp16, an overflow skips its step and lowers the scale
        if all(map(math.isfinite, losses)) and is_finite(list(self.state.params.values())):
            return
        checkpoints = self.progress.checkpoints
        if checkpoints:
            resume = f"Its checkpoint of epoch {checkpoints[-1][0]}, step {checkpoints[-1][1]} is intact."
        else:
            resume = "It has no checkpoint yet."
        raise DivergedError(
            f"Loss of member {self.state.number} became NaN or infinite at epoch {epoch}, step {step}. {resume} "
            'Lower optimizer.lr, set optimizer.max_grad_norm, or set train.precision = "fp32"'
        )

    def check_inputs(self, epoch: int, first: int, last: int) -> None:
        """Raise DataError if inputs of the steps first .. last-1 contain NaN or infinity, which explains a NaN loss."""
        for batch in islice(self.loader.epoch(epoch, start=first), last - first):
            bad = batch.index[nonfinite_inputs(batch)].tolist()
            if bad:
                raise DataError(
                    f"Training inputs contain NaN or infinity (samples {', '.join(map(str, bad[:5]))}, epoch {epoch}), "
                    "so the loss is not finite for any member that trains on them. Remove these samples, or replace "
                    "the values; the last checkpoints are intact"
                )


def to_plain(progress: MemberProgress) -> dict[str, Any]:
    """Return the progress that is stored inside a checkpoint; it names no checkpoints, digests, or writer."""
    fields = {name: getattr(progress, name) for name in MemberProgress.__slots__}
    return {**fields, "checkpoints": (), "digests": {}, "claim": None}
