"""Overhead of the trainer: images per second of `train` compared with a plain PyTorch loop.

All sides, engine and bare loop, SGD and SAM, train the same network with the same batches and alternate epoch by epoch,
because the memory location of the weights affects the speed of a network and the speed of the machine drifts. The
figures are medians of the ratios per round; a second bare loop is the control. The engine's side is the trainer's own
epoch: derived seeds, logs, progress events, stop signals. Checkpoints are not included.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack

import torch
import torch.nn.functional as F
from _common import (
    Results,
    at_least,
    at_most,
    budget,
    flag_parser,
    interleaved,
    native_precision,
    ratio,
    selected,
)
from torch import nn

import plateaux
from plateaux.config.builders.data import build_loader, train_val_split
from plateaux.config.builders.training import build_executor, build_method
from plateaux.config.experiment import Experiment
from plateaux.core.runtime import autocast, configure_runtime
from plateaux.data.sources import DataSplits, InMemorySource
from plateaux.distributed.stop_signal import StopFlag
from plateaux.storage.member_writer import write_member
from plateaux.storage.run import Run
from plateaux.storage.run_info import DataInfo, RunInfo
from plateaux.training.jobs import Job
from plateaux.training.loop.trainer import Trainer

DEVICE = torch.device("cpu")
Epoch = Callable[[int], None]
NETS = {"resnet18": ("resnet18", {"width": 64}, 2), "resnet8": ("resnet8", {"width": 16}, 12)}
LIMITS = {"resnet18": at_least(0.97), "resnet8": at_least(0.95)}
AGAIN = "sgd bare, again"


def random_images(steps: int) -> DataSplits:
    """Return random images of CIFAR's shape, `steps` batches of 128."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (128 * steps, 3, 32, 32), dtype=torch.uint8, generator=generator)
    y = torch.randint(0, 10, (128 * steps,), generator=generator)
    source = InMemorySource(x, y)
    return DataSplits("noise", source, source, 10, (3, 32, 32), (0.5,) * 3, (0.25,) * 3)


def precision() -> str:
    """Return the faster precision of the device."""
    if DEVICE.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    return native_precision()


def finished(epoch: Epoch) -> Epoch:
    """Return an epoch that waits until the device has computed it."""

    def run(number: int) -> None:
        epoch(number)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize(DEVICE)

    return run


def recipe_for(net: str, method: str) -> plateaux.Recipe:
    name, options, _ = NETS[net]
    return plateaux.Recipe.from_dict(
        {
            "members": 1,
            "data": {"name": "noise", "batch_size": 128, "crop": 4, "flip": True},
            "model": {"name": name, **options},
            "method": {"name": method, **({"rho": 0.05} if method == "sam" else {})},
            "optimizer": {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4},
            "lr_scheduler": [],
            "train": {"epochs": 10_000, "precision": precision(), "memory_format": "channels_last"},
            "run": {"checkpoint_every_epochs": 10_000},
        }
    )


def engine(recipe: plateaux.Recipe, data: DataSplits, stack: ExitStack) -> tuple[nn.Module, Callable[[str], Epoch]]:
    """Return a network, and a function from a method to one epoch of the trainer with it."""
    root = stack.enter_context(tempfile.TemporaryDirectory())
    run = Run.begin(root, Experiment(recipe), RunInfo(DataInfo.from_splits(data)))
    job = Job((0,), (0, 0), recipe.train.epochs)
    writers = {0: stack.enter_context(write_member(run, 0))}
    trainer = Trainer(run, data, job, [0], writers, build_executor(recipe), DEVICE, lambda _: None)
    options, state = trainer.step_options(stack), trainer.members[0].state

    def by_method(name: str) -> Epoch:
        method = build_method(recipe_for(recipe.model.name, name))

        def epoch(number: int) -> None:
            state.method = method
            trainer.train_epoch(number, 0, options, StopFlag())

        return epoch

    return state.module, by_method


def bare(recipe: plateaux.Recipe, data: DataSplits, model: nn.Module, method: str) -> Epoch:
    """Return one epoch of a plain loop, as a user would write it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    loader = build_loader(recipe, data, 0, shared=False, device=DEVICE, ids=train_val_split(recipe, data)[0])
    is_sam = method == "sam"

    def backward(x: torch.Tensor, y: torch.Tensor) -> None:
        with autocast(recipe.train.precision, DEVICE):
            loss = F.cross_entropy(model(x), y)
        loss.backward()

    def epoch(number: int) -> None:
        for batch in loader.epoch(number):
            backward(batch.x, batch.y)
            if is_sam:
                weights = perturb(model, 0.05)
                optimizer.zero_grad()
                set_batchnorm_momentum(model, 0.0)
                backward(batch.x, batch.y)
                set_batchnorm_momentum(model, 0.1)
                with torch.no_grad():
                    for parameter, value in zip(model.parameters(), weights, strict=True):
                        parameter.copy_(value)
            optimizer.step()
            optimizer.zero_grad()

    return epoch


@torch.no_grad()
def perturb(model: nn.Module, rho: float) -> list[torch.Tensor]:
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    weights = [p.clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.add_(parameter.grad * (rho / (norm + 1e-12)))
    return weights


def set_batchnorm_momentum(model: nn.Module, momentum: float) -> None:
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = momentum


def measure(results: Results, net: str, steps: int, builds: int, rounds: int) -> None:
    """Measure epochs of every side on one network, built several times."""
    recipe, data = recipe_for(net, "deep_ensemble"), random_images(steps)
    found: dict[str, list[float]] = {}
    for _ in range(builds):
        within = budget(results.quick, 1 / builds)
        with ExitStack() as stack:
            model, by_method = engine(recipe, data, stack)
            sides: dict[str, Epoch] = {AGAIN: bare(recipe, data, model, "deep_ensemble")}
            for word, method in (("sgd", "deep_ensemble"), ("sam", "sam")):
                sides[f"{word} engine"] = by_method(method)
                sides[f"{word} bare"] = bare(recipe, data, model, method)
            for side in sides.values():
                side(9_999)  # warm-up
            sides = {name: finished(side) for name, side in sides.items()}
            interleaved(sides, rounds, control=("sgd bare", AGAIN), within=within, into=found)
    control = f"{net} sgd: bare / bare, the control"
    results.add(control, ratio(found["sgd bare"], found[AGAIN]), is_control=True)
    for word in ("sgd", "sam"):
        speed = ratio(found[f"{word} bare"], found[f"{word} engine"])
        name = f"{net} {word}: engine / bare, images per second"
        results.add(name, speed, full=LIMITS[net], quick=at_least(0.5), control=control)
    cost = ratio(found["sam engine"], found["sgd engine"])
    results.add(f"{net}: sam / sgd, time of a step", cost, full=at_most(2.05), quick=at_most(4.0), control=control)
    if not results.quiet:
        for side, times in found.items():
            print(f"{net:9} {side:16} {128 * steps / statistics.median(times):8.0f} images/s, {len(times)} rounds")


def main() -> None:
    global DEVICE
    parser = flag_parser(__doc__ or "", tuple(NETS))
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    args = selected(parser.parse_args())
    DEVICE = torch.device(args.device)
    results = Results(args.quick, args.json)
    configure_runtime()
    builds, rounds = (1, 4) if args.quick else (2, 10)
    if args.quick:
        NETS["resnet18"] = ("resnet18", {"width": 8}, 1)
    for net in args.parts:
        _, _, usual = NETS[net]
        measure(results, net, 1 if args.quick else usual, builds, rounds)
    results.finish(parts=args.parts, device=args.device, precision=precision())


if __name__ == "__main__":
    main()
