"""Wide residual networks (Zagoruyko and Komodakis, arXiv:1605.07146) with BatchNorm before each convolution."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from plateaux.core.errors import RecipeError
from plateaux.core.ranges import Depth, Fraction, Size
from plateaux.core.registry import model
from plateaux.models.architectures import channels


@model
@model("wrn16_4", depth=16, widen_factor=4)
@model("wrn28_10", depth=28, widen_factor=10)
@model("wrn40_2", depth=40, widen_factor=2)
def wrn(
    *, shape: tuple[int, ...], classes: int, depth: Depth = 28, widen_factor: Size = 10, dropout: Fraction = 0.0
) -> nn.Module:
    """Wide ResNet of a depth 6n+4, `widen_factor` times as wide as a CIFAR ResNet."""
    blocks, rest = divmod(depth - 4, 6)
    if rest or blocks < 1:
        nearest = 6 * max(1, round((depth - 4) / 6)) + 4
        raise RecipeError(f"depth = {depth} was given. A wide resnet needs 6n+4 (10, 16, 22, ...); try {nearest}.")
    return WideResNet(channels(shape), classes, blocks=blocks, widen=widen_factor, dropout=dropout)


class WideResNet(nn.Module):
    """Three stages of pre-activation blocks; weights are named as in common checkpoints."""

    def __init__(self, inputs: int, classes: int, *, blocks: int, widen: int, dropout: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, 16, 3, padding=1, bias=False)
        self.block1 = Stage(16, 16 * widen, blocks=blocks, stride=1, dropout=dropout)
        self.block2 = Stage(16 * widen, 32 * widen, blocks=blocks, stride=2, dropout=dropout)
        self.block3 = Stage(32 * widen, 64 * widen, blocks=blocks, stride=2, dropout=dropout)
        self.bn1 = nn.BatchNorm2d(64 * widen)
        self.fc = nn.Linear(64 * widen, classes)
        nn.init.zeros_(self.fc.bias)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.block3(self.block2(self.block1(self.conv1(x))))
        return self.fc(F.relu(self.bn1(x)).mean((2, 3)))  # type: ignore[no-any-return]


class Stage(nn.Module):
    """Blocks with the same number of channels."""

    def __init__(self, before: int, size: int, *, blocks: int, stride: int, dropout: float) -> None:
        super().__init__()
        first = WideBlock(before, size, stride=stride, dropout=dropout)
        others = [WideBlock(size, size, stride=1, dropout=dropout) for _ in range(blocks - 1)]
        self.layer = nn.Sequential(first, *others)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


class WideBlock(nn.Module):
    """Two pre-activation 3x3 convolutions with a shortcut."""

    def __init__(self, before: int, size: int, *, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(before)
        self.conv1 = nn.Conv2d(before, size, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(size)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(size, size, 3, padding=1, bias=False)
        self.changes = before != size or stride != 1
        if self.changes:
            self.convShortcut = nn.Conv2d(before, size, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(self.bn1(x))
        out = self.conv2(self.dropout(F.relu(self.bn2(self.conv1(activated)))))
        # The shortcut of a block that changes the shape starts from the activated input, otherwise from the input.
        shortcut = self.convShortcut(activated) if self.changes else x
        return out + shortcut  # type: ignore[no-any-return]
