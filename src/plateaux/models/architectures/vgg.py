"""VGG networks (Simonyan and Zisserman, arXiv:1409.1556) with one linear layer for 32 px images."""

from __future__ import annotations

from torch import Tensor, nn

from plateaux.core.ranges import Size
from plateaux.core.registry import model
from plateaux.models.architectures import channels

CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


@model
def vgg11(*, shape: tuple[int, ...], classes: int, width: Size = 64) -> nn.Module:
    """VGG with 11 layers, without BatchNorm, for 32 px images."""
    return VGG(channels(shape), classes, depth=11, width=width, norm=False)


@model
def vgg11_bn(*, shape: tuple[int, ...], classes: int, width: Size = 64) -> nn.Module:
    """VGG with 11 layers, with BatchNorm, for 32 px images."""
    return VGG(channels(shape), classes, depth=11, width=width, norm=True)


@model
def vgg13(*, shape: tuple[int, ...], classes: int, width: Size = 64) -> nn.Module:
    """VGG with 13 layers, without BatchNorm, for 32 px images."""
    return VGG(channels(shape), classes, depth=13, width=width, norm=False)


@model
def vgg13_bn(*, shape: tuple[int, ...], classes: int, width: Size = 64) -> nn.Module:
    """VGG with 13 layers, with BatchNorm, for 32 px images."""
    return VGG(channels(shape), classes, depth=13, width=width, norm=True)


@model
def vgg16(*, shape: tuple[int, ...], classes: int, width: Size = 64) -> nn.Module:
    """VGG with 16 layers, without BatchNorm, for 32 px images."""
    return VGG(channels(shape), classes, depth=16, width=width, norm=False)


@model
def vgg16_bn(*, shape: tuple[int, ...], classes: int, width: Size = 64) -> nn.Module:
    """VGG with 16 layers, with BatchNorm, for 32 px images."""
    return VGG(channels(shape), classes, depth=16, width=width, norm=True)


@model
def vgg19(*, shape: tuple[int, ...], classes: int, width: Size = 64) -> nn.Module:
    """VGG with 19 layers, without BatchNorm, for 32 px images."""
    return VGG(channels(shape), classes, depth=19, width=width, norm=False)


@model
def vgg19_bn(*, shape: tuple[int, ...], classes: int, width: Size = 64) -> nn.Module:
    """VGG with 19 layers, with BatchNorm, for 32 px images."""
    return VGG(channels(shape), classes, depth=19, width=width, norm=True)


class VGG(nn.Module):
    """Five stages of 3x3 convolutions, global average pooling, and a linear head."""

    def __init__(self, inputs: int, classes: int, *, depth: int, width: int, norm: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for stage, convolutions in enumerate(CONVOLUTIONS[depth]):
            size = width * min(2**stage, 8)
            for _ in range(convolutions):
                layers += [nn.Conv2d(inputs, size, 3, padding=1)]
                layers += [nn.BatchNorm2d(size), nn.ReLU()] if norm else [nn.ReLU()]
                inputs = size
            # ceil_mode changes nothing at 32 px and supports smaller images.
            layers += [nn.MaxPool2d(2, ceil_mode=True)]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(inputs, classes)
        for part in self.features:
            if isinstance(part, nn.Conv2d):
                # Without BatchNorm, torch's default initialization shrinks activations, and 19 layers do not train.
                nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
                assert part.bias is not None
                nn.init.zeros_(part.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))  # type: ignore[no-any-return]
