"""The manifest of a bundle: what the graph takes, what it returns, where its numbers come from, and all digests.

A bundle may come from anyone. Its manifest is read first, and every value in it is checked before it is used.
Importing this module does not import torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from plateaux.core.errors import StorageError
from plateaux.core.ranges import Finite, StoredCount, StoredInt
from plateaux.ensembles.ood_alarm import OodAlarm
from plateaux.prediction.contract import InputContract
from plateaux.prediction.predictions import BY_CLASS, DTYPES, NUMBERS, RAW
from plateaux.prediction.stage_backend import QUERIED
from plateaux.storage.digests import DigestError, check_json_digest, with_json_digest
from plateaux.storage.json_shapes import parse_json, read_shape

FORMAT = 2
MANIFEST, CARD, ONNX, SHARED, GOLDEN = (
    "manifest.json",
    "README.md",
    "model.onnx",
    "shared.safetensors",
    "golden.safetensors",
)
# All names that a bundle may contain besides its manifest. `stages` are the graphs of a cascade.
NAMES = re.compile(
    r"model\.onnx|shared\.safetensors|golden\.safetensors|README\.md"
    r"|members/(0|[1-9][0-9]{0,5})\.safetensors|stages/[1-9][0-9]{0,5}\.onnx"
)
MAX_CLASSES = 1 << 20  # more would fill the memory with their names
MAX_BYTES = 1 << 25  # of a manifest; the vocabulary of a tokenizer is its largest part
ADVICE = "export the bundle again, or get a complete copy"

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Dtype = Literal["int64", "float32", "bool"]


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and SHA-256 of one file."""

    bytes: StoredInt
    sha256: Sha256


@dataclass(frozen=True, slots=True)
class OutputRecord:
    """One output of the graph; the first dimension, the batch, is left out of its shape."""

    name: str
    dtype: Dtype
    shape: tuple[StoredInt, ...]


@dataclass(frozen=True, slots=True)
class SetRule:
    """The rule of the prediction sets, which is part of the graph."""

    kind: Literal["lac", "aps", "raps"]
    alpha: Finite
    threshold: Finite | None  # None: infinite, every set contains all classes
    k_reg: StoredInt
    penalty: Finite
    never_empty: bool
    samples: StoredInt  # number of samples it was fitted on


@dataclass(frozen=True, slots=True)
class CalibrationRecord:
    """The calibration that is part of the graph."""

    order: str
    temperatures: tuple[Finite, ...]
    split: str  # the samples it was fitted on
    samples: StoredInt
    sets: SetRule | None  # None: there are no prediction sets
    max_error_probability: Finite | None  # the graph abstains above it; None: it never does
    alarm: OodAlarm  # of the OOD score of the bundle


@dataclass(frozen=True, slots=True)
class CascadeRecord:
    """When an input stops, and what is guaranteed. There is one graph per stage, and one for all members."""

    stages: tuple[StoredCount, ...]  # numbers of members after which an input may stop, increasing
    threshold: Finite | None  # the confidence at which it stops; None: every input queries all members
    kind: Literal["harm", "differs"]
    max_harm: Finite
    confidence: Finite
    samples: StoredInt  # number of samples it was fitted on
    queried: Finite  # mean number of members that they needed

    def ends(self, members: int) -> tuple[int, ...]:
        """Return the number of members after each graph."""
        return (members,) if self.threshold is None else (*self.stages, members)


@dataclass(frozen=True, slots=True)
class MeasuredNumber:
    """One metric of the ensemble, and the data it was measured on. It is not measured again at export."""

    metric: str
    row: str  # which prediction was measured: of the mean probability before calibration, or of the calibrated one
    value: Finite
    stderr: Finite | None
    split: str
    data: str
    samples: StoredInt | None
    fingerprint: str  # of the samples


@dataclass(frozen=True, slots=True)
class GraphCheck:
    """How far a graph was from the members in PyTorch when it was exported."""

    file: str
    inputs: str  # what it was compared on
    batch_sizes: tuple[StoredCount, ...]
    max_difference: Finite  # of a probability
    near_threshold: StoredInt  # decisions that differ, within the tolerance of a threshold


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of manifest.json."""

    contract: InputContract
    outputs: tuple[OutputRecord, ...]
    members: tuple[StoredInt, ...]  # their numbers in the run
    ood_score: str
    calibration: CalibrationRecord | None
    cascade: CascadeRecord | None  # None: one graph for all members
    remark: str  # why outputs are missing
    golden: str  # where the golden inputs come from
    measured: tuple[MeasuredNumber, ...]
    checks: tuple[GraphCheck, ...]
    license: str
    intended_use: str  # in the words of whoever exported it
    plateaux: str  # the version that wrote it
    files: Mapping[str, FileRecord]
    task: Literal["classification"] = "classification"
    format: Literal[2] = 2

    def graphs(self) -> tuple[str, ...]:
        """Return the files of the ONNX graphs: one, or those of a cascade in order."""
        if self.cascade is None:
            return (ONNX,)
        return tuple(f"stages/{number + 1}.onnx" for number in range(len(self.cascade.ends(len(self.members)))))

    def to_bytes(self) -> bytes:
        """Return the content of manifest.json."""
        return _to_json(with_json_digest({"format": self.format, "task": self.task, **asdict(self)}))

    @classmethod
    def from_bytes(cls, content: bytes, file: object) -> Manifest:
        """Read the content of manifest.json. Another byte anywhere, also of white space, is an error."""
        if len(content) > MAX_BYTES:
            raise StorageError(f"{file} has more than {MAX_BYTES:,} bytes; {ADVICE}")
        tree = parse_json(content, file, ADVICE)
        version = tree.get("format") if isinstance(tree, dict) else None
        if version != FORMAT:
            raise StorageError(
                f"{file} has format {str(version)[:20]!r}; this version of Plateaux reads format {FORMAT}. Use the "
                "version that wrote it, or export the bundle again"
            )
        try:
            fields = check_json_digest(tree)
        except DigestError as problem:
            raise StorageError(f"{file} is damaged: {problem}; {ADVICE}") from None
        if _to_json(tree) != content:
            raise StorageError(f"{file} is damaged: it is not as it was written; {ADVICE}")
        manifest = read_shape(cls, fields, file, ADVICE, required=("format", "task"))
        manifest._check(file)
        return manifest

    def _check(self, file: object) -> None:
        """Raise an error for values that fit their types, but not each other."""
        for name in self.files:
            if not NAMES.fullmatch(name):
                raise StorageError(f"{file} names {name[:100]!r}, which no bundle contains; {ADVICE}")
        for name in (*self.graphs(), GOLDEN):
            if name not in self.files:
                raise StorageError(f"{file} does not name {name}; {ADVICE}")
        if self.contract.classes > MAX_CLASSES:
            raise StorageError(f"{file} has {self.contract.classes:,} classes. Expected: at most {MAX_CLASSES:,}")
        if self.cascade is not None:
            self._check_cascade(self.cascade, file)
        found, expected = {each.name: each for each in self.outputs}, expected_outputs(self.contract.classes)
        optional = {*OPTIONAL, *RAW, *([QUERIED] if self.cascade is None else [])}
        missing = [name for name in expected if name not in found and name not in optional]
        wrong = [name for name, each in found.items() if expected.get(name) != each]
        if missing or wrong or len(found) != len(self.outputs):
            raise StorageError(f"{file}: the outputs {[*missing, *wrong]} are missing or unknown; {ADVICE}")

    def _check_cascade(self, cascade: CascadeRecord, file: object) -> None:
        increasing = sorted({*cascade.stages, len(self.members)})
        if increasing != [*cascade.stages, len(self.members)]:
            raise StorageError(f"{file}: the stages {list(cascade.stages)} are not increasing numbers; {ADVICE}")
        if cascade.threshold is not None and not 0 <= cascade.threshold <= 1:
            raise StorageError(f"{file}: the threshold of the cascade is {cascade.threshold}; {ADVICE}")


OPTIONAL = ("prediction_set", "abstain", "is_ood")


def expected_outputs(classes: int) -> dict[str, OutputRecord]:
    """Return all outputs that a graph can have, by name."""
    names = ("label", *OPTIONAL, "probabilities", *NUMBERS, QUERIED, *RAW)
    kinds: dict[Any, Dtype] = {np.int64: "int64", np.bool_: "bool", np.float64: "float32"}
    return {name: OutputRecord(name, kinds[DTYPES[name]], (classes,) if name in BY_CLASS else ()) for name in names}


def _to_json(tree: Mapping[str, Any]) -> bytes:
    return (json.dumps(tree, indent=2) + "\n").encode()
