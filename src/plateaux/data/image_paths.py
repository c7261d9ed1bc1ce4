"""Images by path: a folder that is searched for images, or a text file that lists them.

A list has one image per line, `path` or `path label` as in the lists of OpenOOD. Paths are relative to the folder of
the list, to the data root, or to the folders of OpenOOD below it; they cannot lead out of it.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from plateaux.core.errors import DataError
from plateaux.data.files import ImageFiles, data_path, data_root, limited_count, read_lines
from plateaux.data.images import SUFFIXES
from plateaux.data.sources import DatasetSource

LISTS = (".txt", ".lst")
OPENOOD_FOLDERS = ("images_largescale", "images_classic")


def is_image_path(name: str) -> bool:
    """Return whether a name means a folder or a list of images, and not a registered data set.

    >>> is_image_path("./photos"), is_image_path("lists/test.txt"), is_image_path("mnist"), is_image_path("a.b:c")
    (True, True, False, False)
    """
    return "/" in name or name.endswith(LISTS) or name in (".", "..")


def open_images(
    path: str, *, size: int, channels: int = 3, root: str | None = None, limit: int | None = None
) -> DatasetSource:
    """Return the images of a folder, or of a list, in the order of their names or of the list. Their label is 0."""
    place = data_path(path, root)
    if place.is_dir():
        folder, names = place, sorted(_find_images(place))
        if not names:
            raise DataError(f"{place} contains no images. Supported suffixes: {', '.join(sorted(SUFFIXES))}")
    elif place.is_file():
        names = [_listed_name(line, place) for line in read_lines(place)]
        if not names:
            raise DataError(f"{place} is empty. Expected: one image per line, `path` or `path label`")
        folder = _folder_of_list(place, names[0], root)
    else:
        raise DataError(
            f"{path} was not found in {str(data_root(root).absolute())!r} nor in the current folder. Expected: a "
            "folder of images, or a text file with one image per line"
        )
    names = names[: limited_count(len(names), limit)]
    return DatasetSource(ImageFiles(folder, names, [0] * len(names), size=size, channels=channels), name=place.name)


def _find_images(folder: Path) -> list[str]:
    """Return the images below a folder; links to other folders are not followed."""
    return [
        file.relative_to(folder).as_posix()
        for file in folder.rglob("*")
        if file.suffix.lower() in SUFFIXES and file.is_file()
    ]


def _listed_name(line: str, file: Path) -> str:
    name, _, label = line.rpartition(" ")
    name = name if name and label.lstrip("-").isdigit() else line
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise DataError(f"{file} lists {name[:200]!r}. Expected: paths below one folder, without ..")
    return name


def _folder_of_list(file: Path, first: str, root: str | None) -> Path:
    base = data_root(root)
    places = (file.parent, base, *(base / name for name in OPENOOD_FOLDERS))
    for place in places:
        if (place / first).is_file():
            return place
    raise DataError(
        f"{file} lists {first!r}, which is in none of {', '.join(str(place) for place in dict.fromkeys(places))}. "
        "Unpack the images there, or set PLATEAUX_DATA to the folder that contains them"
    )
