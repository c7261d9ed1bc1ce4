"""SAM, ASAM, and GSAM: sharpness-aware minimization for every member."""

from __future__ import annotations

from typing import Literal

from plateaux.core.method import LossFn, Method, Objective
from plateaux.core.ranges import Count, NonNegative
from plateaux.core.registry import method
from plateaux.optim import sam as updates
from plateaux.optim.sam import asam_direction, asam_elementwise, sam_direction

Perturbation = Literal["global", "per_worker"]


@method
def sam(
    loss: LossFn, *, rho: NonNegative = 0.05, m: Count | None = None, perturbation: Perturbation = "global"
) -> Method:
    """Sharpness-aware minimization: use the gradient at weights perturbed by rho along it (Foret et al. 2021)."""
    return Method(Objective(loss), updates.sam(rho, m=m, perturbation=perturbation))


@method
def asam(
    loss: LossFn,
    *,
    rho: NonNegative = 0.5,
    variant: Literal["published", "elementwise"] = "published",
    eta: NonNegative = 0.01,
    m: Count | None = None,
    perturbation: Perturbation = "global",
) -> Method:
    """Adaptive SAM: the perturbation is proportional to the weights (Kwon et al. 2021).

    `published`: T = |w| + eta for parameters named weight, 1 for all others (rho about 0.5). `elementwise`: T = |w| for
    all parameters, without eta, as in a widely used implementation (rho about 2).
    """
    direction = asam_direction(eta) if variant == "published" else asam_elementwise
    return Method(Objective(loss), updates.sam(rho, direction=direction, m=m, perturbation=perturbation))


@method
def gsam(
    loss: LossFn,
    *,
    rho: NonNegative = 0.05,
    rho_min: NonNegative | None = None,
    alpha: NonNegative = 0.4,
    lr_min: NonNegative = 0.0,
    variant: Literal["plain", "elementwise"] = "plain",
) -> Method:
    """SAM that also minimizes the surrogate gap between perturbed and original loss (Zhuang et al. 2022).

    The radius decays with the learning rate from rho to rho_min; without rho_min it is constant.
    """
    rho_min = rho if rho_min is None else rho_min
    direction = sam_direction if variant == "plain" else asam_elementwise
    return Method(Objective(loss), updates.gsam(rho, alpha=alpha, rho_min=rho_min, lr_min=lr_min, direction=direction))
