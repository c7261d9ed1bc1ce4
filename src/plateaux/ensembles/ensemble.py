"""An ensemble for inference: its members, their shared weights, and the combined prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from plateaux.core import tensor_tree
from plateaux.core.types import ArrayInputs, Inputs, map_tensors, to_inputs
from plateaux.data.augment import normalize
from plateaux.ensembles import combine as combining
from plateaux.models.backbone import common_backbone
from plateaux.models.surgery import size_in_bytes

ALL = slice(None)


class Ensemble(nn.Module):
    """The members of an ensemble as one module; shared weights are stored once.

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
        self.weights = None if weights is None else tuple(weights)  # of the members in the mean; None: equal
        self.eval()

    def __len__(self) -> int:
        return len(self.members)

    def logits(self, x: ArrayInputs) -> Tensor:
        """Return the logits of all members `[M, B, C]`; inputs are as in the data set and are normalized here."""
        return self.member_logits(self.prepare(x))

    def prepare(self, x: ArrayInputs) -> Inputs:
        """Return inputs as the members take them: on their device, and normalized."""
        param = next(self.members.parameters())
        x = map_tensors(to_inputs(x), lambda tensor: tensor.to(param.device))
        return normalize(x, self.mean, self.std, param.dtype) if isinstance(x, Tensor) else x

    @torch.no_grad()
    def member_logits(self, x: Inputs, members: slice = ALL) -> Tensor:
        """Return the logits of some members for prepared inputs."""
        backbone = common_backbone(list(self.members))
        if backbone is not None:  # run it once for all members
            x = backbone(x) if isinstance(x, Tensor) else backbone(**x)
        args, kwargs = ((x,), {}) if isinstance(x, Tensor) else ((), dict(x))
        outputs = [member(*args, **kwargs) for member in self.members[members]]
        return torch.stack([output if isinstance(output, Tensor) else output.logits for output in outputs])

    def predict(
        self, x: ArrayInputs, *, combine: Literal["probability", "logit", "majority", "weighted"] | None = None
    ) -> Tensor:
        """Return the class probabilities of the ensemble `[B, C]`.

        The default is the mean of the members' probabilities, weighted if the members have weights.
        """
        rule = combine or ("probability" if self.weights is None else "weighted")
        name = {"probability": "mean probability", "logit": "mean logit"}.get(rule, rule)
        return combining.combine(self.logits(x), name, self.weights if rule == "weighted" else None).exp()

    def forward(self, x: ArrayInputs) -> Tensor:
        return self.predict(x)

    def bytes(self) -> dict[str, int]:
        """Return the memory of all members in bytes, with shared weights counted once and counted per member."""
        unshared = sum(tensor_tree.size([*m.parameters(), *m.buffers()]) for m in self.members)
        return {"held": size_in_bytes(self.members), "unshared": unshared}
