"""Cost of the engine: images a second of `train` against a bare hand-written PyTorch loop.

Both sides have the same network, batches, precision and optimiser, and take turns epoch by epoch in one process; six
processes do so one after the other, and every second one builds the bare side first. The engine's side is the real
course of a job: keyed randomness, logs, news, stop signs. Checkpoints fall outside.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
import torch.nn.functional as F
from _common import close, flags, interleaved, ratio
from torch import nn

import plateaux
from plateaux.build import NOTHING_GIVEN, executor_of, network
from plateaux.course import Course
from plateaux.learning import feed_of, split_of
from plateaux.machine import FORMATS, autocast, settle_in
from plateaux.plan import Job
from plateaux.pool import Sign
from plateaux.run import Run, facts_of
from plateaux.samples import Data, Resident

CPU = torch.device("cpu")
NETS = {"resnet18": ("resnet18", {"width": 64}, 2), "resnet8": ("resnet8", {"width": 16}, 30)}
LEAST = {"resnet18": 0.97, "resnet8": 0.95}


def images(steps: int) -> Data:
    """Return made-up images of CIFAR's shape, `steps` batches of 128."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (128 * steps, 3, 32, 32), dtype=torch.uint8, generator=generator)
    y = torch.randint(0, 10, (128 * steps,), generator=generator)
    both = Resident(x, y)
    return Data("noise", both, both, 10, (3, 32, 32), (0.5,) * 3, (0.25,) * 3)


def recipe_for(net: str, method: str) -> plateaux.Recipe:
    name, options, _ = NETS[net]
    return plateaux.Recipe.from_dict(
        {
            "members": 1,
            "data": {"name": "noise", "batch": 128, "crop": 4, "flip": True},
            "model": {"name": name, **options},
            "method": {"name": method, **({"rho": 0.05} if method == "sam" else {})},
            "optimizer": {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4},
            "train": {"epochs": 10_000, "precision": "bf16", "memory_format": "channels_last"},
            "run": {"checkpoint_epochs": 10_000},
        }
    )


def engine(recipe: plateaux.Recipe, data: Data, stack: ExitStack) -> Callable[[int], None]:
    """Return one epoch of the engine's own course."""
    root = stack.enter_context(tempfile.TemporaryDirectory())
    run = Run.begin(root, recipe, {"data": facts_of(data)})
    job = Job((0,), (0, 0), recipe.train.epochs)
    course = Course(run, data, job, [0], executor_of(recipe), CPU, NOTHING_GIVEN, lambda _: None)
    way = course.way(stack)
    return lambda epoch: course.one_epoch(epoch, 0, way, Sign())


def bare(recipe: plateaux.Recipe, data: Data) -> Callable[[int], None]:
    """Return one epoch of a plain loop, as one would write it by hand."""
    model = network(recipe, data, 0).to(memory_format=FORMATS[recipe.train.memory_format]).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    feed = feed_of(recipe, data, 0, shared=False, device=CPU, ids=split_of(recipe, data)[0])
    climbing = recipe.method.name == "sam"

    def backward(x: torch.Tensor, y: torch.Tensor) -> None:
        with autocast(recipe.train.precision, CPU):
            loss = F.cross_entropy(model(x), y)
        loss.backward()

    def epoch(number: int) -> None:
        for batch in feed.epoch(number):
            backward(batch.x, batch.y)
            if climbing:
                home = climb(model, 0.05)
                optimizer.zero_grad()
                moving_statistics(model, 0.0)
                backward(batch.x, batch.y)
                moving_statistics(model, 0.1)
                with torch.no_grad():
                    for parameter, value in zip(model.parameters(), home, strict=True):
                        parameter.copy_(value)
            optimizer.step()
            optimizer.zero_grad()

    return epoch


@torch.no_grad()
def climb(model: nn.Module, rho: float) -> list[torch.Tensor]:
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    home = [p.clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.add_(parameter.grad * (rho / (norm + 1e-12)))
    return home


def moving_statistics(model: nn.Module, momentum: float) -> None:
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = momentum


def timed(net: str, steps: int, rounds: int, bare_first: bool) -> None:
    """Time all sides in this process and print the seconds of every round: the inner half of `main`."""
    settle_in()
    data = images(steps)
    with ExitStack() as stack:
        sides: dict[str, Callable[[int], None]] = {}
        for method, word in (("deep_ensemble", "sgd"), ("sam", "sam")):
            recipe = recipe_for(net, method)
            builders = {"engine": partial(engine, recipe, data, stack), "bare": partial(bare, recipe, data)}
            for name in sorted(builders, reverse=not bare_first):
                sides[f"{word} {name}"] = builders[name]()
        for side in sides.values():
            side(9_999)  # warm-up
        print(json.dumps(interleaved(sides, rounds)))


def main() -> None:
    args = flags(__doc__ or "")
    figures: dict[str, float] = {}
    limits: dict[str, tuple[str, float]] = {}
    processes, rounds = (1, 2) if args.quick else (6, 4)
    for net, (_, _, usual) in NETS.items():
        steps = 1 if args.quick else usual
        found: dict[str, list[float]] = {}
        for number in range(processes):  # where tensors happen to lie favours one side for the life of a process
            call = [sys.executable, __file__, "inner", net, str(steps), str(rounds), str(number % 2)]
            for side, times in json.loads(subprocess.check_output(call, text=True).splitlines()[-1]).items():
                found.setdefault(side, []).extend(times)
        for word in ("sgd", "sam"):
            name = f"{net} {word}: engine / bare, images per second"
            figures[name] = ratio(found[f"{word} bare"], found[f"{word} engine"])
            limits[name] = ("at least", LEAST[net])
        figures[f"{net}: sam / sgd, time of a step"] = ratio(found["sam engine"], found["sgd engine"])
        limits[f"{net}: sam / sgd, time of a step"] = ("at most", 2.05)
        if not args.json:
            for side, times in found.items():
                print(f"{net:9} {side:11} {128 * steps / statistics.median(times):8.0f} images/s")
    close(figures, limits, args.quick)


if __name__ == "__main__":
    if sys.argv[1:2] == ["inner"]:
        timed(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "1")
    else:
        main()
