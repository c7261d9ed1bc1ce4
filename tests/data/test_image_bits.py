"""Images with 16 bits per channel, and images whose range is unknown."""

from __future__ import annotations

import io
import os
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
from plateaux.prediction.input_files import list_inputs
from plateaux.prediction.inputs import prepare

VALUES = (np.arange(48) * 1300).astype(np.uint16).reshape(6, 8)
EXPECTED = VALUES // 256


@pytest.mark.parametrize("suffix", ["png", "tiff", "pgm"])
@pytest.mark.parametrize("channels", [1, 3])
def test_files_of_16_bits_are_scaled_to_8_bits(tmp_path: Path, suffix: str, channels: int) -> None:
    Image.fromarray(VALUES).save(tmp_path / f"image.{suffix}")
    pixels = decode(tmp_path / f"image.{suffix}", channels=channels)
    assert pixels.tolist() == [EXPECTED.tolist()] * channels


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "png", "tiff"])
def test_the_exif_orientation_is_applied_in_training_and_prediction(
    tmp_path: Path, orientation: int, suffix: str
) -> None:
    stored = np.arange(0, 240, 5, dtype=np.uint8).reshape(6, 8)
    image = Image.fromarray(stored)
    image.getexif()[0x0112] = orientation
    options = {"quality": 100} if suffix == "jpg" else {}
    image.save(file := tmp_path / f"image.{suffix}", exif=image.getexif(), **options)
    turned = [stored, stored[:, ::-1], stored[::-1, ::-1], stored[::-1], stored.T, np.rot90(stored, -1),
              stored[::-1, ::-1].T, np.rot90(stored)]  # fmt: skip
    expected = decode(file, channels=1)[0].numpy()
    assert expected.shape == turned[orientation - 1].shape
    assert np.abs(expected.astype(int) - turned[orientation - 1].astype(int)).max() <= 3  # JPEG loses something
    contract = InputContract({"x": TensorSummary("uint8", (1, *expected.shape), 0.0, 255.0)}, 2, ("no", "yes"))
    for given in (file, file.read_bytes(), Image.open(io.BytesIO(file.read_bytes()))):
        found = prepare(given, contract).arrays["x"]  # type: ignore[arg-type]
        assert np.array_equal(found[0, 0], expected.astype(np.float32) / np.float32(255))


def test_damaged_exif_data_do_not_refuse_an_image(tmp_path: Path) -> None:
    Image.fromarray(VALUES.astype(np.uint8)).save(tmp_path / "a.png", exif=b"Exif\\x00\\x00broken")
    assert decode(tmp_path / "a.png", channels=1).shape == (1, 6, 8)


def test_a_pipe_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    os.mkfifo(tmp_path / "a.csv")
    with pytest.raises(DataError, match="is not a file"):
        decode_image(tmp_path / "a.png")
    contract = InputContract({"x": TensorSummary("uint8", (1, 6, 8), 0.0, 255.0)}, 2, ("no", "yes"))
    for name in ("a.png", "a.csv"):
        with pytest.raises(DataError, match="is not a file"):
            list_inputs([str(tmp_path / name)], contract)


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
