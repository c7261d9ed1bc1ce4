"""Probes for tests, selected like custom probes: `toy_probes:loss`. None of them is in the registry."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from plateaux.core import tensor_tree
from plateaux.core.errors import RecipeError
from plateaux.core.types import Estimate
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.probe import Probe


def loss(*, scale: float = 1.0, samples: int = 8) -> Probe:
    """The mean loss, times a scale."""

    def run(surface: LossSurface) -> Mapping[str, Estimate]:
        result = scale * surface.all_losses()
        return {
            "": Estimate(float(result.mean()), float(result.std() / len(result) ** 0.5)),
            "samples": Estimate(len(result)),
        }

    return Probe(run, lambda n: n / 3, samples=samples, scale_invariant=True, definition="the mean over samples")


def ascent(*, mc_samples: int = 3) -> Probe:
    """The loss after random steps and after one step along the gradient."""

    def run(surface: LossSurface) -> Mapping[str, Estimate]:
        result = []
        for number in range(mc_samples):
            generator = surface.generator("climb", number)
            direction = {n: torch.randn(w.shape, generator=generator, dtype=w.dtype) for n, w in surface.origin.items()}
            result.append(float(surface.all_losses(tensor_tree.add(surface.origin, direction, times=0.1)).mean()))
        _, gradient = surface.gradient(surface.batches[0])
        uphill = surface.all_losses(tensor_tree.add(surface.origin, gradient, times=0.1))
        spread = torch.tensor(result).std() / mc_samples**0.5
        return {"": Estimate(sum(result) / mc_samples, 0.01, float(spread)), "uphill": Estimate(float(uphill.mean()))}

    return Probe(run, lambda n: n * (mc_samples / 3 + 4 / 3), samples=16)


def many() -> Probe:
    """One value per layer."""
    return Probe(
        lambda surface: {"": Estimate(1.0), **{f"layer {name}": Estimate(2.0) for name in "abcdefg"}},
        lambda n: 0.0,
        samples=4,
    )


def refuses() -> Probe:
    """A probe that supports no network."""

    def run(_: LossSurface) -> Mapping[str, Estimate]:
        raise RecipeError("this network is not supported")

    return Probe(run, lambda n: n, samples=4)


def stopped(*, after: int = 1) -> Probe:
    """A probe that is interrupted by Ctrl-C."""
    calls: list[int] = []

    def run(_: LossSurface) -> Mapping[str, Estimate]:
        if len(calls) == after:
            raise KeyboardInterrupt
        calls.append(1)
        return {"": Estimate(1.0)}

    return Probe(run, lambda n: n, samples=4)
