"""The splits, columns, and labels of data sets that `datasets` wrote, and of folders of parquet files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plateaux.core.errors import DataError, PlateauxError, RecipeError, first_line, suggest
from plateaux.core.imports import optional_import
from plateaux.core.types import derive_seed
from plateaux.data.files import limited_count
from plateaux.integrations.huggingface_files import EXTRA, is_plain_name, read_json

TEST_SPLITS = ("test", "validation", "val", "dev")  # the first that exists
HELD_OUT = 0.2  # of a data set with one split
MAX_CLASSES = 1_000_000  # a column of ids, taken for classes, would give a head that does not fit into memory
MAX_SHOWN = 5  # class names in an error
ROWS_AT_ONCE = 65_536  # some megabytes of a column, however long the table is


def read_splits(folder: Path) -> dict[str, Any]:
    """Return the splits of a folder; the key of a data set without splits is empty."""
    library = datasets_library()
    try:
        if (folder / "dataset_dict.json").is_file():
            names = read_json(folder / "dataset_dict.json").get("splits")
            if not isinstance(names, list) or not all(map(is_plain_name, names)):
                raise DataError(f"{folder / 'dataset_dict.json'} names splits that are no folders in it")
            return {name: _read_split(library, folder / name) for name in names}
        if (folder / "state.json").is_file():
            return {"": _read_split(library, folder)}
        return _read_parquet(library, folder)
    except PlateauxError:
        raise
    except Exception as error:  # untrusted files may be wrong in any way
        raise DataError(
            f"{folder} cannot be read as a data set ({type(error).__name__}: {first_line(error)}). Expected: a folder "
            "that save_to_disk wrote"
        ) from error


def _read_split(library: Any, folder: Path) -> Any:
    files = read_json(folder / "state.json").get("_data_files")
    names = [each.get("filename") if isinstance(each, dict) else None for each in files or ()]
    if not all(map(is_plain_name, names)):
        raise DataError(f"{folder / 'state.json'} names files that are not in its folder. Save the data set again")
    return library.Dataset.load_from_disk(str(folder), keep_in_memory=False).with_format(None)


def _read_parquet(library: Any, folder: Path) -> dict[str, Any]:
    """Read parquet files by split: `train-00000-of-00002.parquet`, or `train/0000.parquet`."""
    groups: dict[str, list[Path]] = {}
    for file in sorted(folder.rglob("*.parquet")):
        name = file.parent.name if file.stem.isdigit() else file.stem.partition("-")[0]
        groups.setdefault(name, []).append(file)
    if not groups or any(len({file.parent for file in files}) > 1 for files in groups.values()):
        found = "several configurations of parquet files" if groups else "neither state.json nor parquet files"
        raise DataError(
            f"{folder} has {found}. Expected: one data set. Load it with datasets.load_dataset, save it with "
            "save_to_disk, and give that folder"
        )
    parquet = optional_import("pyarrow.parquet", extra=EXTRA)
    tables = {name: [parquet.ParquetFile(file).read() for file in files] for name, files in groups.items()}
    return {
        name: library.concatenate_datasets([library.Dataset(table) for table in some]) for name, some in tables.items()
    }


def choose_splits(
    parts: dict[str, Any], splits: tuple[str, str] | None, folder: Path
) -> tuple[tuple[str, Any], tuple[str, Any]]:
    """Return the training and the test split with their names."""
    if splits is not None:
        for name in splits:
            if name not in parts:
                raise RecipeError(f"data.splits: {folder} has no split {name!r}; {suggest(name, list(parts))}")
        return (splits[0], parts[splits[0]]), (splits[1], parts[splits[1]])
    if len(parts) == 1:
        (whole,) = parts.values()
        order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(derive_seed(0, "arrays"))).tolist()
        count = round(len(whole) * HELD_OUT)
        return ("train", whole.select(sorted(order[count:]))), ("held out", whole.select(sorted(order[:count])))
    test = next((name for name in TEST_SPLITS if name in parts), None)
    if "train" not in parts or test is None:
        raise RecipeError(f"{folder} has the splits {', '.join(parts)}. Name training and test split in data.splits")
    return ("train", parts["train"]), (test, parts[test])


def limit_samples(train: Any, test: Any, limit: int | None, test_limit: int | None) -> tuple[Any, Any]:
    """Return the first samples of both splits."""
    counts = [limited_count(len(part), value) for part, value in ((train, limit), (test, test_limit))]
    return train.select(range(counts[0])), test.select(range(counts[1]))


def find_label(part: Any, label: str | None, folder: Path) -> str:
    """Return the column of the labels: the named one, or the only one that it can be."""
    library = datasets_library()
    if label is not None:
        return _check_column(part, label, "label", folder)
    classes = [name for name, kind in part.features.items() if isinstance(kind, library.ClassLabel)]
    found = next((name for name in ("label", "labels") if name in part.features), None)
    found = found or (classes[0] if len(classes) == 1 else None)
    if found is None:
        raise RecipeError(f"{folder} has the columns {', '.join(part.features)}. Name that of the labels in data.label")
    return found


def find_inputs(part: Any, columns: tuple[str, ...] | None, label: str, folder: Path) -> tuple[str, ...]:
    """Return the columns of the inputs: one text, a pair of texts, or an image."""
    if columns is not None:
        found = tuple(_check_column(part, name, "columns", folder) for name in columns)
    else:
        images = [name for name in part.features if is_image(part, name)]
        found = tuple(images or [name for name in part.features if _is_text(part, name) and name != label])
    are_texts = all(_is_text(part, name) for name in found) and 1 <= len(found) <= 2
    if not are_texts and not (len(found) == 1 and is_image(part, found[0])):
        kinds = ", ".join(f"{name} ({type(kind).__name__})" for name, kind in part.features.items())
        raise RecipeError(
            f"{folder} has the columns {kinds}. Name the inputs in data.columns: one text, two texts, or one image"
        )
    return found


def check_test_columns(train: Any, test: Any, columns: Sequence[str], label: str, *, split: str, folder: Path) -> None:
    """Raise DataError if the test split lacks the label or an input, or has inputs of another kind."""
    where = f"{folder}: the test split {split!r}"
    for name in (*columns, label):
        if name not in test.features:
            raise DataError(
                f"{where} has no column {name!r}, but the training split has one. Its columns are "
                f"{', '.join(test.features)}. Name a split that has it in data.splits, or other columns in data.label "
                "or data.columns"
            )
    for name in columns:
        if is_image(train, name) != is_image(test, name) or _is_text(train, name) != _is_text(test, name):
            raise DataError(
                f"{where} has a column {name!r} of type {test.features[name]}. Expected: {train.features[name]}, as in "
                "the training split"
            )


def _check_column(part: Any, name: str, key: str, folder: Path) -> str:
    if name not in part.features:
        raise RecipeError(f"data.{key}: {folder} has no column {name!r}; {suggest(name, list(part.features))}")
    return name


def is_image(part: Any, name: str) -> bool:
    """Return whether a column contains images."""
    return isinstance(part.features[name], datasets_library().Image)


def _is_text(part: Any, name: str) -> bool:
    return getattr(part.features[name], "dtype", None) in ("string", "large_string", "string_view")


def class_names(part: Any, label: str, folder: Path) -> list[str]:
    """Return the names of the classes: those of a ClassLabel, the distinct texts, or the numbers from 0.

    `part` is the whole training split, so that the classes do not depend on `limit`.
    """
    kind = part.features[label]
    if isinstance(kind, datasets_library().ClassLabel):
        return list(kind.names)
    values = _distinct(part, label)
    if _is_text(part, label):
        return sorted(str(value) for value in values if value is not None)
    count = max((int(value) for value in values if isinstance(value, int)), default=0) + 1
    if count > MAX_CLASSES:
        raise DataError(
            f"{folder} has the label {count - 1:,} in the column {label!r}. Expected: class numbers from 0 to "
            f"{MAX_CLASSES - 1:,}. Name the column of the classes in data.label"
        )
    return [str(number) for number in range(count)]


def _distinct(part: Any, name: str) -> set[Any]:
    """Return the distinct values of a column, of which only a part is in memory at once."""
    batches = part.select_columns([name]).with_format("arrow").iter(ROWS_AT_ONCE)
    return {value for batch in batches for value in batch.column(0).unique().to_pylist()}


def to_labels(part: Any, label: str, names: Sequence[str], *, split: str, folder: Path) -> Tensor:
    """Return the class numbers of a split."""
    values = _read_labels(part, label, names)
    positions = {name: number for number, name in enumerate(names)}
    numbers = [positions.get(value) if isinstance(value, str) else value for value in values]
    wrong = [i for i, number in enumerate(numbers) if not isinstance(number, int) or not 0 <= number < len(names)]
    if wrong:
        shown = ", ".join(map(repr, names[:MAX_SHOWN])) + (", ..." if len(names) > MAX_SHOWN else "")
        raise DataError(
            f"{folder}: sample {wrong[0]} has the label {values[wrong[0]]!r} in the column {label!r} of the split "
            f"{split!r}. Expected: one of the {len(names)} classes of the training split ({shown}). A split without "
            "labels has -1; name others in data.splits"
        )
    return torch.tensor(numbers, dtype=torch.int64)


def _read_labels(part: Any, label: str, names: Sequence[str]) -> list[Any]:
    """Return the labels of a split; the numbers of a ClassLabel become names if its names are not those of training."""
    values, own = list(part[label]), list(getattr(part.features[label], "names", None) or ())
    if not own or own == list(names) or any(each == list(map(str, range(len(each)))) for each in (own, list(names))):
        return values
    return [own[value] if isinstance(value, int) and 0 <= value < len(own) else value for value in values]


def datasets_library() -> Any:
    """Return the package datasets."""
    return optional_import("datasets", extra=EXTRA)
