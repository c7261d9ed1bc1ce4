"""Write metrics for TensorBoard, if the recipe asks for it; the logs in the run folder are always written."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from plateaux.core.errors import RecipeError
from plateaux.core.process_info import host_id


class TensorBoardLogger:
    """Writes the metrics of one member as TensorBoard scalars."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise RecipeError(
                'run.tensorboard = true needs TensorBoard: pip install "plateaux[tensorboard]", or leave it out'
            ) from None
        with _without_host_name():
            self._writer = SummaryWriter(str(folder))

    def add(self, epoch: int, line: Mapping[str, Any]) -> None:
        """Write the metrics of one epoch."""
        for name, value in line.items():
            if isinstance(value, float):
                self._writer.add_scalar(name.replace(" ", "/"), value, epoch)
        self._writer.flush()


@contextmanager
def _without_host_name() -> Iterator[None]:
    """Keep the name of this machine out of the names of event files; TensorBoard has no option for it."""
    original = socket.gethostname
    socket.gethostname = host_id
    try:
        yield
    finally:
        socket.gethostname = original
