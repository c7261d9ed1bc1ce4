"""The input contract: what the inputs of a trained ensemble look like, as stored in the run at training time.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from plateaux.core.errors import RunError
from plateaux.core.ranges import Finite, StoredCount
from plateaux.data.data_summary import TensorSummary
from plateaux.data.preprocessing import NO_PREPROCESSING, Preprocessing
from plateaux.storage.json_shapes import read_shape
from plateaux.storage.run import Run

MAX_COLUMNS = 8  # of a table, whose names are shown
MAX_RANGES = 10.0  # features may lie outside the training range by that many times its width


@dataclass(frozen=True, slots=True)
class InputContract:
    """The inputs that an ensemble was trained on, and its classes.

    Images are channels first. Those that were uint8 in training are floats from 0 to 1 after `prepare`; the ensemble
    normalizes them with mean and std.
    """

    inputs: Mapping[str, TensorSummary]  # by name; a single tensor is called "x"
    classes: StoredCount
    labels: tuple[str, ...]  # names of the classes; empty: they have none
    mean: tuple[Finite, ...] = ()
    std: tuple[Finite, ...] = ()
    preprocessing: Preprocessing = NO_PREPROCESSING
    task: Literal["classification"] = "classification"

    @classmethod
    def from_run(cls, run: Run) -> InputContract:
        """Return the contract that is stored in a run."""
        info = run.info
        if info.inputs is None:
            raise RunError(
                f"{run} has no record of the inputs it was trained on, so new inputs cannot be checked. Train it "
                "again, or import its weights again"
            )
        return cls(
            info.inputs.inputs,
            info.data.classes,
            info.data.labels,
            info.data.mean,
            info.data.std,
            info.preprocessing or NO_PREPROCESSING,
        )

    @classmethod
    def from_dict(cls, tree: Any, file: object) -> InputContract:
        """Read the result of `to_dict`."""
        return read_shape(cls, tree, file, "export the bundle again")

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible values."""
        return asdict(self)

    @property
    def is_image(self) -> bool:
        """Whether the input is one image of 1, 3, or 4 channels."""
        return set(self.inputs) == {"x"} and self.image_channels in (1, 3, 4)

    @property
    def image_channels(self) -> int | None:
        """The number of channels of an image; None: the input is no image."""
        shape = self.inputs["x"].shape if "x" in self.inputs else ()
        return shape[0] if len(shape) == 3 else None

    def example(self) -> dict[str, Any] | None:
        """Return one input by name, for instructions; None: an image, an array, or a table of many columns."""
        if self.preprocessing.tokenizer is not None:
            return dict.fromkeys(self.preprocessing.tokenizer.texts, "...")
        columns = self.preprocessing.columns
        return dict.fromkeys(columns, 0) if 0 < len(columns) <= MAX_COLUMNS else None

    def to_json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of a request with named columns or texts, or with arrays, and the labels."""
        tokenizer, columns = self.preprocessing.tokenizer, self.preprocessing.columns
        names: Sequence[str] = columns if tokenizer is None else tokenizer.texts
        row: dict[str, Any]
        if names:
            one = _to_schema(self.inputs["x"], ()) if tokenizer is None else {"type": "string"}
            row = {"type": "object", "properties": dict.fromkeys(names, one), "required": list(names)}
            inputs: dict[str, Any] = {"type": "array", "minItems": 1, "items": row}
        else:
            arrays = {
                name: {"type": "array", "minItems": 1, "items": _to_schema(summary, summary.shape)}
                for name, summary in self.inputs.items()
            }
            row = {"type": "object", "properties": arrays, "required": list(arrays), "additionalProperties": False}
            inputs = arrays["x"] if set(arrays) == {"x"} else row
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {"inputs": inputs},
            "required": ["inputs"],
            "additionalProperties": False,
            "labels": list(self.labels),
        }

    def describe(self) -> str:
        """Return what is expected, for error messages."""
        if self.preprocessing.tokenizer is not None:
            texts = " and ".join(repr(name) for name in self.preprocessing.tokenizer.texts)
            return f"texts named {texts}"
        text = ", ".join(describe_tensor(name, summary) for name, summary in self.inputs.items())
        columns = self.preprocessing.columns
        names = ", ".join(map(repr, columns[:MAX_COLUMNS])) + (", ..." if len(columns) > MAX_COLUMNS else "")
        return f"{text} (columns {names})" if columns else text


def allowed_range(summary: TensorSummary) -> tuple[float, float] | None:
    """Return the smallest and the largest number of an input; None: any. Masks may be 0 and 1 in any case."""
    is_float = summary.dtype.startswith(("float", "bfloat"))
    if summary.dtype == "uint8":
        return 0, 1
    if summary.low is None or summary.high is None:
        return None
    if not is_float:
        return min(summary.low, 0), max(summary.high, 1)
    margin = MAX_RANGES * max(summary.high - summary.low, 1e-6)
    is_image = len(summary.shape) == 3 and summary.low >= 0 and summary.high <= 1
    return (0, 1) if is_image else (summary.low - margin, summary.high + margin)


def _to_schema(summary: TensorSummary, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the JSON Schema of numbers of this range and shape."""
    is_integer = summary.dtype != "uint8" and not summary.dtype.startswith(("float", "bfloat"))
    schema: dict[str, Any] = {"type": "integer" if is_integer else "number"}
    schema |= dict(zip(("minimum", "maximum"), allowed_range(summary) or (), strict=False))
    for size in reversed(shape):
        schema = {"type": "array", "items": schema, "minItems": size, "maxItems": size}
    return schema


def describe_tensor(name: str, summary: TensorSummary) -> str:
    """Return the kind, shape, and range of one input."""
    shape = list(summary.shape)
    if summary.dtype == "uint8":
        return f"uint8, or floats from 0 to 1, of shape {shape} (channels first)"
    kind = "floats" if summary.dtype.startswith(("float", "bfloat")) else "integers"
    bounds = "" if summary.low is None else f" from {summary.low:g} to {summary.high:g}"
    return f"{kind}{bounds} of shape {shape}" + ("" if name == "x" else f" named {name!r}")
