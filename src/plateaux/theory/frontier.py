"""The most diversity that SAM can have without being sharper than allowed, while it converges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from plateaux.core.errors import RecipeError
from plateaux.theory.setting import Setting
from plateaux.theory.theorems import Order, Prediction, theorem2

STEPS = 60  # at most
RADII = 24  # of SAM that are looked at, before the best is found between two of them
HALVINGS = 16


@dataclass(frozen=True, slots=True)
class Best:
    """A setting, and what theory says of it."""

    setting: Setting
    prediction: Prediction


def most_diverse(
    bound: float, like: Setting, *, paper: bool = False, order: Order = "exact", steps: int = STEPS
) -> Best:
    """Return the most diverse stable setting whose bound of sharpness is at most `bound`; k and rho are free.

    With `like.parts` = 1 members see all data, and else one part each. Both diversity and the bound fall as rho grows,
    so that for every k the smallest rho that is flat enough is taken.
    """
    found = [best for best in _flat_enough(bound, like, paper, order, steps) if best.setting.stable]
    if not found:
        raise RecipeError(f"No stable setting up to {steps} steps has a sharpness bound of {bound:g}; allow more")
    return max(found, key=lambda best: best.prediction.diversity)


def _flat_enough(bound: float, like: Setting, paper: bool, order: Order, steps: int) -> Iterator[Best]:
    radii = np.linspace(0, max(like.limit, 0) * 0.999, RADII).tolist()
    for k in range(1, steps + 1):
        settings = [replace(like, k=k, rho=rho) for rho in radii]
        at = next((at for at, each in enumerate(settings) if _says(each, paper, order).upper <= bound), None)
        if at is None:
            continue
        low, high = radii[max(at - 1, 0)], radii[at]
        for _ in range(HALVINGS if at else 0):
            middle = (low + high) / 2
            flat = theorem2(replace(like, k=k, rho=middle), paper=paper, order=order).upper <= bound
            low, high = (low, middle) if flat else (middle, high)
        best = replace(like, k=k, rho=high)
        yield Best(best, _says(best, paper, order))


@cache
def _says(setting: Setting, paper: bool, order: Order) -> Prediction:
    return theorem2(setting, paper=paper, order=order)  # of one part, it is Theorem 1
