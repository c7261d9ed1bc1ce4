"""pandas: a DataFrame as a table of numbers, and a Series as labels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from plateaux.core.errors import DataError
from plateaux.core.types import Inputs
from plateaux.data.user_arrays import convert_inputs


def is_pandas(value: Any) -> bool:
    """Return whether a value is a DataFrame or a Series, without importing pandas."""
    return type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "to_numpy")


def read_table(x: Any) -> NDArray[np.float32]:
    """Return the columns of a DataFrame as float32 `[N, columns]`; a Series is one column."""
    frame = x.to_frame() if x.ndim == 1 else x
    other = [str(name) for name, dtype in frame.dtypes.items() if not _is_number(dtype)]
    if other:
        raise DataError(
            f"x has {len(other)} columns that are not numbers ({', '.join(map(repr, other[:3]))}): encode them, as in "
            f"x = pandas.get_dummies(x, columns={other[:3]}), or drop them."
        )
    table: NDArray[np.float32] = frame.to_numpy(dtype=np.float32, na_value=np.nan)
    missing = [str(frame.columns[i]) for i in np.flatnonzero(np.isnan(table).any(axis=0))]
    if missing:
        raise DataError(
            f"x has missing values in {len(missing)} columns ({', '.join(map(repr, missing[:3]))}): replace them, as "
            "in x = x.fillna(x.median()), or remove these rows from x and y."
        )
    return table


def convert_table_or_arrays(x: Any, what: str = "x") -> Inputs:
    """Return a DataFrame, arrays, or tensors as the inputs of a data set."""
    return convert_inputs(read_table(x) if is_pandas(x) else x, what)


def read_labels(y: Any) -> NDArray[Any]:
    """Return the values of a Series, or of a DataFrame with one column."""
    if y.ndim == 2 and y.shape[1] != 1:
        raise DataError(f"y has the columns {list(map(str, y.columns))}: give one column, such as y[{y.columns[0]!r}].")
    series = y.iloc[:, 0] if y.ndim == 2 else y
    missing = series.isna().to_numpy()
    if missing.any():
        raise DataError(
            f"y has {int(missing.sum()):,} missing labels (first: row {int(missing.argmax())}): remove these rows from "
            "x and y."
        )
    values: NDArray[Any] = series.to_numpy()
    return values if values.dtype.kind in "iubf" else np.asarray(values, dtype=object)


def _is_number(dtype: Any) -> bool:
    """Return whether a column has integers, floats, or booleans; `kind` also describes pandas' nullable types."""
    return getattr(dtype, "kind", "O") in "iufb"
