"""Images by path: a folder that is searched for images, or a text file that lists them.

A list has one image per line, `path` or `path label` as in the lists of OpenOOD. Paths are relative to the folder of
the list, to the data root, or to the folders of OpenOOD below it; they cannot lead out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from plateaux.core.errors import DataError
from plateaux.core.registry import HUB_PREFIX
from plateaux.data.files import ImageFiles, data_path, data_root, limited_count, read_lines, try_read
from plateaux.data.images import SUFFIXES
from plateaux.data.sources import DatasetSource

LISTS = (".txt", ".lst")
OPENOOD_FOLDERS = ("images_largescale", "images_classic")


def is_image_path(name: str) -> bool:
    """Return whether a name means a folder or a list of images, and not a registered data set.

    >>> is_image_path("./photos"), is_image_path("lists/test.txt"), is_image_path("mnist"), is_image_path("hf:./photos")
    (True, True, False, False)
    """
    return not name.startswith(HUB_PREFIX) and ("/" in name or name.endswith(LISTS) or name in (".", ".."))


def open_images(
    path: str, *, size: int, channels: int = 3, root: str | None = None, limit: int | None = None
) -> DatasetSource:
    """Return the images of a folder, or of a list, in the order of their names or of the list. Their label is 0."""
    place = find_place(path, root)
    if place.is_dir():
        folder, names = place, find_images(place)
        if not names:
            raise no_images_error(place)
    else:
        names = [_listed_name(line) for line in list_lines(place)]
        folder = folder_of_list(place, names, root)
    names = names[: limited_count(len(names), limit)]
    return DatasetSource(ImageFiles(folder, names, [0] * len(names), size=size, channels=channels), name=place.name)


def find_place(path: str, root: str | None) -> Path:
    """Return the folder or the list: `path` in the data root, or in the current folder."""
    for place in (data_path(path, root), Path(path).expanduser()):
        if place.is_dir() or place.is_file():
            return place.absolute()
    raise DataError(
        f"{path} was not found in {str(data_root(root).absolute())!r} nor in the current folder. Expected: a "
        "folder of images, or a text file with one image per line"
    )


def find_images(folder: Path) -> list[str]:
    """Return the images below a folder, sorted by name; links to other folders are not followed."""
    return sorted(
        file.relative_to(folder).as_posix()
        for file in folder.rglob("*")
        if file.suffix.lower() in SUFFIXES and file.is_file()
    )


def no_images_error(place: Path) -> DataError:
    """Build the error for a folder without images."""
    return DataError(f"{place} contains no images. Supported suffixes: {', '.join(sorted(SUFFIXES))}")


def list_lines(file: Path) -> list[str]:
    """Return the lines of a list."""
    lines: list[str] = try_read(file, read_lines)
    if not lines:
        raise DataError(f"{file} is empty. Expected: one image per line, `path` or `path label`")
    return lines


def folder_of_list(file: Path, names: Sequence[str], root: str | None) -> Path:
    """Return the folder that the paths in a list are relative to, after checking that the paths stay below it."""
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise DataError(f"{file} lists {name[:200]!r}. Expected: paths below one folder, without ..")
    base = data_root(root)
    places = (file.parent, base, *(base / name for name in OPENOOD_FOLDERS))
    for place in places:
        if (place / names[0]).is_file():
            return place.absolute()
    raise DataError(
        f"{file} lists {names[0]!r}, which is in none of {', '.join(str(place) for place in dict.fromkeys(places))}. "
        "Unpack the images there, or set PLATEAUX_DATA to the folder that contains them"
    )


def _listed_name(line: str) -> str:
    name, _, label = line.rpartition(" ")
    return name if name and label.lstrip("-").isdigit() else line
