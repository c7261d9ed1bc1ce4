"""Autotune: find the precision and memory format that train fastest on this machine without changing the loss.

This happens once, before the first step, and is stored in the run: a resume on another machine must use the same.
"""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import torch

from plateaux.config.builders.data import build_loader, build_training_data, on_device, train_val_split
from plateaux.config.builders.training import build_executor
from plateaux.config.components import Components
from plateaux.config.recipe import Recipe
from plateaux.core.progress import Message, Progress
from plateaux.core.runtime import configure_runtime, get_device
from plateaux.training.setup import build_train_states, shared_lr_schedulers
from plateaux.training.state import StepOptions
from plateaux.training.step import step

STEPS = 50
LOSS_TOLERANCE = 0.02  # relative difference to the loss of the first candidate (fp32)


def autotune(recipe: Recipe, components: Components, progress: Progress, *, steps: int = STEPS) -> dict[str, Any]:
    """Return the fastest precision and memory format, and the results of all candidates; {} if none is "auto"."""
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
        candidate = recipe.replaced(train={"precision": precision, "memory_format": memory_format, "compile": False})
        loss, rate = _measure(candidate, components, steps)
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


def throughput(recipe: Recipe, components: Components, *, steps: int = 6) -> float:
    """Return the training speed of one member in images per second, measured over a few steps."""
    return _measure(recipe, components, steps)[1]


def _measure(recipe: Recipe, components: Components, steps: int) -> tuple[float, float]:
    """Return the mean loss of the first member over some steps, and images per second over the second half."""
    device = get_device(recipe.executor.devices[0] if recipe.executor.devices else None)
    data = on_device(build_training_data(recipe, components), device)
    recipe = recipe.replaced(executor={"name": "local", "mode": "loop", "processes": 1})
    ids, _ = train_val_split(recipe, data)
    loader = build_loader(recipe, data, 0, shared=False, device=device, ids=ids)
    executor = build_executor(recipe, components)
    states = build_train_states(recipe, data, [0], executor, device=device, steps=loader.steps(), components=components)
    options = StepOptions(recipe.train.precision, device, shared_lr_schedulers=shared_lr_schedulers(states))
    losses: list[torch.Tensor] = []
    epoch, half, samples, start_time = 0, steps // 2, 0, time.perf_counter()
    while len(losses) < steps:
        for batch in loader.epoch(epoch):
            losses.append(step(executor, states, [batch], options)[0].loss)
            if len(losses) == half:
                samples, start_time = 0, time.perf_counter()
            samples += len(batch)
            if len(losses) == steps:
                break
        epoch += 1
    rate = samples / (time.perf_counter() - start_time)
    return float(torch.stack(losses).mean()), rate
