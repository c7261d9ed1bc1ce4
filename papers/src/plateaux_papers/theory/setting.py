"""Settings of the theory: least squares on Gaussian data, and the steps of SAM."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from math import sqrt

from plateaux.errors import RecipeError


class UnstableWarning(UserWarning):
    """SAM diverges at this step size and radius, so sharpness and diversity grow with every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting: rows `n` and columns `d` of the data, `k` steps of SAM, and the radius of the sharpness measure.

    Data have independent entries N(0, 1/d). With `parts` > 1 each member trains on one of `parts` equal subsets.
    Members start at N(0, variance); `norm` is the norm of the teacher's weights, `radius` that of the perturbation.
    """

    n: int = 3000
    d: int = 150
    k: int = 3
    eta: float = 0.01
    rho: float = 0.1
    parts: int = 1
    variance: float = 0.1
    norm: float = sqrt(15.0)
    radius: float = 0.01

    def __post_init__(self) -> None:
        if min(self.n, self.d, self.parts) < 1 or self.k < 0:
            raise RecipeError(f"{self}: n, d, and parts must be at least 1, and k at least 0.")
        if self.n % self.parts:
            raise RecipeError(f"{self.n} rows cannot be split into {self.parts} equal parts. Choose a divisor of n.")
        if self.eta <= 0 or self.rho < 0 or min(self.variance, self.norm, self.radius) < 0:
            raise RecipeError(f"{self}: eta must be above 0; rho, variance, norm, and radius must not be negative.")

    @property
    def rows(self) -> int:
        """The number of samples that one member trains on."""
        return self.n // self.parts

    @property
    def ratio(self) -> float:
        """Training samples of one member per weight."""
        return self.n / (self.parts * self.d)

    @property
    def limit(self) -> float:
        """The smallest radius rho at which SAM diverges."""
        return stability_limit(eta=self.eta, ratio=self.ratio)

    @property
    def stable(self) -> bool:
        """Whether SAM converges."""
        return self.rho < self.limit


def stability_limit(*, eta: float, ratio: float) -> float:
    """Return the radius rho from which SAM diverges; if it is not positive, SAM diverges at every rho.

    |1 - eta x - eta rho x^2| < 1 must hold up to the largest eigenvalue, x = (1 + sqrt(ratio))^2.
    """
    top = (1 + sqrt(ratio)) ** 2
    return (2 - eta * top) / (eta * top**2)


def warn_if_unstable(setting: Setting, *, stacklevel: int = 3) -> None:
    """Warn if SAM diverges; the warning points to the caller `stacklevel` frames up."""
    if setting.stable:
        return
    limit = setting.limit
    remedy = f"rho below {limit:.3g}" if limit > 0 else f"eta below {2 / (1 + sqrt(setting.ratio)) ** 2:.3g}"
    warnings.warn(
        f"SAM diverges at eta = {setting.eta:g}, rho = {setting.rho:g} with {setting.ratio:g} samples per weight, so"
        f" sharpness and diversity grow with every step; {remedy} is stable",
        UnstableWarning,
        stacklevel=stacklevel,
    )
