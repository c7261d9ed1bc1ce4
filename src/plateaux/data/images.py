"""Decode, resize, and crop images with Pillow to NumPy arrays. Importing this module does not import torch."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plateaux.core.errors import DataError, first_line
from plateaux.data.preprocessing import ImageSize

MAX_PIXELS = 89_478_485  # of an image file: Pillow's own limit, above which it only warns
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}  # of image files
GRAY_MODES = ("1", "L", "LA", "La", "I", "F")  # of Pillow
SIXTEEN_BITS = "I;16"  # and I;16B, I;16L, I;16N
EXIF_ORIENTATION = 0x0112
EXIF_TURNS = {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 
              7: "TRANSVERSE", 8: "ROTATE_90"}  # fmt: skip

Pixels = NDArray[np.uint8]


def decode_image(
    source: Path | bytes, *, size: int | ImageSize | None = None, channels: int = 3, name: str = ""
) -> Pixels:
    """Decode an image file, or its bytes, to uint8 `[channels, H, W]`; see `to_pixels`."""
    shown = name or (str(source) if isinstance(source, Path) else "The image")
    with _open(source, shown) as opened:
        return to_pixels(opened, size=size, channels=channels, name=shown)


def has_color(source: Path | bytes, *, name: str) -> bool:
    """Return whether an image file has channels of color; only its header is read."""
    with _open(source, name) as opened:
        return opened.mode not in GRAY_MODES and not opened.mode.startswith(SIXTEEN_BITS)


def to_pixels(image: Any, *, size: int | ImageSize | None = None, channels: int = 3, name: str = "The image") -> Pixels:
    """Convert a Pillow image to uint8 `[channels, H, W]`: grayscale for 1 channel, RGB for 3, RGBA for 4.

    Its EXIF orientation is applied. With a number as `size`, the shorter side is resized to it and the center square is
    cropped.
    """
    image = to_eight_bits(upright(image), name=name).convert({1: "L", 3: "RGB", 4: "RGBA"}[channels])
    if isinstance(size, ImageSize):
        image = _process(image, size)
    elif size is not None and image.size != (size, size):
        scale = size / min(image.size)
        width, height = (max(size, round(side * scale)) for side in image.size)
        left, top = (width - size) // 2, (height - size) // 2
        _check_pixels((width, height), "The resized image")
        image = image.resize((width, height), _pillow().Resampling.BILINEAR)
        image = image.crop((left, top, left + size, top + size))
    pixels = np.array(image, dtype=np.uint8)
    return np.ascontiguousarray(pixels[None] if channels == 1 else pixels.transpose(2, 0, 1))


def upright(image: Any) -> Any:
    """Return a Pillow image with its EXIF orientation applied; EXIF data that cannot be read have none."""
    image.load()
    try:
        turn = EXIF_TURNS.get(image.getexif().get(EXIF_ORIENTATION))
    except Exception:  # Pillow raises many kinds of errors for damaged EXIF data
        turn = None
    return image if turn is None else image.transpose(_pillow().Transpose[turn])


def to_eight_bits(image: Any, *, name: str = "The image") -> Any:
    """Return a Pillow image with 8 bits per channel; Pillow itself would clip 16 bits to 255 instead of scaling them.

    An image with another range, which the file does not say, is an error.
    """
    is_16_bit = image.mode.startswith(SIXTEEN_BITS) or (image.mode == "I" and image.format == "PPM")
    if is_16_bit:
        return _pillow().fromarray((np.asarray(image.convert("I")) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        kind = "integers of 32 bits" if image.mode == "I" else "floats"
        raise DataError(
            f"{name} has pixels that are {kind} (mode {image.mode!r}), whose range is unknown. Expected: 8 or 16 bits "
            "per channel. Scale them to 0 to 255 and save the image as uint8: "
            "PIL.Image.fromarray((pixels * scale).astype('uint8'))"
        )
    return image


@contextmanager
def _open(source: Path | bytes, name: str) -> Iterator[Any]:
    """Open an image file; what is wrong with it, also while it is decoded, becomes a DataError with its name."""
    image_module = _pillow()
    if isinstance(source, Path) and source.exists() and not source.is_file():
        raise DataError(f"{name} is not a file. Opening a pipe or a device could wait forever")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", image_module.DecompressionBombWarning)  # refused below
            opened = image_module.open(source if isinstance(source, Path) else io.BytesIO(source))
            opened.filename = ""  # Pillow ignores the orientation of a TIFF file that it maps into memory by its name
        with opened:
            _check_pixels(opened.size, name)
            yield opened
    except image_module.DecompressionBombError as error:
        raise _too_large(name, first_line(error)) from None
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{name} cannot be decoded as an image ({error}). Replace the file or remove it.") from error


def _process(image: Any, size: ImageSize) -> Any:
    """Resize and crop like the image processors of transformers; what is cropped outside of the image is black."""
    width, height = image.size
    wanted = size.resize
    if isinstance(wanted, int):  # the shorter side; the longer one is rounded down
        short = min(width, height)
        wanted = (wanted, int(wanted * width / short)) if height <= width else (int(wanted * height / short), wanted)
    if wanted is not None and wanted != (height, width):
        _check_pixels(wanted, "The resized image")
        image = image.resize(wanted[::-1], _pillow().Resampling[size.resample.upper()])
        width, height = image.size
    left, top = (width - size.width) // 2, (height - size.height) // 2
    return image.crop((left, top, left + size.width, top + size.height))


def _check_pixels(size: tuple[int, int], name: str) -> None:
    """Refuse an image before it is decoded if it would fill the memory."""
    width, height = size
    if width * height > MAX_PIXELS:
        raise _too_large(name, f"{width:,} x {height:,} pixels")


def _too_large(name: str, found: str) -> DataError:
    return DataError(
        f"{name} is too large to decode: {found}. Expected: at most {MAX_PIXELS:,} pixels. The usual cause is a scan "
        "or a file made to exhaust the memory; resize it or remove it"
    )


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("Decoding image files needs Pillow. Install it: pip install 'plateaux[vision]'") from error
    return Image
