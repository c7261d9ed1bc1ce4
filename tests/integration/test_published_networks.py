"""Published networks on real images have the metrics of their data sheet."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plateaux.config.recipe import Recipe
from plateaux.core.row_names import row_name
from plateaux.evaluation.evaluate import evaluate
from plateaux.evaluation.ood import detect_ood
from plateaux.storage.import_weights import import_weights

DATA = Path(os.environ.get("PLATEAUX_DATA", "data"))
WEIGHTS = DATA / "weights" / "resnet20_32_44_56_cifar10.safetensors"
SAMPLES = 600


@pytest.mark.skipif(not WEIGHTS.is_file(), reason="CIFAR-10 and the weights are not here: set PLATEAUX_DATA")
def test_two_published_resnets_have_their_published_accuracy_and_ood_scores(tmp_path: Path) -> None:
    recipe = Recipe.from_dict(
        {
            "members": 2,
            "data": {"name": "cifar10", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
            "model": {"name": ["resnet20", "resnet32"]},
            "train": {"memory_format": "channels_last"},
        }
    )
    import_weights(tmp_path, recipe, [f"{WEIGHTS}:resnet{depth}." for depth in (20, 32)])
    found = {each.metric: each.rows for each in evaluate(tmp_path, split=f"test@{SAMPLES}", metrics=["all"])}
    accuracy = found["accuracy"]["member 0"]
    assert accuracy.stderr is not None
    assert abs(accuracy.value - 0.9173) < 3 * accuracy.stderr
    assert 0 < found["disagreement"]["members 0 and 1"].value < 0.2
    (far,) = detect_ood(tmp_path, {"far": ["texture"]}, limit=SAMPLES)
    alarm = far.rows[row_name("member 0", "max_probability", "auroc")]
    assert alarm.stderr is not None
    assert abs(alarm.value - 0.871) < 3 * alarm.stderr
