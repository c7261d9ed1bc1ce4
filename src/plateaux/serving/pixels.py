"""Limit the size of images by their headers, before they are decoded."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence

from PIL import Image

from plateaux.core.errors import DataError
from plateaux.data.preprocessing import ImageSize

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "PPM", "TIFF")  # Pillow runs a PostScript interpreter for EPS, if any


def count_pixels(files: Sequence[bytes], limit: int, resize: int | ImageSize | None) -> int:
    """Return how many pixels the files have together. More than the limit, or a file that is no image, is an error.

    An image counts as large as it is after it is resized, if that is larger.
    """
    total = 0
    for content in files:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # refused below
                with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                    width, height = image.size
        except Image.DecompressionBombError:
            raise DataError(f"An image is too large. Expected: at most {limit:,} pixels in a request") from None
        except Exception:  # Pillow raises many kinds of errors for damaged files
            allowed = ", ".join(FORMATS)
            raise DataError(f"The input cannot be decoded as an image. Expected: a file of {allowed}") from None
        side = resize.resize if isinstance(resize, ImageSize) else resize
        scale = side / min(width, height) if isinstance(side, int) else 1.0
        total += int(width * height * max(1.0, scale) ** 2)
        if total > limit:
            raise DataError(
                f"The images have {total:,} pixels, the last one {width:,} x {height:,}. Expected: at most {limit:,} "
                "in a request, also after the shorter side of each is resized"
            )
    return total
