"""Python objects that stand in for the names in a recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from plateaux.core.method import LossFn
from plateaux.data.sources import DataSplits, Source

Model = Callable[..., nn.Module]


@dataclass(frozen=True, slots=True)
class Components:
    """What a caller hands over in Python instead of naming it in the recipe."""

    data: DataSplits | None = None
    model: Model | None = None
    loss: LossFn | None = None
    unlabeled: Source | None = None  # samples whose labels are not looked at, laid out as the data's
    trust: tuple[str, ...] = ()  # modules outside whose functions a recipe may call

    def keywords(self) -> dict[str, Any]:
        """Return the arguments of an entry point that passes these components on."""
        return {"data": self.data, "model": self.model, "loss": self.loss, "trust": self.trust}


NO_COMPONENTS = Components()
