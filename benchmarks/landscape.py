"""Cost of every probe in forward and backward passes, and its time relative to that many bare passes.

A bare pass is what a user would write: the module itself, forward, cross entropy, backward, on the same batches in the
same mode. A probe says how many it needs (`passes`; a Hessian-vector product counts four, a forward pass a third), and
both sides take turns on one thread. Probes that repeat themselves do so less often here: draws, steps and directions
cost the same each. Beside them: relative flatness of a last layer of 200 classes from kept features, on two threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from _common import close, flags, interleaved, ratio, seconds
from torch import Tensor

from plateaux.config.schema import accepts
from plateaux.core.member import MemberModule
from plateaux.core.registry import model, probe
from plateaux.core.types import Batch
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.probe import Probe
from plateaux.loss_landscape.probes.relative_flatness import last_layer_flatness, standardize_features

MOST = 1.2
FEWER = {"mc_samples": 2, "steps": 3, "directions": 6, "m": 32}
FIRST = "relative_flatness of the first layer"


def problem(quick: bool) -> LossSurface:
    """Return a network and two batches of noise."""
    torch.manual_seed(0)
    name, width, size = ("resnet8", 8, 4) if quick else ("resnet18", 64, 32)
    module = model.get(name)(shape=(3, 32, 32), classes=10, width=width).eval()
    x, y = torch.randn(2 * size, 3, 32, 32), torch.arange(2 * size) % 10
    whole = Batch(x, y, torch.arange(2 * size))
    return LossSurface(MemberModule(module), [whole.take(slice(0, size)), whole.take(slice(size, 2 * size))], seed=1)


def compared(ground: LossSurface, asked: Probe, each: float, quick: bool) -> float:
    """Return the time of a probe over that of as many bare passes, `each` for every sample.

    Cheap probes take more turns, and dear ones stand beside several passes: a machine is never quite quiet.
    """
    passes = max(1, min(2, round(each)))
    sides = {"bare": lambda _: bare(ground, passes), "probe": lambda _: asked.run(ground)}
    if each <= 4 and not quick:  # what is done once, at the first meeting, is little beside many passes
        for side in sides.values():
            side(0)
    times = interleaved(sides, 1 if quick else max(3, min(5, round(5 / each))))
    return ratio(times["probe"], times["bare"]) * passes / each


def bare(ground: LossSurface, passes: int) -> None:
    """Pass over the samples so many times."""
    for _ in range(passes):
        for batch in ground.batches:
            F.cross_entropy(ground.module(batch.x), batch.y).backward()
        ground.module.zero_grad()


def probes(ground: LossSurface) -> dict[str, Probe]:
    """Return every registered probe with its own options, but for those that say how often it repeats itself."""
    layer = next(iter(ground.origin)).removesuffix(".weight")
    made: dict[str, Probe] = {}
    for title, name in {**{name: name for name in probe.names()}, FIRST: "relative_flatness"}.items():
        factory = probe.get(name)
        fewer: dict[str, Any] = {option: value for option, value in FEWER.items() if accepts(factory, option)}
        made[title] = factory(**fewer, layer=layer) if title == FIRST else factory(**fewer)
    return made


def kept(samples: int) -> Callable[[], Tensor]:
    """Return relative flatness of a last layer of 200 classes, from features of 512 numbers."""
    torch.manual_seed(0)
    features, weight = torch.randn(samples, 512).relu(), torch.randn(200, 512) / 512**0.5

    def work() -> Tensor:
        logits = features @ weight.T
        return last_layer_flatness(*_scaled(features, weight, logits)) + last_layer_flatness(features, logits, weight)

    return work


def _scaled(features: Tensor, weight: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    features, weight = standardize_features(features, weight)
    return features, logits, weight


def main() -> None:
    args = flags(__doc__ or "")
    figures: dict[str, float] = {}
    limits: dict[str, tuple[str, float]] = {}

    def tell(name: str, value: float, words: str) -> None:
        figures[name] = value
        if not args.json:
            print(f"{name:>58}: {words}", flush=True)

    torch.set_num_threads(2)
    took = seconds(kept(500 if args.quick else 10_000))
    tell("relative flatness, 200 classes, kept features: seconds", took, f"{took:.2f} s, plain and scaled")
    limits["relative flatness, 200 classes, kept features: seconds"] = ("at most", 10.0)

    torch.set_num_threads(1)
    ground = problem(args.quick)
    for name, asked in probes(ground).items():
        each = asked.passes(ground.samples) / ground.samples
        over = compared(ground, asked, each, args.quick)
        tell(f"{name}: passes a sample", each, f"{each:.2f}")
        tell(f"{name}: time / bare passes", over, f"{over:.2f}")
        limits[f"{name}: time / bare passes"] = ("at most", MOST)
    close(figures, limits, args.quick, samples=ground.samples, fewer=FEWER, threads=1)


if __name__ == "__main__":
    main()
