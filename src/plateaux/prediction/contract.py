"""The input contract: what the inputs of a trained ensemble look like, as stored in the run at training time.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from plateaux.core.errors import RunError
from plateaux.core.ranges import Finite, StoredCount
from plateaux.data.data_summary import TensorSummary
from plateaux.data.preprocessing import NO_PREPROCESSING, Preprocessing
from plateaux.storage.json_shapes import read_shape
from plateaux.storage.run import Run

MAX_COLUMNS = 8  # of a table, whose names are shown


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

    def describe(self) -> str:
        """Return what is expected, for error messages."""
        if self.preprocessing.tokenizer is not None:
            texts = " and ".join(repr(name) for name in self.preprocessing.tokenizer.texts)
            return f"texts named {texts}"
        text = ", ".join(describe_tensor(name, summary) for name, summary in self.inputs.items())
        columns = self.preprocessing.columns
        names = ", ".join(map(repr, columns[:MAX_COLUMNS])) + (", ..." if len(columns) > MAX_COLUMNS else "")
        return f"{text} (columns {names})" if columns else text


def describe_tensor(name: str, summary: TensorSummary) -> str:
    """Return the kind, shape, and range of one input."""
    shape = list(summary.shape)
    if summary.dtype == "uint8":
        return f"uint8, or floats from 0 to 1, of shape {shape} (channels first)"
    kind = "floats" if summary.dtype.startswith(("float", "bfloat")) else "integers"
    bounds = "" if summary.low is None else f" from {summary.low:g} to {summary.high:g}"
    return f"{kind}{bounds} of shape {shape}" + ("" if name == "x" else f" named {name!r}")
