"""Cost of every probe in forward-and-backward passes, and its time relative to that many bare passes.

A bare pass is what a user would write: the module itself, forward, cross entropy, backward, on the same batches in the
same mode. A probe states how many it needs (`passes`; a Hessian-vector product counts as four, a forward pass as one
third). Probe and bare passes alternate on one thread; the bare passes are measured twice, as the control. Draws, steps
and directions are reduced here, because each costs the same. The part `last_layer` is the relative flatness of a last
layer of 200 classes from cached features, on two threads. The quick form times single small batches and judges only the
last layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from _common import Results, at_most, budget, interleaved, parse_flags, ratio, seconds
from torch import Tensor

from plateaux.config.schema import accepts
from plateaux.core.member import MemberModule
from plateaux.core.registry import model, probe
from plateaux.core.types import Batch
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.probe import Probe
from plateaux.loss_landscape.probes.relative_flatness import last_layer_flatness, standardize_features

PARTS = ("last_layer", "cheap", "costly")
CHEAP = 4  # passes per sample; more are costly
LIMIT = at_most(1.2)
REDUCED = {"mc_samples": 2, "steps": 3, "directions": 6, "m": 32}
FIRST_LAYER = "relative_flatness of the first layer"


def build_surface(quick: bool) -> LossSurface:
    """Return the loss surface of a network on two batches of noise."""
    torch.manual_seed(0)
    name, width, size = ("resnet8", 8, 4) if quick else ("resnet18", 64, 32)
    module = model.get(name)(shape=(3, 32, 32), classes=10, width=width).eval()
    x, y = torch.randn(2 * size, 3, 32, 32), torch.arange(2 * size) % 10
    whole = Batch(x, y, torch.arange(2 * size))
    return LossSurface(MemberModule(module), [whole.take(slice(0, size)), whole.take(slice(size, 2 * size))], seed=1)


def measure_probe(results: Results, name: str, subject: Probe, surface: LossSurface, share: float) -> None:
    """Time a probe relative to bare passes.

    Cheap probes take more rounds, and costly ones are compared with several passes, because no machine is idle.
    """
    within, each = budget(results.quick, share), passes_per_sample(subject, surface)
    passes = max(1, min(2, round(each)))

    def bare(_: int) -> None:
        bare_passes(surface, passes)

    sides = {"bare": bare, "probe": lambda _: subject.run(surface), "bare, again": bare}
    if each <= CHEAP and not results.quick:  # for others, the cost of the first call is negligible
        for side in sides.values():
            side(0)
    rounds = 1 if results.quick else max(3, min(5, round(5 / each)))
    pair = None if results.quick else ("bare", "bare, again")
    times = interleaved(sides, rounds, control=pair, within=within)
    control = f"{name}: bare passes / bare passes"
    results.add(control, ratio(times["bare"], times["bare, again"]), is_control=True)
    results.add(f"{name}: passes a sample", each)
    results.add(
        f"{name}: time / bare passes",
        ratio(times["probe"], times["bare"]) * passes / each,
        full=LIMIT,
        control=control,
    )


def passes_per_sample(subject: Probe, surface: LossSurface) -> float:
    return subject.passes(surface.samples) / surface.samples


def bare_passes(surface: LossSurface, passes: int) -> None:
    """Pass over the samples this many times."""
    for _ in range(passes):
        for batch in surface.batches:
            F.cross_entropy(surface.module(batch.x), batch.y).backward()
        surface.module.zero_grad()


def build_probes(surface: LossSurface) -> dict[str, Probe]:
    """Return every registered probe with its defaults, except for the options that say how often it repeats."""
    layer = next(iter(surface.origin)).removesuffix(".weight")
    probes: dict[str, Probe] = {}
    for title, name in {**{name: name for name in probe.names()}, FIRST_LAYER: "relative_flatness"}.items():
        factory = probe.get(name)
        options: dict[str, Any] = {option: value for option, value in REDUCED.items() if accepts(factory, option)}
        probes[title] = factory(**options, layer=layer) if title == FIRST_LAYER else factory(**options)
    return probes


def last_layer(samples: int) -> Callable[[], Tensor]:
    """Return the relative flatness of a last layer of 200 classes, from 512 features, as stored and standardized."""
    torch.manual_seed(0)
    features, weight = torch.randn(samples, 512).relu(), torch.randn(200, 512) / 512**0.5

    def work() -> Tensor:
        logits = features @ weight.T
        scaled_features, scaled_weight = standardize_features(features, weight)
        scaled = last_layer_flatness(scaled_features, logits, scaled_weight)
        return scaled + last_layer_flatness(features, logits, weight)

    return work


def main() -> None:
    args = parse_flags(__doc__ or "", PARTS)
    results = Results(args.quick, args.json)
    if "last_layer" in args.parts:
        torch.set_num_threads(2)
        took = seconds(last_layer(500 if args.quick else 10_000))
        name = "relative flatness, 200 classes, cached features: seconds"
        results.add(name, took, full=at_most(10.0), quick=at_most(10.0))
    torch.set_num_threads(1)
    surface = build_surface(args.quick)
    groups: dict[str, dict[str, Probe]] = {"cheap": {}, "costly": {}}
    for name, each in build_probes(surface).items():
        groups["cheap" if passes_per_sample(each, surface) <= CHEAP else "costly"][name] = each
    for part, group in groups.items():
        for name, each in group.items() if part in args.parts else ():
            measure_probe(results, name, each, surface, 1 / len(group))
    results.finish(parts=args.parts, samples=surface.samples, reduced=REDUCED, threads=1)


if __name__ == "__main__":
    main()
