"""The search space for hyperparameters of the members: ranges and choices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from pydantic import Field, model_validator

from plateaux.config.schema import ConfigSection
from plateaux.core.ranges import Number


class Range(ConfigSection):
    """A uniform range from `low` to `high`; with `log` log-uniform, with `integer` integers only."""

    low: Number
    high: Number
    log: bool = False
    integer: bool = False

    @model_validator(mode="after")
    def _check_bounds(self) -> Range:
        if not self.low <= self.high or (self.log and self.low <= 0):
            raise ValueError(
                f"the {'logarithmic ' if self.log else ''}range from {self.low:g} to {self.high:g} is empty: "
                f"low must be at most high{', and above 0' if self.log else ''}"
            )
        return self

    def at(self, quantile: float) -> float | int:
        """Return the value at a quantile from 0 (low) to 1 (high; excluded for integers)."""
        low, high = (self.low, self.high + 1) if self.integer else (self.low, self.high)
        value = low * (high / low) ** quantile if self.log else low + (high - low) * quantile
        return math.floor(value) if self.integer else value


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
    """Hyperparameters that are sampled for every member: a range, or a list of equally likely choices."""

    method: Ranges = Field({})
    loss: Ranges = Field({})
    optimizer: Ranges = Field({})

    @model_validator(mode="after")
    def _check_choices(self) -> SearchConfig:
        if empty := [f"{section}.{name}" for section, name, space in self.all() if space == ()]:
            raise ValueError(f"{empty[0]} has an empty list to choose from")
        return self

    def all(self) -> Iterator[tuple[str, str, Range | Choices]]:
        """Yield section, key, and range or choices of every searched hyperparameter."""
        for section in type(self).model_fields:
            for name, space in getattr(self, section).items():
                yield section, name, space


def sample(space: Range | Choices, seed: int) -> Any:
    """Return one value of a range, or one of the choices, as determined by the seed.

    >>> sample(Range(low=2, high=2), 0), sample(("a",), 0)
    (2.0, 'a')
    """
    import torch  # here, because a recipe without [search] is read without it

    quantile = float(torch.rand((), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
    return space.at(quantile) if isinstance(space, Range) else space[int(quantile * len(space))]
