"""Theorems 1 and 2 of Lu et al. 2024 (section 3), corrected, and as printed.

Diversity is the variance of members' predictions on new data. Sharpness is the expected worst rise of the training loss
within a radius of the members' mean weights. Theorem 1 is of SAM on all data, Theorem 2 of SAM on one of S parts.
docs/results/theory.md lists what is corrected.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Literal, Protocol

from plateaux.core.errors import RecipeError
from plateaux.theory.phi import phi, trace_variance
from plateaux.theory.setting import Setting, warn_if_unstable
from plateaux.theory.spectrum import exact_phi

Order = Literal["leading", "first", "exact"]
"""How phi is computed: in the limit of infinite size, with the first correction in 1/d, or at the size given."""

Jensen = Literal["cs", "haar"]
"""How the variance in G is found: bounded by Cauchy-Schwarz, or from eigenvectors that point anywhere."""


class Phi(Protocol):
    """phi(i, j) of one setting."""

    def __call__(self, i: int, j: int, /) -> float: ...


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a theorem says: the diversity, and bounds of the sharpness."""

    diversity: float
    upper: float
    lower: float | None = None


def theorem1(setting: Setting, *, paper: bool = False, order: Order = "exact", jensen: Jensen = "haar") -> Prediction:
    """Return diversity and bounds of sharpness of SAM on all data; `paper` gives the printed formulas.

    >>> found = theorem1(Setting(k=3, eta=0.01, rho=0.1))
    >>> round(found.diversity, 5), round(found.lower, 4), round(found.upper, 4)
    (0.0024, 0.0887, 0.0905)
    """
    if setting.parts != 1:
        raise RecipeError(f"Theorem 1 is of members that see all data, not one of {setting.parts} parts: theorem2")
    warn_if_unstable(setting)
    value = get_phi(setting, "leading" if paper else order)
    middle = setting.radius * sqrt(value(2 * setting.k, 2)) * setting.norm
    least = setting.radius**2 / 2 * (sqrt(setting.n / setting.d) - 1) ** 2
    gap = jensen_gap(setting, paper=paper, order=order, jensen=jensen)
    diversity = value(2 * setting.k, 0) * setting.variance
    return Prediction(diversity, _steepest(setting, paper) + middle, least + middle - gap)


def theorem2(setting: Setting, *, paper: bool = False, order: Order = "exact") -> Prediction:
    """Return diversity and the bound of sharpness of SAM on random parts; `paper` gives the printed formulas.

    >>> found = theorem2(Setting(k=3, eta=0.01, rho=0.1, parts=10))
    >>> round(found.diversity, 4), round(found.upper, 3)
    (0.0863, 0.73)
    """
    warn_if_unstable(setting)
    value, k, parts = get_phi(setting, "leading" if paper else order), setting.k, setting.parts
    between = (parts - 1) / (setting.d * parts) * (value(2 * k, 0) - value(k, 0) ** 2) * setting.norm**2
    constant = subset_constant(setting, paper=paper, order=order)
    upper = _steepest(setting, paper) + setting.radius / parts * sqrt(constant) * setting.norm
    return Prediction(value(2 * k, 0) * setting.variance + between, upper)


def subset_constant(setting: Setting, *, paper: bool = False, order: Order = "exact") -> float:
    """Return C of Theorem 2: the mean of |sum_s B_s^k W w*|^2 / |w*|^2.

    All terms but one are exact in phi. The crossed one, of B_s W_t with B_t W_s, is not: it is right to order 1/d,
    for parts turned against each other at random.
    """
    value, k, s, r, d = (
        get_phi(setting, "leading" if paper else order),
        setting.k,
        setting.parts,
        setting.ratio,
        setting.d,
    )
    p0, p1, p2 = (value(k, j) for j in range(3))
    q0, q1, q2 = (value(2 * k, j) for j in range(3))
    two, three, four = s * (s - 1), s * (s - 1) * (s - 2), s * (s - 1) * (s - 2) * (s - 3)
    same = s * q2 + 2 * r * two * q1 + 2 * two * p2 * p0 + r * r * four * p0 * p0
    if paper:
        pairs = two * (r * (1 + r) * q0 + 2 * p1 * p1)
        return same + pairs + three * (1.5 * r * (1 + r) * p0 * p0 + 1.5 * r * r * q0 + 3 * r * p0 * p1)
    finite = 0.0 if order == "leading" else 1.0
    second = r * (1 + r + finite / d)  # phi(0, 2)
    crossed = 2 * r * p0 * p1 - r * r * p0 * p0 + finite * _turned(d) * (p1 - r * p0) ** 2
    pairs = two * (second * q0 + p1 * p1 + crossed)
    return same + pairs + three * (second * p0 * p0 + r * r * q0 + 4 * r * p0 * p1)


def jensen_gap(setting: Setting, *, paper: bool = False, order: Order = "exact", jensen: Jensen = "haar") -> float:
    """Return G of Theorem 1: how far the mean of a root may lie below the root of the mean."""
    value, k, norm = get_phi(setting, "leading" if paper else order), setting.k, setting.norm
    mean, spread = value(2 * k, 2), value(4 * k, 4) - value(2 * k, 2) ** 2
    if paper:
        return spread / (2 * mean * sqrt(mean) * norm)
    if jensen == "haar":
        traces = trace_variance(2 * k, 2, r=setting.ratio, eta=setting.eta, rho=setting.rho) / setting.d
        spread = (2 * spread + traces) / (setting.d + 2)
    return setting.radius * norm * spread / (2 * mean * sqrt(mean))


def get_phi(setting: Setting, order: Order) -> Phi:
    """Return phi(i, j) of the data that one member of the setting trains on."""
    if order == "exact":
        return partial(exact_phi, n=setting.rows, d=setting.d, eta=setting.eta, rho=setting.rho)
    size = setting.d if order == "first" else None
    return partial(phi, r=setting.ratio, d=size, eta=setting.eta, rho=setting.rho)


def _steepest(setting: Setting, paper: bool) -> float:
    """Return what curvature alone can add to the loss: the largest eigenvalue is at most that, on average."""
    top = (sqrt(setting.n / setting.d) + 1) ** 2 + (0 if paper else 1 / setting.d)
    return setting.radius**2 / 2 * top


def _turned(d: int) -> float:
    """Return E tr[X Y X Y] / d over tr[X X] tr[Y Y] / d^2, of traceless X and Y turned by a random rotation."""
    return (d - 2) / ((d - 1) * (d + 2)) if d > 1 else 0.0
