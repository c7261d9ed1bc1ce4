"""Switch networks between training and evaluation mode, and update BatchNorm statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
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
    """Replace the running statistics of BatchNorm by their averages over batches, with equal weights.

    Like torch.optim.swa_utils.update_bn, but it restores the mode of every module, and all other layers are in
    evaluation mode, so that dropout is off. For a network without BatchNorm it does nothing and reads no batch.
    """
    layers = [
        layer for layer in batchnorm_layers(module) if isinstance(layer, _BatchNorm) and layer.track_running_stats
    ]
    if not layers:
        return
    stream = iter(batches)
    first = next(stream, None)
    if first is None:
        raise DataError("There are no batches to estimate BatchNorm statistics from. Pass training samples.")
    momenta = [layer.momentum for layer in layers]
    with eval_mode([module]):
        try:
            for layer in layers:
                layer.reset_running_stats()
                layer.training, layer.momentum = True, None
            for x in chain([first], stream):
                MemberModule(module, forward=forward)(x)
        finally:
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.momentum = momentum


@contextmanager
def eval_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Set networks to evaluation mode, and restore the mode of every layer on exit."""
    modes = [(layer, layer.training) for module in modules for layer in module.modules()]
    for layer, _ in modes:
        layer.training = False
    try:
        yield
    finally:
        for layer, mode in modes:
            layer.training = mode
