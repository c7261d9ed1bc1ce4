"""The running mean of one member's weights over its steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from plateaux.core.types import TensorTree


@dataclass(slots=True)
class AveragedWeights:
    """The mean of weights and buffers after step `start` and all later steps, with equal weights; empty before.

    mean <- (c mean + w) / (c + 1), where c is the number of averaged steps. Integer buffers are left out.
    """

    start: int
    steps: int = 0  # taken so far
    tree: TensorTree = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of averaged steps."""
        return max(self.steps - self.start + 1, 0)

    @torch.no_grad()
    def add(self, tensors: TensorTree) -> None:
        """Add the weights after one more step."""
        self.steps += 1
        if self.count == 1:
            self.tree = {name: t.detach().clone() for name, t in tensors.items() if _is_averaged(t)}
        elif self.count > 1:
            values = [tensors[name].detach() for name in self.tree]
            torch._foreach_lerp_(list(self.tree.values()), values, 1.0 / self.count)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"steps": self.steps, "tree": dict(self.tree)}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore the state of a checkpoint."""
        self.steps = int(state["steps"])
        self.tree = {name: tensor.to(device) for name, tensor in state["tree"].items()}


def _is_averaged(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
