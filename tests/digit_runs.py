"""The recipe of small runs on scikit-learn's digits, for tests that need a trained run and not a particular one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plateaux

SMALL_RESNET = {"name": "resnet8", "width": 4}
SMALL_MLP = {"name": "mlp", "hidden_sizes": [16]}


def digits_recipe(*, members: int = 2, epochs: int = 2, model: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a recipe with 300 validation samples."""
    return {
        "members": members,
        "data": {"name": "digits", "batch_size": 64, "validation_split": 300},
        "model": model or SMALL_RESNET,
        "optimizer": {"name": "SGD", "lr": 0.1, "momentum": 0.9},
        "lr_scheduler": [],
        "train": {"epochs": epochs},
        "executor": {"threads": 1},
    }


def train_digits(out: Path, **settings: Any) -> Path:
    """Train a run with `digits_recipe`, and return its folder."""
    plateaux.train(plateaux.Recipe.from_dict(digits_recipe(**settings)), out)
    return out
