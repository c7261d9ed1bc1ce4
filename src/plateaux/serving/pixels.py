"""Limit the size of images by their headers, before they are decoded."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence

from PIL import Image

from plateaux.core.errors import DataError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "PPM", "TIFF")  # Pillow runs a PostScript interpreter for EPS, if any


def check_pixels(files: Sequence[bytes], limit: int) -> None:
    """Raise DataError if a file is no image, of another format, or has more pixels than the limit."""
    for content in files:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # refused below
                with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                    width, height = image.size
        except Image.DecompressionBombError:
            raise DataError(f"The image is too large. Expected: at most {limit:,} pixels") from None
        except Exception:  # Pillow raises many kinds of errors for damaged files
            allowed = ", ".join(FORMATS)
            raise DataError(f"The input cannot be decoded as an image. Expected: a file of {allowed}") from None
        if width * height > limit:
            raise DataError(f"The image has {width:,} x {height:,} pixels. Expected: at most {limit:,}")
