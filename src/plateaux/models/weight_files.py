"""Read the tensors of a weights file as data: nothing in the file is executed.

Checkpoints of training libraries also contain hyperparameters. Objects of a few plain types among them are skipped;
every other object makes the file unreadable, because to build it could run code.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from plateaux.core.errors import RecipeError

STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "net")  # under which checkpoints store the weights
# Types whose objects are skipped. Their constructors are not called either.
SKIPPED = (
    "argparse.Namespace", "types.SimpleNamespace", "datetime.date", "datetime.datetime", "datetime.timedelta",
    "pathlib.Path", "pathlib.PosixPath", "pathlib.PurePath", "pathlib.PurePosixPath", "pathlib.PureWindowsPath",
    "pathlib.WindowsPath", "pathlib._local.Path", "pathlib._local.PosixPath", "pathlib._local.WindowsPath",
)  # fmt: skip


class Skipped:
    """Stands for an object in a checkpoint that is not a tensor and is not needed."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


def read_weights(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file or torch checkpoint by name, without executing code in it."""
    if file.suffix == ".safetensors":
        return _read_safetensors(file)
    content = read_checkpoint(file)
    while key := next(
        (k for k in STATE_DICT_KEYS if isinstance(content, Mapping) and isinstance(content.get(k), Mapping)), None
    ):
        content = content[key]
    if not isinstance(content, Mapping):
        raise RecipeError(f"{str(file)!r} contains a {type(content).__name__}, not a state dict. Save a state_dict().")
    return {str(name): tensor for name, tensor in content.items() if isinstance(tensor, Tensor)}


def read_checkpoint(file: Path) -> Any:
    """Return the content of a torch checkpoint: tensors, numbers, text, and containers of them."""
    names = _unsafe_names(file)
    unknown = sorted(name for name in names if not (name in SKIPPED or name.startswith("torch.nn.modules.")))
    if unknown:
        listed = ", ".join(unknown[:3]) + (", ..." if len(unknown) > 3 else "")
        raise RecipeError(
            f"{str(file)!r} contains objects that could run code when they are read ({listed}), so it is refused. In "
            "the program that wrote it, save only the model's state_dict(), preferably as a safetensors file."
        )
    try:
        with torch.serialization.safe_globals([(Skipped, name) for name in names]):
            return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a damaged file can raise anything
        raise RecipeError(
            f"{str(file)!r} cannot be read as weights: it is damaged, or contains more than tensors. "
            "Save only the model's state_dict(), preferably as a safetensors file."
        ) from error


def _unsafe_names(file: Path) -> list[str]:
    """Return the names of types and functions in a checkpoint that torch does not allow; none for an old format."""
    try:
        return torch.serialization.get_unsafe_globals_in_checkpoint(str(file))
    except Exception:  # a damaged file can raise anything; reading it reports the problem
        return []


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise RecipeError(
            f"{str(file)!r} cannot be read as weights: it is not a complete safetensors file ({error}). Save the "
            "model's state_dict() again."
        ) from error
