"""What one member can offer about a batch."""

from __future__ import annotations

from torch import Tensor

from plateaux.exchange import Offer, View, logits
from plateaux.types import Batch

__all__ = ["features", "logits"]


def features(layer: str) -> Offer:
    """Offer what the named layer puts out, flattened to `[B, D]`."""

    def offer(view: View, batch: Batch) -> Tensor:
        return view.record(batch.x, [layer])[1][layer].output.flatten(1)

    offer.batched = False  # type: ignore[attr-defined]  # hooks do not run inside vmap's functional call
    return offer
