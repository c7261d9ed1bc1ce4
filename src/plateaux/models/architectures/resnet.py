"""Residual nets for 32 px images: the thin nets of depth 6n+2 and the wide-stemmed resnet18 and resnet34.

He, Zhang, Ren and Sun, "Deep residual learning for image recognition", arXiv:1512.03385. Names of weights are
`conv1, bn1, layer1.0.conv1, layer1.0.bn1, ..., linear`, as in the weights most often passed around for CIFAR.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from plateaux.core.errors import RecipeError
from plateaux.core.registry import model
from plateaux.models.architectures import channels

Shortcut = Literal["A", "B"]


@model
def resnet(
    *, shape: tuple[int, ...], classes: int, depth: int = 20, width: int = 16, shortcut: Shortcut = "A"
) -> nn.Module:
    """A thin residual net for 32 px images, of any depth 6n+2.

    Shortcuts that change the shape are free of parameters (`"A"`) or a 1x1 convolution (`"B"`).
    """
    blocks, rest = divmod(depth - 2, 6)
    if rest or blocks < 1:
        near = 6 * max(1, round((depth - 2) / 6)) + 2
        raise RecipeError(f"A resnet for 32 px images has a depth of 6n+2 (8, 14, 20, ...), got {depth}; try {near}")
    return ResNet(channels(shape), classes, stages=(blocks,) * 3, width=width, shortcut=shortcut)


def _thin(depth: int) -> Callable[..., nn.Module]:
    def build(*, shape: tuple[int, ...], classes: int, width: int = 16, shortcut: Shortcut = "A") -> nn.Module:
        return resnet(shape=shape, classes=classes, depth=depth, width=width, shortcut=shortcut)

    build.__name__ = build.__qualname__ = f"resnet{depth}"
    build.__doc__ = f"The residual net for 32 px images with {depth} layers, 16 channels wide at first."
    return model(build)


resnet8 = _thin(8)
resnet14 = _thin(14)
resnet20 = _thin(20)
resnet26 = _thin(26)
resnet32 = _thin(32)
resnet38 = _thin(38)
resnet44 = _thin(44)
resnet56 = _thin(56)
resnet110 = _thin(110)


@model
def resnet18(*, shape: tuple[int, ...], classes: int, width: int = 64) -> nn.Module:
    """The residual net with 18 layers, its stem a 3x3 convolution without pooling, for 32 px images."""
    return ResNet(channels(shape), classes, stages=(2, 2, 2, 2), width=width, shortcut="B")


@model
def resnet34(*, shape: tuple[int, ...], classes: int, width: int = 64) -> nn.Module:
    """The residual net with 34 layers, its stem a 3x3 convolution without pooling, for 32 px images."""
    return ResNet(channels(shape), classes, stages=(3, 4, 6, 3), width=width, shortcut="B")


class ResNet(nn.Module):
    """Stages of residual blocks, each half the size and twice the width of the one before."""

    def __init__(self, inputs: int, classes: int, *, stages: Sequence[int], width: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.conv1 = _conv3(inputs, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.stages = len(stages)
        before = width
        for number, blocks in enumerate(stages):
            size, stride = width * 2**number, 1 if number == 0 else 2
            first = Block(before, size, stride=stride, shortcut=shortcut)
            others = [Block(size, size, stride=1, shortcut=shortcut) for _ in range(blocks - 1)]
            self.add_module(f"layer{number + 1}", nn.Sequential(first, *others))
            before = size
        self.linear = nn.Linear(before, classes)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        for number in range(self.stages):
            x = self.get_submodule(f"layer{number + 1}")(x)
        return self.linear(x.mean((2, 3)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Two 3x3 convolutions around which the input is led."""

    def __init__(self, before: int, size: int, *, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.conv1 = _conv3(before, size, stride)
        self.bn1 = nn.BatchNorm2d(size)
        self.conv2 = _conv3(size, size)
        self.bn2 = nn.BatchNorm2d(size)
        self.shortcut = _shortcut(before, size, stride, shortcut)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class Pad(nn.Module):
    """Every `stride`-th pixel, with channels of zeros on both sides: the shortcut without parameters."""

    def __init__(self, extra: int, stride: int) -> None:
        super().__init__()
        self.before, self.after, self.stride = extra // 2, extra - extra // 2, stride

    def forward(self, x: Tensor) -> Tensor:
        # Averages over one pixel are the slice x[:, :, ::stride, ::stride], whose own gradient forgets channels_last:
        # with the slice a training step of resnet8 in bf16 took 96 ms instead of 70 (CPU, one thread, batch 128).
        return F.pad(F.avg_pool2d(x, 1, self.stride), (0, 0, 0, 0, self.before, self.after))


def _shortcut(before: int, size: int, stride: int, kind: Shortcut) -> nn.Module:
    if stride == 1 and before == size:
        return nn.Sequential()
    if kind == "A":
        return Pad(size - before, stride)
    return nn.Sequential(nn.Conv2d(before, size, 1, stride=stride, bias=False), nn.BatchNorm2d(size))


def _conv3(before: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, size, 3, stride=stride, padding=1, bias=False)
