"""Write metrics for TensorBoard, if the recipe asks for it; the logs in the run folder are always written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plateaux.core.errors import RecipeError


class TensorBoardLogger:
    """Writes the metrics of one member as TensorBoard scalars."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise RecipeError(
                'run.tensorboard = true needs TensorBoard: pip install "plateaux[track]", or leave it out'
            ) from None
        self._writer = SummaryWriter(str(folder))

    def add(self, epoch: int, line: Mapping[str, Any]) -> None:
        """Write the metrics of one epoch."""
        for name, value in line.items():
            if isinstance(value, float):
                self._writer.add_scalar(name.replace(" ", "/"), value, epoch)
        self._writer.flush()
