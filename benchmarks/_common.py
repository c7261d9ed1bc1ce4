"""Shared code of the benchmarks: flags, time budgets, alternating measurement, limits, controls, the final JSON line.

A script adds every figure to `Results`, together with the limit of the full form, the limit of the quick form, and the
control that shows whether the figure can be judged. A limit is judged only in the form it is stated for. A control is a
ratio that is 1 on an undisturbed machine, usually one side of a comparison measured twice. If it is off by more than
3 %, the measurement first runs longer, within its budget; after that, the limits that depend on it are not judged.

The last line that a script prints is JSON. "ok" is true if every limit holds, false if one does not, and null if the
benchmark cannot tell: because of a control, because time ran out, or because this form judges nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plateaux.data.files import data_root

STEADY = 0.03  # how far a control may be from 1
PART_SECONDS = 480.0  # for the measurement of one part, so that the whole of it finishes within ten minutes
QUICK_SECONDS = 15.0
LONGER = 4  # a measurement with an unsteady control takes up to this many times the usual number of rounds
NETWORKS = "weights/resnet20_32_44_56_cifar10.safetensors"
DATA = {  # files or folders in PLATEAUX_DATA, of which one suffices
    "CIFAR-10": ("cifar-10-batches-bin", "cifar-10-batches-py"),
    "CIFAR-100": ("cifar-100-binary", "cifar-100-python"),
    "MNIST": ("MNIST", "mnist"),
    "Fashion-MNIST": ("FashionMNIST", "fashion-mnist", "fashion_mnist"),
    "MRPC": ("MRPC", "mrpc"),
    "OOD sets": ("ood",),
    "ResNets": (NETWORKS,),
    "MiniLM": ("weights/minilm_l3_mrpc_fp16.safetensors",),
}
Limit = tuple[str, float]
Side = Callable[[int], Any]


def at_least(bound: float) -> Limit:
    return "at least", bound


def at_most(bound: float) -> Limit:
    return "at most", bound


def flag_parser(about: str, parts: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return a parser of `--json`, `--quick`, and, if the benchmark has parts, `--part NAME`."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print only the final JSON line")
    parser.add_argument(
        "--quick", action="store_true", help="a small version, judged only by limits that it can resolve"
    )
    if parts:
        listed = ", ".join(parts)
        parser.add_argument(
            "--part", choices=parts, metavar="NAME", help=f"only this part, within ten minutes: {listed} (default: all)"
        )
    parser.set_defaults(parts=tuple(parts))
    return parser


def parse_flags(about: str, parts: Sequence[str] = (), argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the flags; `parts` of the result are the parts to measure."""
    return selected(flag_parser(about, parts).parse_args(argv))


def selected(args: argparse.Namespace) -> argparse.Namespace:
    """Return the flags with `parts` reduced to the part that was asked for."""
    if getattr(args, "part", None):
        args.parts = (args.part,)
    return args


def missing_data(*names: str) -> str | None:
    """Return a sentence that names the data of `DATA` that are missing, or None if all are there."""
    root = data_root(None)
    missing = [name for name in names if not any((root / path).exists() for path in DATA[name])]
    if not missing:
        return None
    paths = ", ".join(DATA[name][0] for name in missing)
    return f"no {' and no '.join(missing)}; set PLATEAUX_DATA to the folder that contains {paths}"


class OutOfTime(Exception):
    """A measurement that did not finish within its budget."""


class Budget:
    """Seconds that a measurement may take, from now on."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock = seconds, clock
        self._end = clock() + seconds

    def left(self) -> float:
        return self._end - self._clock()

    def require(self) -> float:
        """Return the seconds that are left; raise OutOfTime if there are none."""
        if (left := self.left()) <= 0:
            raise OutOfTime(f"not finished within {self.seconds:g} s")
        return left


def budget(quick: bool, share: float = 1.0) -> Budget:
    """Return the budget of one part, or of a share of it."""
    return Budget((QUICK_SECONDS if quick else PART_SECONDS) * share)


def seconds(work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return how long one call takes, in wall-clock time or by another clock (`time.process_time`)."""
    begin = clock()
    work()
    return clock() - begin


def steady(control: float) -> bool:
    return abs(control - 1) <= STEADY


def needs_round(done: int, usual: int, control: Callable[[], float] | None, longest: float, left: float) -> bool:
    """Say whether another round is needed and fits: the usual number, or more if the control is off by over 3 %."""
    if done == 0:
        return True
    if longest > left:
        return False
    return done < usual or (control is not None and done < LONGER * usual and not steady(control()))


def interleaved(
    sides: Mapping[str, Side],
    rounds: int,
    *,
    control: tuple[str, str] | None = None,
    within: Budget | None = None,
    into: MutableMapping[str, list[float]] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time every side once per round, in an order that rotates; each side receives the number of the round.

    Args:
        control: Two sides that do the same. If their ratio is off by more than 3 %, further rounds are taken.
        within: No round begins that would probably exceed this budget; at least one round is taken.
        into: Times of earlier rounds, to which these are added.
    """
    names, found = list(sides), {} if into is None else into
    for name in names:
        found.setdefault(name, [])
    now = None if control is None else lambda: ratio(found[control[0]], found[control[1]])
    done, longest = 0, 0.0
    while needs_round(done, rounds, now, longest, within.left() if within else float("inf")):
        first, begin = done % len(names), time.perf_counter()
        for name in names[first:] + names[:first]:
            found[name].append(seconds(partial(sides[name], done), clock))
        done, longest = done + 1, max(longest, time.perf_counter() - begin)
    return dict(found)


def paired(
    base: Side, sides: Mapping[str, Side], rounds: int, *, control: str | None = None, within: Budget | None = None
) -> tuple[list[float], dict[str, list[float]]]:
    """Time every side between two turns of the base, in random order; return the base's times, and ratios by side.

    A ratio is relative to the mean of the turns directly before and after, so that drift within a round cancels. The
    clock is CPU time: in steps of seconds, wall-clock time would include the time of other processes on the core.
    """
    rng, clock = random.Random(0), time.process_time
    times, found = [seconds(partial(base, 0), clock)], dict[str, list[float]]({name: [] for name in sides})
    now = None if control is None else lambda: statistics.median(found[control])
    done, longest = 0, 0.0
    while needs_round(done, rounds, now, longest, within.left() if within else float("inf")):
        begin = time.perf_counter()
        for name in rng.sample(list(sides), len(sides)):
            took = seconds(partial(sides[name], done), clock)
            times.append(seconds(partial(base, done), clock))
            found[name].append(2 * took / (times[-2] + times[-1]))
        done, longest = done + 1, max(longest, time.perf_counter() - begin)
    return times, found


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Return the median of the ratios per round, in which slow drift of the machine cancels."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


@dataclass
class Results:
    """The figures of a benchmark with their limits and controls.

    >>> results = Results(quick=True)
    >>> results.add("a / a", 1.01, is_control=True)
    >>> results.add("a / b", 0.98, full=at_least(0.97), quick=at_least(0.5), control="a / a")
    >>> results.verdict()
    True
    """

    quick: bool
    quiet: bool = True
    figures: dict[str, float] = field(default_factory=dict)
    limits: dict[str, Limit] = field(default_factory=dict)
    controls: dict[str, float] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)  # why the benchmark cannot tell
    _control_by_name: dict[str, str] = field(default_factory=dict)

    def add(
        self,
        name: str,
        value: float,
        *,
        full: Limit | None = None,
        quick: Limit | None = None,
        control: str | None = None,
        is_control: bool = False,
    ) -> None:
        """Add a figure; `full` and `quick` are its limits, and `control` names the figure that must be near 1."""
        self.figures[name] = value
        if is_control:
            self.controls[name] = value
        if limit := (quick if self.quick else full):
            self.limits[name] = limit
        if control is not None:
            self._control_by_name[name] = control
        if not self.quiet:
            print(f"{value:12.4f}  {name}", flush=True)

    def cannot_tell(self, reason: str) -> None:
        """State why the verdict can be at best null."""
        self.reasons.append(reason)

    def verdict(self) -> bool | None:
        """Return False if a limit that can be judged does not hold, True if all hold, None if neither is known."""
        judged = [self._holds(name) for name in self.limits]
        if False in judged:
            return False
        return None if self.reasons or None in judged or not judged else True

    def _holds(self, name: str) -> bool | None:
        control = self._control_by_name.get(name)
        if control is not None and not steady(self.figures[control]):
            return None
        word, bound = self.limits[name]
        return self.figures[name] >= bound if word == "at least" else self.figures[name] <= bound

    def finish(self, **facts: Any) -> None:
        """Print the final JSON line."""
        reasons = list(self.reasons)
        for name in dict.fromkeys(self._control_by_name[name] for name in self.limits if self._holds(name) is None):
            reasons.append(f"{name} is {self.figures[name]:.3f}, more than {STEADY:.0%} from 1")
        if not self.limits and not reasons:
            reasons.append("this form judges nothing" if self.quick else "no limit was measured")
        line = {
            "figures": {name: round(value, 4) for name, value in self.figures.items()},
            "limits": {name: f"{word} {bound:g}" for name, (word, bound) in self.limits.items()},
            "controls": {name: round(value, 4) for name, value in self.controls.items()},
            "quick": self.quick,
            **facts,
            "cannot_tell": reasons,
            "ok": self.verdict(),
        }
        print(json.dumps(line))


@cache
def native_precision() -> str:
    """Return bf16 if this machine is faster in bf16 than in fp32, otherwise fp32."""
    x, net = torch.randn(32, 16, 32, 32), torch.nn.Conv2d(16, 16, 3, padding=1)

    def side(precision: torch.dtype) -> Side:
        return lambda _: net.to(precision)(x.to(precision)).sum().backward()

    sides = {"fp32": side(torch.float32), "bf16": side(torch.bfloat16)}
    interleaved(sides, 2)  # torch selects kernels at the first call
    times = interleaved(sides, 5)
    return "bf16" if ratio(times["bf16"], times["fp32"]) < 1 else "fp32"


def write_images(folder: Path, count: int) -> Path:
    """Write random images of CIFAR's shape to a file that every process can read."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (count + 128, 3, 32, 32), dtype=np.uint8)
    y = rng.integers(0, 10, count + 128)
    file = folder / "images.npz"
    np.savez(file, x_train=x[:count], y_train=y[:count], x_test=x[count:], y_test=y[count:])
    return file
