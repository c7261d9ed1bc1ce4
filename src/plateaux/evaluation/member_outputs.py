"""Outputs of all members on all samples of a split, in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plateaux.core.metric import Metric
from plateaux.core.progress import Progress, log_messages
from plateaux.core.types import Batch, TensorTree
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.splits import EvalSplit


@dataclass(frozen=True, slots=True)
class MemberOutputs:
    """The logits of all members for some samples."""

    logits: Tensor  # [M, N, C]
    y: Tensor
    ids: Tensor

    def take(self, rows: Tensor) -> MemberOutputs:
        """Return the outputs for some of the samples."""
        return MemberOutputs(self.logits[:, rows], self.y[rows], self.ids[rows])


def predict_all(evaluator: Evaluator, split: EvalSplit, *, progress: Progress = log_messages) -> MemberOutputs:
    """Return the logits of all members for all samples of a split."""
    everyone = tuple(range(len(evaluator.numbers)))
    sums, _ = evaluator.accumulate(split, {"all": ALL_OUTPUTS}, [everyone], progress=progress)
    rows = sums[everyone, "all"]
    return MemberOutputs(rows["logits"].transpose(0, 1).cpu(), rows["labels"].cpu(), rows["ids"].cpu())


def error_probability(log_p: Tensor) -> Tensor:
    """Return 1 - max probability: the ensemble's estimate of the probability that its prediction is incorrect."""
    return -torch.expm1(log_p.amax(-1))


def _keep_rows(logits: Tensor, batch: Batch) -> TensorTree:
    return {"logits": logits.transpose(0, 1), "labels": batch.y, "ids": batch.index}


ALL_OUTPUTS = Metric(_keep_rows, lambda _: {}, reduce="cat")
