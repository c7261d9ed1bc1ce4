"""VGG networks (Simonyan and Zisserman, arXiv:1409.1556) with one linear layer for 32 px images."""

from __future__ import annotations

from torch import Tensor, nn

from plateaux.core.ranges import Size
from plateaux.core.registry import model
from plateaux.models.architectures import channels

CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


@model("vgg11", depth=11, norm=False)
@model("vgg11_bn", depth=11, norm=True)
@model("vgg13", depth=13, norm=False)
@model("vgg13_bn", depth=13, norm=True)
@model("vgg16", depth=16, norm=False)
@model("vgg16_bn", depth=16, norm=True)
@model("vgg19", depth=19, norm=False)
@model("vgg19_bn", depth=19, norm=True)
def vgg(*, shape: tuple[int, ...], classes: int, depth: int, norm: bool, width: Size = 64) -> nn.Module:
    """VGG for 32 px images, with or without BatchNorm."""
    return VGG(channels(shape), classes, depth=depth, width=width, norm=norm)


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
