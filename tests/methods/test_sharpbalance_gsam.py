"""The weight alpha of GSAM inside of SharpBalance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import plateaux
from plateaux.core.errors import RecipeError
from plateaux.training.train import train


def trained(out: Path, **method: Any) -> dict[str, torch.Tensor]:
    recipe = {
        "members": 2,
        "data": {"name": "digits", "batch_size": 256},
        "model": {"name": "mlp", "hidden_sizes": [8]},
        "method": {"name": "sharpbalance", "rho": 0.1, "partition_epoch": 1, **method},
        "train": {"epochs": 2},
    }
    return train(plateaux.Recipe.from_dict(recipe), out).weights(1)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_alpha_of_zero_is_sam_and_the_default_is_the_published_one(tmp_path: Path) -> None:
    sam = trained(tmp_path / "sam")
    none = trained(tmp_path / "none", sam_variant="gsam", alpha=0.0)
    default = trained(tmp_path / "default", sam_variant="gsam")
    same = trained(tmp_path / "same", sam_variant="gsam", alpha=0.4)
    more = trained(tmp_path / "more", sam_variant="gsam", alpha=0.8)
    assert distance(sam, none) < 1e-6
    assert distance(default, same) == 0
    assert distance(default, sam) > 1e-5
    assert distance(default, more) > 1e-5


def test_alpha_without_gsam_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"belongs to GSAM, but method\.sam_variant is 'sam'"):
        trained(tmp_path / "run", alpha=0.2)
