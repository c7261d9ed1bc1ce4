"""The moving average of one member's weights over its steps: equal shares from a first step on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from plateaux.core.types import TensorTree


@dataclass(slots=True)
class AveragedWeights:
    """The mean of weights and buffers after step `start` and every later one; nothing before that.

    mean <- (c mean + w) / (c + 1), c the steps it holds. Integer buffers have no mean, and stay out.
    """

    start: int
    steps: int = 0  # taken so far
    tree: TensorTree = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many steps' weights the mean is of."""
        return max(self.steps - self.start + 1, 0)

    @torch.no_grad()
    def add(self, tensors: TensorTree) -> None:
        """Take the weights after one more step in."""
        self.steps += 1
        if self.count == 1:
            self.tree = {name: t.detach().clone() for name, t in tensors.items() if _has_mean(t)}
        elif self.count > 1:
            now = [tensors[name].detach() for name in self.tree]
            torch._foreach_lerp_(list(self.tree.values()), now, 1.0 / self.count)

    def state_dict(self) -> dict[str, Any]:
        """Return all that it takes to go on."""
        return {"steps": self.steps, "tree": dict(self.tree)}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Go back to where `state` was taken."""
        self.steps = int(state["steps"])
        self.tree = {name: tensor.to(device) for name, tensor in state["tree"].items()}


def _has_mean(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
