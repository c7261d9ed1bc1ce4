"""Labeled images for a run: a folder with one subfolder per class, a list with labels, or another data set.

Labels become the class numbers of the run, by the names of its classes. A list has one image per line, `path label`;
its labels are all names of classes, or all class numbers, as in the lists of OpenOOD.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from plateaux.core.errors import DataError
from plateaux.core.types import Inputs
from plateaux.data.files import ImageFiles, interleave_classes
from plateaux.data.image_paths import find_images, find_place, folder_of_list, list_lines, no_images_error
from plateaux.data.images import SUFFIXES
from plateaux.data.sources import DatasetSource, Source

SHOWN = 5  # names in a message


@dataclass(frozen=True, slots=True)
class LabeledImages:
    """Images whose labels are class numbers of a run."""

    source: Source
    classes: tuple[int, ...]  # the classes of the set, ascending; an empty class folder counts


class RelabeledSource(Source):
    """The samples of another data set, with the class numbers of a run as labels."""

    def __init__(self, inner: Source, numbers: Sequence[int]) -> None:
        self.inner, self.numbers = inner, torch.tensor(numbers)  # by label of the other data set

    def __len__(self) -> int:
        return len(self.inner)

    def fetch(self, ids: Tensor, *, seed: int | None = None) -> tuple[Inputs, Tensor]:
        x, y = self.inner.fetch(ids, seed=seed)
        return x, self.numbers.to(y.device)[y]

    def fingerprint(self) -> str:
        digest = blake2b(self.inner.fingerprint().encode(), digest_size=8)
        digest.update(self.numbers.numpy().tobytes())
        return digest.hexdigest()

    @property
    def has_content_hash(self) -> bool:
        return self.inner.has_content_hash


def open_labeled_images(
    path: str, names: Sequence[str], *, size: int, channels: int = 3, root: str | None = None
) -> LabeledImages:
    """Return the images of class folders, or of a list with labels; `names` are the classes of the run in order.

    Images of class folders are interleaved over the classes, so that the first N of them are balanced.
    """
    place = find_place(path, root)
    if place.is_dir():
        folder = place
        files, labels, classes = _read_folders(place, names)
    else:
        files, labels = _read_list(place, names)
        folder, classes = folder_of_list(place, files, root), sorted(set(labels))
        if missing := [name for name in files if not (folder / name).is_file()]:
            raise DataError(
                f"{place} lists {len(missing):,} files that are missing in {folder}, such as {missing[0]!r}. Unpack "
                "them there, or remove their lines"
            )
    images = ImageFiles(folder, files, labels, size=size, channels=channels)
    return LabeledImages(DatasetSource(images, name=place.name), tuple(classes))


def class_numbers(found: Sequence[str], names: Sequence[str], place: object) -> list[int]:
    """Return the class numbers of a run for names of classes; a name that is unknown or not unique is an error."""
    numbers = {name: number for number, name in enumerate(names)}
    unknown = [name for name in dict.fromkeys(found) if name not in numbers]
    if unknown:
        raise DataError(
            f"{place} has {len(unknown):,} of {len(set(found)):,} classes that are not classes of this run: "
            f"{_shown(unknown)}. The run has {len(names):,} classes: {_shown(names)}. Rename or remove the former, "
            "or use these images as an out-of-distribution set (--ood far=...)"
        )
    if len(numbers) < len(names) and (twice := [name for name in dict.fromkeys(found) if names.count(name) > 1]):
        raise DataError(
            f"{place}: several classes of this run are called {_shown(twice)}, so labels by name are ambiguous. Use a "
            "list with class numbers: one `path number` per line"
        )
    return [numbers[name] for name in found]


def _read_folders(place: Path, names: Sequence[str]) -> tuple[list[str], list[int], list[int]]:
    """Return the images below class folders, their class numbers, and the numbers of all class folders."""
    folders = sorted(entry for entry in place.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if links := [entry.name for entry in folders if entry.is_symlink()]:
        raise DataError(
            f"{place} has class folders that are links, which are not followed: {_shown(links)}. Copy the images, or "
            "write a list with one `path label` per line"
        )
    if not folders:
        if not find_images(place):
            raise no_images_error(place)
        raise DataError(
            f"{place} has images but no class folders, so the images have no labels. Expected: one folder per class, "
            "with the name of the class. Without labels, use the images as an out-of-distribution set (--ood far=...)"
        )
    by_number = sorted(zip(class_numbers([entry.name for entry in folders], names, place), folders, strict=True))
    groups = [[f"{folder.name}/{image}" for image in find_images(folder)] for _, folder in by_number]
    if not any(groups):
        raise no_images_error(place)
    classes = [number for number, _ in by_number]
    files, positions = interleave_classes(groups)
    return files, [classes[position] for position in positions], classes


def _read_list(file: Path, names: Sequence[str]) -> tuple[list[str], list[int]]:
    """Return the images of a list and their class numbers."""
    known = set(names)
    rows = [_split_label(line, known) for line in list_lines(file)]
    if bare := [name for name, label in rows if not label]:
        raise DataError(
            f"{file} lists {len(bare):,} images without a label, such as {bare[0]!r}. Expected: one `path label` per "
            "line. Without labels, use the images as an out-of-distribution set (--ood far=...)"
        )
    labels = [label for _, label in rows]
    if not known.issuperset(labels) and all(
        label.isdecimal() and len(label) < 10 and int(label) < len(names) for label in labels
    ):
        numbers = [int(label) for label in labels]
    else:
        numbers = class_numbers(labels, names, file)
    return [name for name, _ in rows], numbers


def _split_label(line: str, known: set[str]) -> tuple[str, str]:
    """Return path and label; the longest name of a class at the end of the line counts, because names have spaces.

    >>> _split_label("a b/1.png great white shark", {"shark", "great white shark"})
    ('a b/1.png', 'great white shark')
    >>> _split_label("a b/1.png 7", {"shark"}), _split_label("a b/1.png", {"shark"})
    (('a b/1.png', '7'), ('a b/1.png', ''))
    """
    words = line.split(" ")
    for start in range(1, len(words)):
        if (label := " ".join(words[start:])) in known:
            return " ".join(words[:start]), label
    name, _, label = line.rpartition(" ")
    return (name, label) if name and Path(label).suffix.lower() not in SUFFIXES else (line, "")


def _shown(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:SHOWN])) + (", ..." if len(names) > SHOWN else "")
