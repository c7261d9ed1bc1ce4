"""An ensemble ready for use: its members, what they share, and the prediction they make together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from plateaux.core import tensor_tree
from plateaux.core.types import Inputs
from plateaux.data.augment import normalize
from plateaux.ensembles import combine as combining
from plateaux.models.backbone import common_backbone
from plateaux.models.surgery import size_in_bytes


class Ensemble(nn.Module):
    """Members side by side; weights they share are held once.

    >>> two = Ensemble([nn.Linear(4, 3), nn.Linear(4, 3)])
    >>> two.logits(torch.zeros(5, 4)).shape, two.predict(torch.zeros(5, 4)).shape
    (torch.Size([2, 5, 3]), torch.Size([5, 3]))
    """

    def __init__(
        self,
        members: Sequence[nn.Module],
        *,
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
        labels: Sequence[str] = (),
        weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.mean, self.std, self.labels = tuple(mean), tuple(std), tuple(labels)
        self.weights = None if weights is None else tuple(weights)  # how much each counts; None: all alike
        self.eval()

    def __len__(self) -> int:
        return len(self.members)

    @torch.no_grad()
    def logits(self, x: Inputs) -> Tensor:
        """Return every member's output `[M, B, C]`; inputs are as the data set has them, and normalised here."""
        first = next(self.members.parameters())
        if isinstance(x, Tensor):
            x = normalize(x.to(first.device), self.mean, self.std, first.dtype)
        backbone = common_backbone(list(self.members))
        if backbone is not None:  # it runs once for all
            x = backbone(x) if isinstance(x, Tensor) else backbone(**x)
        args, kwargs = ((x,), {}) if isinstance(x, Tensor) else ((), dict(x))
        rows = [member(*args, **kwargs) for member in self.members]
        return torch.stack([row if isinstance(row, Tensor) else row.logits for row in rows])

    def predict(
        self, x: Inputs, *, combine: Literal["probability", "logit", "majority", "weighted"] | None = None
    ) -> Tensor:
        """Return the ensemble's class probabilities `[B, C]`.

        By the mean of probabilities (weighted where members have weights), the mean of logits, or the share of votes.
        """
        rule = combine or ("probability" if self.weights is None else "weighted")
        name = {"probability": "mean probability", "logit": "mean logit"}.get(rule, rule)
        return combining.combine(self.logits(x), name, self.weights if rule == "weighted" else None).exp()

    def forward(self, x: Inputs) -> Tensor:
        return self.predict(x)

    def bytes(self) -> dict[str, int]:
        """Return the memory of all members, and what it would be if nothing were shared."""
        apart = sum(tensor_tree.size([*m.parameters(), *m.buffers()]) for m in self.members)
        return {"held": size_in_bytes(self.members), "unshared": apart}
