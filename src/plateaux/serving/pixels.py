"""Limit the size of images by their headers, before they are decoded."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence

from PIL import Image

from plateaux.core.errors import DataError


def check_pixels(files: Sequence[bytes], limit: int) -> None:
    """Raise DataError if a file is no image, or has more pixels than the limit."""
    for content in files:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # refused below
                with Image.open(io.BytesIO(content)) as image:
                    width, height = image.size
        except Image.DecompressionBombError:
            raise DataError(f"The image is too large. Expected: at most {limit:,} pixels") from None
        except Exception:  # Pillow raises many kinds of errors for damaged files
            raise DataError("The body cannot be decoded as an image. Expected: a PNG, JPEG, or WebP file") from None
        if width * height > limit:
            raise DataError(f"The image has {width:,} x {height:,} pixels. Expected: at most {limit:,}")
