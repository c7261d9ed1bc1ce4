"""The splits, columns, and labels of data sets that `datasets` wrote, and of folders of parquet files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plateaux.core.errors import DataError, PlateauxError, RecipeError, first_line, suggest
from plateaux.core.optional import optional_import
from plateaux.core.types import derive_seed
from plateaux.data.files import limited_count
from plateaux.integrations.huggingface_files import EXTRA, is_plain_name, read_json

TEST_SPLITS = ("test", "validation", "val", "dev")  # the first that exists
HELD_OUT = 0.2  # of a data set with one split


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


def choose_splits(parts: dict[str, Any], splits: tuple[str, str] | None, folder: Path) -> tuple[Any, Any]:
    """Return the training and the test split."""
    if splits is not None:
        for name in splits:
            if name not in parts:
                raise RecipeError(f"data.splits: {folder} has no split {name!r}; {suggest(name, list(parts))}")
        return parts[splits[0]], parts[splits[1]]
    if len(parts) == 1:
        (whole,) = parts.values()
        order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(derive_seed(0, "arrays"))).tolist()
        count = round(len(whole) * HELD_OUT)
        return whole.select(sorted(order[count:])), whole.select(sorted(order[:count]))
    test = next((name for name in TEST_SPLITS if name in parts), None)
    if "train" not in parts or test is None:
        raise RecipeError(f"{folder} has the splits {', '.join(parts)}. Name training and test split in data.splits")
    return parts["train"], parts[test]


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


def _check_column(part: Any, name: str, key: str, folder: Path) -> str:
    if name not in part.features:
        raise RecipeError(f"data.{key}: {folder} has no column {name!r}; {suggest(name, list(part.features))}")
    return name


def is_image(part: Any, name: str) -> bool:
    """Return whether a column contains images."""
    return isinstance(part.features[name], datasets_library().Image)


def _is_text(part: Any, name: str) -> bool:
    return getattr(part.features[name], "dtype", None) in ("string", "large_string", "string_view")


def class_names(part: Any, label: str) -> list[str]:
    """Return the names of the classes: those of a ClassLabel, the distinct texts, or the numbers from 0."""
    kind, values = part.features[label], part[label]
    if isinstance(kind, datasets_library().ClassLabel):
        return list(kind.names)
    if _is_text(part, label):
        return sorted({str(value) for value in values})
    numbers = [int(value) for value in values if isinstance(value, int)]
    return [str(number) for number in range(max(numbers, default=0) + 1)]


def to_labels(part: Any, label: str, names: Sequence[str], folder: Path) -> Tensor:
    """Return the class numbers of a split."""
    values = list(part[label])
    if _is_text(part, label):
        positions = {name: number for number, name in enumerate(names)}
        values = [positions.get(value, -1) for value in values]
    wrong = [i for i, value in enumerate(values) if not isinstance(value, int) or not 0 <= value < len(names)]
    if wrong:
        raise DataError(
            f"{folder}: sample {wrong[0]} has the label {values[wrong[0]]!r} in the column {label!r}. Expected: one of "
            f"{len(names)} classes. A split without labels has -1; name others in data.splits"
        )
    return torch.tensor(values, dtype=torch.int64)


def datasets_library() -> Any:
    """Return the package datasets."""
    optional_import("transformers", extra=EXTRA)  # first, with the workaround for torchvision
    return optional_import("datasets", extra=EXTRA)
