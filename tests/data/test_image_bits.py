"""Images with 16 bits per channel, and images whose range is unknown."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from plateaux.core.errors import DataError
from plateaux.data.data_summary import TensorSummary
from plateaux.data.files import decode
from plateaux.data.images import decode_image, has_color, to_pixels
from plateaux.data.preprocessing import Preprocessing
from plateaux.prediction.contract import InputContract
from plateaux.prediction.inputs import prepare

VALUES = (np.arange(48) * 1300).astype(np.uint16).reshape(6, 8)
EXPECTED = VALUES // 256


@pytest.mark.parametrize("suffix", ["png", "tiff", "pgm"])
@pytest.mark.parametrize("channels", [1, 3])
def test_files_of_16_bits_are_scaled_to_8_bits(tmp_path: Path, suffix: str, channels: int) -> None:
    Image.fromarray(VALUES).save(tmp_path / f"image.{suffix}")
    pixels = decode(tmp_path / f"image.{suffix}", channels=channels)
    assert pixels.tolist() == [EXPECTED.tolist()] * channels


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I;16L"])
def test_every_order_of_bytes_is_read(mode: str) -> None:
    content = VALUES.astype(">u2" if mode == "I;16B" else "<u2").tobytes()
    assert to_pixels(Image.frombytes(mode, (8, 6), content), channels=1)[0].tolist() == EXPECTED.tolist()


def test_a_predictor_reads_16_bits_as_training_does() -> None:
    summary = TensorSummary("uint8", (1, 6, 8), 0.0, 255.0)
    contract = InputContract({"x": summary}, 2, ("no", "yes"), preprocessing=Preprocessing())
    found = prepare(Image.fromarray(VALUES), contract).arrays["x"]
    assert np.array_equal(found[0, 0], EXPECTED.astype(np.float32) / np.float32(255))


@pytest.mark.parametrize("dtype", ["int32", "float32"])
@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_of_unknown_range_is_an_error(dtype: str, channels: int) -> None:
    file = io.BytesIO()
    Image.fromarray(VALUES.astype(dtype)).save(file, "TIFF")
    with pytest.raises(DataError, match=r"Scan 3 has pixels that are (integers|floats).*Scale them to 0 to 255"):
        decode_image(file.getvalue(), channels=channels, name="Scan 3")


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("1", False), ("L", False), ("LA", False), ("I;16", False), ("P", True), ("RGB", True), ("RGBA", True)],
)
def test_color_is_known_from_the_header(mode: str, expected: bool) -> None:
    file = io.BytesIO()
    Image.new(mode, (3, 2)).save(file, "PNG")
    assert has_color(file.getvalue(), name="image") is expected


def test_a_damaged_header_is_an_error_with_the_name_of_the_image() -> None:
    with pytest.raises(DataError, match="Image 4 cannot be decoded as an image"):
        has_color(b"no image", name="Image 4")
