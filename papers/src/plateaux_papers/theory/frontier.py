"""The sharpness-diversity frontier: the most diverse converging setting of SAM at a given sharpness bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from plateaux.errors import RecipeError
from plateaux_papers.theory.setting import Setting
from plateaux_papers.theory.theorems import Order, Prediction, theorem2

MAX_STEPS = 60
GRID_POINTS = 24  # values of rho tried before the bisection between two of them
BISECTIONS = 16


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """A setting and its prediction."""

    setting: Setting
    prediction: Prediction


def most_diverse(
    bound: float, like: Setting, *, paper: bool = False, order: Order = "exact", steps: int = MAX_STEPS
) -> FrontierPoint:
    """Return the most diverse stable setting with a sharpness bound of at most `bound`, over all k and rho.

    With `like.parts` = 1 each member trains on all data, otherwise on one subset. Diversity and the bound decrease in
    rho, so the smallest rho that satisfies the bound is best for each k.
    """
    candidates = [point for point in _flat_enough(bound, like, paper, order, steps) if point.setting.stable]
    if not candidates:
        raise RecipeError(
            f"No stable setting with up to {steps} steps has a sharpness bound of at most {bound:g}. Raise the "
            "bound or `steps`."
        )
    return max(candidates, key=lambda point: point.prediction.diversity)


def _flat_enough(bound: float, like: Setting, paper: bool, order: Order, steps: int) -> Iterator[FrontierPoint]:
    radii = np.linspace(0, max(like.limit, 0) * 0.999, GRID_POINTS).tolist()
    for k in range(1, steps + 1):
        settings = [replace(like, k=k, rho=rho) for rho in radii]
        at = next((at for at, each in enumerate(settings) if _predict(each, paper, order).upper <= bound), None)
        if at is None:
            continue
        low, high = radii[max(at - 1, 0)], radii[at]
        for _ in range(BISECTIONS if at else 0):
            middle = (low + high) / 2
            is_flat = theorem2(replace(like, k=k, rho=middle), paper=paper, order=order).upper <= bound
            low, high = (low, middle) if is_flat else (middle, high)
        best = replace(like, k=k, rho=high)
        yield FrontierPoint(best, _predict(best, paper, order))


@cache
def _predict(setting: Setting, paper: bool, order: Order) -> Prediction:
    return theorem2(setting, paper=paper, order=order)  # equals Theorem 1 for one part
