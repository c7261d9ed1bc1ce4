"""What a table of logits `[M, B, C]` says: the rows of its members, and of the ensemble they make.

Rows are called by the members' positions in the table, `member 0`, `members 0 and 1`; `renumbered` makes numbers of
them. A name with parts, `member 0 · class 3 · recall`, is a cell of a larger table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps

import torch
from torch import Tensor

Work = Callable[[Tensor], Tensor]

_MEMO: ContextVar[tuple[Tensor | None, dict[Work, tuple[Tensor, int]]]] = ContextVar("shared", default=(None, {}))


@contextmanager
def memo_scope(table: Tensor) -> Iterator[None]:
    """Work out only once what several measures ask of this table; all is forgotten at the end."""
    before = _MEMO.set((table, {}))
    try:
        yield
    finally:
        _MEMO.reset(before)


def memoized(work: Work) -> Work:
    """Return the function with what it found before, if the table is shared and neither of them was written into."""

    @wraps(work)
    def found(table: Tensor) -> Tensor:
        owner, known = _MEMO.get()
        if table is not owner or torch.is_inference_mode_enabled():  # whose tensors do not count what is written
            return work(table)
        if work not in known or known[work][1] != known[work][0]._version + table._version:
            made = work(table)
            known[work] = made, made._version + table._version
        return known[work][0]

    return found


@memoized
def log_probs(table: Tensor) -> Tensor:
    """Return the members' own log-probabilities `[M, B, C]`, in float32 or better."""
    return (table if table.dtype == torch.float64 else table.float()).log_softmax(-1)


@memoized
def log_probs_float64(table: Tensor) -> Tensor:
    """Return the members' own log-probabilities `[M, B, C]` in float64."""
    return log_probs(table.double())


@memoized
def log_probabilities(table: Tensor) -> Tensor:
    """Return log-probabilities `[M + 2, B, C]`: each member, the mean of their probabilities, the mean of their logits.

    One member alone is no ensemble: its table stays `[1, B, C]`.
    """
    members = log_probs(table)
    if len(table) == 1:
        return members
    pooled = members.logsumexp(0) - math.log(len(table))
    return torch.cat([members, pooled[None], table.to(members.dtype).mean(0).log_softmax(-1)[None]])


@memoized
def predictions(table: Tensor) -> Tensor:
    """Return the most likely class of every row of `log_probabilities`, `[M + 2, B]`; of equal ones the first."""
    return log_probabilities(table).argmax(-1)
