"""Samples in a run folder from someone else are data: what does not fit is refused before it is used."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import plateaux
from plateaux.core.types import TensorTree
from plateaux.data.datasets.arrays import arrays
from plateaux.data.tensor_names import DATA_FILE
from plateaux.errors import PlateauxError
from plateaux.storage.local_store import LocalStore

METADATA = {"classes": "2", "labels": "[]"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    out = tmp_path_factory.mktemp("runs") / "run"
    plateaux.fit(rng.normal(size=(60, 3)), np.arange(60) % 2, model="mlp", members=1, epochs=1, out=out)
    return out


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_the_samples_in_the_folder_are_used(run: Path) -> None:
    assert plateaux.evaluate(run, metrics="accuracy")[0].data["samples"] == 12
    assert resume(run) is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("x_test"),
        lambda tensors: tensors.pop("y_train"),
        lambda tensors: tensors.clear(),
        lambda tensors: tensors.update(x_test=torch.zeros(12, 4)),
        lambda tensors: tensors.update(x_test=torch.zeros(11, 3)),
        lambda tensors: tensors.update(y_test=torch.full((12,), 7)),
        lambda tensors: tensors.update(y_test=torch.full((12,), -1)),
        lambda tensors: tensors.update(y_test=1 - tensors["y_test"]),
        lambda tensors: tensors.update(x_test=tensors["x_test"] + 1),
    ],
)
def test_other_samples_in_the_folder_are_refused(change: Callable[[TensorTree], object], run: Path) -> None:
    store = LocalStore(run)
    tensors = store.get_tensors(DATA_FILE)
    change(tensors)
    store.put_tensors(DATA_FILE, tensors)
    for use in (plateaux.evaluate, resume):
        with pytest.raises(PlateauxError):
            use(run)


def test_mean_and_std_of_the_run_are_used(run: Path) -> None:
    """The recipe alone reads those in the file, which must have one dimension."""
    expected = plateaux.evaluate(run, metrics="nll", cache_logits="off")[0].to_dict()["rows"]
    store = LocalStore(run)
    store.put_tensors(DATA_FILE, {**store.get_tensors(DATA_FILE), "mean": torch.zeros(3, 3)}, METADATA)
    assert plateaux.evaluate(run, metrics="nll", cache_logits="off")[0].to_dict()["rows"] == expected
    with pytest.raises(PlateauxError, match="need one dimension"):
        arrays(path=DATA_FILE, root=str(run))


def test_a_link_is_not_followed(run: Path, tmp_path: Path) -> None:
    (run / DATA_FILE).rename(tmp_path / "elsewhere.safetensors")
    (run / DATA_FILE).symlink_to(tmp_path / "elsewhere.safetensors")
    for use in (plateaux.evaluate, resume):
        with pytest.raises(PlateauxError):
            use(run)


def resume(run: Path) -> object:
    return plateaux.train(plateaux.Run.open(run).recipe, run)
