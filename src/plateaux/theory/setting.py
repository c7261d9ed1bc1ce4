"""What the theory is asked about: least squares on Gaussian data, and SAM's steps on them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from math import sqrt

from plateaux.core.errors import RecipeError


class Unstable(UserWarning):
    """SAM does not converge at this step size and radius: sharpness and diversity grow with every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One experiment: rows `n` and columns `d` of the data, `k` steps of SAM, and how sharpness is measured.

    Data have independent entries N(0, 1/d). With `parts` > 1 every member trains on one of so many equal parts. Members
    start at N(0, variance); `norm` is the length of the teacher's weights, `radius` that of the measured perturbation.
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
            raise RecipeError(f"{self}: n, d and parts are at least 1, k at least 0")
        if self.n % self.parts:
            raise RecipeError(f"{self.n} rows cannot be cut into {self.parts} equal parts; choose a divisor of n")
        if self.eta <= 0 or self.rho < 0 or min(self.variance, self.norm, self.radius) < 0:
            raise RecipeError(f"{self}: eta is above 0; rho, variance, norm and radius are not below")

    @property
    def rows(self) -> int:
        """How many samples one member trains on."""
        return self.n // self.parts

    @property
    def ratio(self) -> float:
        """Samples that one member trains on, for each weight."""
        return self.n / (self.parts * self.d)

    @property
    def limit(self) -> float:
        """The largest stable radius of SAM here."""
        return stability_limit(eta=self.eta, ratio=self.ratio)

    @property
    def stable(self) -> bool:
        """Whether SAM converges."""
        return self.rho < self.limit


def stability_limit(*, eta: float, ratio: float) -> float:
    """Return the radius rho at which SAM stops converging; nothing converges where it is not above zero.

    |1 - eta x - eta rho x^2| < 1 must hold up to the largest eigenvalue, x = (1 + sqrt(ratio))^2.
    """
    top = (1 + sqrt(ratio)) ** 2
    return (2 - eta * top) / (eta * top**2)


def warn_if_unstable(setting: Setting, *, above: int = 3) -> None:
    """Warn where SAM diverges; `above` names the caller to blame."""
    if setting.stable:
        return
    limit = setting.limit
    what = f"rho below {limit:.3g}" if limit > 0 else f"eta below {2 / (1 + sqrt(setting.ratio)) ** 2:.3g}"
    warnings.warn(
        f"SAM diverges at eta = {setting.eta:g}, rho = {setting.rho:g} with {setting.ratio:g} samples a weight, so"
        f" sharpness and diversity grow with every step; {what} is stable",
        Unstable,
        stacklevel=above,
    )
