"""Shared helpers of the benchmarks: flags, interleaved timing, random images, precision, and the final JSON line."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch


def flags(about: str) -> argparse.Namespace:
    """Read `--json` (print nothing but the last line) and `--quick` (a small version of the same measurement)."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--json", action="store_true", help="print nothing but the closing JSON line")
    parser.add_argument("--quick", action="store_true", help="a small version of the same measurement")
    return parser.parse_args()


def seconds(work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return how long one call takes by a clock: the wall's, or the processor's (`time.process_time`)."""
    begun = clock()
    work()
    return clock() - begun


def interleaved(sides: Mapping[str, Callable[[int], Any]], rounds: int) -> dict[str, list[float]]:
    """Time every side once a round, in an order that turns with the rounds; each side is told the round's number."""
    names = list(sides)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            found[name].append(seconds(partial(sides[name], number)))
    return found


def beside(
    base: Callable[[int], Any], sides: Mapping[str, Callable[[int], Any]], rounds: int
) -> tuple[list[float], dict[str, list[float]]]:
    """Time every side between two turns of the base, in another order each round; return its times, and the ratios.

    A ratio is over the mean of the turns right before and right after, so that what drifts within a round is in both.
    The clock is the processor's: steps of seconds would otherwise meet the moments in which another has the core.
    """
    chance, clock = random.Random(0), time.process_time
    times, found = [seconds(partial(base, 0), clock)], dict[str, list[float]]({name: [] for name in sides})
    for number in range(rounds):
        for name in chance.sample(list(sides), len(sides)):
            took = seconds(partial(sides[name], number), clock)
            times.append(seconds(partial(base, number), clock))
            found[name].append(2 * took / (times[-2] + times[-1]))
    return times, found


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Return the median of the rounds' ratios: what drifts over an evening drifts on both sides of each."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def listed(figures: Mapping[str, float]) -> None:
    """Print one figure a line."""
    for name, value in figures.items():
        print(f"{value:10.3f}  {name}")


def close(figures: Mapping[str, float], limits: Mapping[str, tuple[str, float]], quick: bool, **facts: Any) -> None:
    """Print the figures, the limits ("at least" or "at most") and whether every limit holds."""
    held = {
        name: figures[name] >= bound if word == "at least" else figures[name] <= bound
        for name, (word, bound) in limits.items()
    }
    shown = {name: round(value, 4) for name, value in figures.items()}
    words = {name: f"{word} {bound:g}" for name, (word, bound) in limits.items()}
    print(json.dumps({"figures": shown, "limits": words, "quick": quick, **facts, "ok": all(held.values())}))


@cache
def precision_here() -> str:
    """Return bf16 where this machine computes in it faster than in fp32, else fp32: without units for it, it crawls."""
    x, net = torch.randn(32, 16, 32, 32), torch.nn.Conv2d(16, 16, 3, padding=1)

    def side(precision: torch.dtype) -> Callable[[int], Any]:
        return lambda _: net.to(precision)(x.to(precision)).sum().backward()

    sides = {"fp32": side(torch.float32), "bf16": side(torch.bfloat16)}
    interleaved(sides, 2)  # kernels are chosen at the first call
    times = interleaved(sides, 5)
    return "bf16" if ratio(times["bf16"], times["fp32"]) < 1 else "fp32"


def images(folder: Path, count: int) -> Path:
    """Write made-up images of CIFAR's shape where every process can read them."""
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (count + 128, 3, 32, 32), dtype=np.uint8)
    y = random.integers(0, 10, count + 128)
    file = folder / "images.npz"
    np.savez(file, x_train=x[:count], y_train=y[:count], x_test=x[count:], y_test=y[count:])
    return file
