"""Autotune: find the precision and memory format that train fastest on this machine without changing the loss.

This happens once, before the first step, and is stored in the run: a resume on another machine must use the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count, product
from typing import Any

import torch

from plateaux.config.builders.data import build_loader, on_device, train_val_split
from plateaux.config.experiment import Experiment
from plateaux.core.progress import Message, Progress
from plateaux.core.runtime import configure_runtime, get_device
from plateaux.core.types import Batch
from plateaux.data.loader import MemberLoader
from plateaux.training.loop.setup import build_train_states, shared_lr_schedulers
from plateaux.training.loop.state import StepOptions
from plateaux.training.loop.step import step

STEPS = 50
LOSS_TOLERANCE = 0.02  # relative difference to the loss of the first candidate (fp32)


def autotune(experiment: Experiment, progress: Progress, *, steps: int = STEPS) -> dict[str, Any]:
    """Return the fastest precision and memory format, and the results of all candidates; {} if none is "auto"."""
    recipe = experiment.recipe
    if "auto" not in (recipe.train.precision, recipe.train.memory_format):
        return {}
    supported = ["fp32"] if recipe.executor.mode == "vmap" else ["fp32", "bf16"]  # vmap does not support autocast
    precisions = supported if recipe.train.precision == "auto" else [recipe.train.precision]
    formats = ["contiguous", "channels_last"] if recipe.train.memory_format == "auto" else [recipe.train.memory_format]
    if len(precisions) * len(formats) == 1:
        return {"precision": precisions[0], "memory_format": formats[0], "tried": []}
    configure_runtime(threads=recipe.executor.threads)
    tried = []
    for precision, memory_format in product(precisions, formats):
        candidate = {"precision": precision, "memory_format": memory_format, "compile": False}
        loss, rate = _measure(experiment.replaced(train=candidate), steps)
        tried.append({"precision": precision, "memory_format": memory_format, "loss": loss, "images_per_second": rate})
        progress(Message(f"tried {precision}, {memory_format}: {rate:,.0f} images/s, loss {loss:.4f}"))
    best = fastest(tried)
    progress(Message(f"autotuned for this run: {best['precision']} and {best['memory_format']}"))
    return {"precision": best["precision"], "memory_format": best["memory_format"], "tried": tried}


def fastest(tried: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fastest candidate whose loss is within the tolerance of the first candidate's."""
    reference = tried[0]["loss"]
    accurate = [result for result in tried[1:] if abs(result["loss"] - reference) <= LOSS_TOLERANCE * abs(reference)]
    return max([tried[0], *accurate], key=lambda result: float(result["images_per_second"]))


def _measure(experiment: Experiment, steps: int) -> tuple[float, float]:
    """Return the mean loss of the first member over some steps, and images per second over the second half."""
    devices = experiment.recipe.executor.devices
    device = get_device(devices[0] if devices else None)
    data = on_device(experiment.training_data, device)
    experiment = experiment.replaced(executor={"name": "local", "mode": "loop", "processes": 1})
    recipe = experiment.recipe
    ids, _ = train_val_split(recipe, data)
    loader = build_loader(recipe, data, 0, shared=False, device=device, ids=ids)
    executor = experiment.executor()
    states = build_train_states(experiment, data, [0], executor, device=device, steps=loader.steps())
    options = StepOptions(recipe.train.precision, device, shared_lr_schedulers=shared_lr_schedulers(states))
    losses: list[torch.Tensor] = []
    sizes: list[int] = []
    times = [time.perf_counter()]
    for batch in _batches(loader):
        losses.append(step(executor, states, [batch], options)[0].loss)
        sizes.append(len(batch))
        times.append(time.perf_counter())
        if len(losses) == steps:
            break
    first = len(losses) // 2  # the first half is not counted: it includes the start
    return float(torch.stack(losses).mean()), sum(sizes[first:]) / (times[-1] - times[first])


def _batches(loader: MemberLoader) -> Iterator[Batch]:
    """Yield the batches of one epoch after another."""
    for epoch in count():
        yield from loader.epoch(epoch)
