"""Worst-case sharpness: the largest increase of the loss within a radius, by APGD in groups of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from plateaux.core.ranges import Count, NonNegative
from plateaux.core.registry import probe
from plateaux.core.stats.estimates import mean_of_independent
from plateaux.core.types import Estimate
from plateaux.loss_landscape import perturbations
from plateaux.loss_landscape.apgd import ApgdResult, Ball, Norm, run_apgd
from plateaux.loss_landscape.groups import REMAINDER, num_grouped, split_groups
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.probe import Probe

Preset = Literal["sharpbalance"]

RADII: Mapping[tuple[Norm, bool], float] = {
    ("l2", True): 0.5,
    ("l2", False): 0.05,
    ("linf", True): 0.002,
    ("linf", False): 0.001,
}
"""Default radius by norm and whether it is adaptive.

The adaptive radii are among those in Andriushchenko et al.; the non-adaptive l2 radius is the usual rho of SAM.
"""

PRESETS: Mapping[str, Mapping[str, float]] = {"sharpbalance": {"radius": 0.5, "m": 5, "samples": 500}}


@probe("worst_l2", norm="l2")
@probe("worst_linf", norm="linf")
def worst(
    *,
    norm: Norm,
    radius: NonNegative | None = None,
    adaptive: bool = True,
    m: Count | None = None,
    samples: Count | None = None,
    steps: Count = 20,
    restarts: Count = 1,
    eta: NonNegative = 0.0,
    preset: Preset | None = None,
) -> Probe:
    """Worst-case sharpness: the largest increase of a group's mean loss within a ball around the weights.

    The ball is |delta / (|w| + eta)| <= radius, or |delta| <= radius if not adaptive. In l-infinity it is a box: each
    weight changes by at most a fraction of itself. `preset = "sharpbalance"` uses 100 groups of 5 samples and a radius
    of .5, for l-infinity hundreds of times the default; options that are given override it.
    """
    defaults = PRESETS[preset] if preset else {"radius": RADII[norm, adaptive], "m": 128, "samples": 1024}
    ball_radius = float(defaults["radius"] if radius is None else radius)
    size, count = int(defaults["m"] if m is None else m), int(defaults["samples"] if samples is None else samples)

    def run(surface: LossSurface) -> dict[str, Estimate]:
        scale = perturbations.perturbation_scale(surface.origin, adaptive=adaptive, eta=eta)
        ball = Ball(ball_radius, norm, scale)
        increases = []
        with surface.at_params(surface.origin):
            for i, group in enumerate(split_groups(surface.batches, size)):
                generator = surface.generator(f"worst_{norm}", i)
                results = run_apgd(surface, group, ball, steps=steps, generator=generator, restarts=restarts)
                increases.append(_increases(results))
        return _summarize(torch.stack(increases))

    variable = "delta / (|w| + eta)" if eta else "delta / |w|" if adaptive else "delta"
    starts = "the weights" if restarts == 1 else f"the weights and {restarts - 1} random starts"
    return Probe(
        run,
        passes=lambda samples: restarts * (steps + 1 / 3) * num_grouped(samples, size),
        samples=count,
        scale_invariant=adaptive and not eta,
        definition=f"{norm} norm of {variable} at most {ball_radius:g}; APGD, {steps} steps from {starts}; mean over "
        f"groups of {size} samples of the largest loss minus the loss at the weights, standard error over groups, "
        f"{REMAINDER}; converged: the fraction of that increase that was reached after half of the steps"
        + ("; restarts: the result of a single start, mean and standard error over starts" if restarts > 1 else ""),
    )


def _increases(results: Sequence[ApgdResult]) -> torch.Tensor:
    """Return the increase from each start, and that after half of the steps of the best start, `[starts + 1]`."""
    best = max(results, key=lambda result: result.best_loss)
    increases = [result.best_loss - result.initial_loss for result in results]
    return torch.tensor([*increases, best.halfway_loss - best.initial_loss], dtype=torch.float64)


def _summarize(increases: torch.Tensor) -> dict[str, Estimate]:
    """Return the estimates from increases `[groups, starts + 1]`."""
    by_start, halfway = increases[:, :-1], increases[:, -1]
    largest = by_start.amax(1)
    total = float(largest.sum())
    estimates = {
        "": mean_of_independent(largest.tolist()),
        "converged": Estimate(float(halfway.sum()) / total if total else 1.0),
    }
    starts = by_start.shape[1]
    if starts > 1:
        means = by_start.mean(0)
        estimates["restarts"] = Estimate(float(means.mean()), mc_stderr=float(means.std()) / starts**0.5)
    return estimates
