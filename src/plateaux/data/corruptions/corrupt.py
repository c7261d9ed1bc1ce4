"""Image corruptions computed on the fly: the 15 + 4 kinds of Hendrycks and Dietterich (2019) at severities 1 to 5.

    noisy = corrupt(images, ids, "gaussian_noise", severity=3)  # uint8 [B, C, H, W] -> uint8 [B, C, H, W]
    source = Corrupted(data.test, "fog", 5)                     # implements Source

The images are CIFAR-C-like: the published constants and operations with new random draws, so they are not bit-identical
to the published files (`published.py` reads those). The seed of an image depends only on its id, kind, and severity.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from plateaux.core.errors import DataError
from plateaux.core.types import Inputs, derive_seed
from plateaux.data.corruptions import blur, digital, noise, weather
from plateaux.data.corruptions.image_ops import Array, generators
from plateaux.data.corruptions.severities import TABLES, check_kind, table_size
from plateaux.data.sources import Source

VERSION = 1  # part of the fingerprint; increment it when any corrupted image changes by a bit
MIN_SIDE_PX = 16
CHUNK = 2**20  # values processed at once: a few MB per array for any batch size

KINDS: dict[str, Callable[..., Array]] = {
    "gaussian_noise": noise.gaussian_noise,
    "shot_noise": noise.shot_noise,
    "impulse_noise": noise.impulse_noise,
    "defocus_blur": blur.defocus_blur,
    "glass_blur": blur.glass_blur,
    "motion_blur": blur.motion_blur,
    "zoom_blur": blur.zoom_blur,
    "snow": weather.snow,
    "frost": weather.frost,
    "fog": weather.fog,
    "brightness": digital.brightness,
    "contrast": digital.contrast,
    "elastic_transform": digital.elastic_transform,
    "pixelate": digital.pixelate,
    "jpeg_compression": digital.jpeg_compression,
    "speckle_noise": noise.speckle_noise,
    "gaussian_blur": blur.gaussian_blur,
    "spatter": weather.spatter,
    "saturate": digital.saturate,
}
CORRUPTIONS: tuple[str, ...] = tuple(KINDS)[:15]
EXTRA: tuple[str, ...] = tuple(KINDS)[15:]
# Kinds that are computed in color: a gray image is repeated to three channels, and the luminance of the result is used.
# All other kinds treat every channel alike, so that noise on one channel has the published strength.
IN_COLOR = frozenset({"snow", "frost", "spatter", "pixelate", "jpeg_compression"})


def corrupt(images: Tensor, ids: Tensor, name: str, severity: int) -> Tensor:
    """Corrupt uint8 images `[B, C, H, W]`, C = 3 or 1; the result for image i depends only on it and on `ids[i]`.

    >>> gray = torch.full((2, 3, 32, 32), 128, dtype=torch.uint8)
    >>> corrupt(gray, torch.arange(2), "brightness", 4)[0, 0, 0, :2].tolist()  # 128 + 0.2 * 255
    [179, 179]
    """
    check_kind(name, severity)
    _check(images, ids, name)
    size = table_size(*images.shape[2:])
    constants = TABLES[size][name][severity - 1]
    seed = derive_seed("corruption", name, severity)
    out = torch.empty_like(images, device="cpu", memory_format=torch.contiguous_format)
    step = max(1, CHUNK // max(images[:1].numel(), 1))
    for start in range(0, len(images), step):
        part = images[start : start + step].cpu().permute(0, 2, 3, 1).numpy()
        x = np.ascontiguousarray(part, dtype=np.float32) / np.float32(255)
        in_color = x.shape[-1] == 1 and name in IN_COLOR
        x = np.repeat(x, 3, axis=-1) if in_color else x
        corrupted = KINDS[name](x, generators(seed, ids[start : start + step].tolist()), *constants)
        corrupted = (np.clip(corrupted, 0, 1) @ weather.LUMA)[..., None] if in_color else corrupted
        out[start : start + step] = torch.from_numpy(digital.to_uint8(corrupted)).permute(0, 3, 1, 2)
    return out.to(images.device)


class Corrupted(Source):
    """A source that corrupts the images of another source on access."""

    def __init__(self, inner: Source, name: str, severity: int) -> None:
        check_kind(name, severity)
        self.inner, self.name, self.severity = inner, name, severity

    def __len__(self) -> int:
        return len(self.inner)

    def fetch(self, ids: Tensor, *, seed: int | None = None) -> tuple[Inputs, Tensor]:
        x, y = self.inner.fetch(ids)
        if not isinstance(x, Tensor):
            raise DataError(f"Corruptions need images; these samples are dicts with keys {', '.join(sorted(x))}.")
        return corrupt(x, ids, self.name, self.severity), y

    def fingerprint(self) -> str:
        parts = f"{self.inner.fingerprint()}:{self.name}:{self.severity}:{VERSION}"
        return blake2b(parts.encode(), digest_size=8).hexdigest()

    def remark(self) -> str:
        """Describe these images and, if their size has no constants of its own, which constants are used."""
        x, _ = self.inner.fetch(torch.zeros(min(1, len(self)), dtype=torch.int64))
        return describe(self.name, self.severity, (x.shape[-2], x.shape[-1])) if isinstance(x, Tensor) else ""


def describe(name: str, severity: int, size: tuple[int, int]) -> str:
    """Describe generated images of this size in one line.

    >>> describe("fog", 3, (48, 48))
    'fog, severity 3: generated, CIFAR-C-like, with the constants for 64 px on 48 x 48 px'
    """
    nominal = table_size(*size)
    suffix = "" if size == (nominal, nominal) else f", with the constants for {nominal} px on {size[0]} x {size[1]} px"
    return f"{name}, severity {severity}: generated, CIFAR-C-like{suffix}"


def _check(images: Tensor, ids: Tensor, name: str) -> None:
    shape = list(images.shape)
    if images.dtype != torch.uint8 or images.dim() != 4:
        raise DataError(
            f"Images are {images.dtype} {shape}. Corruptions need uint8 images [B, C, H, W], before normalization."
        )
    if shape[1] not in (1, 3):
        raise DataError(f"Images have shape {shape}. Corruptions need color [B, 3, H, W] or gray [B, 1, H, W] images.")
    if shape[1] == 1 and name == "saturate":
        raise DataError(f"Images have shape {shape}. 'saturate' needs color: gray images have no saturation to change.")
    if min(shape[2:]) < MIN_SIDE_PX:
        raise DataError(f"Images have shape {shape}. Corruptions need at least {MIN_SIDE_PX} pixels per side.")
    if ids.shape != images.shape[:1]:
        raise DataError(f"ids have shape {list(ids.shape)}; {shape[0]} images need ids of shape [{shape[0]}].")
