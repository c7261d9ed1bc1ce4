"""Lightning: the weights in a `.ckpt` file, read as data.

A checkpoint also contains the states of loops, callbacks, and optimizers, and the hyperparameters that
`save_hyperparameters()` stores. None of them is used, and no object in them is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from plateaux.core.errors import RecipeError
from plateaux.models.weight_files import read_checkpoint

VERSION = "pytorch-lightning_version"
SUFFIX = ".ckpt"


def read_lightning_checkpoint(file: Path) -> dict[str, Tensor]:
    """Return the weights of the LightningModule in a checkpoint, with the names of its attributes as prefixes."""
    try:
        content = read_checkpoint(file)
    except RecipeError as error:
        raise RecipeError(
            f"{error} Lightning stores hyperparameters: use self.save_hyperparameters(ignore=[...]) for those that are "
            "neither numbers nor text."
        ) from error
    weights = content.get("state_dict") if isinstance(content, Mapping) else None
    if not isinstance(weights, Mapping):
        found = sorted(map(str, content)) if isinstance(content, Mapping) else type(content).__name__
        raise RecipeError(
            f"{str(file)!r} has no state_dict; it contains {found}. Use a checkpoint that Lightning's Trainer saved."
        )
    return {str(name): tensor for name, tensor in weights.items() if isinstance(tensor, Tensor)}


def is_sharded_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint of several files, as FSDP and DeepSpeed write it."""
    return folder.suffix == SUFFIX or (folder / ".metadata").is_file() or (folder / "checkpoint").is_dir()
