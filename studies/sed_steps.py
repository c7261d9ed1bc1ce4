"""Measure how the time of a training step of SED depends on the number of members (claim 10).

    python studies/sed_steps.py runs/sed_steps            # a few minutes on one thread
    python studies/sed_steps.py runs/sed_steps --quick    # seconds

Each step trains two randomly chosen linear heads. Every head takes one step before timing starts, and the ensemble
sizes are interleaved. Each round takes the median of several steps and gives the slope of log seconds over log members;
the result is the mean slope over rounds with a 95 % t interval. The evidence is written to `evidence/` in that folder.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from _evidence import write_mean
from torch import nn

from plateaux.core.runtime import configure_runtime
from plateaux.core.types import Batch, derive_seed
from plateaux.distributed.executors.local import SINGLE_PROCESS
from plateaux.methods.sed import sed
from plateaux.optim.losses import cross_entropy
from plateaux.training.state import SharedLRScheduler, StepOptions, TrainState
from plateaux.training.step import step

CLAIM = "10-sed-costs-the-same-for-many"
STEPS = 11  # per ensemble size and round


def build_heads(count: int, width: int, classes: int, scheduler: SharedLRScheduler) -> list[TrainState]:
    """Return the train states of linear heads that share a learning rate schedule."""
    method, states = sed(cross_entropy()), []
    for member in range(count):
        head = nn.Linear(width, classes)
        params = dict(head.named_parameters())
        optimizer = torch.optim.AdamW(params.values(), lr=1e-3, weight_decay=0.01)
        states.append(TrainState(member, head, method, optimizer, params, {}, 1e-3, shared_lr_scheduler=scheduler))
    return states


def time_steps(sizes: tuple[int, ...], width: int, classes: int, rounds: int) -> dict[int, list[float]]:
    """Return the seconds of training steps by number of heads; the order of the sizes rotates from round to round."""
    torch.manual_seed(0)
    batch = Batch(torch.randn(16, width), torch.randint(classes, (16,)), torch.arange(16))
    leader = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-3, weight_decay=0.01)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(leader, T_max=100_000)
    scheduler = SharedLRScheduler(leader, cosine, every_step=True)
    options = StepOptions(shared_lr_schedulers=(scheduler,))
    heads = build_heads(max(sizes), width, classes, scheduler)
    for start in [*range(0, len(heads) - 1, 2), len(heads) - 2]:
        step(SINGLE_PROCESS, heads[start : start + 2], [batch] * 2, options)

    def run_step(size: int, number: int) -> None:
        step(SINGLE_PROCESS, heads[:size], [replace(batch, seed=derive_seed("round", number))] * size, options)

    for size in sizes:
        run_step(size, 0)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(rounds):
        first = number % len(sizes)
        for size in sizes[first:] + sizes[:first]:
            start_time = time.perf_counter()
            run_step(size, number)
            times[size].append(time.perf_counter() - start_time)
    return times


def slopes(times: dict[int, list[float]]) -> list[float]:
    """Return the slope of log time over log members in every round."""
    members = np.log(list(times))
    medians = [[statistics.median(row[i : i + STEPS]) for i in range(0, len(row), STEPS)] for row in times.values()]
    return [float(np.polyfit(members, np.log(round_times), 1)[0]) for round_times in zip(*medians, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true", help="few and narrow heads")
    args = parser.parse_args()
    start_time = time.monotonic()
    configure_runtime(threads=1)
    sizes, width, classes, rounds = ((5, 20, 40), 96, 50, 3) if args.quick else ((5, 50, 500, 1000), 768, 1000, 20)
    round_slopes = slopes(time_steps(sizes, width, classes, STEPS * rounds))
    for number, slope in enumerate(round_slopes):
        print(f"round {number}: slope {slope:.4f}")
    write_mean(CLAIM, round_slopes, args.out, start_time)


if __name__ == "__main__":
    main()
