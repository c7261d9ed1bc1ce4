"""Cost of joint methods: steps of SED with up to a thousand heads, all pairs for comparison, and the memory of DivDis.

A step of SED trains two of M linear heads (768 wide, 1000 classes, batch size 16, AdamW with a schedule), for any M;
all pairs (A2D on labeled samples) train all of them. The ensembles are the first M of one list of heads, every head is
trained for one step before timing starts, and the sides alternate: the figures are medians of the ratios per round. SED
with 5 heads, measured twice, is the control. DivDis computes the loss of 128 labeled and 128 unlabeled samples, 5 heads
and 1000 classes, and its gradient, in a separate process: the figure is its peak resident memory, minus what the
process held before.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import psutil
import torch
from _common import Results, at_most, budget, interleaved, parse_flags, ratio
from member_memory import bytes_of_heads, peak_memory
from torch import nn

from plateaux.core.method import Method
from plateaux.core.runtime import configure_runtime
from plateaux.core.types import Batch, derive_seed
from plateaux.distributed.executors.local import SINGLE_PROCESS
from plateaux.methods.a2d import a2d
from plateaux.methods.divdis import divdis
from plateaux.methods.sed import sed
from plateaux.models.surgery import size_in_bytes
from plateaux.optim.losses import cross_entropy
from plateaux.training.loop.state import SharedLRScheduler, StepOptions, TrainState
from plateaux.training.loop.step import step

LOSS = cross_entropy()
AGAIN = "SED, again"
CONTROL = "SED / SED, 5 heads each"


def build_heads(count: int, width: int, classes: int, scheduler: SharedLRScheduler) -> list[TrainState]:
    """Return linear heads in training."""
    states = []
    for number in range(count):
        head = nn.Linear(width, classes)
        params = dict(head.named_parameters())
        optimizer = torch.optim.AdamW(params.values(), lr=1e-3, weight_decay=0.01)
        states.append(TrainState(number, head, sed(LOSS), optimizer, params, {}, 1e-3, shared_lr_scheduler=scheduler))
    return states


def cosine() -> SharedLRScheduler:
    leader = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-3, weight_decay=0.01)
    return SharedLRScheduler(leader, torch.optim.lr_scheduler.CosineAnnealingLR(leader, T_max=100_000), every_step=True)


def step_function(
    heads: list[TrainState], method: Method, batch: Batch, options: StepOptions
) -> Callable[[int], object]:
    """Return one step of an ensemble; the heads that it trains depend on the round."""
    states = [replace(head, method=method) for head in heads]

    def take_step(number: int) -> object:
        seeded = replace(batch, seed=derive_seed("round", number))
        return step(SINGLE_PROCESS, states, [seeded] * len(states), options)

    return take_step


def measure_steps(
    results: Results, sizes: tuple[int, ...], pairs: tuple[int, ...], width: int, classes: int, rounds: int
) -> None:
    """Time steps of SED and of all pairs by number of heads."""
    torch.manual_seed(0)
    batch = Batch(torch.randn(16, width), torch.randint(classes, (16,)), torch.arange(16))
    scheduler = cosine()
    options = StepOptions(shared_lr_schedulers=(scheduler,))
    heads = build_heads(max((*sizes, *pairs)), width, classes, scheduler)
    for start in range(0, len(heads) - 1, 2):
        step(SINGLE_PROCESS, heads[start : start + 2], [batch] * 2, options)
    step(SINGLE_PROCESS, heads[-2:], [batch] * 2, options)
    sides = {f"SED, {m} heads": step_function(heads[:m], sed(LOSS), batch, options) for m in sizes}
    first, largest = f"SED, {sizes[0]} heads", f"SED, {sizes[-1]} heads"
    sides[AGAIN] = sides[first]
    for m in pairs:
        method = a2d(LOSS, disagree_on="labeled")
        sides[f"all pairs, {m} heads"] = step_function(heads[:m], method, batch, options)
    for side in sides.values():
        side(0)
    found = interleaved(sides, rounds, control=(AGAIN, first), within=budget(results.quick))
    results.add(CONTROL, ratio(found[AGAIN], found[first]), is_control=True)
    for name in sides:
        if name not in (first, AGAIN):
            limits = {"full": at_most(1.2), "quick": at_most(2.0)} if name == largest else {}
            results.add(f"{name} / {first}", ratio(found[name], found[first]), control=CONTROL, **limits)
    for name in sides:
        if name != AGAIN:
            results.add(f"{name}, ms", 1e3 * statistics.median(found[name]))
    results.add("one head, MB", size_in_bytes([heads[0].module]) / 1e6)


def print_divdis_memory(size: int, heads: int, classes: int) -> None:
    """Compute DivDis in this process and print its memory; called by `divdis_memory` in a separate process."""
    configure_runtime(threads=1)
    loss = divdis(LOSS).objective.loss

    def loss_and_gradient(size: int, heads: int, classes: int) -> None:
        batch = Batch(torch.zeros(size, 1), torch.arange(size) % classes, torch.arange(size))
        logits = torch.randn(heads, 2 * size, classes, requires_grad=True)
        loss(logits, batch).mean(1).sum().backward()

    loss_and_gradient(4, 2, 3)  # loads everything
    before = psutil.Process().memory_info().rss / 2**20
    loss_and_gradient(size, heads, classes)
    print(json.dumps({"before": before, "net": peak_memory() - before}))


def divdis_memory(size: int, heads: int, classes: int) -> dict[str, float]:
    words = [sys.executable, __file__, "inner", str(size), str(heads), str(classes)]
    return dict(json.loads(subprocess.check_output(words, text=True).splitlines()[-1]))


def main() -> None:
    args = parse_flags(__doc__ or "")
    configure_runtime(threads=1)
    results = Results(args.quick, args.json)
    sizes, pairs, width, classes, rounds = (5, 50, 500, 1000), (5, 10, 25, 50), 768, 1000, 101
    problem = (128, 5, 1000)
    if args.quick:
        sizes, pairs, width, classes, rounds, problem = (5, 40), (5, 10), 96, 50, 15, (16, 3, 100)
    memory = divdis_memory(*problem)  # first: a process starts with the peak memory of the one that started it
    measure_steps(results, sizes, pairs, width, classes, rounds)
    held, needed = bytes_of_heads(20 if args.quick else 200)
    results.add(
        "heads on a frozen backbone: memory held / (backbone once + heads), bytes",
        held / needed,
        full=at_most(1.01),
        quick=at_most(1.01),
    )
    results.add("DivDis, MB beyond the process", memory["net"], full=at_most(300.0), quick=at_most(50.0))
    results.add("the process before, MB", memory["before"])
    results.finish(torch=torch.__version__)


if __name__ == "__main__":
    if sys.argv[1:2] == ["inner"]:
        print_divdis_memory(*map(int, sys.argv[2:]))
    else:
        main()
