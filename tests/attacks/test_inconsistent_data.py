"""Inconsistent data: a data set that changes while it is read ends with an error that names the sample, or correctly.

Every case runs through training, evaluation, and resume, in this process and with loader workers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import OBJECTS
from torch import Tensor, nn

import plateaux
from plateaux.core.errors import DataError, PlateauxError
from plateaux.data.samples import sample_ids
from plateaux.data.sources import DataSplits, from_dataset

N = 100
SAMPLED = set(sample_ids(N, 32).tolist()) | set(sample_ids(N, 16).tolist())
HIDDEN = next(i for i in range(N) if i not in SAMPLED)  # an index that no check reads before training
WORKERS = [0, 2]


class Rows:
    """Consistent samples; `change` replaces the sample with index `at`."""

    def __init__(self, n: int = N, at: int = -1, change: Callable[[Tensor, int], Any] | None = None) -> None:
        self.n, self.at, self.change = n, at, change

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        x, y = torch.tensor([i / N, 1.0 - i / N]), i % 3
        return self.change(x, y) if i == self.at and self.change is not None else (x, y)


class Shrinking(Rows):
    """A data set that loses its last samples after its length was read once."""

    reads = 0

    def __len__(self) -> int:
        self.reads += 1
        return self.n if self.reads == 1 else self.n - 30

    def __getitem__(self, i: int) -> Any:
        if i >= self.n - 30:
            raise IndexError("list index out of range")
        return super().__getitem__(i)


class Growing(Rows):
    """A data set that has more samples whenever its length is read."""

    def __len__(self) -> int:
        self.n += 7
        return self.n - 7


class Random(Rows):
    """Samples with noise of generators that cannot be seeded from outside, and with noise of those that can."""

    own = random.Random()

    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        return x + self.own.random() * 0.1 + 0.1 * torch.rand(2) + float(np.random.rand()) * 0.1, y


def splits(train: Any, test: Any = None) -> DataSplits:
    return from_dataset(train, Rows(40) if test is None else test, classes=3, shape=(2,))


def network(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Linear(2, 3)


def train(out: Path, data: DataSplits, workers: int = 0) -> Any:
    return plateaux.train(OBJECTS.replaced(data={"num_workers": workers}), out, data=data, model=network)


def fail(x: Tensor, y: int) -> Any:
    raise OSError("the file is gone")


def fail_with_newlines(x: Tensor, y: int) -> Any:
    raise ValueError("first line\nsecond line \x1b[31m")


CHANGES: dict[str, Callable[[Tensor, int], Any]] = {
    "an exception": fail,
    "an exception with newlines": fail_with_newlines,
    "a float64 input": lambda x, y: (x.double(), y),
    "a uint8 input": lambda x, y: (x.to(torch.uint8), y),
    "an array instead of a tensor with another dtype": lambda x, y: (x.double().numpy(), y),
    "a longer input": lambda x, y: (torch.cat([x, x]), y),
    "a scalar input": lambda x, y: (x[0], y),
    "no input": lambda x, y: (None, y),
    "a text as input": lambda x, y: ("image.png", y),
    "a dictionary as input": lambda x, y: ({"x": x}, y),
    "a dictionary as sample": lambda x, y: {"x": x, "y": y},
    "three values": lambda x, y: (x, y, 0),
    "nothing": lambda x, y: None,
    "a float label": lambda x, y: (x, float(y)),
    "a label of -100": lambda x, y: (x, -100),
    "a label of 3": lambda x, y: (x, 3),
    "a huge label": lambda x, y: (x, 2**70),
    "a one-hot label": lambda x, y: (x, nn.functional.one_hot(torch.tensor(y), 3)),
    "a text as label": lambda x, y: (x, "cat"),
    "no label": lambda x, y: (x, None),
    "a NaN input": lambda x, y: (x * torch.nan, y),
}


WITH_WORKERS = ("an exception", "a float64 input", "a label of -100", "a NaN input")  # one of each kind


@pytest.mark.parametrize(("name", "workers"), [*((name, 0) for name in CHANGES), *((name, 2) for name in WITH_WORKERS)])
def test_one_sample_that_differs_in_training_ends_with_an_error_that_names_it(
    tmp_path: Path, name: str, workers: int
) -> None:
    with pytest.raises(PlateauxError) as error:
        train(tmp_path, splits(Rows(at=HIDDEN, change=CHANGES[name])), workers)
    assert str(HIDDEN) in str(error.value)
    assert "Traceback" not in str(error.value)


@pytest.mark.parametrize("name", [name for name in CHANGES if name != "a huge label"])
def test_one_sample_that_differs_in_the_test_set_ends_with_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    run = train(tmp_path, splits(Rows()))
    test = Rows(at=HIDDEN, change=CHANGES[name])
    with pytest.raises(PlateauxError) as error:
        plateaux.evaluate(plateaux.open_run(run, data=splits(Rows(), test), model=network))
    assert str(HIDDEN) in str(error.value)
    assert "Traceback" not in str(error.value)


@pytest.mark.parametrize("at", [0, N - 1])
@pytest.mark.parametrize("name", CHANGES)
def test_a_sample_that_is_checked_first_is_refused_before_anything_is_written(
    tmp_path: Path, name: str, at: int
) -> None:
    with pytest.raises(PlateauxError) as error:
        train(tmp_path / "run", splits(Rows(at=at, change=CHANGES[name])))
    assert str(at) in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("label", [np.int64(1), np.uint8(1), torch.tensor(1), torch.tensor(1, dtype=torch.uint8), True])
def test_a_class_number_of_another_type_is_the_same_label(tmp_path: Path, label: Any) -> None:
    at = next(i for i in range(N) if i % 3 == 1 and i not in SAMPLED)
    odd = train(tmp_path / "odd", splits(Rows(at=at, change=lambda x, y: (x, label))))
    plain = train(tmp_path / "plain", splits(Rows()))
    assert torch.equal(odd.weights(0)["weight"], plain.weights(0)["weight"])


@pytest.mark.parametrize("workers", WORKERS)
def test_a_data_set_that_shrinks_is_an_error_that_names_a_sample(tmp_path: Path, workers: int) -> None:
    with pytest.raises(DataError, match=r"Sample \d+ of 'Shrinking.train' \(100 samples\) cannot be read: IndexError"):
        train(tmp_path, splits(Shrinking()), workers)


def test_a_data_set_that_grows_is_used_at_its_first_length(tmp_path: Path) -> None:
    grown = train(tmp_path / "grown", splits(Growing()))
    plain = train(tmp_path / "plain", splits(Rows()))
    assert grown.info.data.train.samples == N
    assert torch.equal(grown.weights(1)["weight"], plain.weights(1)["weight"])


@pytest.mark.parametrize("workers", WORKERS)
def test_random_items_are_trained_evaluated_and_resumed(tmp_path: Path, workers: int) -> None:
    data = splits(Random(), Random(40))
    run = train(tmp_path, data, workers)
    assert train(tmp_path, splits(Random(), Random(40)), workers).progress(0).finished
    assert 0 <= plateaux.evaluate(plateaux.open_run(run, data=data, model=network))["accuracy"].ensemble.value <= 1


@pytest.mark.parametrize("length", ["many", -1, 2.5, None])
def test_an_invalid_length_is_refused(length: Any) -> None:
    class Odd(Rows):
        def __len__(self) -> Any:
            return length

    with pytest.raises(DataError, match="length"):
        splits(Odd())
