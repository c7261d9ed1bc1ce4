"""What a search draws each member's hyper-parameters from: ranges and choices, as a recipe gives them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from pydantic import Field, model_validator

from plateaux.config.schema import ConfigSection


class Range(ConfigSection):
    """Numbers from `low` to `high`, all equally likely; with `log` their logarithms are, with `whole` only integers."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    @model_validator(mode="after")
    def _sound(self) -> Range:
        if not self.low <= self.high or (self.log and self.low <= 0):
            raise ValueError(
                f"a range from {self.low:g} to {self.high:g}{' by logarithm' if self.log else ''} has nothing to draw "
                f"from: low must be at most high{', and above 0' if self.log else ''}"
            )
        return self

    def at(self, place: float) -> float | int:
        """Return the number at a place from 0 (low) to 1 (high, left out where only integers count)."""
        low, high = (self.low, self.high + 1) if self.whole else (self.low, self.high)
        found = low * (high / low) ** place if self.log else low + (high - low) * place
        return math.floor(found) if self.whole else found


Choices = tuple[Any, ...]
Ranges = dict[str, Range | Choices]


class SearchConfig(ConfigSection):
    """Hyper-parameters that every member draws for itself: a range, or a list to choose from, all equally likely."""

    method: Ranges = Field({})
    loss: Ranges = Field({})
    optimizer: Ranges = Field({})

    @model_validator(mode="after")
    def _something(self) -> SearchConfig:
        if empty := [f"{section}.{name}" for section, name, what in self.all() if what == ()]:
            raise ValueError(f"{empty[0]} has an empty list to choose from")
        return self

    def all(self) -> Iterator[tuple[str, str, Range | Choices]]:
        """Yield the section, the key and what to draw from, of everything that is searched."""
        for section in type(self).model_fields:
            for name, what in getattr(self, section).items():
                yield section, name, what


def sample(what: Range | Choices, seed: int) -> Any:
    """Return one number of a range, or one of the choices, as the key says.

    >>> drawn(Range(low=2, high=2), 0), drawn(("a",), 0)
    (2.0, 'a')
    """
    place = float(torch.rand((), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
    return what.at(place) if isinstance(what, Range) else what[int(place * len(what))]
