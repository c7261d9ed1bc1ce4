"""Output functions: what one member computes for a batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from plateaux.core.errors import RecipeError
from plateaux.core.member import MemberModule, is_same_tensor
from plateaux.core.types import Batch

OutputFn = Callable[[MemberModule, Batch], Tensor]
"""What ONE member says about a batch. `offer.batched = False` marks one that cannot run under vmap."""


def logits(view: MemberModule, batch: Batch) -> Tensor:
    """The model's output for every sample."""
    return view(batch.x)


class NoFeaturesError(RecipeError):
    """A network without a last layer whose inputs could be taken for features."""


def features(view: MemberModule, batch: Batch) -> Tensor:
    """What the last layer sees of every sample, `[B, D]`."""
    return logits_and_features(view, batch)[1]


features.batched = False  # type: ignore[attr-defined]  # hooks do not run inside vmap's functional call


def logits_and_features(view: MemberModule, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return both from one forward pass; the last layer is the nn.Linear whose output the network returns."""
    assert isinstance(view.module, nn.Module)
    layers = [name for name, part in view.module.named_modules() if isinstance(part, nn.Linear)]
    out, seen = view.record(batch.x, layers)
    for each in seen.values():
        if is_same_tensor(each.output, out) and each.inputs.ndim == 2:
            return out, each.inputs
    raise NoFeaturesError(
        f"Features are what the last nn.Linear sees, and this {type(view.module).__name__} does not end in one; "
        "leave out measures of features (cka)"
    )


def logits_with_unlabeled(view: MemberModule, batch: Batch) -> Tensor:
    """Offer the logits of the labelled samples, then of the unlabelled ones: `[B + U, C]`.

    Two forward passes, and only the first moves buffers. BatchNorm normalises each kind of sample by its own
    statistics, and remembers those of the samples that the network is to be used on: what a member does with labelled
    samples is what it would do without the others.
    """
    return torch.cat([view(batch.x), view.call_preserving_buffers(batch.extra["unlabeled"])])
