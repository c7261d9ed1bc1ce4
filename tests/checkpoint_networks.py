"""A network that tests train with Lightning and transformers, by name in recipes: `checkpoint_networks:small_net`."""

from __future__ import annotations

from torch import nn


def small_net(*, shape: tuple[int, ...], classes: int, width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, classes))
