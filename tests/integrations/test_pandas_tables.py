"""pandas: tables and labels, compared with what scikit-learn and pandas compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import plateaux
from plateaux.core.errors import DataError

FRAME = pd.DataFrame({"age": [1, 2, 3, 4, 5], "is_new": [True, False] * 2 + [True], "price": [0.5] * 5})
LABELS = pd.Series(["yes", "no", "yes", "no", "no"], index=list("vwxyz"))


def test_a_data_frame_equals_the_array_of_its_columns() -> None:
    data = plateaux.from_arrays(FRAME, LABELS)
    expected = plateaux.from_arrays(
        np.array([[1, 1, 0.5], [2, 0, 0.5], [3, 1, 0.5], [4, 0, 0.5], [5, 1, 0.5]]), [1, 0, 1, 0, 0]
    )
    assert data.train.fingerprint() == expected.train.fingerprint()
    assert data.test.fingerprint() == expected.test.fingerprint()
    assert data.labels == ("no", "yes")


@pytest.mark.parametrize(
    "labels",
    [
        LABELS.astype("category"),
        LABELS.astype("string"),
        LABELS.to_frame(),
        LABELS.astype(object),
    ],
)
def test_labels_of_any_pandas_type_are_the_same_classes(labels: Any) -> None:
    data, plain = plateaux.from_arrays(FRAME, labels), plateaux.from_arrays(FRAME, LABELS.tolist())
    assert data.train.fingerprint() == plain.train.fingerprint()
    assert data.labels == plain.labels


def test_nullable_dtypes_equal_plain_dtypes() -> None:
    frame = FRAME.astype({"age": "Int64", "is_new": "boolean", "price": "Float32"})
    assert (
        plateaux.from_arrays(frame, LABELS).train.fingerprint()
        == plateaux.from_arrays(FRAME, LABELS).train.fingerprint()
    )


def test_a_test_frame_and_integer_labels() -> None:
    data = plateaux.from_arrays(FRAME, pd.Series([0, 1, 2, 0, 1], dtype="Int64"), test=(FRAME[:2], pd.Series([2, 2])))
    assert data.test.fetch(torch.arange(2))[1].tolist() == [2, 2]
    assert data.classes == 3


def test_columns_of_a_test_frame_are_read_by_name() -> None:
    test = FRAME[["price", "age", "is_new"]]
    data = plateaux.from_arrays(FRAME, LABELS, test=(test, LABELS))
    expected = plateaux.from_arrays(FRAME, LABELS, test=(FRAME, LABELS))
    assert data.test.fingerprint() == expected.test.fingerprint()


@pytest.mark.parametrize(
    ("test", "text"),
    [
        (FRAME.rename(columns={"age": "years"}), "test x has other columns than x: it lacks 'age' and has in addition"),
        (FRAME.drop(columns="age"), r"it lacks 'age'\. .*test_x\.reindex\(columns=x\.columns, fill_value=0\)"),
        (FRAME.assign(a=1, b=1, c=1, d=1), r"it has in addition 4 columns \('a', 'b', 'c', \.\.\.\)"),
    ],
)
def test_other_columns_of_a_test_frame_are_an_error(test: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        plateaux.from_arrays(FRAME, LABELS, test=(test, LABELS))


def test_repeated_names_that_cannot_be_matched_are_an_error() -> None:
    twice = FRAME.set_axis(["age", "is_new", "age"], axis=1)
    for x, test in ((FRAME, twice), (twice, twice.iloc[:, ::-1].set_axis(["age", "age", "is_new"], axis=1))):
        with pytest.raises(DataError, match="cannot be matched by the repeated name 'age'"):
            plateaux.from_arrays(x, LABELS, test=(test, LABELS))
    with pytest.raises(DataError, match="cannot be matched by the repeated name 'age'"):
        plateaux.from_arrays(twice, LABELS, test=(twice.iloc[:, :2], LABELS))


def test_columns_are_compared_only_between_two_frames() -> None:
    twice = FRAME.set_axis(["a", "b", "a"], axis=1)
    expected = plateaux.from_arrays(FRAME, LABELS, test=(FRAME, LABELS)).test.fingerprint()
    for x, test in ((FRAME, FRAME.to_numpy("float32")), (FRAME.to_numpy("float32"), FRAME), (twice, twice)):
        assert plateaux.from_arrays(x, LABELS, test=(test, LABELS)).test.fingerprint() == expected


@pytest.mark.parametrize(
    ("x", "y", "text"),
    [
        (FRAME.assign(city=["a"] * 5), LABELS, r"not numbers in 1 column \('city'\): .*get_dummies"),
        (FRAME.assign(kind=LABELS.astype("category").tolist()), LABELS, "values that are not numbers"),
        (FRAME.assign(day=pd.Timestamp("2020-01-01")), LABELS, "values that are not numbers"),
        (FRAME.assign(age=[1, None, 2, 3, 4]), LABELS, r"missing values in 1 column \('age'\)"),
        (
            FRAME.astype({"age": "Int64"}).assign(age=pd.array([1, None, 2, 3, 4], dtype="Int64")),
            LABELS,
            "missing values",
        ),
        (FRAME, LABELS.where(LABELS != "no"), r"y has 3 missing labels \(first: row 1\)"),
        (FRAME, FRAME, "give one column, such as"),
        (FRAME[:4], LABELS, "x has 4 samples, but y has 5 labels"),
    ],
)
def test_the_error_for_an_unsupported_frame_states_the_next_step(x: Any, y: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        plateaux.from_arrays(x, y)
