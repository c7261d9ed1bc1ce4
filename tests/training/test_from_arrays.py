"""`plateaux.from_arrays`: which samples are for training and which for the test, and from what they can be read."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import plateaux
from plateaux.core.errors import DataError
from plateaux.data.datasets.arrays import arrays
from plateaux.data.tensor_names import to_named_tensors
from plateaux.storage.local_store import LocalStore
from plateaux.training import from_arrays as module

X, Y = np.arange(40, dtype=float).reshape(20, 2), np.arange(20) % 2


class Numbers(Dataset[tuple[torch.Tensor, int]]):
    """Samples whose input is their number."""

    def __init__(self, count: int = 20) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(i)]), i % 2


class Stream(IterableDataset[int]):
    """Samples without ids."""

    def __iter__(self) -> Any:
        return iter(range(3))


def samples(source: Any) -> tuple[Any, Any]:
    return source.fetch(torch.arange(len(source)))


def test_every_sample_is_in_one_split_with_its_label() -> None:
    data = plateaux.from_arrays(X, Y)
    (x, y), (test_x, test_y) = samples(data.train), samples(data.test)
    assert (len(y), len(test_y), data.classes, data.shape) == (16, 4, 2, (2,))
    rows = torch.cat([x, test_x])
    assert sorted(rows[:, 0].tolist()) == X[:, 0].tolist()
    assert torch.equal(torch.cat([y, test_y]), (rows[:, 0] / 2).long() % 2)


def test_the_test_set_depends_on_its_seed_and_fraction_only() -> None:
    first, again = plateaux.from_arrays(X, Y), plateaux.from_arrays(X, Y)
    assert first.test.fingerprint() == again.test.fingerprint()
    assert first.test.fingerprint() != plateaux.from_arrays(X, Y, seed=1).test.fingerprint()
    assert len(plateaux.from_arrays(X, Y, test=0.5).test) == 10


def test_a_given_test_set_shares_the_class_names() -> None:
    data = plateaux.from_arrays(X, np.array(["b"] * 10 + ["c"] * 10), test=(X[:2] + 0.5, ["a", "c"]))
    assert data.labels == ("a", "b", "c")
    assert samples(data.train)[1].tolist() == [1] * 10 + [2] * 10
    assert samples(data.test)[1].tolist() == [0, 2]
    assert samples(data.test)[0].tolist() == (X[:2] + 0.5).tolist()


def test_only_training_samples_determine_mean_and_std() -> None:
    data = plateaux.from_arrays(X, Y)
    assert np.allclose(data.mean, samples(data.train)[0].mean(0))
    assert np.allclose(data.std, samples(data.train)[0].std(0, correction=0))
    assert plateaux.from_arrays(X, Y, standardize=False).mean == ()


def test_a_tensor_dataset_is_its_tensors() -> None:
    data = plateaux.from_arrays(TensorDataset(torch.tensor(X), torch.tensor(Y)))
    assert data.train.fingerprint() == plateaux.from_arrays(X, Y).train.fingerprint()
    assert data.keep_in_run


def test_a_torch_dataset_is_split_and_not_stored() -> None:
    data = plateaux.from_arrays(Numbers(), classes=2)
    seen = torch.cat([samples(data.train)[0], samples(data.test)[0]])
    assert sorted(seen.flatten().tolist()) == list(range(20))
    assert (len(data.test), data.shape, data.mean, data.keep_in_run) == (4, (1,), (), False)
    assert len(plateaux.from_arrays(Numbers(), classes=2, test=Numbers(7)).test) == 7


def test_named_inputs_are_split_together() -> None:
    x = {"input_ids": np.arange(40).reshape(20, 2), "attention_mask": np.ones((20, 2), dtype=int)}
    data = plateaux.from_arrays(x, Y)
    assert isinstance(samples(data.test)[0], dict)
    assert (samples(data.test)[0]["input_ids"][:, 0] // 2 % 2).tolist() == samples(data.test)[1].tolist()
    assert data.mean == ()


@pytest.mark.parametrize("named", [False, True])
def test_stored_data_are_read_as_they_were(named: bool, tmp_path: Path) -> None:
    x: Any = {"a": np.arange(40).reshape(20, 2), "b": np.ones((20, 3))} if named else X
    data = plateaux.from_arrays(x, np.array(["no", "yes"])[Y])
    tensors, metadata = to_named_tensors(data)
    LocalStore(tmp_path).put_tensors("data.safetensors", tensors, metadata)
    read = arrays(path="data.safetensors", root=str(tmp_path))
    for name in ("classes", "shape", "mean", "std", "labels"):
        assert getattr(read, name) == getattr(data, name)
    for split in ("train", "test"):
        assert getattr(read, split).fingerprint() == getattr(data, split).fingerprint()
    if not named:
        limited = arrays(path="data.safetensors", root=str(tmp_path), limit=3, test_limit=2, mean=[0, 0], std=[1, 1])
        assert (len(limited.train), len(limited.test), limited.mean) == (3, 2, (0.0, 0.0))


def test_a_missing_or_damaged_file_of_tensors_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"was not found: .*Correct the path, or set data\.root") as problem:
        arrays(path="data.safetensors", root=str(tmp_path))
    assert "ownload" not in str(problem.value)
    (tmp_path / "data.safetensors").write_bytes(b"no")
    with pytest.raises(DataError, match="not a complete safetensors file"):
        arrays(path="data.safetensors", root=str(tmp_path))
    LocalStore(tmp_path).put_tensors("data.safetensors", {"x_train": torch.zeros(2, 2)})
    with pytest.raises(DataError, match="do not contain 'y_train'"):
        arrays(path="data.safetensors", root=str(tmp_path))


def test_large_arrays_are_not_stored(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "MAX_STORED_BYTES", 100)
    with caplog.at_level(logging.WARNING):
        assert not plateaux.from_arrays(X, Y).keep_in_run
    assert "does not keep a copy" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"x": DataLoader(TensorDataset(torch.zeros(8, 2), torch.zeros(8)))},
            "x is a DataLoader, .* give its data set",
        ),
        ({"x": iter([(X[0], 0)])}, "x is a list_iterator, which can be read only once"),
        ({"x": csr_array(np.eye(8)), "y": np.arange(8) % 2}, r"x is a sparse matrix of scipy.* x\.toarray\(\)"),
        ({"x": X}, "x is a ndarray without labels"),
        ({"x": {"a": X}}, "x is a dict without labels"),
        ({"x": X, "y": Y[:-1]}, "x has 20 samples, but y has 19 labels"),
        ({"x": X, "y": Y, "test": (X, Y[:-1])}, "test x has 20 samples, but test y has 19 labels"),
        ({"x": X, "y": 3}, "y is a int"),
        ({"x": X, "y": [[1], [1, 2]]}, "different lengths"),
        ({"x": X, "y": Y, "test": 1.0}, "fraction between 0 and 1"),
        ({"x": X, "y": Y, "test": True}, "fraction between 0 and 1"),
        ({"x": X, "y": Y, "test": "test.csv"}, "test is a str"),
        ({"x": X[:3], "y": Y[:3]}, "3 samples cannot be split"),
        ({"x": X, "y": np.array(["a", "b"])[Y], "classes": 3}, "2 different labels, but classes = 3"),
        ({"x": Numbers()}, "number of classes of Numbers is not known"),
        ({"x": Numbers(), "y": Y}, "leave out y"),
        ({"x": Stream(), "classes": 2}, "map-style"),
        ({"x": TensorDataset(torch.zeros(3))}, "1 tensors"),
    ],
)
def test_a_wrong_argument_is_an_error_with_a_next_step(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        plateaux.from_arrays(arguments.pop("x"), **arguments)
