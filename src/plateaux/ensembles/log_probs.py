"""Log-probabilities and predictions from logits `[M, B, C]`, of the members and of the ensemble, computed once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps

import torch
from torch import Tensor

TensorFn = Callable[[Tensor], Tensor]

_MEMO: ContextVar[tuple[Tensor | None, dict[TensorFn, tuple[Tensor, int]]]] = ContextVar("shared", default=(None, {}))


@contextmanager
def memo_scope(logits: Tensor) -> Iterator[None]:
    """Cache the results of memoized functions for these logits; the cache is dropped at the end."""
    token = _MEMO.set((logits, {}))
    try:
        yield
    finally:
        _MEMO.reset(token)


def memoized(fn: TensorFn) -> TensorFn:
    """Cache the results of `fn` inside `memo_scope`, as long as neither logits nor result are modified in place."""

    @wraps(fn)
    def cached(logits: Tensor) -> Tensor:
        owner, cache = _MEMO.get()
        if logits is not owner or torch.is_inference_mode_enabled():  # inference tensors have no version counter
            return fn(logits)
        if fn not in cache or cache[fn][1] != cache[fn][0]._version + logits._version:
            result = fn(logits)
            cache[fn] = result, result._version + logits._version
        return cache[fn][0]

    return cached


@memoized
def log_probs(logits: Tensor) -> Tensor:
    """Return the log-probabilities of the members `[M, B, C]`, in float32 or float64."""
    return (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)


@memoized
def log_probs_float64(logits: Tensor) -> Tensor:
    """Return the log-probabilities of the members `[M, B, C]` in float64."""
    return log_probs(logits.double())


@memoized
def log_probabilities(logits: Tensor) -> Tensor:
    """Return log-probabilities `[M + 2, B, C]`: of each member, of their mean probability, and of their mean logits.

    For a single member there is no ensemble, and the result is `[1, B, C]`.
    """
    members = log_probs(logits)
    if len(logits) == 1:
        return members
    pooled = members.logsumexp(0) - math.log(len(logits))
    return torch.cat([members, pooled[None], logits.to(members.dtype).mean(0).log_softmax(-1)[None]])


@memoized
def predictions(logits: Tensor) -> Tensor:
    """Return the argmax class of every row of `log_probabilities`, `[M + 2, B]`; among ties, the first."""
    return log_probabilities(logits).argmax(-1)
