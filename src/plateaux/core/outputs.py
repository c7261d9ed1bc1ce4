"""Output functions: what one member computes for a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from plateaux.core.errors import RecipeError
from plateaux.core.member import MemberModule, find_last_linear
from plateaux.core.types import Batch

OutputFn: TypeAlias = Callable[[MemberModule, Batch], Tensor]
"""Computes the output of ONE member for a batch, `[B, ...]`. Wrap it in `LoopedOutput` if vmap does not support it."""


@dataclass(frozen=True, slots=True)
class LoopedOutput:
    """An output function that does not support vmap: executors call it for one member after the other."""

    fn: OutputFn

    def __call__(self, member: MemberModule, batch: Batch) -> Tensor:
        return self.fn(member, batch)


def supports_vmap(output: OutputFn) -> bool:
    """Return whether an output function can run under vmap."""
    return not isinstance(output, LoopedOutput)


def logits(member: MemberModule, batch: Batch) -> Tensor:
    """Return the output of the network for every sample."""
    return member(batch.x)


class NoFeaturesError(RecipeError):
    """The output of a network is not the output of an nn.Linear, so it has no features."""


def _features(member: MemberModule, batch: Batch) -> Tensor:
    return logits_and_features(member, batch)[1]


features = LoopedOutput(_features)  # forward hooks do not run inside the functional call of vmap
"""Returns the features of every sample, `[B, D]`: the inputs of the last layer."""


def logits_and_features(member: MemberModule, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return logits and features from one forward pass; features are the inputs of the last nn.Linear."""
    last = find_last_linear(member, batch.x)
    if last is None:
        raise NoFeaturesError(
            "Features are the inputs of the last nn.Linear, but the output of this "
            f"{type(member.module).__name__} is not the output of an nn.Linear. Leave out metrics of features (cka)"
        )
    return last.output, last.inputs


def logits_with_unlabeled(member: MemberModule, batch: Batch) -> Tensor:
    """Return the logits of the labeled samples, then of the unlabeled ones: `[B + U, C]`.

    There are two forward passes, and only the first updates buffers. BatchNorm normalizes labeled and unlabeled samples
    by their own statistics, and its running statistics are those of the labeled samples, as without unlabeled ones.
    """
    return torch.cat([member(batch.x), member.call_preserving_buffers(batch.extra["unlabeled"])])
