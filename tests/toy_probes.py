"""Probes for tests, reached as a user's own are: `toy_probes:loss`. None of them is in the registry."""

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

    def ask(ground: LossSurface) -> Mapping[str, Estimate]:
        found = scale * ground.all_losses()
        return {
            "": Estimate(float(found.mean()), float(found.std() / len(found) ** 0.5)),
            "samples": Estimate(len(found)),
        }

    return Probe(ask, lambda n: n / 3, samples=samples, scale_invariant=True, definition="the mean over samples")


def climb(*, mc_samples: int = 3) -> Probe:
    """The loss after random steps and one along the gradient: moves the weights and draws numbers."""

    def ask(ground: LossSurface) -> Mapping[str, Estimate]:
        found = []
        for number in range(mc_samples):
            chance = ground.generator("climb", number)
            away = {n: torch.randn(w.shape, generator=chance, dtype=w.dtype) for n, w in ground.origin.items()}
            found.append(float(ground.all_losses(tensor_tree.add(ground.origin, away, times=0.1)).mean()))
        _, gradient = ground.gradient(ground.batches[0])
        uphill = ground.all_losses(tensor_tree.add(ground.origin, gradient, times=0.1))
        spread = torch.tensor(found).std() / mc_samples**0.5
        return {"": Estimate(sum(found) / mc_samples, 0.01, float(spread)), "uphill": Estimate(float(uphill.mean()))}

    return Probe(ask, lambda n: n * (mc_samples / 3 + 4 / 3), samples=16)


def many() -> Probe:
    """A number of every layer."""
    return Probe(
        lambda ground: {"": Estimate(1.0), **{f"layer {name}": Estimate(2.0) for name in "abcdefg"}},
        lambda n: 0.0,
        samples=4,
    )


def refuses() -> Probe:
    """A probe that no network suits."""

    def ask(_: LossSurface) -> Mapping[str, Estimate]:
        raise RecipeError("this network is not supported")

    return Probe(ask, lambda n: n, samples=4)


def stopped(*, after: int = 1) -> Probe:
    """A probe in which Ctrl-C is pressed."""
    asked: list[int] = []

    def ask(_: LossSurface) -> Mapping[str, Estimate]:
        if len(asked) == after:
            raise KeyboardInterrupt
        asked.append(1)
        return {"": Estimate(1.0)}

    return Probe(ask, lambda n: n, samples=4)
