"""The search space of the members' hyper-parameters: ranges and choices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from pydantic import Field, model_validator

from plateaux.config.schema import ConfigSection


class Range(ConfigSection):
    """A uniform range from `low` to `high`; with `log` log-uniform, with `integer` integers only."""

    low: float
    high: float
    log: bool = False
    integer: bool = False

    @model_validator(mode="after")
    def _sound(self) -> Range:
        if not self.low <= self.high or (self.log and self.low <= 0):
            raise ValueError(
                f"a range from {self.low:g} to {self.high:g}{' by logarithm' if self.log else ''} has nothing to draw "
                f"from: low must be at most high{', and above 0' if self.log else ''}"
            )
        return self

    def at(self, place: float) -> float | int:
        """Return the value at a quantile from 0 (low) to 1 (high; excluded for integers)."""
        low, high = (self.low, self.high + 1) if self.integer else (self.low, self.high)
        found = low * (high / low) ** place if self.log else low + (high - low) * place
        return math.floor(found) if self.integer else found


# Seeds are derived from key names. Renamed keys keep their old name here, so that the sampled values do not change.
SEED_NAMES = {
    "class_ratio": "shares",
    "decay_filter": "decay",
    "disagree_on": "on",
    "diversity_weight": "strength",
    "gradient_accumulation_steps": "accumulate",
    "max_grad_norm": "clip",
    "members_per_step": "pair",
    "partition_epoch": "meet_after",
    "regularizer": "regulariser",
    "regularizer_weight": "regularise",
    "repartition_every": "rescore_every",
    "sam_variant": "climb",
    "top_k": "top",
}

Choices = tuple[Any, ...]
Ranges = dict[str, Range | Choices]


class SearchConfig(ConfigSection):
    """Hyper-parameters that are sampled for every member: a range, or a list of equally likely choices."""

    method: Ranges = Field({})
    loss: Ranges = Field({})
    optimizer: Ranges = Field({})

    @model_validator(mode="after")
    def _something(self) -> SearchConfig:
        if empty := [f"{section}.{name}" for section, name, what in self.all() if what == ()]:
            raise ValueError(f"{empty[0]} has an empty list to choose from")
        return self

    def all(self) -> Iterator[tuple[str, str, Range | Choices]]:
        """Yield section, key, and range or choices of every searched hyper-parameter."""
        for section in type(self).model_fields:
            for name, what in getattr(self, section).items():
                yield section, name, what


def sample(what: Range | Choices, seed: int) -> Any:
    """Return one value of a range, or one of the choices, as determined by the seed.

    >>> sample(Range(low=2, high=2), 0), sample(("a",), 0)
    (2.0, 'a')
    """
    place = float(torch.rand((), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
    return what.at(place) if isinstance(what, Range) else what[int(place * len(what))]
