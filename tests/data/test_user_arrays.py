"""Conversion of arrays: dtypes, layout of images, class numbers, and standardization."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.preprocessing import LabelEncoder, StandardScaler

import plateaux
from plateaux.core.errors import DataError
from plateaux.data.user_arrays import CHUNK_ROWS, convert_inputs, convert_labels, mean_and_std


@pytest.mark.parametrize(
    ("given", "dtype", "shape"),
    [
        (np.zeros((5, 3)), torch.float32, (5, 3)),
        (torch.zeros(5, 3, dtype=torch.float16), torch.float32, (5, 3)),
        (np.zeros((5, 3), dtype=bool), torch.float32, (5, 3)),
        (np.zeros((5, 3), dtype=np.uint8), torch.float32, (5, 3)),  # a table of bytes
        (np.zeros((5, 3), dtype=np.int32), torch.int64, (5, 3)),  # token ids
        ([[1.0, 2.0], [3.0, 4.0]], torch.float32, (2, 2)),
        (np.zeros((5, 8, 8), dtype=np.uint8), torch.uint8, (5, 1, 8, 8)),
        (np.zeros((5, 8, 9, 3), dtype=np.uint8), torch.uint8, (5, 3, 8, 9)),
        (np.zeros((5, 3, 8, 9), dtype=np.uint8), torch.uint8, (5, 3, 8, 9)),
        (np.zeros((5, 8, 9, 1)), torch.float32, (5, 1, 8, 9)),
        (np.zeros((5, 3, 8, 3)), torch.float32, (5, 3, 8, 3)),  # both could be channels: first
        (np.zeros((5, 7, 2)), torch.float32, (5, 7, 2)),
    ],
)
def test_inputs_become_the_documented_dtype_and_shape(given: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    converted = convert_inputs(given)
    assert isinstance(converted, torch.Tensor)
    assert (converted.dtype, tuple(converted.shape)) == (dtype, shape)


def test_channels_last_are_moved_and_not_reshaped() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 5, 6, 3), dtype=np.uint8)
    converted = convert_inputs(pixels)
    assert isinstance(converted, torch.Tensor)
    assert np.array_equal(converted[1, 2].numpy(), pixels[1, :, :, 2])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (np.zeros(5), r"x.reshape\(-1, 1\)"),
        (np.zeros((5, 2), dtype=complex), "complex"),
        (np.array([["a"], ["b"]]), "cannot become a tensor"),
        ({"a": np.zeros((2, 1)), "b": np.zeros((3, 1))}, "same length"),
        ({}, "at least one"),
    ],
)
def test_invalid_inputs_are_refused(given: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        convert_inputs(given)


def test_the_error_for_nan_names_the_first_sample() -> None:
    x = np.zeros((CHUNK_ROWS + 10, 2))
    x[CHUNK_ROWS + 3, 1], x[CHUNK_ROWS + 5, 0] = np.nan, np.inf
    with pytest.raises(DataError, match=f"in 2 of {CHUNK_ROWS + 10:,} samples \\(first: sample {CHUNK_ROWS + 3}\\)"):
        convert_inputs(x)


@pytest.mark.parametrize(
    "labels",
    [
        np.array(["dog", "cat", "dog", "ant"]),
        np.array(["dog", "cat"], dtype=object),
        [3, 1, 2, 3],
        [10, -1, 10],
        np.array([0, 2, 2], dtype=np.int8),
        np.array([5.0, 7.0]),
    ],
)
def test_labels_are_numbered_as_by_scikit_learn(labels: Any) -> None:
    encoder = LabelEncoder()
    expected = encoder.fit_transform(labels)
    numbers, names = convert_labels(labels)
    assert numbers.tolist() == expected.tolist()
    assert names == tuple(
        str(int(name)) if isinstance(name, float) else str(name) for name in encoder.classes_.tolist()
    )


@pytest.mark.parametrize("labels", [[0, 1, 1, 2], np.array([False, True]), torch.tensor([2, 1, 0]), [0.0, 1.0], [0, 0]])
def test_class_numbers_are_kept(labels: Any) -> None:
    numbers, names = convert_labels(labels)
    assert numbers.tolist() == np.asarray(labels).astype(int).tolist()
    assert names == ()


def test_integer_labels_are_unchanged_if_the_number_of_classes_is_given() -> None:
    numbers, names = convert_labels([1, 3, 3], 5)
    assert (numbers.tolist(), names) == ([1, 3, 3], ())


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        ([[0], [1]], r"y.reshape\(-1\)"),
        ([[0, 1], [1, 0]], r"y.argmax\(1\)"),
        ([[0, 1, 1], [1, 0, 0]], "Multi-label classification is not supported yet"),
        ([[0.5, 1.0], [2.0, 3.0]], "Regression is not supported yet"),
        ([[5, 7, 9], [1, 2, 3]], "A class for each token"),
        (np.zeros((2, 4, 4), dtype=int), "segmentation"),
        ([["a", "b"], ["c", "d"]], "several targets for each sample"),
        ([0.5, 1.0], "fractions, such as 0.5.*regression is not supported yet"),
        ([0.0, float("nan")], "NaN or infinity"),
        (np.array(["a", None], dtype=object), "1 missing labels .first: sample 1"),
        ([], "no labels"),
        (np.array(["2020-01-01"], dtype="datetime64[D]"), "integers or text"),
    ],
)
def test_invalid_labels_are_refused(labels: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        convert_labels(labels)


def test_mean_and_std_of_a_table_are_those_of_scikit_learn() -> None:
    x = np.random.default_rng(0).normal(size=(CHUNK_ROWS + 100, 3)).astype(np.float32) * [1, 100, 1e-3] + [1e4, 0, 7]
    tensor = torch.from_numpy(x.astype(np.float32))
    scaler = StandardScaler().fit(tensor.double().numpy())
    mean, std = mean_and_std(tensor)
    assert np.allclose(mean, scaler.mean_, rtol=1e-12)
    assert np.allclose(std, scaler.scale_, rtol=1e-9)


def test_mean_and_std_of_bytes_are_of_values_in_0_to_1() -> None:
    x = np.random.default_rng(0).integers(0, 256, (50, 3, 4, 5), dtype=np.uint8)
    mean, std = mean_and_std(torch.from_numpy(x))
    assert np.allclose(mean, (x / 255).mean((0, 2, 3)))
    assert np.allclose(std, (x / 255).std((0, 2, 3)))


def test_a_constant_feature_has_std_1() -> None:
    mean, std = mean_and_std(torch.full((30, 2), 0.1))
    assert np.allclose(mean, 0.1)
    assert std == (1.0, 1.0)


def test_token_ids_and_named_inputs_are_not_standardized() -> None:
    assert mean_and_std(torch.ones(3, 2, dtype=torch.int64)) == ((), ())
    assert mean_and_std({"a": torch.ones(3, 2)}) == ((), ())


def test_tensors_instead_of_pairs_are_refused_with_the_correct_call() -> None:
    x, y = torch.zeros(6, 4), torch.zeros(6, dtype=torch.long)
    with pytest.raises(DataError, match=r"train is a Tensor, not a pair: pass from_tensors\(\(x_train, y_train\)"):
        plateaux.from_tensors(x, y, classes=2)  # type: ignore[arg-type]
    assert plateaux.from_tensors((x, y), (x, y), classes=2).shape == (4,)
