"""pandas: a DataFrame as a table of numbers, and a Series as labels.

Importing this module imports neither pandas nor torch, because predictors use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from plateaux.core.errors import DataError

if TYPE_CHECKING:
    from plateaux.core.types import Inputs


def is_pandas(value: Any) -> bool:
    """Return whether a value is a DataFrame or a Series, without importing pandas."""
    return type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "to_numpy")


def column_names(x: Any) -> tuple[str, ...]:
    """Return the names of the columns of a DataFrame; none if a name is no text, or repeated."""
    names = tuple(x.columns) if is_pandas(x) and x.ndim == 2 else ()
    return names if all(isinstance(name, str) for name in names) and len(set(names)) == len(names) else ()


def select_columns(x: Any, columns: Sequence[str], what: str = "x") -> Any:
    """Return the columns that a model was trained on, in that order, of a DataFrame or of one of its rows.

    Other columns, such as labels, are left out. A table without names is returned as it is.
    """
    if columns and x.ndim == 1 and set(columns) <= set(x.index):
        x = x.to_frame().T.infer_objects()
    if not columns or not column_names(x):
        return x
    missing = [name for name in columns if name not in x.columns]
    if missing:
        raise DataError(
            f"{what} lacks {_show_names(missing)}, which the model was trained on. Prepare it as the training table; "
            "after pandas.get_dummies, use x = x.reindex(columns=x_train.columns, fill_value=0)."
        )
    return x[list(columns)]


def read_table(x: Any, what: str = "x") -> NDArray[np.float32]:
    """Return the columns of a DataFrame as float32 `[N, columns]`; a Series is one column."""
    frame = x.to_frame() if x.ndim == 1 else x
    other = [str(name) for name, dtype in frame.dtypes.items() if getattr(dtype, "kind", "O") not in "iufb"]
    if other:
        raise DataError(
            f"{what} has values that are not numbers in {_count(other)}: encode them, as in x = "
            f"pandas.get_dummies(x, columns={other[:3]}), or drop them."
        )
    table: NDArray[np.float32] = frame.to_numpy(dtype=np.float32, na_value=np.nan)
    missing = [str(frame.columns[i]) for i in np.flatnonzero(np.isnan(table).any(axis=0))]
    if missing:
        raise DataError(
            f"{what} has missing values in {_count(missing)}: replace them, as in x = x.fillna(x.median()), or "
            "remove these rows from x and y."
        )
    return table


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} column{'s' * (len(names) > 1)} ({', '.join(map(repr, names[:3]))})"


def convert_table_or_arrays(x: Any, what: str = "x", *, columns: Sequence[str] = ()) -> Inputs:
    """Return a DataFrame, arrays, or tensors as the inputs of a data set; of a DataFrame only `columns`, if given."""
    from plateaux.data.user_arrays import convert_inputs

    return convert_inputs(read_table(select_columns(x, columns, what), what) if is_pandas(x) else x, what)


def match_columns(test_x: Any, x: Any) -> Any:
    """Return the test table with its columns in the order of the training table, if both are DataFrames."""
    if not all(is_pandas(table) and table.ndim == 2 for table in (x, test_x)) or test_x.columns.equals(x.columns):
        return test_x
    differences = {
        "lacks": [name for name in x.columns if name not in test_x.columns],
        "has in addition": [name for name in test_x.columns if name not in x.columns],
        "cannot be matched by the repeated name": _repeated(x) or _repeated(test_x),
    }
    if any(differences.values()):
        found = " and ".join(f"{verb} {_show_names(names)}" for verb, names in differences.items() if names)
        raise DataError(
            f"test x has other columns than x: it {found}. Give both the same columns, as in "
            "test_x = test_x.reindex(columns=x.columns, fill_value=0) after pandas.get_dummies."
        )
    return test_x[list(x.columns)]


def _repeated(table: Any) -> list[Any]:
    return list(table.columns[table.columns.duplicated()].unique())


def _show_names(names: Sequence[Any]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return f"{len(names)} columns ({shown}, ...)" if len(names) > 3 else shown


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
