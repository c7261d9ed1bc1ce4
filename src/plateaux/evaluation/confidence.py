"""What must be kept of every sample: one number that says how sure each row was, and whether it was right.

Several measures need it, and the walk settles equal settles once: it is kept once for all of them. What follows from
it is worked out row by row and piece by piece, so that a million samples take little more than the numbers kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plateaux.core.errors import RecipeError
from plateaux.core.types import Batch, TensorTree
from plateaux.ensembles.log_probs import log_probabilities

PIECE = 1 << 14  # samples at once

Codes = NDArray[np.uint32]
"""The packed numbers of one row in ascending order of doubt, the right ones of equals first."""


class TieGroups(NamedTuple):
    """Groups of equally sure samples in ascending order of doubt, an entry for each group."""

    error_probability: NDArray[np.float64]  # minus the logarithm of their confidence
    start: NDArray[np.int64]  # how many samples are surer
    end: NDArray[np.int64]  # how many are as sure or surer
    incorrect: NDArray[np.float64]  # how many of the group are wrong

    @property
    def size(self) -> NDArray[np.int64]:
        return self.end - self.start


def confidences(table: Tensor, batch: Batch) -> TensorTree:
    """Return confidence and rightness of every sample and row `[B, R]`, packed in four bytes."""
    log_confidence, guess = confidence_and_prediction(log_probabilities(table))
    return {"kept": pack_confidence(log_confidence, guess == batch.y).T}


def sort_by_confidence(packed: Tensor) -> Codes:
    """Return one row `[N]` in ascending order of doubt; what is no number comes last.

    The bits of a positive float32 are ordered as it is. The sign, which says wrong, is moved to the lowest bit.
    """
    bits: Codes = packed.clone(memory_format=torch.contiguous_format).cpu().numpy().view(np.uint32)
    for start in range(0, len(bits), PIECE):
        part = bits[start : start + PIECE]
        part[:] = part << 1 | part >> 31
    bits.sort()  # in place, as the default kind is
    return bits


def decode_confidence(codes: Codes) -> tuple[Tensor, Tensor]:
    """Return minus the logarithm of the confidence in float64, and whether the guess was right."""
    return unpack_confidence(torch.from_numpy((codes >> 1 | codes << 31).view(np.float32)))


def has_nan(codes: Codes) -> bool:
    """Say whether any confidence is not a number."""
    return bool(decode_confidence(codes[-1:])[0].isnan().any())


def groups(codes: Codes) -> Iterator[TieGroups]:
    """Yield the groups of equals, those of about PIECE samples at a time; no group is cut in two."""
    start = 0
    while start < len(codes):
        found = _whole_groups(codes, start, min(start + PIECE, len(codes)))
        yield found
        start = int(found.end[-1])


def equal_mass(each: TieGroups, samples: int, bins: int) -> NDArray[np.int64]:
    """Return the bin of every group, bin 0 the least sure, so that bins hold equally many of all samples.

    Equals share the bin of the first of them in ascending order of confidence.
    """
    return (samples - each.end) * bins // samples


def _whole_groups(codes: Codes, start: int, stop: int) -> TieGroups:
    """Return the groups that begin at `start` up to `stop`; the last of them may end later."""
    part = codes[start:stop]
    first = np.flatnonzero(np.diff(part >> 1, prepend=~part[:1] >> 1))
    wrong = np.add.reduceat((part & 1).astype(np.float64), first)
    last = part[-1:] | 1  # the wrong ones of a group come last
    end = start + np.append(first[1:], 0)
    end[-1] = start + int(np.searchsorted(codes[start:], last, side="right")[0])
    wrong[-1] = end[-1] - start - int(np.searchsorted(codes[start:], last)[0])
    return TieGroups(decode_confidence(part[first])[0].numpy(), start + first, end, wrong)


CERTAIN = torch.finfo(torch.float32).tiny  # stands for -log(1): a zero would lose its sign where rows are added up


def check_bins(bins: int) -> None:
    """Refuse a number of bins that is none."""
    if bins < 1:
        raise RecipeError(f"bins = {bins}: confidences are sorted into 1 bin or more; leave it out for 15")


def confidence_and_prediction(log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the confidence `[R, B]` and the guess `[R, B]` from log-probabilities `[R, B, C]`."""
    best, guess = log_p.max(-1)
    return best.clamp(max=0), guess  # should a mean over members round to above probability 1


def equal_width(p: Tensor, bins: int) -> Tensor:
    """Return the bin of every probability: bin i holds [i/bins, (i+1)/bins), and the last one holds 1 too."""
    edges = torch.arange(1, bins, dtype=torch.float64, device=p.device) / bins
    return torch.bucketize(p.double().contiguous(), edges, right=True)


def bin_sums(bin_index: Tensor, parts: Sequence[Tensor], bins: int) -> Tensor:
    """Return the sum of every part `[..., B]` over the samples of every bin: `[..., bins, parts]`."""
    empty = bin_index.new_zeros(*bin_index.shape[:-1], bins, dtype=torch.float64)
    return torch.stack([empty.scatter_add(-1, bin_index, part.double()) for part in parts], -1)


def pack_confidence(log_confidence: Tensor, correct: Tensor) -> Tensor:
    """Return one float32 for each confidence and its rightness: minus the logarithm, negative where wrong.

    The logarithm tells confidences apart that round to 1, and nothing of a float32 one is lost.
    """
    doubt = (-log_confidence).float().clamp(min=CERTAIN)
    return torch.where(correct, doubt, -doubt)


def unpack_confidence(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return minus the logarithm of the confidence in float64, and whether the guess was right."""
    return packed.abs().double(), packed > 0
