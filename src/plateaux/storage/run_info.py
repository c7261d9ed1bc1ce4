"""The content of run.json: the data a run was trained on, and the settings that were chosen once for the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from plateaux.config.code import changed_code
from plateaux.config.recipe import diff
from plateaux.core.ranges import Finite, StoredCount, StoredInt
from plateaux.data.data_summary import DataSummary
from plateaux.data.preprocessing import NO_PREPROCESSING, Preprocessing
from plateaux.storage.json_shapes import read_shape

if TYPE_CHECKING:
    from plateaux.data.sources import DataSplits

FORMAT = 4  # version of the layout of a run folder


@dataclass(frozen=True, slots=True)
class SplitInfo:
    """Number and content hash of the samples of a split."""

    samples: StoredInt
    fingerprint: str


@dataclass(frozen=True, slots=True)
class UnlabeledInfo:
    """The unlabeled samples that were used in training. They must not be used as test samples."""

    name: str
    fingerprint: str
    ids: tuple[StoredInt, ...]


@dataclass(frozen=True, slots=True)
class DataInfo:
    """Description of a data set: what a model needs to predict, and hashes that identify the samples."""

    name: str
    classes: StoredCount
    shape: tuple[StoredInt, ...]
    mean: tuple[Finite, ...]
    std: tuple[Finite, ...]
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

    def to_dict(self) -> dict[str, Any]:
        """Return plain values. The key `unlabeled` is omitted if there are no unlabeled samples."""
        tree = {name: _to_plain(value) for name, value in asdict(self).items()}
        return {name: value for name, value in tree.items() if value is not None}


@dataclass(frozen=True, slots=True)
class AutotuneInfo:
    """Settings that were measured once and hold for the whole run; None: not autotuned."""

    precision: Literal["fp32", "bf16", "fp16", "fp64"] | None = None
    memory_format: Literal["contiguous", "channels_last"] | None = None
    tried: tuple[Mapping[str, Any], ...] | None = None  # the candidates, with loss and throughput
    scoring_batch: StoredCount | None = None  # batch size of the per-sample sharpness scores

    @classmethod
    def from_dict(cls, tree: Any, file: object = "autotune.json") -> AutotuneInfo:
        """Read the settings that `autotune` returned, or that a study stored."""
        return read_shape(cls, tree, file)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values of the settings that were autotuned."""
        return {name: _to_plain(value) for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class StoredPartition:
    """What is read from the summary of a data partition, `sam_sets/<epoch>/summary.json`."""

    members: StoredInt
    without: tuple[StoredInt, ...] = ()  # members that had failed by then and are excluded from the run
    share: tuple[Finite | None, ...] = ()  # fraction of the samples to which each member applies SAM
    overlap: Any = None
    trained: StoredInt = 0  # number of training samples


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The content of run.json, without the names of the members, which follow from the recipe."""

    data: DataInfo
    id: str = ""  # random; the progress of every member has it too
    imported_from: tuple[str, ...] | None = None  # the weight files of a run that was not trained here
    autotune: AutotuneInfo | None = None  # None: not decided yet
    calibration_digest: str | None = None  # None: not calibrated
    model: str | None = None  # qualified name of a model that was passed in Python; None: the recipe names it
    inputs: DataSummary | None = None  # what was found in the training samples; None: they were not checked
    preprocessing: Preprocessing | None = None  # how raw inputs became the samples; None: not at all
    layers: Mapping[str, str] | None = None  # type and configuration by name; None: the model is built into Plateaux
    model_configs: Mapping[str, Mapping[str, Any]] | None = None  # config.json of Hugging Face models, by their name
    code: Mapping[str, str] = field(default_factory=dict)  # hashes of the user's code, by section of the recipe
    warnings: Mapping[str, str] = field(default_factory=dict)  # about the data and the model, by name
    accepted_changes: tuple[tuple[str, ...], ...] = ()  # of data or model code, by --accept-changes, oldest first

    @classmethod
    def from_dict(cls, tree: Any, file: object = "run.json") -> RunInfo:
        """Read a run.json. The error for a missing or invalid field names the file and the field."""
        return read_shape(cls, tree, file)

    def changes(self, new: RunInfo) -> list[str]:
        """Return one line for every difference of the data and of the model's code."""
        changes = diff(self.data.to_dict(), new.data.to_dict())
        if self.layers is not None and new.layers is not None:
            changes += diff(dict(self.layers), dict(new.layers), "model.layers.")
        if self.model is None and new.model is not None:
            changes.append(f"model: named by the recipe -> {new.model}")
        changes += diff(dict(self.model_configs or {}), dict(new.model_configs or {}), "model config ")
        changed = changed_code(self.code, new.code)
        codes = [{name: info.code[name] for name in changed if name in info.code} for info in (self, new)]
        return changes + diff(codes[0], codes[1], "code of ")

    def with_changes(self, new: RunInfo) -> RunInfo:
        """Return the description of this run with the data and the model of `new`, and a record of what changed."""
        accepted = (*self.accepted_changes, tuple(self.changes(new)))
        return replace(
            self,
            data=new.data,
            inputs=new.inputs,
            preprocessing=new.preprocessing,
            model=new.model,
            layers=new.layers,
            model_configs=new.model_configs,
            code=new.code,
            warnings=new.warnings,
            accepted_changes=accepted,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        tree: dict[str, Any] = {"format": FORMAT, "data": self.data.to_dict()}
        if self.id:
            tree["id"] = self.id
        if self.imported_from is not None:
            tree["imported_from"] = list(self.imported_from)
        if self.autotune is not None:
            tree["autotune"] = self.autotune.to_dict()
        if self.model is not None:
            tree["model"] = self.model
        if self.inputs is not None:
            tree["inputs"] = _to_plain(asdict(self.inputs))
        if self.preprocessing not in (None, NO_PREPROCESSING):
            tree["preprocessing"] = _to_plain(asdict(self.preprocessing))
        if self.layers is not None:
            tree["layers"] = dict(self.layers)
        if self.model_configs is not None:
            tree["model_configs"] = _to_plain(self.model_configs)
        if self.code:
            tree["code"] = dict(self.code)
        if self.warnings:
            tree["warnings"] = dict(self.warnings)
        if self.accepted_changes:
            tree["accepted_changes"] = _to_plain(self.accepted_changes)
        if self.calibration_digest is not None:
            tree["calibration_digest"] = self.calibration_digest
        return tree


def _to_plain(value: Any) -> Any:
    """Turn tuples into lists, as JSON has them."""
    if isinstance(value, Mapping):
        return {name: _to_plain(item) for name, item in value.items()}
    return [_to_plain(item) for item in value] if isinstance(value, list | tuple) else value
