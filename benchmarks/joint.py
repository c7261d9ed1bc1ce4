"""Cost of joint methods: steps of SED up to a thousand heads, all pairs for comparison, and the memory of DivDis.

A step of SED trains two of M linear heads (768 wide, 1000 classes, batch 16, AdamW with a schedule), whatever M is; all
pairs (A2D on labelled samples) train all of them. The ensembles are the first M of one row of heads, every head was
trained for a step before the clock starts, and the sides take turns: the figures are medians of the rounds' ratios.
DivDis settles 128 labelled and 128 unlabelled samples of 5 heads and 1000 classes, forwards and backwards, in a process
of its own: its peak resident memory, less what the process held before.
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
from _common import close, flags, interleaved, listed, ratio
from members import heads as heads_over_a_trunk
from members import peak
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
from plateaux.training.state import SharedLRScheduler, StepOptions, TrainState
from plateaux.training.step import step

LOSS = cross_entropy()


def row_of_heads(count: int, width: int, classes: int, pace: SharedLRScheduler) -> list[TrainState]:
    """Return linear heads in training."""
    made = []
    for number in range(count):
        head = nn.Linear(width, classes)
        params = dict(head.named_parameters())
        optimizer = torch.optim.AdamW(params.values(), lr=1e-3, weight_decay=0.01)
        made.append(TrainState(number, head, sed(LOSS), optimizer, params, {}, 1e-3, shared_lr_scheduler=pace))
    return made


def cosine() -> SharedLRScheduler:
    leader = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-3, weight_decay=0.01)
    return SharedLRScheduler(leader, torch.optim.lr_scheduler.CosineAnnealingLR(leader, T_max=100_000), every_step=True)


def stepping(learners: list[TrainState], method: Method, batch: Batch, way: StepOptions) -> Callable[[int], object]:
    """Return one step of an ensemble; who takes part changes with the round."""
    own = [replace(learner, method=method) for learner in learners]

    def go(number: int) -> object:
        return step(SINGLE_PROCESS, own, [replace(batch, seed=derive_seed("round", number))] * len(own), way)

    return go


def timed(
    sizes: tuple[int, ...], pairs: tuple[int, ...], width: int, classes: int, rounds: int
) -> tuple[dict[str, list[float]], float]:
    """Return the seconds of steps of SED and of all pairs, by number of heads, and the bytes of one head."""
    torch.manual_seed(0)
    batch = Batch(torch.randn(16, width), torch.randint(classes, (16,)), torch.arange(16))
    pace = cosine()
    way = StepOptions(shared_lr_schedulers=(pace,))
    everyone = row_of_heads(max((*sizes, *pairs)), width, classes, pace)
    for start in range(0, len(everyone) - 1, 2):
        step(SINGLE_PROCESS, everyone[start : start + 2], [batch] * 2, way)
    step(SINGLE_PROCESS, everyone[-2:], [batch] * 2, way)
    sides = {f"SED, {m} heads": stepping(everyone[:m], sed(LOSS), batch, way) for m in sizes}
    sides |= {
        f"all pairs, {m} heads": stepping(everyone[:m], a2d(LOSS, disagree_on="labeled"), batch, way) for m in pairs
    }
    for side in sides.values():
        side(0)
    return interleaved(sides, rounds), float(size_in_bytes([everyone[0].module]))


def compared(found: dict[str, list[float]]) -> dict[str, float]:
    """Return the steps' times in steps of the first side, and in milliseconds."""
    first = next(iter(found))
    figures = {f"{name} / {first}": ratio(found[name], found[first]) for name in found if name != first}
    return figures | {f"{name}, ms": 1e3 * statistics.median(found[name]) for name in found}


def settle_once(size: int, rows: int, classes: int) -> None:
    """Settle DivDis in this process and print what it took: the inner half of `divdis_memory`."""
    configure_runtime(threads=1)
    settle = divdis(LOSS).objective.loss

    def both(size: int, rows: int, classes: int) -> None:
        batch = Batch(torch.zeros(size, 1), torch.arange(size) % classes, torch.arange(size))
        table = torch.randn(rows, 2 * size, classes, requires_grad=True)
        settle(table, batch).mean(1).sum().backward()

    both(4, 2, 3)  # everything is loaded now
    before = psutil.Process().memory_info().rss / 2**20
    both(size, rows, classes)
    print(json.dumps({"before": before, "net": peak() - before}))


def divdis_memory(size: int, rows: int, classes: int) -> dict[str, float]:
    words = [sys.executable, __file__, "inner", str(size), str(rows), str(classes)]
    return dict(json.loads(subprocess.check_output(words, text=True).splitlines()[-1]))


def main() -> None:
    args = flags(__doc__ or "")
    configure_runtime(threads=1)
    sizes, pairs, width, classes, rounds = (5, 50, 500, 1000), (5, 10, 25, 50), 768, 1000, 101
    problem = (128, 5, 1000)
    if args.quick:
        sizes, pairs, width, classes, rounds, problem = (5, 40), (5, 10), 96, 50, 5, (16, 3, 100)
    memory = divdis_memory(*problem)  # first: a process begins with the peak of the one that started it
    found, head = timed(sizes, pairs, width, classes, rounds)
    figures = compared(found)
    held, needed = heads_over_a_trunk(20 if args.quick else 200)
    figures |= {
        "one head, MB": head / 1e6,
        "heads over a frozen trunk: held / (trunk once + heads), bytes": held / needed,
        "DivDis, MB beyond the process": memory["net"],
        "the process before, MB": memory["before"],
    }
    limits = {
        f"SED, {sizes[-1]} heads / SED, {sizes[0]} heads": ("at most", 1.2),
        "heads over a frozen trunk: held / (trunk once + heads), bytes": ("at most", 1.01),
        "DivDis, MB beyond the process": ("at most", 300.0),
    }
    if not args.json:
        listed(figures)
    close(figures, limits, args.quick, torch=torch.__version__)


if __name__ == "__main__":
    if sys.argv[1:2] == ["inner"]:
        settle_once(*map(int, sys.argv[2:]))
    else:
        main()
