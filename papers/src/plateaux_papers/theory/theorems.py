"""Theorems 1 and 2 of Lu et al. 2024 (section 3), corrected and as printed.

Diversity is the variance of the members' predictions on new data. Sharpness is the expected worst-case rise of the
training loss within a radius of the members' mean weights. Theorem 1 covers SAM on all data, Theorem 2 SAM on one of S
subsets. lu2024/theory.md lists the corrections.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Literal, Protocol

from plateaux.errors import RecipeError
from plateaux_papers.theory.phi import phi, trace_variance
from plateaux_papers.theory.setting import Setting, warn_if_unstable
from plateaux_papers.theory.spectrum import exact_phi

Order = Literal["leading", "first", "exact"]
"""How phi is computed: for infinite size, with the first correction in 1/d, or exactly at finite size."""

Jensen = Literal["cs", "haar"]
"""How the variance in G is computed: bounded by Cauchy-Schwarz, or from Haar-distributed eigenvectors."""


class Phi(Protocol):
    """phi(i, j) of one setting."""

    def __call__(self, i: int, j: int, /) -> float: ...


@dataclass(frozen=True, slots=True)
class Prediction:
    """The diversity and the sharpness bounds that a theorem predicts."""

    diversity: float
    upper: float
    lower: float | None = None


def theorem1(setting: Setting, *, paper: bool = False, order: Order = "exact", jensen: Jensen = "haar") -> Prediction:
    """Return the diversity and the sharpness bounds of SAM on all data; `paper` selects the printed formulas.

    >>> prediction = theorem1(Setting(k=3, eta=0.01, rho=0.1))
    >>> round(prediction.diversity, 5), round(prediction.lower, 4), round(prediction.upper, 4)
    (0.0024, 0.0887, 0.0905)
    """
    if setting.parts != 1:
        raise RecipeError(f"Theorem 1 needs parts = 1, not {setting.parts}. Use theorem2 for members on subsets.")
    warn_if_unstable(setting)
    value = get_phi(setting, "leading" if paper else order)
    first_order = setting.radius * sqrt(value(2 * setting.k, 2)) * setting.norm
    curvature = setting.radius**2 / 2 * (sqrt(setting.n / setting.d) - 1) ** 2
    gap = jensen_gap(setting, paper=paper, order=order, jensen=jensen)
    diversity = value(2 * setting.k, 0) * setting.variance
    return Prediction(diversity, _curvature_bound(setting, paper) + first_order, curvature + first_order - gap)


def theorem2(setting: Setting, *, paper: bool = False, order: Order = "exact") -> Prediction:
    """Return the diversity and the sharpness bound of SAM on random subsets; `paper` selects the printed formulas.

    >>> prediction = theorem2(Setting(k=3, eta=0.01, rho=0.1, parts=10))
    >>> round(prediction.diversity, 4), round(prediction.upper, 3)
    (0.0863, 0.73)
    """
    warn_if_unstable(setting)
    value, k, parts = get_phi(setting, "leading" if paper else order), setting.k, setting.parts
    between = (parts - 1) / (setting.d * parts) * (value(2 * k, 0) - value(k, 0) ** 2) * setting.norm**2
    constant = subset_constant(setting, paper=paper, order=order)
    upper = _curvature_bound(setting, paper) + setting.radius / parts * sqrt(constant) * setting.norm
    return Prediction(value(2 * k, 0) * setting.variance + between, upper)


def subset_constant(setting: Setting, *, paper: bool = False, order: Order = "exact") -> float:
    """Return C of Theorem 2: the mean of |sum_s B_s^k W w*|^2 / |w*|^2.

    All terms except one are exact in phi. The cross term of B_s W_t with B_t W_s is correct to order 1/d, for subsets
    with independent random eigenvectors.
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
    cross = 2 * r * p0 * p1 - r * r * p0 * p0 + finite * _rotation_factor(d) * (p1 - r * p0) ** 2
    pairs = two * (second * q0 + p1 * p1 + cross)
    return same + pairs + three * (second * p0 * p0 + r * r * q0 + 4 * r * p0 * p1)


def jensen_gap(setting: Setting, *, paper: bool = False, order: Order = "exact", jensen: Jensen = "haar") -> float:
    """Return G of Theorem 1: the largest gap between the square root of a mean and the mean of square roots."""
    value, k, norm = get_phi(setting, "leading" if paper else order), setting.k, setting.norm
    mean, spread = value(2 * k, 2), value(4 * k, 4) - value(2 * k, 2) ** 2
    if paper:
        return spread / (2 * mean * sqrt(mean) * norm)
    if jensen == "haar":
        traces = trace_variance(2 * k, 2, r=setting.ratio, eta=setting.eta, rho=setting.rho) / setting.d
        spread = (2 * spread + traces) / (setting.d + 2)
    return setting.radius * norm * spread / (2 * mean * sqrt(mean))


def get_phi(setting: Setting, order: Order) -> Phi:
    """Return phi(i, j) for the training data of one member."""
    if order == "exact":
        return partial(exact_phi, n=setting.rows, d=setting.d, eta=setting.eta, rho=setting.rho)
    size = setting.d if order == "first" else None
    return partial(phi, r=setting.ratio, d=size, eta=setting.eta, rho=setting.rho)


def _curvature_bound(setting: Setting, paper: bool) -> float:
    """Return the second-order term of the upper bound, from a bound of the mean largest eigenvalue."""
    top = (sqrt(setting.n / setting.d) + 1) ** 2 + (0 if paper else 1 / setting.d)
    return setting.radius**2 / 2 * top


def _rotation_factor(d: int) -> float:
    """Return E tr[X Y X Y] / d over tr[X X] tr[Y Y] / d^2 for traceless X and Y with a random rotation between them."""
    return (d - 2) / ((d - 1) * (d + 2)) if d > 1 else 0.0
