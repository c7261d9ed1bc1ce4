"""Cost and savings of cached features: reading, backbone passes, disk space, and restarts.

    python benchmarks/features.py          # 10,000 made-up images, 768 features
    python benchmarks/features.py --quick  # 600 of them

A step is one of an MLP head with 512 units and 100 classes on a batch of 128, SGD; reading is all that comes before it:
order, shards, labels. A second run is another seed over the same images; passes are counted, not timed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from _common import close, flags, images, interleaved, listed, ratio, seconds

import plateaux
from plateaux.config.builders.data import build_data, build_loader
from plateaux.config.builders.model import build_backbone
from plateaux.core.runtime import configure_runtime
from plateaux.distributed.executors.local import SINGLE_PROCESS
from plateaux.models.backbone import Backbone
from plateaux.models.surgery import size_in_bytes
from plateaux.storage.feature_cache import FeatureSource, prepare_features, training_sources, with_cached_features
from plateaux.training.setup import build_train_states
from plateaux.training.state import StepOptions
from plateaux.training.step import step

CPU = torch.device("cpu")


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
def counted() -> Iterator[list[int]]:
    """Lend a list that grows by the number of images whenever a trunk is run."""
    seen: list[int] = []
    before = Backbone.forward

    def forward(self: Backbone, x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return before(self, x)

    Backbone.forward = forward  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Backbone.forward = before  # type: ignore[method-assign]


def reading(recipe: plateaux.Recipe, rounds: int) -> dict[str, float]:
    """Return what reading a batch takes, as a share of a head's step and in milliseconds."""
    data = with_cached_features(recipe, build_data(recipe))
    assert isinstance(data.train, FeatureSource)
    ids = torch.arange(len(data.train))
    feed = build_loader(recipe, data, 0, shared=False, device=CPU, ids=ids)
    (learner,) = build_train_states(recipe, data, [0], SINGLE_PROCESS, device=CPU, steps=feed.steps())
    batches = list(feed.epoch(0))

    def read(number: int) -> None:
        for _ in feed.epoch(number):
            pass

    def train(_: int) -> None:
        for batch in batches:
            step(SINGLE_PROCESS, [learner], [batch], StepOptions())

    found = interleaved({"read": read, "train": train}, rounds)
    share = {"reading / a step of an MLP head": ratio(found["read"], found["train"])}
    return share | {f"{name}, ms a batch": 1e3 * min(times) / len(batches) for name, times in found.items()}


def main() -> None:
    args = flags(__doc__ or "")
    configure_runtime(threads=1)
    count, width, rounds = (600, 96, 3) if args.quick else (10_000, 768, 7)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = recipe_for(folder, images(folder, count), width)
        with counted() as first:
            whole = with_cached_features(recipe, build_data(recipe))
            building = seconds(lambda: prepare_features(training_sources(recipe, whole), SINGLE_PROCESS))
            plateaux.train(recipe, folder / "one")
        # The trunk starts from the seed where it has no file of weights: the second run differs in its heads only.
        with counted() as second:
            plateaux.train(recipe.replaced(optimizer={"lr": 0.02}), folder / "two")
        trunk = size_in_bytes([build_backbone(recipe, build_data(recipe))])
        kept = sum(file.stat().st_size for file in (folder / "features").rglob("*.safetensors"))
        figures = {
            **reading(recipe, rounds),
            "images through the trunk, first run / images": sum(first) / count,
            "images through the trunk, second run": float(sum(second)),
            "building, ms an image": 1e3 * building / count,
            "bytes kept / (4 bytes x features)": kept / (4 * width * count),
            "the trunk, MB": trunk / 1e6,
        }
    limits = {
        "reading / a step of an MLP head": ("at most", 0.1),
        "images through the trunk, first run / images": ("at most", 1.0),
        "images through the trunk, second run": ("at most", 0.0),
    }
    if not args.json:
        listed(figures)
    close(figures, limits, args.quick, torch=torch.__version__)


if __name__ == "__main__":
    main()
