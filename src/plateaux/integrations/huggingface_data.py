"""Data sets of Hugging Face `datasets` as `hf:PATH_OR_ID`: texts, pairs of texts, or images, with a class label.

A folder is one that `save_to_disk` wrote, or one of parquet files whose names start with their split. It is read as
data: no script is run, and no file outside of the folder is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plateaux.core.errors import DataError, RecipeError
from plateaux.core.ranges import Count
from plateaux.core.registry import HUB_PREFIX, NO_HUB_ACCESS, HubAccess, dataset
from plateaux.data.files import data_root
from plateaux.data.images import decode_image, has_color
from plateaux.data.preprocessing import ImageSize, Preprocessing, Tokenizer
from plateaux.data.samples import sample_ids
from plateaux.data.sources import DatasetSource, DataSplits, InMemorySource
from plateaux.data.tokenizer_files import read_tokenizer
from plateaux.integrations.huggingface_files import find_folder, local_folder
from plateaux.integrations.huggingface_processors import (
    ImageProcessor,
    has_image_processor,
    read_image_processor,
    read_tokenizer_folder,
)
from plateaux.integrations.huggingface_tables import (
    check_test_columns,
    choose_splits,
    class_names,
    datasets_library,
    find_inputs,
    find_label,
    is_image,
    limit_samples,
    read_splits,
    to_labels,
)

TOKENIZED_AT_ONCE = 1024  # texts; encodings take a hundred times the memory of token ids
IMAGES_LOOKED_AT = 256  # per split, to find out whether the images have color


@dataset(prefix="hf:")
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
    (train_split, train), (test_split, test) = choose_splits(read_splits(folder), splits, folder)
    label = find_label(train, label, folder)
    columns = find_inputs(train, columns, label, folder)
    check_test_columns(train, test, columns, label, split=test_split, folder=folder)
    names = class_names(train, label, folder)
    parts = limit_samples(train, test, limit, test_limit)
    labels = [
        to_labels(part, label, names, split=split, folder=folder)
        for part, split in zip(parts, (train_split, test_split), strict=True)
    ]
    processors = _Processors(length, vocabulary, image_processor, root, hub_access)
    if is_image(train, columns[0]):
        return _images(folder.name, parts, labels, columns[0], names, processors, whole=(train, test))
    return _texts(folder.name, parts, labels, columns, names, processors)


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
        name = name.removeprefix(HUB_PREFIX)
        file = next((place for place in (Path(name), data_root(self.root) / name) if place.is_file()), None)
        if file is not None:
            found = read_tokenizer(file, self.length)
            return replace(found, texts=texts)
        return read_tokenizer_folder(self._folder(name), self.length, texts)

    def images(self) -> ImageProcessor | None:
        name = self.image_processor or self.access.model
        if name is None:
            return None
        folder = self._folder(name.removeprefix(HUB_PREFIX))
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
    train, test = [
        InMemorySource(_tokenize(part, columns, tokenizer), y) for part, y in zip(parts, labels, strict=True)
    ]
    return DataSplits(
        name,
        train=train,
        test=test,
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
        if self.channels == 1 and has_color(content, name=f"Image {i}"):
            raise DataError(
                f"Image {i} of the column {self.column!r} is in color, but the images that were looked at first are "
                "grayscale. Expected: images of one kind. Convert all to RGB before saving the data set: "
                f"dataset.map(lambda row: {{{self.column!r}: row[{self.column!r}].convert('RGB')}})"
            )
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
    column: str,
    names: Sequence[str],
    processors: _Processors,
    *,
    whole: Sequence[Any],
) -> DataSplits:
    """Return the images of both splits; `whole` are the splits before `limit`, which does not change the channels."""
    encoded, processor = datasets_library().Image(decode=False), processors.images()
    tables = [part.cast_column(column, encoded) for part in parts]
    all_images = [part.cast_column(column, encoded) for part in whole]
    channels = 3 if processor is not None else _count_channels(all_images, column)
    size = None if processor is None else processor.size
    first = encoded_image(tables[0], column, 0)
    shape = decode_image(first, size=size, channels=channels, name="Image 0").shape
    train, test = [
        DatasetSource(
            ImageTable(
                table, column, y, size=size, channels=channels,
                fingerprint=_fingerprint(part, column, y, size, channels),
            ),
            name=f"{name}.{split}",
            classes=len(names),
        )
        for table, part, y, split in zip(tables, parts, labels, ("train", "test"), strict=True)
    ]  # fmt: skip
    return DataSplits(
        name,
        train=train,
        test=test,
        classes=len(names),
        shape=tuple(shape),
        mean=() if processor is None else processor.mean,
        std=() if processor is None else processor.std,
        labels=tuple(names),
        preprocessing=Preprocessing(resize=size),
    )


def _count_channels(tables: Sequence[Any], column: str) -> int:
    """Return 3 if an image in a sample of each split has color, else 1."""
    is_color = any(
        has_color(encoded_image(table, column, i), name=f"Image {i}")
        for table in tables
        for i in sample_ids(len(table), IMAGES_LOOKED_AT).tolist()
    )
    return 3 if is_color else 1


def _fingerprint(part: Any, column: str, labels: Tensor, size: ImageSize | None, channels: int) -> str:
    digest = blake2b(f"{part._fingerprint} {column} {size} {channels}".encode(), digest_size=8)
    digest.update(labels.numpy().tobytes())
    return digest.hexdigest()
