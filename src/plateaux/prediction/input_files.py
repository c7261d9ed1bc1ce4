"""The inputs of a batch prediction: image files, folders, patterns, arrays, tables, and lines of text, local or by URL.

`list_inputs` names every input without reading its content. `InputReader` reads some of them; an input that cannot be
read is an error for its row only. Importing this module does not import torch.
"""

from __future__ import annotations

import csv
import glob
import io
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np

from plateaux.core.errors import DataError, RecipeError, first_line
from plateaux.core.imports import optional_import
from plateaux.data.images import SUFFIXES
from plateaux.prediction.contract import InputContract

ARRAYS, TABLES, TEXTS = (".npy", ".npz"), (".csv", ".tsv", ".parquet"), (".txt",)
ROW_FILES = (*ARRAYS, *TABLES, *TEXTS)
PATH_COLUMNS = ("path", "file", "image")  # of tables that list image files
OPEN_FILES = 4  # tables and arrays that a reader keeps in memory
MAX_CELL = 1 << 24  # characters of a cell in a CSV file
MAX_MISSING = 3  # columns that an error names
BOOLEANS = {"True": 1, "False": 0}  # as pandas writes columns of booleans


@dataclass(frozen=True, slots=True)
class InputRef:
    """One input: a file, or a row of a file."""

    file: str  # path or URL
    row: int | None = None
    problem: str | None = None  # why the file has no rows that can be read

    @property
    def name(self) -> str:
        """The name of the input in the output; rows are counted from 0."""
        return self.file if self.row is None else f"{self.file}[{self.row}]"


def list_inputs(inputs: Sequence[str], contract: InputContract, columns: Sequence[str] = ()) -> list[InputRef]:
    """Return the inputs that paths, folders, patterns, and URLs name: in the given order, those of a folder sorted."""
    refs: list[InputRef] = []
    reader = InputReader(contract, columns)
    for argument in inputs:
        for file in _expand(argument, contract):
            suffix = PurePosixPath(file).suffix.lower()
            if suffix not in ROW_FILES:
                refs.append(InputRef(file))
                continue
            try:
                refs += [InputRef(file, row) for row in range(reader.count_rows(file))]
            except DataError as error:
                refs.append(InputRef(file, problem=str(error)))
    if not refs:
        raise DataError(f"{', '.join(inputs)}: there are no inputs. Expected: at least one file or row")
    return refs


def _expand(argument: str, contract: InputContract) -> list[str]:
    """Return the files that one argument names."""
    wanted = SUFFIXES if contract.is_image else set(ROW_FILES)
    if "://" in argument:
        return _expand_url(argument, wanted)
    path = Path(argument).expanduser()
    if path.is_dir():
        found = sorted(str(file) for file in path.rglob("*") if file.suffix.lower() in wanted and file.is_file())
        if not found:
            raise DataError(f"{argument}: the folder contains no files that end in {', '.join(sorted(wanted))}")
        return found
    if path.exists():
        return [_check_file(str(path), contract)]
    found = sorted(file for file in glob.glob(str(path), recursive=True) if Path(file).is_file())
    if not found:
        kind = "no file matches the pattern" if glob.has_magic(str(path)) else "there is no such file or folder"
        raise DataError(f"{argument}: {kind}. Expected: files, folders, patterns, or URLs")
    return [_check_file(file, contract) for file in found]


def _expand_url(argument: str, wanted: set[str]) -> list[str]:
    try:
        files, path = _filesystem(argument)
        if glob.has_magic(path):
            found = files.glob(path)
        elif files.isdir(path):
            found = [file for file in files.find(path) if PurePosixPath(file).suffix.lower() in wanted]
        else:
            return [argument]
        return [files.unstrip_protocol(file) for file in sorted(found)]
    except RecipeError:
        raise
    except Exception as error:  # of the client of the file system
        raise DataError(f"{argument} cannot be listed: {type(error).__name__}: {first_line(error)}") from None


def _check_file(file: str, contract: InputContract) -> str:
    suffix = Path(file).suffix.lower()
    if not Path(file).is_file():
        raise DataError(f"{file} is not a file. Pipes and devices are not read: write their content to a file first")
    if suffix in ROW_FILES or (contract.is_image and suffix in SUFFIXES):
        return file
    allowed = [*ROW_FILES, *(sorted(SUFFIXES) if contract.is_image else [])]
    raise DataError(f"{file}: the inputs of this model are {contract.describe()}, from files {', '.join(allowed)}")


def _filesystem(url: str) -> tuple[Any, str]:
    files, path = optional_import("fsspec.core", extra="cloud").url_to_fs(url)
    return files, str(path)


def _read_bytes(file: str) -> bytes:
    if "://" in file:
        files, path = _filesystem(file)
        return bytes(files.cat_file(path))
    return Path(file).read_bytes()


class InputReader:
    """Reads inputs; the last tables and arrays stay open. Not for several threads."""

    def __init__(self, contract: InputContract, columns: Sequence[str] = ()) -> None:
        self.contract, self.columns = contract, tuple(columns)
        self._rows: OrderedDict[str, Sequence[Any]] = OrderedDict()

    def count_rows(self, file: str) -> int:
        """Return the number of rows of a table, an array, or a text file."""
        return len(self._open(file))

    def read(self, ref: InputRef) -> Any:
        """Return an input as `prepare` takes it. Raise DataError if it cannot be read."""
        if ref.problem is not None:
            raise DataError(ref.problem)
        if ref.row is not None:
            value = self._open(ref.file)[ref.row]
            return self._image_path(value, ref.file) if self.contract.is_image and isinstance(value, str) else value
        return _guard(ref.file, lambda: _read_bytes(ref.file)) if "://" in ref.file else Path(ref.file)

    def _image_path(self, path: str, table: str) -> Any:
        """Return the image file that a cell names, relative to the folder of the table."""
        if "://" in path:  # only what the user names is fetched, and a table may come from anyone
            raise DataError(f"The table names the URL {path[:200]!r}. Pass URLs as inputs of the command")
        if "://" in table:
            return _guard(path, lambda: _read_bytes(f"{table.rpartition('/')[0]}/{path}"))
        return Path(table).parent / path

    def _open(self, file: str) -> Sequence[Any]:
        if file not in self._rows:
            suffix = PurePosixPath(file).suffix.lower()
            self._rows[file] = _guard(file, lambda: self._load(file, suffix))
            while len(self._rows) > OPEN_FILES:
                self._rows.popitem(last=False)
        self._rows.move_to_end(file)
        return self._rows[file]

    def _load(self, file: str, suffix: str) -> Sequence[Any]:
        if suffix in TEXTS:
            return self._split_lines(_read_bytes(file).decode("utf-8").splitlines())
        if suffix in ARRAYS:
            return self._load_array(file, suffix)
        if suffix == ".parquet":
            return self._select(file, *_read_parquet(file))
        text = io.StringIO(_read_bytes(file).decode("utf-8-sig"), newline="")
        return self._select(file, *_read_csv(text, "\t" if suffix == ".tsv" else ","))

    def _split_lines(self, lines: list[str]) -> Sequence[Any]:
        """Return one text per line, or texts that are separated by tabs; for images, each line is a path."""
        tokenizer = self.contract.preprocessing.tokenizer
        if tokenizer is None:
            return lines if self.contract.is_image else [_Numbers(line.split(), self.contract) for line in lines]
        return lines if len(tokenizer.texts) == 1 else [tuple(line.split("\t")) for line in lines]

    def _load_array(self, file: str, suffix: str) -> Sequence[Any]:
        local = "://" not in file
        source: Any = file if local else io.BytesIO(_read_bytes(file))
        loaded = np.load(source, mmap_mode="r" if local and suffix == ".npy" else None, allow_pickle=False)
        if suffix == ".npy":
            return _rows(loaded)
        with loaded:
            names = self.columns or tuple(self.contract.inputs)
            missing = [name for name in names if name not in loaded.files]
            if missing and len(loaded.files) == 1 and len(self.contract.inputs) == 1:
                return _rows(loaded[loaded.files[0]])
            if missing:
                raise DataError(f"it contains the arrays {loaded.files}, not {', '.join(missing)}")
            arrays = [_rows(loaded[name]) for name in names]
        if len(arrays) == 1:
            return arrays[0]
        named = zip(*arrays, strict=True)
        return [dict(zip(self.contract.inputs, row, strict=True)) for row in named]

    def _select(self, file: str, header: list[str], rows: Sequence[Sequence[Any]]) -> Sequence[Any]:
        """Return the inputs of a table: texts by name, paths of images, or numbers."""
        columns = self.columns or self._default_columns(file, header)
        missing = [name for name in columns if name not in header]
        if missing:
            names = ", ".join(map(repr, missing[:MAX_MISSING]))
            more = f" and {len(missing) - MAX_MISSING} others" if len(missing) > MAX_MISSING else ""
            hint = "" if self.columns else ". Name the columns with the inputs, in the order of training: --columns"
            raise DataError(f"it has no column {names}{more}; its columns are {', '.join(header[:20])}{hint}")
        at = [header.index(name) for name in columns]
        tokenizer = self.contract.preprocessing.tokenizer
        if tokenizer is not None:
            return [tuple(row[i] for i in at) for row in rows]
        if self.contract.is_image and len(at) == 1:
            return [str(row[at[0]]) for row in rows]
        return [_Numbers([row[i] for i in at], self.contract) for row in rows]

    def _default_columns(self, file: str, header: list[str]) -> Sequence[str]:
        tokenizer = self.contract.preprocessing.tokenizer
        if tokenizer is not None:
            return tokenizer.texts
        if self.contract.is_image:
            found = [name for name in PATH_COLUMNS if name in header]
            if not found:
                raise DataError(f"it has no column {' or '.join(PATH_COLUMNS)}; name the one with the paths: --columns")
            return found[:1]
        return self.contract.preprocessing.columns or header


class _Numbers:
    """The cells of a row, which become numbers when the row is read, so that a wrong cell is an error of its row."""

    def __init__(self, cells: Sequence[Any], contract: InputContract) -> None:
        self.cells, self.contract = cells, contract

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        summary = self.contract.inputs["x"]
        kind = np.float32 if summary.dtype.startswith(("float", "bfloat", "uint8")) else np.int64
        return np.array([kind(BOOLEANS.get(cell, cell)) for cell in self.cells]).reshape(summary.shape)


def _rows(array: np.ndarray[Any, Any]) -> Sequence[Any]:
    if array.ndim == 0:
        raise DataError("it is a single number, not an array with one row per input")
    rows: Sequence[Any] = array  # type: ignore[assignment]
    return rows


def _read_csv(text: IO[str], delimiter: str) -> tuple[list[str], list[list[str]]]:
    csv.field_size_limit(MAX_CELL)
    rows = [row for row in csv.reader(text, delimiter=delimiter) if row]
    if not rows:
        raise DataError("it is empty; the first line must name the columns")
    width = len(rows[0])
    return rows[0], [[*row, *[""] * (width - len(row))] for row in rows[1:]]


def _read_parquet(file: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    read = optional_import("pyarrow.parquet", extra="parquet").read_table
    table = read(io.BytesIO(_read_bytes(file)))
    columns = [column.to_pylist() for column in table.columns]
    return list(table.column_names), list(zip(*columns, strict=True))


def _guard(file: str, read: Callable[[], Any]) -> Any:
    """Return what `read` returns; any failure becomes a DataError that names the file."""
    try:
        return read()
    except RecipeError:
        raise
    except Exception as error:  # of NumPy, pyarrow, fsspec, or the client of a file system
        text = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {first_line(error)}"
        raise DataError(f"{file} cannot be read: {text}") from None


def split_parts(refs: Sequence[InputRef], size: int) -> Iterator[tuple[int, tuple[InputRef, ...]]]:
    """Yield the number and the inputs of every part."""
    for number, start in enumerate(range(0, len(refs), size)):
        yield number, tuple(refs[start : start + size])
