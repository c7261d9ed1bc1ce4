"""Residual networks for 32 px images: the CIFAR ResNets of depth 6n+2, and resnet18 and resnet34 with a 3x3 stem.

He, Zhang, Ren, and Sun, "Deep residual learning for image recognition", arXiv:1512.03385. Weights are named
`conv1, bn1, layer1.0.conv1, layer1.0.bn1, ..., linear`, as in common CIFAR checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from plateaux.core.errors import RecipeError
from plateaux.core.ranges import Depth, Size
from plateaux.core.registry import model
from plateaux.models.architectures import channels

Shortcut = Literal["A", "B"]


@model
@model("resnet8", depth=8)
@model("resnet14", depth=14)
@model("resnet20", depth=20)
@model("resnet26", depth=26)
@model("resnet32", depth=32)
@model("resnet38", depth=38)
@model("resnet44", depth=44)
@model("resnet56", depth=56)
@model("resnet110", depth=110)
def resnet(
    *, shape: tuple[int, ...], classes: int, depth: Depth = 20, width: Size = 16, shortcut: Shortcut = "A"
) -> nn.Module:
    """ResNet for 32 px images of a depth 6n+2.

    Shortcuts that change the shape have no parameters (`"A"`) or are a 1x1 convolution (`"B"`).
    """
    blocks, rest = divmod(depth - 2, 6)
    if rest or blocks < 1:
        nearest = 6 * max(1, round((depth - 2) / 6)) + 2
        raise RecipeError(f"depth = {depth} was given. This resnet needs 6n+2 (8, 14, 20, ...); try {nearest}.")
    return ResNet(channels(shape), classes, stages=(blocks,) * 3, width=width, shortcut=shortcut)


@model("resnet18", stages=(2, 2, 2, 2))
@model("resnet34", stages=(3, 4, 6, 3))
def deep_resnet(*, shape: tuple[int, ...], classes: int, stages: tuple[int, ...], width: Size = 64) -> nn.Module:
    """ResNet for 32 px images with four stages: the stem is a 3x3 convolution without pooling."""
    return ResNet(channels(shape), classes, stages=stages, width=width, shortcut="B")


class ResNet(nn.Module):
    """Stages of residual blocks; each stage halves the image size and doubles the channels."""

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
    """Two 3x3 convolutions with a shortcut."""

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
    """The shortcut without parameters: every `stride`-th pixel, with zero channels on both sides."""

    def __init__(self, extra: int, stride: int) -> None:
        super().__init__()
        self.before, self.after, self.stride = extra // 2, extra - extra // 2, stride

    def forward(self, x: Tensor) -> Tensor:
        # Equals the slice x[:, :, ::stride, ::stride], whose gradient does not preserve channels_last: with the slice,
        # a training step of resnet8 in bf16 took 96 ms instead of 70 (CPU, one thread, batch 128).
        return F.pad(F.avg_pool2d(x, 1, self.stride), (0, 0, 0, 0, self.before, self.after))


def _shortcut(before: int, size: int, stride: int, kind: Shortcut) -> nn.Module:
    if stride == 1 and before == size:
        return nn.Sequential()
    if kind == "A":
        return Pad(size - before, stride)
    return nn.Sequential(nn.Conv2d(before, size, 1, stride=stride, bias=False), nn.BatchNorm2d(size))


def _conv3(before: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, size, 3, stride=stride, padding=1, bias=False)
