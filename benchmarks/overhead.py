"""Overhead of the trainer: images per second of `train` compared with a plain PyTorch loop.

All sides, engine and bare, SGD and SAM, train one and the same network by the same batches and take turns epoch by
epoch: of two networks one would be faster for where its weights happen to lie, and a machine's speed drifts within
minutes. The figures are medians of the rounds' ratios; a second bare loop shows how much chance is left in them. The
engine's side is the real course of a job: keyed randomness, logs, news, stop signs. Checkpoints fall outside.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack

import torch
import torch.nn.functional as F
from _common import close, flags, interleaved, precision_here, ratio
from torch import nn

import plateaux
from plateaux.config.builders.data import build_loader, train_val_split
from plateaux.config.builders.training import build_executor, build_method
from plateaux.config.components import NO_COMPONENTS
from plateaux.core.runtime import autocast, configure_runtime
from plateaux.data.sources import DataSplits, InMemorySource
from plateaux.distributed.stop_signal import StopFlag
from plateaux.storage.run import Run
from plateaux.storage.run_info import DataInfo, RunInfo
from plateaux.training.jobs import Job
from plateaux.training.trainer import Trainer

CPU = torch.device("cpu")
Epoch = Callable[[int], None]
NETS = {"resnet18": ("resnet18", {"width": 64}, 2), "resnet8": ("resnet8", {"width": 16}, 12)}
LEAST = {"resnet18": 0.97, "resnet8": 0.95}


def images(steps: int) -> DataSplits:
    """Return made-up images of CIFAR's shape, `steps` batches of 128."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (128 * steps, 3, 32, 32), dtype=torch.uint8, generator=generator)
    y = torch.randint(0, 10, (128 * steps,), generator=generator)
    both = InMemorySource(x, y)
    return DataSplits("noise", both, both, 10, (3, 32, 32), (0.5,) * 3, (0.25,) * 3)


def recipe_for(net: str, method: str) -> plateaux.Recipe:
    name, options, _ = NETS[net]
    return plateaux.Recipe.from_dict(
        {
            "members": 1,
            "data": {"name": "noise", "batch_size": 128, "crop": 4, "flip": True},
            "model": {"name": name, **options},
            "method": {"name": method, **({"rho": 0.05} if method == "sam" else {})},
            "optimizer": {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4},
            "train": {"epochs": 10_000, "precision": precision_here(), "memory_format": "channels_last"},
            "run": {"checkpoint_every_epochs": 10_000},
        }
    )


def engine(recipe: plateaux.Recipe, data: DataSplits, stack: ExitStack) -> tuple[nn.Module, Callable[[str], Epoch]]:
    """Return a network, and a function from a method to one epoch of the engine's own course with it."""
    root = stack.enter_context(tempfile.TemporaryDirectory())
    run = Run.begin(root, recipe, RunInfo(DataInfo.from_splits(data)))
    job = Job((0,), (0, 0), recipe.train.epochs)
    course = Trainer(run, data, job, [0], build_executor(recipe), CPU, NO_COMPONENTS, lambda _: None)
    way, learner = course.step_options(stack), course.members[0].state

    def by(method: str) -> Epoch:
        own = build_method(recipe_for(recipe.model.name, method))

        def epoch(number: int) -> None:
            learner.method = own
            course.train_epoch(number, 0, way, StopFlag())

        return epoch

    return learner.module, by


def bare(recipe: plateaux.Recipe, data: DataSplits, model: nn.Module, method: str) -> Epoch:
    """Return one epoch of a plain loop over a network, as one would write it by hand."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    feed = build_loader(recipe, data, 0, shared=False, device=CPU, ids=train_val_split(recipe, data)[0])
    climbing = method == "sam"

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


def compared(net: str, steps: int, builds: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of epochs of every side, round by round."""
    recipe, data = recipe_for(net, "deep_ensemble"), images(steps)
    found: dict[str, list[float]] = {}
    for _ in range(builds):
        with ExitStack() as stack:
            model, by = engine(recipe, data, stack)
            sides: dict[str, Epoch] = {"sgd bare, again": bare(recipe, data, model, "deep_ensemble")}
            for word, method in (("sgd", "deep_ensemble"), ("sam", "sam")):
                sides[f"{word} engine"] = by(method)
                sides[f"{word} bare"] = bare(recipe, data, model, method)
            for side in sides.values():
                side(9_999)  # warm-up
            for side, times in interleaved(sides, rounds).items():
                found.setdefault(side, []).extend(times)
    return found


def main() -> None:
    args = flags(__doc__ or "")
    figures: dict[str, float] = {}
    limits: dict[str, tuple[str, float]] = {}
    configure_runtime()
    builds, rounds = (1, 2) if args.quick else (2, 10)
    if args.quick:
        NETS["resnet18"] = ("resnet18", {"width": 8}, 1)
    for net, (_, _, usual) in NETS.items():
        steps = 1 if args.quick else usual
        found = compared(net, steps, builds, rounds)
        for word in ("sgd", "sam"):
            name = f"{net} {word}: engine / bare, images per second"
            figures[name] = ratio(found[f"{word} bare"], found[f"{word} engine"])
            limits[name] = ("at least", LEAST[net])
        figures[f"{net} sgd: bare / bare, the control"] = ratio(found["sgd bare"], found["sgd bare, again"])
        figures[f"{net}: sam / sgd, time of a step"] = ratio(found["sam engine"], found["sgd engine"])
        limits[f"{net}: sam / sgd, time of a step"] = ("at most", 2.05)
        if not args.json:
            for side, times in found.items():
                print(f"{net:9} {side:16} {128 * steps / statistics.median(times):8.0f} images/s")
    close(figures, limits, args.quick, precision=precision_here())


if __name__ == "__main__":
    main()
