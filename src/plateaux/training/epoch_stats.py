"""One member on its course: how far it is, and what it has seen since it last wrote a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from plateaux.core.errors import DivergedError
from plateaux.core.tensor_tree import is_finite
from plateaux.data.loader import MemberLoader
from plateaux.storage.run import MemberProgress
from plateaux.training.state import StepStats, TrainState


@dataclass(slots=True)
class EpochStats:
    """One member on the course: how far it is, and what it has seen since it last wrote a line."""

    state: TrainState
    loader: MemberLoader
    progress: MemberProgress
    loss: float = 0.0  # sum over the samples of this epoch so far
    correct: float = 0.0
    samples: int = 0  # in this epoch so far
    lines: list[dict[str, Any]] = field(default_factory=list)
    pending: list[tuple[StepStats, int]] = field(default_factory=list)

    def check_finite(self, losses: Sequence[float], epoch: int, done: int) -> None:
        """Refuse to go on with a loss or with weights that are no numbers."""
        scaler = self.state.scaler
        if scaler is not None and scaler.factor > 1:
            return  # an overflow under fp16 has skipped its step already
        if not (all(map(math.isfinite, losses)) and is_finite(list(self.state.params.values()))):
            held = self.progress.checkpoints
            where = (
                f"its checkpoint of epoch {held[-1][0]}, step {held[-1][1]} is untouched"
                if held
                else "it has no checkpoint"
            )
            raise DivergedError(
                f"The loss of member {self.state.number} is no number any more (epoch {epoch}, step {done}); "
                f"{where}. "
                'Try a smaller optimizer.lr, optimizer.max_grad_norm, or train.precision = "fp32"'
            )


def to_plain(progress: MemberProgress) -> dict[str, Any]:
    """Return where a member stands as a state keeps it: a state does not name states."""
    return {**{name: getattr(progress, name) for name in MemberProgress.__slots__}, "checkpoints": ()}
