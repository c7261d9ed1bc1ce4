"""Cost and savings of cached features: reading, backbone passes, disk space, and restarts.

A step is one SGD step of an MLP head with 512 units and 100 classes on a batch of 128. Reading is everything before it:
order, shards, labels; the step measured twice is the control. A second run trains other heads on the same 10,000 random
images with 768 features; backbone passes are counted, not timed. The quick form (600 images, 96 features) judges only
the counts: reading takes 0.1 ms there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from _common import Results, at_most, budget, interleaved, parse_flags, ratio, seconds, write_images

import plateaux
from plateaux.config.builders.data import build_data, build_loader
from plateaux.config.builders.model import build_backbone
from plateaux.config.experiment import Experiment
from plateaux.core.runtime import configure_runtime
from plateaux.distributed.executors.local import SINGLE_PROCESS
from plateaux.models.backbone import Backbone
from plateaux.models.surgery import size_in_bytes
from plateaux.storage.feature_cache import FeatureSource, prepare_features, training_sources, with_cached_features
from plateaux.training.loop.setup import build_train_states
from plateaux.training.loop.state import StepOptions
from plateaux.training.loop.step import step
from plateaux.training.model_check import check_model

CPU = torch.device("cpu")
CONTROL = "a step / a step of an MLP head"


def recipe_for(folder: Path, file: Path, width: int, **changes: Any) -> plateaux.Recipe:
    return plateaux.Recipe.from_dict(
        {
            "members": 2,
            "data": {"name": "arrays", "path": str(file), "batch_size": 128},
            "model": {
                "name": "cnn",
                "channels": [8, width],
                "backbone": "features",
                "head": "mlp",
                "cache_features": True,
            },
            "optimizer": {"lr": 0.05, "momentum": 0.9},
            "train": {"epochs": 1},
            "run": {"feature_cache": str(folder / "features")},
            **changes,
        }
    )


@contextmanager
def count_images() -> Iterator[list[int]]:
    """Yield a list to which every pass of the backbone appends its number of images."""
    counts: list[int] = []
    before = Backbone.forward

    def forward(self: Backbone, x: torch.Tensor) -> torch.Tensor:
        counts.append(len(x))
        return before(self, x)

    Backbone.forward = forward  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        Backbone.forward = before  # type: ignore[method-assign]


def measure_reading(results: Results, recipe: plateaux.Recipe, rounds: int) -> None:
    """Measure how long reading a batch takes, relative to a step of the head and in milliseconds."""
    data = with_cached_features(recipe, build_data(recipe))
    assert isinstance(data.train, FeatureSource)
    ids = torch.arange(len(data.train))
    loader = build_loader(recipe, data, 0, shared=False, device=CPU, ids=ids)
    (state,) = build_train_states(Experiment(recipe), data, [0], SINGLE_PROCESS, device=CPU, steps=loader.steps())
    batches = list(loader.epoch(0))

    def read(number: int) -> None:
        for _ in loader.epoch(number):
            pass

    def train(_: int) -> None:
        for batch in batches:
            step(SINGLE_PROCESS, [state], [batch], StepOptions())

    sides = {"read": read, "train": train, "train, again": train}
    pair = None if results.quick else ("train", "train, again")
    found = interleaved(sides, rounds, control=pair, within=budget(results.quick))
    results.add(CONTROL, ratio(found["train"], found["train, again"]), is_control=True)
    share = ratio(found["read"], found["train"])
    results.add("reading / a step of an MLP head", share, full=at_most(0.1), control=CONTROL)
    for name in ("read", "train"):
        results.add(f"{name}, ms a batch", 1e3 * min(found[name]) / len(batches))


def main() -> None:
    args = parse_flags(__doc__ or "")
    configure_runtime(threads=1)
    results = Results(args.quick, args.json)
    count, width, rounds = (600, 96, 3) if args.quick else (10_000, 768, 7)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = recipe_for(folder, write_images(folder, count), width)
        with count_images() as check:  # a run begins with a check of the network on a few images
            check_model(recipe, build_data(recipe))
        with count_images() as first:
            data = with_cached_features(recipe, build_data(recipe))
            building = seconds(lambda: prepare_features(training_sources(recipe, data), SINGLE_PROCESS))
            plateaux.train(recipe, folder / "one")
        # A backbone without a file of weights is initialized from the seed, so the second run changes only the heads.
        with count_images() as second:
            plateaux.train(recipe.replaced(optimizer={"lr": 0.02}), folder / "two")
        backbone = size_in_bytes([build_backbone(recipe, build_data(recipe))])
        stored = sum(file.stat().st_size for file in (folder / "features").rglob("*.safetensors"))
        measure_reading(results, recipe, rounds)
    checked = sum(check)
    passes = (sum(first) - checked) / count
    results.add("images through the backbone, first run / images", passes, full=at_most(1.0), quick=at_most(1.0))
    results.add("images through the backbone, second run", sum(second) - checked, full=at_most(0.0), quick=at_most(0.0))
    results.add("images through the backbone, check before a run", checked)
    results.add("building, ms an image", 1e3 * building / count)
    results.add("bytes stored / (4 bytes x features)", stored / (4 * width * count))
    results.add("the backbone, MB", backbone / 1e6)
    results.finish(torch=torch.__version__)


if __name__ == "__main__":
    main()
