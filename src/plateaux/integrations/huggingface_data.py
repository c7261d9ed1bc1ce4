"""Data sets of Hugging Face `datasets` as `hf:PATH_OR_ID`: texts, pairs of texts, or images, with a class label.

A folder is one that `save_to_disk` wrote, or one of parquet files whose names start with their split. It is read as
data: no script is run, and no file outside of the folder is opened.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plateaux.core.errors import DataError, PlateauxError, RecipeError, first_line, suggest
from plateaux.core.hub_access import NO_HUB_ACCESS, PREFIX, HubAccess
from plateaux.core.optional import optional_import
from plateaux.core.ranges import Count
from plateaux.core.registry import dataset
from plateaux.core.types import derive_seed
from plateaux.data.files import data_root, limited_count
from plateaux.data.images import decode_image
from plateaux.data.preprocessing import ImageSize, Preprocessing, Tokenizer
from plateaux.data.sources import DatasetSource, DataSplits, InMemorySource
from plateaux.data.tokenizer_files import read_tokenizer
from plateaux.integrations.huggingface_files import EXTRA, find_folder, local_folder, read_json
from plateaux.integrations.huggingface_processors import (
    ImageProcessor,
    has_image_processor,
    read_image_processor,
    read_tokenizer_folder,
)

TEST_SPLITS = ("test", "validation", "val", "dev")  # the first that exists
HELD_OUT = 0.2  # of a data set with one split
TOKENIZED_AT_ONCE = 1024  # texts; encodings take a hundred times the memory of token ids


@dataset(prefix=PREFIX)
def hf_dataset(
    name: str,
    *,
    columns: tuple[str, ...] | None = None,
    label: str | None = None,
    splits: tuple[str, str] | None = None,
    length: Count = 128,
    vocabulary: str | None = None,
    image_processor: str | None = None,
    root: str | None = None,
    limit: Count | None = None,
    test_limit: Count | None = None,
    hub_access: HubAccess = NO_HUB_ACCESS,
) -> DataSplits:
    """A data set of Hugging Face datasets, from a folder that save_to_disk wrote or a hub id.

    `columns` are the inputs: one image, one text, or a pair of texts; by default the only columns of their kind.
    `splits` are training and test; without a test split, a fifth of the samples is held out. Texts have `length` tokens
    of the tokenizer in `vocabulary`, a folder or a file; images are prepared as the folder `image_processor` says. Both
    are by default those of a model `hf:...`; without an image processor, images keep their size.
    """
    folder = find_folder(name, "dataset", download=hub_access.download, root=root)
    train, test = _limited(*_split(_read(folder), splits, folder), limit, test_limit)
    label = _label_column(train, label, folder)
    columns = _input_columns(train, columns, label, folder)
    names = _class_names(train, label)
    made = _images if _is_image(train, columns[0]) else _texts
    labels = [_to_labels(part, label, names, folder) for part in (train, test)]
    processors = _Processors(length, vocabulary, image_processor, root, hub_access)
    return made(folder.name, [train, test], labels, columns, names, processors)


@dataclass(frozen=True, slots=True)
class _Processors:
    """The options that say where the tokenizer or the image processor is."""

    length: int
    vocabulary: str | None
    image_processor: str | None
    root: str | None
    access: HubAccess

    def tokenizer(self, texts: tuple[str, ...]) -> Tokenizer:
        name = self.vocabulary or self.access.model
        if name is None:
            raise RecipeError(
                "data.vocabulary is not set, and the model has no tokenizer. Expected: the folder of a tokenizer, a "
                "text file with one WordPiece token per line, or the tokenizer.json of an ALBERT"
            )
        name = name.removeprefix(PREFIX)
        file = next((place for place in (Path(name), data_root(self.root) / name) if place.is_file()), None)
        if file is not None:
            found = read_tokenizer(file, self.length)
            return replace(found, texts=texts)
        return read_tokenizer_folder(self._folder(name), self.length, texts)

    def images(self) -> ImageProcessor | None:
        name = self.image_processor or self.access.model
        if name is None:
            return None
        folder = self._folder(name.removeprefix(PREFIX))
        if self.image_processor is None and not has_image_processor(folder):
            return None
        return read_image_processor(folder)

    def _folder(self, name: str) -> Path:
        root = self.root if local_folder(name) is None else None
        return find_folder(name, "model", download=self.access.download, root=root)


def _texts(
    name: str,
    parts: Sequence[Any],
    labels: Sequence[Tensor],
    columns: tuple[str, ...],
    names: Sequence[str],
    processors: _Processors,
) -> DataSplits:
    tokenizer = processors.tokenizer(columns)
    sources = [InMemorySource(_tokenize(part, columns, tokenizer), y) for part, y in zip(parts, labels, strict=True)]
    return DataSplits(
        name,
        *sources,
        classes=len(names),
        shape=(processors.length,),
        labels=tuple(names),
        preprocessing=Preprocessing(tokenizer=tokenizer),
    )


def _tokenize(part: Any, columns: tuple[str, ...], tokenizer: Tokenizer) -> dict[str, Tensor]:
    batches: dict[str, list[Tensor]] = {name: [] for name in tokenizer.outputs}
    for start in range(0, max(len(part), 1), TOKENIZED_AT_ONCE):
        rows = part[start : start + TOKENIZED_AT_ONCE]
        for column in columns:
            empty = [start + i for i, text in enumerate(rows[column]) if text is None]
            if empty:
                raise DataError(f"Sample {empty[0]} has no text in the column {column!r}. Remove such samples")
        texts = list(zip(*(rows[column] for column in columns), strict=True))
        for name, values in tokenizer.encode(texts).items() if texts else ():
            batches[name].append(torch.from_numpy(values))
    empty_rows = torch.zeros(0, tokenizer.length, dtype=torch.int64)
    return {name: torch.cat(values) if values else empty_rows for name, values in batches.items()}


class ImageTable:
    """A map-style data set of images in a column of encoded files, decoded by Pillow on access."""

    def __init__(
        self, table: Any, column: str, labels: Tensor, *, size: ImageSize | None, channels: int, fingerprint: str
    ) -> None:
        self.table, self.column, self.labels = table, column, labels
        self.size, self.channels, self.digest = size, channels, fingerprint

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        content = encoded_image(self.table, self.column, i)
        pixels = decode_image(content, size=self.size, channels=self.channels, name=f"Image {i}")
        return torch.from_numpy(pixels), int(self.labels[i])

    def fingerprint(self) -> str:
        return self.digest


def encoded_image(table: Any, column: str, i: int) -> bytes:
    """Return the content of an image file in a column; a path is not opened, because it may lead anywhere."""
    content = (table[i][column] or {}).get("bytes")
    if not isinstance(content, bytes):
        raise DataError(
            f"Sample {i} of the column {column!r} contains no image, but at most a path, which is not opened. Save the "
            "data set with save_to_disk, which stores the images"
        )
    return content


def _images(
    name: str,
    parts: Sequence[Any],
    labels: Sequence[Tensor],
    columns: tuple[str, ...],
    names: Sequence[str],
    processors: _Processors,
) -> DataSplits:
    library, processor = _library(), processors.images()
    tables = [part.cast_column(columns[0], library.Image(decode=False)) for part in parts]
    first = encoded_image(tables[0], columns[0], 0)
    channels = 3 if processor is not None else _count_channels(first)
    size = None if processor is None else processor.size
    shape = decode_image(first, size=size, channels=channels, name="Image 0").shape
    sources = [
        DatasetSource(
            ImageTable(
                table, columns[0], y, size=size, channels=channels,
                fingerprint=_fingerprint(part, columns[0], y, size, channels),
            ),
            name=f"{name}.{split}",
            classes=len(names),
        )
        for table, part, y, split in zip(tables, parts, labels, ("train", "test"), strict=True)
    ]  # fmt: skip
    return DataSplits(
        name,
        *sources,
        classes=len(names),
        shape=tuple(shape),
        mean=() if processor is None else processor.mean,
        std=() if processor is None else processor.std,
        labels=tuple(names),
        preprocessing=Preprocessing(resize=size),
    )


def _count_channels(content: bytes) -> int:
    """Return 1 for a grayscale image, else 3."""
    decode_image(content, name="Image 0")  # fails on a damaged or too large file
    with optional_import("PIL.Image", extra=EXTRA).open(io.BytesIO(content)) as image:
        return 1 if image.mode in ("1", "L", "I", "I;16") else 3


def _fingerprint(part: Any, column: str, labels: Tensor, size: ImageSize | None, channels: int) -> str:
    digest = blake2b(f"{part._fingerprint} {column} {size} {channels}".encode(), digest_size=8)
    digest.update(labels.numpy().tobytes())
    return digest.hexdigest()


def _read(folder: Path) -> dict[str, Any]:
    """Return the splits of a folder; the key of a data set without splits is empty."""
    library = _library()
    try:
        if (folder / "dataset_dict.json").is_file():
            names = read_json(folder / "dataset_dict.json").get("splits")
            if not isinstance(names, list) or not all(isinstance(n, str) and Path(n).name == n for n in names):
                raise DataError(f"{folder / 'dataset_dict.json'} names splits that are no folders in it")
            return {name: _read_split(library, folder / name) for name in names}
        if (folder / "state.json").is_file():
            return {"": _read_split(library, folder)}
        return _read_parquet(library, folder)
    except PlateauxError:
        raise
    except Exception as error:  # files of somebody else may be wrong in any way
        raise DataError(
            f"{folder} cannot be read as a data set ({type(error).__name__}: {first_line(error)}). Expected: a folder "
            "that save_to_disk wrote"
        ) from error


def _read_split(library: Any, folder: Path) -> Any:
    files = read_json(folder / "state.json").get("_data_files")
    names = [each.get("filename") if isinstance(each, dict) else None for each in files or ()]
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
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


def _split(parts: dict[str, Any], splits: tuple[str, str] | None, folder: Path) -> tuple[Any, Any]:
    if splits is not None:
        for name in splits:
            if name not in parts:
                raise RecipeError(f"data.splits: {folder} has no split {name!r}; {suggest(name, list(parts))}")
        return parts[splits[0]], parts[splits[1]]
    if len(parts) == 1:
        (whole,) = parts.values()
        order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(derive_seed(0, "hf"))).tolist()
        count = round(len(whole) * HELD_OUT)
        return whole.select(sorted(order[count:])), whole.select(sorted(order[:count]))
    test = next((name for name in TEST_SPLITS if name in parts), None)
    if "train" not in parts or test is None:
        raise RecipeError(f"{folder} has the splits {', '.join(parts)}. Name training and test split in data.splits")
    return parts["train"], parts[test]


def _limited(train: Any, test: Any, limit: int | None, test_limit: int | None) -> tuple[Any, Any]:
    counts = [limited_count(len(part), value) for part, value in ((train, limit), (test, test_limit))]
    return train.select(range(counts[0])), test.select(range(counts[1]))


def _label_column(part: Any, label: str | None, folder: Path) -> str:
    library = _library()
    if label is not None:
        return _check_column(part, label, "label", folder)
    classes = [name for name, kind in part.features.items() if isinstance(kind, library.ClassLabel)]
    found = next((name for name in ("label", "labels") if name in part.features), None)
    found = found or (classes[0] if len(classes) == 1 else None)
    if found is None:
        raise RecipeError(f"{folder} has the columns {', '.join(part.features)}. Name that of the labels in data.label")
    return found


def _input_columns(part: Any, columns: tuple[str, ...] | None, label: str, folder: Path) -> tuple[str, ...]:
    if columns is not None:
        found = tuple(_check_column(part, name, "columns", folder) for name in columns)
    else:
        images = [name for name in part.features if _is_image(part, name)]
        found = tuple(images or [name for name in part.features if _is_text(part, name) and name != label])
    are_texts = all(_is_text(part, name) for name in found) and 1 <= len(found) <= 2
    if not are_texts and not (len(found) == 1 and _is_image(part, found[0])):
        kinds = ", ".join(f"{name} ({type(kind).__name__})" for name, kind in part.features.items())
        raise RecipeError(
            f"{folder} has the columns {kinds}. Name the inputs in data.columns: one text, two texts, or one image"
        )
    return found


def _check_column(part: Any, name: str, key: str, folder: Path) -> str:
    if name not in part.features:
        raise RecipeError(f"data.{key}: {folder} has no column {name!r}; {suggest(name, list(part.features))}")
    return name


def _is_image(part: Any, name: str) -> bool:
    return isinstance(part.features[name], _library().Image)


def _is_text(part: Any, name: str) -> bool:
    return getattr(part.features[name], "dtype", None) in ("string", "large_string", "string_view")


def _class_names(part: Any, label: str) -> list[str]:
    """Return the names of the classes: those of a ClassLabel, the distinct texts, or the numbers from 0."""
    kind, values = part.features[label], part[label]
    if isinstance(kind, _library().ClassLabel):
        return list(kind.names)
    if _is_text(part, label):
        return sorted({str(value) for value in values})
    numbers = [int(value) for value in values if isinstance(value, int)]
    return [str(number) for number in range(max(numbers, default=0) + 1)]


def _to_labels(part: Any, label: str, names: Sequence[str], folder: Path) -> Tensor:
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


def _library() -> Any:
    optional_import("transformers", extra=EXTRA)  # first, with the workaround for torchvision
    return optional_import("datasets", extra=EXTRA)
