"""A BERT and a ViT of transformers are built from a folder, fine-tuned, evaluated, and exported.

`PLATEAUX_LONG=1` uses the sizes of bert-base and vit-base instead of tiny ones.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_folders import pictures, save_bert, save_pictures, save_texts, save_vit, sentences

import plateaux
from plateaux.deploy.agreement import TOLERANCE

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("onnxruntime")
IS_LONG = bool(os.environ.get("PLATEAUX_LONG"))
BERT_BASE = {
    "vocab_size": 30_522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "max_position_embeddings": 512,
}  # fmt: skip
VIT_BASE = {
    "image_size": 224, "patch_size": 16, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072,
}  # fmt: skip
LR = 1e-5 if IS_LONG else 0.003


def fine_tune(tmp_path: Path, model: dict[str, Any], data: dict[str, Any], *, members: int = 2) -> plateaux.Run:
    recipe = plateaux.Recipe.from_dict(
        {
            "members": members, "model": model, "data": {"batch_size": 12, **data},
            "optimizer": {"name": "AdamW", "lr": LR}, "train": {"epochs": 1 if IS_LONG else 3},
            "executor": {"threads": 1},
        }
    )  # fmt: skip
    return plateaux.train(recipe, tmp_path / "run")


def check_export(run: plateaux.Run, tmp_path: Path, inputs: list[Any]) -> None:
    """Check that members and exported graphs give the same answers for texts or images as a user has them."""
    predictor = plateaux.load_predictor(run, device="cpu")
    before = predictor(inputs)
    plateaux.export(run, tmp_path / "bundle")
    after = plateaux.load_predictor(tmp_path / "bundle")(inputs)
    assert np.abs(before.probabilities - after.probabilities).max() <= TOLERANCE
    assert before.label.tolist() == after.label.tolist()
    assert np.ptp(before.probabilities, axis=0).max() > 1e-3  # the answers depend on the inputs
    print(f"largest difference {np.abs(before.probabilities - after.probabilities).max():.2g}", end=", ")


def report(what: str, started: float, run: plateaux.Run) -> None:
    count = sum(tensor.numel() for tensor in run.weights(0).values())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{what}: {count:,} parameters, {time.monotonic() - started:.0f} s, peak {peak:.1f} GiB")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_bert_is_fine_tuned_evaluated_and_exported(tmp_path: Path) -> None:
    started = time.monotonic()
    save_bert(tmp_path / "bert", **(BERT_BASE if IS_LONG else {}))
    save_texts(tmp_path / "texts")
    data = {"name": f"hf:{tmp_path / 'texts'}", "length": 16}
    run = fine_tune(tmp_path, {"name": f"hf:{tmp_path / 'bert'}"}, data)
    accuracy, _ = plateaux.evaluate(run, metrics=["accuracy", "nll"])
    assert 0 <= accuracy.rows["member 0"].value <= 1
    check_export(run, tmp_path, sentences(6, seed=5)[0])
    report("bert", started, run)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_vision_transformer_is_fine_tuned_evaluated_and_exported(tmp_path: Path) -> None:
    started = time.monotonic()
    save_vit(tmp_path / "vit", **(VIT_BASE if IS_LONG else {}))
    save_pictures(tmp_path / "pictures")
    run = fine_tune(tmp_path, {"name": f"hf:{tmp_path / 'vit'}"}, {"name": f"hf:{tmp_path / 'pictures'}"})
    accuracy, _ = plateaux.evaluate(run, metrics=["accuracy", "nll"])
    assert 0 <= accuracy.rows["member 0"].value <= 1
    check_export(run, tmp_path, pictures(6, seed=5)[0])
    report("vit", started, run)
