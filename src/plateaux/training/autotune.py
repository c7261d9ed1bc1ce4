"""Choices left to the machine: which precision and memory format train fastest here without losing the loss.

Made once before the first step, written into the run, and never made again: a resume elsewhere must not choose
differently.
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
TOLERANCE = 0.02  # how far the loss over those steps may lie from fp32's


def autotune(recipe: Recipe, components: Components, progress: Progress, *, steps: int = STEPS) -> dict[str, Any]:
    """Return the precision and memory format to train in, and what each candidate did; nothing if none is left open."""
    open_to = ["fp32"] if recipe.executor.mode == "vmap" else ["fp32", "bf16"]  # vmap does not run under autocast
    precisions = open_to if recipe.train.precision == "auto" else [recipe.train.precision]
    formats = ["contiguous", "channels_last"] if recipe.train.memory_format == "auto" else [recipe.train.memory_format]
    if "auto" not in (recipe.train.precision, recipe.train.memory_format):
        return {}
    if len(precisions) * len(formats) == 1:
        return {"precision": precisions[0], "memory_format": formats[0], "tried": []}
    configure_runtime(threads=recipe.executor.threads)
    tried = []
    for precision, memory_format in product(precisions, formats):
        candidate = recipe.replaced(train={"precision": precision, "memory_format": memory_format, "compile": False})
        loss, rate = _try(candidate, components, steps)
        tried.append({"precision": precision, "memory_format": memory_format, "loss": loss, "images_per_second": rate})
        progress(Message(f"tried {precision}, {memory_format}: {rate:,.0f} images/s, loss {loss:.4f}"))
    best = fastest(tried)
    progress(Message(f"autotuned for this run: {best['precision']} and {best['memory_format']}"))
    return {"precision": best["precision"], "memory_format": best["memory_format"], "tried": tried}


def fastest(tried: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fastest candidate whose loss lies within the tolerance of the first one's."""
    honest = tried[0]["loss"]
    sound = [each for each in tried[1:] if abs(each["loss"] - honest) <= TOLERANCE * abs(honest)]
    return max([tried[0], *sound], key=lambda each: float(each["images_per_second"]))


def throughput(recipe: Recipe, components: Components, *, steps: int = 6) -> float:
    """Return how many images a second one member trains, from a few steps that are forgotten."""
    return _try(recipe, components, steps)[1]


def _try(recipe: Recipe, components: Components, steps: int) -> tuple[float, float]:
    """Return the mean loss over some steps of the first member, and images a second over the later half of them."""
    device = get_device(recipe.executor.devices[0] if recipe.executor.devices else None)
    data = on_device(build_training_data(recipe, components), device)
    alone = recipe.replaced(executor={"name": "local", "mode": "loop", "processes": 1})
    ids, _ = train_val_split(alone, data)
    feed = build_loader(alone, data, 0, shared=False, device=device, ids=ids)
    executor = build_executor(alone, components)
    learners = build_train_states(alone, data, [0], executor, device=device, steps=feed.steps(), components=components)
    way = StepOptions(alone.train.precision, device, shared_lr_schedulers=shared_lr_schedulers(learners))
    losses: list[torch.Tensor] = []
    epoch, half, seen, clock = 0, steps // 2, 0, time.perf_counter()
    while len(losses) < steps:
        for batch in feed.epoch(epoch):
            losses.append(step(executor, learners, [batch], way)[0].loss)
            if len(losses) == half:
                seen, clock = 0, time.perf_counter()
            seen += len(batch)
            if len(losses) == steps:
                break
        epoch += 1
    rate = seen / (time.perf_counter() - clock)
    return float(torch.stack(losses).mean()), rate
