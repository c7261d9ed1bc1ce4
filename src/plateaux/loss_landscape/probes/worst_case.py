"""The worst case: how much the loss rises at the worst point within a radius, by APGD in groups of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from plateaux.core.errors import RecipeError, suggest
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
"""Radius by norm and whether it is adaptive, where none is given.

Of those Andriushchenko et al. sweep; the plain ball is as large as that in which SAM usually trains.
"""

PRESETS: Mapping[str, Mapping[str, float]] = {"sharpbalance": {"radius": 0.5, "m": 5, "samples": 500}}


@probe
def worst_l2(
    *,
    radius: float | None = None,
    adaptive: bool = True,
    m: int | None = None,
    samples: int | None = None,
    steps: int = 20,
    restarts: int = 1,
    eta: float = 0.0,
    preset: Preset | None = None,
) -> Probe:
    """Worst-case sharpness: the largest rise of a group's mean loss within a Euclidean ball around the weights.

    The ball is |delta / (|w| + eta)| <= radius, or |delta| <= radius where not adaptive. `preset = "sharpbalance"`
    takes 100 groups of 5 samples and a radius of .5; what else is given stands.
    """
    return _worst("l2", radius, adaptive, m, samples, steps, restarts, eta, preset)


@probe
def worst_linf(
    *,
    radius: float | None = None,
    adaptive: bool = True,
    m: int | None = None,
    samples: int | None = None,
    steps: int = 20,
    restarts: int = 1,
    eta: float = 0.0,
    preset: Preset | None = None,
) -> Probe:
    """Worst-case sharpness where no weight moves by more than a share of itself: l-infinity.

    The box is |delta_i| <= radius (|w_i| + eta), or |delta_i| <= radius where not adaptive. `preset = "sharpbalance"`
    takes 100 groups of 5 samples and a radius of .5, as for l2, some hundred times the usual one.
    """
    return _worst("linf", radius, adaptive, m, samples, steps, restarts, eta, preset)


def _worst(
    norm: Norm,
    radius: float | None,
    adaptive: bool,
    m: int | None,
    samples: int | None,
    steps: int,
    restarts: int,
    eta: float,
    preset: str | None,
) -> Probe:
    if preset is not None and preset not in PRESETS:
        raise RecipeError(f"There is no preset {preset!r}; {suggest(preset, PRESETS)}")
    usual = PRESETS[preset] if preset else {"radius": RADII[norm, adaptive], "m": 128, "samples": 1024}
    far = float(usual["radius"] if radius is None else radius)
    size, count = int(usual["m"] if m is None else m), int(usual["samples"] if samples is None else samples)
    perturbations.check_options(
        lengths={"radius": far, "eta": eta},
        counts={"m": size, "samples": count, "steps": steps, "restarts": restarts},
    )

    def ask(ground: LossSurface) -> dict[str, Estimate]:
        ball = Ball(far, norm, perturbations.perturbation_scale(ground.origin, adaptive=adaptive, eta=eta))
        found = []
        with ground.at_params(ground.origin):
            for number, group in enumerate(split_groups(ground.batches, size)):
                chance = ground.generator(f"worst_{norm}", number)
                climbed = run_apgd(ground, group, ball, steps=steps, generator=chance, restarts=restarts)
                found.append(_gains(climbed))
        return _reported(torch.stack(found))

    around = "delta / (|w| + eta)" if eta else "delta / |w|" if adaptive else "delta"
    return Probe(
        ask,
        passes=lambda given: restarts * (steps + 1 / 3) * num_grouped(given, size),
        samples=count,
        scale_invariant=adaptive and not eta,
        definition=f"{norm} norm of {around} at most {far:g}; APGD, {steps} steps from {_starts(restarts)}; mean over "
        f"groups of {size} samples of the largest loss seen less the loss at home, error over groups, {REMAINDER}; "
        "converged: the share of that rise which was there after half of the steps"
        + ("; restarts: what one start finds, mean and its standard error over starts" if restarts > 1 else ""),
    )


def _starts(restarts: int) -> str:
    return "home" if restarts == 1 else f"home and {restarts - 1} random starts"


def _gains(climbed: Sequence[ApgdResult]) -> torch.Tensor:
    """Return the rise found from each start, and that after half of the steps of the best one `[starts + 1]`."""
    best = max(climbed, key=lambda each: each.best_loss)
    return torch.tensor(
        [*(each.best_loss - each.initial_loss for each in climbed), best.halfway_loss - best.initial_loss],
        dtype=torch.float64,
    )


def _reported(found: torch.Tensor) -> dict[str, Estimate]:
    """Return the numbers of `[groups, starts + 1]`."""
    rises, half = found[:, :-1], found[:, -1]
    largest = rises.amax(1)
    total = float(largest.sum())
    report = {
        "": mean_of_independent(largest.tolist()),
        "converged": Estimate(float(half.sum()) / total if total else 1.0),
    }
    starts = rises.shape[1]
    if starts > 1:
        each = rises.mean(0)
        report["restarts"] = Estimate(float(each.mean()), mc_stderr=float(each.std()) / starts**0.5)
    return report
