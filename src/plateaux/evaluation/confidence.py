"""Confidence and correctness of every sample, packed into four bytes, with ties, bins, and sorting.

Several metrics need this state. Their `update` function is the same, so the evaluator computes and stores it once for
all of them. Each row is processed in chunks, so the memory on top of the stored values does not grow with the number
of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plateaux.core.metric import Metric
from plateaux.core.row_names import RowName, row_names
from plateaux.core.types import Batch, Estimate, TensorTree
from plateaux.ensembles.log_probs import log_probabilities

CHUNK_SIZE = 1 << 14  # samples

Codes = NDArray[np.uint32]
"""The packed confidences of one row, from the most to the least confident; among ties, correct samples first."""


class TieGroups(NamedTuple):
    """Groups of samples with equal confidence, from the most to the least confident; one entry per group."""

    neg_log_confidence: NDArray[np.float64]
    start: NDArray[np.int64]  # number of samples with a higher confidence
    end: NDArray[np.int64]  # number of samples with an equal or higher confidence
    incorrect: NDArray[np.float64]  # number of incorrect predictions in the group

    @property
    def size(self) -> NDArray[np.int64]:
        return self.end - self.start


def update_confidences(logits: Tensor, batch: Batch) -> TensorTree:
    """Return the packed confidence and correctness of every sample and row, `[B, R]` in float32."""
    log_confidence, pred = confidence_and_prediction(log_probabilities(logits))
    return {"packed": pack_confidence(log_confidence, pred == batch.y).T}


def sort_by_confidence(packed: Tensor) -> Codes:
    """Return one row `[N]` sorted from the most to the least confident sample; NaN comes last.

    The bits of positive float32 numbers sort like the numbers. The sign bit, which marks incorrect predictions, becomes
    the lowest bit.
    """
    bits: Codes = packed.clone(memory_format=torch.contiguous_format).cpu().numpy().view(np.uint32)
    for start in range(0, len(bits), CHUNK_SIZE):
        chunk = bits[start : start + CHUNK_SIZE]
        chunk[:] = chunk << 1 | chunk >> 31
    bits.sort()  # the default kind sorts in place
    return bits


def decode_confidence(codes: Codes) -> tuple[Tensor, Tensor]:
    """Return the negative log of the confidence in float64, and whether the prediction is correct."""
    return unpack_confidence(torch.from_numpy((codes >> 1 | codes << 31).view(np.float32)))


def has_nan(codes: Codes) -> bool:
    """Return whether any confidence of a sorted row is NaN."""
    return bool(decode_confidence(codes[-1:])[0].isnan().any())


def confidence_metric(value: Callable[[Codes], Estimate], definition: str, *, percent: bool = False) -> Metric:
    """Return the metric that applies `value` to the sorted confidences of each row; NaN if one of them is NaN."""

    def compute(state: TensorTree) -> Mapping[RowName, Estimate]:
        rows = state["packed"].unbind(-1)
        return {name: of_row(sort_by_confidence(row)) for name, row in zip(row_names(len(rows)), rows, strict=True)}

    def of_row(codes: Codes) -> Estimate:
        return Estimate(float("nan")) if has_nan(codes) else value(codes)

    return Metric(
        update_confidences,
        compute,
        reduce="cat",
        higher_is_better=False,
        group="uncertainty",
        percent=percent,
        definition=definition,
    )


def tie_groups(codes: Codes) -> Iterator[TieGroups]:
    """Yield the groups of equal confidence, about `CHUNK_SIZE` samples at a time; no group is split."""
    start = 0
    while start < len(codes):
        chunk = _complete_groups(codes, start, min(start + CHUNK_SIZE, len(codes)))
        yield chunk
        start = int(chunk.end[-1])


def equal_mass(ties: TieGroups, samples: int, bins: int) -> NDArray[np.int64]:
    """Return the equal-mass bin of every group; bin 0 is the least confident.

    Samples of equal confidence share one bin: that of the lowest rank among them, in ascending order of confidence.
    """
    return (samples - ties.end) * bins // samples


def _complete_groups(codes: Codes, start: int, stop: int) -> TieGroups:
    """Return the groups that begin at or after `start` and before `stop`; the last one may end after `stop`."""
    chunk = codes[start:stop]
    first = np.flatnonzero(np.diff(chunk >> 1, prepend=~chunk[:1] >> 1))
    incorrect = np.add.reduceat((chunk & 1).astype(np.float64), first)
    last = chunk[-1:] | 1  # incorrect samples come last in a group
    end = start + np.append(first[1:], 0)
    end[-1] = start + int(np.searchsorted(codes[start:], last, side="right")[0])
    incorrect[-1] = end[-1] - start - int(np.searchsorted(codes[start:], last)[0])
    return TieGroups(decode_confidence(chunk[first])[0].numpy(), start + first, end, incorrect)


MIN_NEG_LOG = torch.finfo(torch.float32).tiny  # replaces -log(1) = 0: the sign of a zero can be lost


def confidence_and_prediction(log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log of the confidence and the predicted class, both `[R, B]`, from log-probabilities `[R, B, C]`."""
    log_confidence, pred = log_p.max(-1)
    return log_confidence.clamp(max=0), pred  # a mean over members can be rounded to a probability above 1


def equal_width(p: Tensor, bins: int) -> Tensor:
    """Return the equal-width bin of every probability: bin i is [i/bins, (i+1)/bins), and the last one includes 1."""
    edges = torch.arange(1, bins, dtype=torch.float64, device=p.device) / bins
    return torch.bucketize(p.double().contiguous(), edges, right=True)


def bin_sums(bin_index: Tensor, parts: Sequence[Tensor], bins: int) -> Tensor:
    """Return the sum of each part `[..., B]` over the samples of each bin: `[..., bins, parts]`."""
    zeros = bin_index.new_zeros(*bin_index.shape[:-1], bins, dtype=torch.float64)
    return torch.stack([zeros.scatter_add(-1, bin_index, part.double()) for part in parts], -1)


def pack_confidence(log_confidence: Tensor, correct: Tensor) -> Tensor:
    """Return one float32 per prediction: the negative log of its confidence, with a minus sign if it is incorrect.

    The log distinguishes confidences that would round to 1, and keeps the full precision of a float32 log-probability.
    """
    neg_log = (-log_confidence).float().clamp(min=MIN_NEG_LOG)
    return torch.where(correct, neg_log, -neg_log)


def unpack_confidence(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the negative log of the confidence in float64, and whether the prediction is correct."""
    return packed.abs().double(), packed > 0
