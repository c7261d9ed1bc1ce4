"""Outputs of all members on all samples, in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plateaux.core.callbacks import Seen
from plateaux.core.metric import Metric
from plateaux.core.types import Batch, TensorTree
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.splits import EvalSplit


@dataclass(frozen=True, slots=True)
class MemberOutputs:
    """All that members said about some samples."""

    logits: Tensor  # [M, N, C]
    y: Tensor
    ids: Tensor

    def take(self, chosen: Tensor) -> MemberOutputs:
        """Return what was said about some of them."""
        return MemberOutputs(self.logits[:, chosen], self.y[chosen], self.ids[chosen])


def predict_all(
    panel: Evaluator, target: EvalSplit, *, samples: int | None = None, seen: Seen = lambda *_: None
) -> MemberOutputs:
    """Return what all members say about all samples, in memory."""
    everyone = tuple(range(len(panel.numbers)))
    sums, _ = panel.accumulate(target, {"all": ALL}, [everyone], samples=samples, seen=seen)
    found = sums[everyone, "all"]
    return MemberOutputs(found["logits"].transpose(0, 1).cpu(), found["labels"].cpu(), found["ids"].cpu())


def error_probability(log_p: Tensor) -> Tensor:
    """Return the probability that the most likely class is not the right one, as the ensemble sees it."""
    return -torch.expm1(log_p.amax(-1))


def _everything(table: Tensor, batch: Batch) -> TensorTree:
    return {"logits": table.transpose(0, 1), "labels": batch.y, "ids": batch.index}


ALL = Metric(_everything, lambda _: {}, reduce="cat")
