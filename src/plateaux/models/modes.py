"""Switch networks between training and evaluation mode, and update BatchNorm statistics."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from itertools import chain

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from plateaux.core.errors import DataError
from plateaux.core.member import Forward, MemberModule
from plateaux.core.types import Inputs
from plateaux.models.surgery import batchnorm_layers


@torch.no_grad()
def update_bn(module: nn.Module, batches: Iterable[Inputs], forward: Forward = nullcontext) -> None:
    """Replace BatchNorm's running statistics by their averages over batches, every batch counting alike.

    As torch.optim.swa_utils.update_bn does, but every module's mode is kept, and all other layers are in evaluation
    mode meanwhile: dropout draws nothing. A network without BatchNorm is left alone, and the batches unread.
    """
    layers = [
        layer for layer in batchnorm_layers(module) if isinstance(layer, _BatchNorm) and layer.track_running_stats
    ]
    if not layers:
        return
    stream = iter(batches)
    first = next(stream, None)
    if first is None:
        raise DataError("There are no batches to estimate BatchNorm's statistics from; give training samples")
    modes, momenta = [(part, part.training) for part in module.modules()], [layer.momentum for layer in layers]
    try:
        for part, _ in modes:
            part.training = False
        for layer in layers:
            layer.reset_running_stats()
            layer.training, layer.momentum = True, None
        for x in chain([first], stream):
            MemberModule(module, forward=forward)(x)
    finally:
        for part, mode in modes:
            part.training = mode
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum


class eval_mode:
    """Hold networks in evaluation mode for a while, and put each layer back to the mode it was in."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._layers = [layer for module in modules for layer in module.modules()]

    def __enter__(self) -> None:
        self._modes = [layer.training for layer in self._layers]
        for layer in self._layers:
            layer.training = False

    def __exit__(self, *_: object) -> None:
        for layer, mode in zip(self._layers, self._modes, strict=True):
            layer.training = mode
