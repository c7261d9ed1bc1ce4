"""Hugging Face `datasets` in memory: which columns are inputs and labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from datasets import Array2D, Array3D, ClassLabel, DatasetDict, Features, Image, Value
from datasets import Dataset as HuggingFaceDataset
from PIL.Image import fromarray

import plateaux
from plateaux.core.errors import DataError

N = 10
LABELS = [i % 2 for i in range(N)]


def table(**columns: Any) -> Any:
    return HuggingFaceDataset.from_dict({"label": LABELS, **columns})


def test_columns_of_numbers_are_a_table() -> None:
    dataset = table(a=list(range(N)), b=[i / 2 for i in range(N)], text=["x"] * N)
    expected = plateaux.from_arrays(np.stack([np.arange(N), np.arange(N) / 2], 1).astype("float32"), LABELS)
    data = plateaux.from_arrays(dataset)
    assert data.train.fingerprint() == expected.train.fingerprint()
    assert (data.preprocessing.columns, expected.preprocessing.columns) == (("a", "b"), ())


def test_named_columns_are_used() -> None:
    dataset = table(a=list(range(N)), b=[i / 2 for i in range(N)], other=[2 - label for label in LABELS])
    data = plateaux.from_arrays(dataset, inputs=["b"], label="other")
    assert (data.shape, data.labels) == ((1,), ("1", "2"))
    x, y = data.train.fetch(torch.arange(len(data.train)))
    assert isinstance(x, torch.Tensor)
    assert (2 * x[:, 0] % 2).tolist() == [1 - label for label in y.tolist()]


def test_tokens_are_named_inputs_and_class_names_come_from_the_label_column() -> None:
    features = Features(
        {
            "text": Value("string"),
            "input_ids": [Value("int64")],
            "attention_mask": [Value("int8")],
            "target": ClassLabel(names=["bad", "good", "unused"]),
        }
    )
    rows = {
        "text": ["a"] * N,
        "input_ids": [[i, 1] for i in range(N)],
        "attention_mask": [[1, 1]] * N,
        "target": LABELS,
    }
    data = plateaux.from_arrays(HuggingFaceDataset.from_dict(rows, features=features))
    assert (data.classes, data.labels) == (3, ("bad", "good", "unused"))
    x, y = data.train.fetch(torch.arange(len(data.train)))
    assert isinstance(x, dict)
    assert {name: values.dtype for name, values in x.items()} == {
        "input_ids": torch.int64,
        "attention_mask": torch.int64,
    }
    assert (x["input_ids"][:, 0] % 2).tolist() == y.tolist()


def test_images_are_uint8_with_channels_first() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (N, 6, 7, 3), dtype=np.uint8)
    rows = {"image": list(pixels), "label": LABELS}
    dataset = HuggingFaceDataset.from_dict(rows, features=Features({"image": Image(), "label": Value("int64")}))
    data, expected = plateaux.from_arrays(dataset), plateaux.from_arrays(pixels, LABELS)
    assert data.shape == (3, 6, 7)
    assert data.test.fingerprint() == expected.test.fingerprint()


def test_images_of_16_bits_are_scaled_to_8_bits() -> None:
    pixels = (np.arange(20) * 3000).astype(np.uint16).reshape(4, 5)
    rows = {"image": [fromarray(pixels)] * N, "label": LABELS}
    dataset = HuggingFaceDataset.from_dict(rows, features=Features({"image": Image(), "label": Value("int64")}))
    x, _ = plateaux.from_arrays(dataset).train.fetch(torch.arange(1))
    assert isinstance(x, torch.Tensor)
    assert x[0, 0].tolist() == (pixels // 256).tolist()


def test_a_dataset_dict_has_its_own_test_split() -> None:
    dataset = DatasetDict(train=table(a=list(range(N))), test=table(a=list(range(100, 100 + N))))
    data = plateaux.from_arrays(dataset)
    x, _ = data.test.fetch(torch.arange(N))
    assert isinstance(x, torch.Tensor)
    assert x[:, 0].tolist() == list(range(100, 100 + N))
    assert len(data.train) == N


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        (ClassLabel(names=["good", "bad"]), ["good", "bad"]),
        (ClassLabel(names=["good", "never", "bad"]), ["good", "never"]),
        (ClassLabel(names=["bad", "good"]), ["bad", "good"]),
        (ClassLabel(num_classes=2), ["bad", "good"]),
        (Value("int64"), ["bad", "good"]),
    ],
)
def test_class_numbers_of_the_test_set_are_matched_by_name(label: Any, expected: list[str]) -> None:
    train = table(a=list(range(N))).cast_column("label", ClassLabel(names=["bad", "good", "never"]))
    test = table(a=list(range(N))).cast_column("label", label)
    for data in (plateaux.from_arrays(DatasetDict(train=train, test=test)), plateaux.from_arrays(train, test=test)):
        _, y = data.test.fetch(torch.arange(N))
        assert [data.labels[number] for number in y] == [expected[number] for number in LABELS]


def test_a_class_of_the_test_set_that_the_training_set_does_not_name() -> None:
    train, test = (
        table(a=list(range(N))).cast_column("label", ClassLabel(names=names))
        for names in (["bad", "good"], ["bad", "fair"])
    )
    with pytest.raises(DataError, match="1 classes that the training set does not name, such as 'fair': remove"):
        plateaux.from_arrays(train, test=test)


@pytest.mark.parametrize("kind", ["array", "lists"])
def test_an_array_column_keeps_its_dtype(kind: str) -> None:
    """Arrays and nested lists of uint8 are images, like the same NumPy array."""
    pixels = np.random.default_rng(0).integers(0, 256, (N, 3, 4, 5), dtype=np.uint8)
    feature = Array3D((3, 4, 5), "uint8") if kind == "array" else [[[Value("uint8")]]]
    features = Features({"x": feature, "label": Value("int64")})
    dataset = HuggingFaceDataset.from_dict({"x": pixels.tolist(), "label": LABELS}, features=features)
    data, expected = plateaux.from_arrays(dataset, inputs="x"), plateaux.from_arrays(pixels, LABELS)
    assert (data.shape, len(data.mean)) == ((3, 4, 5), 3)
    assert data.mean == expected.mean
    assert data.train.fingerprint() == expected.train.fingerprint()


@pytest.mark.parametrize("inputs", [None, "age"])
def test_one_column_of_integers_is_a_table(inputs: str | None) -> None:
    dataset = table(age=list(range(N)))
    expected = plateaux.from_arrays(np.arange(N, dtype="float32")[:, None], LABELS)
    data = plateaux.from_arrays(dataset, inputs=inputs)
    assert data.train.fingerprint() == expected.train.fingerprint()
    assert data.mean == expected.mean


@pytest.mark.parametrize("dtype", ["int64", "uint8"])
def test_tokens_alone_stay_tokens(dtype: str) -> None:
    features = Features({"input_ids": [Value(dtype)], "label": Value("int64")})
    rows = {"input_ids": [[i, 1] for i in range(N)], "label": LABELS}
    x, _ = plateaux.from_arrays(HuggingFaceDataset.from_dict(rows, features=features)).train.fetch(torch.arange(2))
    assert isinstance(x, dict)
    assert x["input_ids"].dtype == torch.int64


@pytest.mark.parametrize("is_split", [True, False])
def test_columns_of_a_test_set_are_read_by_name(is_split: bool) -> None:
    train, test = table(a=[1] * N, b=list(range(N))), table(b=list(range(N)), a=[1] * N, other=[5] * N)
    data = plateaux.from_arrays(DatasetDict(train=train, test=test) if is_split else train, test=test)
    assert data.test.fingerprint() == plateaux.from_arrays(train, test=train).test.fingerprint()
    with pytest.raises(DataError, match="no column 'b'"):
        plateaux.from_arrays(train, test=table(a=[1] * N, c=[2] * N))


def test_a_torch_format_changes_nothing() -> None:
    dataset = table(a=list(range(N)))
    assert (
        plateaux.from_arrays(dataset.with_format("torch")).train.fingerprint()
        == plateaux.from_arrays(dataset).train.fingerprint()
    )


def test_an_array_column_is_used_alone() -> None:
    features = Features({"x": Array2D((2, 3), "float32"), "label": Value("int64")})
    dataset = HuggingFaceDataset.from_dict({"x": np.ones((N, 2, 3)), "label": LABELS}, features=features)
    assert plateaux.from_arrays(dataset).shape == (2, 3)


@pytest.mark.parametrize(
    ("dataset", "options", "text"),
    [
        (table(text=["a"] * N), {}, "input columns are not clear.*tokenize text first"),
        (table(text=["a"] * N), {"inputs": "text"}, "is text: tokenize it first"),
        (table(a=[1] * N), {"inputs": "b"}, "no column 'b'"),
        (table(a=[1] * N), {"label": "lable"}, "did you mean 'label'"),
        (HuggingFaceDataset.from_dict({"a": [1], "b": [2]}), {}, "label column is not clear"),
        (table(input_ids=[[1] * (1 + i % 2) for i in range(N)]), {}, "2 shapes"),
        (table(x=[[1, 2]] * 9 + [[1, None]]), {"inputs": "x"}, "'x' has a sample that is no array of int64.*filter"),
        (DatasetDict(validation=table(a=[1] * N)), {}, "pass one of them"),
    ],
)
def test_columns_that_cannot_be_used_are_an_error_with_a_next_step(dataset: Any, options: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        plateaux.from_arrays(dataset, **options)
