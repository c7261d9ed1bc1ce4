"""The content of run.json: the data a run was trained on, and the settings that were chosen once for the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from plateaux.core.errors import StorageError

if TYPE_CHECKING:
    from plateaux.data.sources import DataSplits

FORMAT = 2  # version of the layout of a run folder


@dataclass(frozen=True, slots=True)
class SplitInfo:
    """Number and content hash of the samples of a split."""

    samples: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class UnlabeledInfo:
    """The unlabeled samples that were used in training. They must not be used as test samples."""

    name: str
    fingerprint: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DataInfo:
    """Description of a data set: what a model needs to predict, and hashes that identify the samples."""

    name: str
    classes: int
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    labels: tuple[str, ...]
    train: SplitInfo
    test: SplitInfo
    unlabeled: UnlabeledInfo | None = None

    @classmethod
    def from_splits(cls, data: DataSplits) -> DataInfo:
        """Describe a data set, including its unlabeled samples."""
        extra = data.unlabeled
        return cls(
            name=data.name,
            classes=data.classes,
            shape=tuple(data.shape),
            mean=tuple(data.mean),
            std=tuple(data.std),
            labels=tuple(data.labels),
            train=SplitInfo(len(data.train), data.train.fingerprint()),
            test=SplitInfo(len(data.test), data.test.fingerprint()),
            unlabeled=None
            if extra is None
            else UnlabeledInfo(extra.name, extra.source.fingerprint(), tuple(extra.ids.tolist())),
        )

    @classmethod
    def from_dict(cls, tree: Any, file: object = "run.json") -> DataInfo:
        """Read the section `data` of a run.json."""
        fields = _Fields(tree, file, "data.")
        unlabeled = fields.section("unlabeled") if "unlabeled" in fields else None
        return cls(
            name=str(fields["name"]),
            classes=int(fields["classes"]),
            shape=tuple(fields["shape"]),
            mean=tuple(fields["mean"]),
            std=tuple(fields["std"]),
            labels=tuple(fields["labels"]),
            train=_read_split(fields.section("train")),
            test=_read_split(fields.section("test")),
            unlabeled=None
            if unlabeled is None
            else UnlabeledInfo(unlabeled["name"], unlabeled["fingerprint"], tuple(unlabeled["ids"])),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values. The key `unlabeled` is omitted if there are no unlabeled samples."""
        tree = {name: _to_plain(value) for name, value in asdict(self).items()}
        return {name: value for name, value in tree.items() if value is not None}


@dataclass(frozen=True, slots=True)
class AutotuneInfo:
    """Settings that were measured once and hold for the whole run; None: not autotuned."""

    precision: str | None = None
    memory_format: str | None = None
    tried: tuple[Mapping[str, Any], ...] | None = None  # the candidates, with loss and throughput
    scoring_batch: int | None = None  # batch size of the per-sample sharpness scores

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> AutotuneInfo:
        tried = tree.get("tried")
        return cls(
            tree.get("precision"),
            tree.get("memory_format"),
            None if tried is None else tuple(tried),
            tree.get("scoring_batch"),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values of the settings that were autotuned."""
        return {name: _to_plain(value) for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The content of run.json, without the names of the members, which follow from the recipe."""

    data: DataInfo
    imported_from: tuple[str, ...] | None = None  # the weight files of a run that was not trained here
    autotune: AutotuneInfo | None = None  # None: not decided yet
    model: str | None = None  # qualified name of a model that was passed in Python; None: the recipe names it

    @classmethod
    def from_dict(cls, tree: Any, file: object = "run.json") -> RunInfo:
        """Read a run.json. The error for a missing field names the file and the field."""
        fields = _Fields(tree, file)
        return cls(
            data=DataInfo.from_dict(fields["data"], file),
            imported_from=tuple(fields["imported_from"]) if "imported_from" in fields else None,
            autotune=AutotuneInfo.from_dict(fields["autotune"]) if "autotune" in fields else None,
            model=str(fields["model"]) if "model" in fields else None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        tree: dict[str, Any] = {"format": FORMAT, "data": self.data.to_dict()}
        if self.imported_from is not None:
            tree["imported_from"] = list(self.imported_from)
        if self.autotune is not None:
            tree["autotune"] = self.autotune.to_dict()
        if self.model is not None:
            tree["model"] = self.model
        return tree


class _Fields:
    """Access to the fields of a file that raises an error with the name of the file and of the missing field."""

    def __init__(self, tree: Any, file: object, prefix: str = "") -> None:
        self._tree, self._file, self._prefix = tree, file, prefix
        if not isinstance(tree, Mapping):
            raise StorageError(f"{file}: {prefix.rstrip('.') or 'the content'} is not a JSON object; restore the file")

    def __contains__(self, name: str) -> bool:
        return name in self._tree

    def __getitem__(self, name: str) -> Any:
        if name not in self._tree:
            raise StorageError(
                f"{self._file} lacks the field {self._prefix + name!r}; restore the file or start a new run"
            )
        return self._tree[name]

    def section(self, name: str) -> _Fields:
        return _Fields(self[name], self._file, f"{self._prefix}{name}.")


def _read_split(fields: _Fields) -> SplitInfo:
    return SplitInfo(int(fields["samples"]), str(fields["fingerprint"]))


def _to_plain(value: Any) -> Any:
    """Turn tuples into lists, as JSON has them."""
    if isinstance(value, Mapping):
        return {name: _to_plain(item) for name, item in value.items()}
    return [_to_plain(item) for item in value] if isinstance(value, list | tuple) else value
