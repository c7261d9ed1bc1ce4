"""Tokenizers and image processors of Hugging Face folders, as descriptions that a run stores.

Both are read with transformers once. Afterwards, samples and new inputs are prepared without it, by the same code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from plateaux.core.errors import DataError, PlateauxError, RecipeError, first_line
from plateaux.core.imports import optional_import
from plateaux.data.images import to_pixels
from plateaux.data.preprocessing import BERT_INPUTS, ImageSize, TokenizerFile
from plateaux.integrations.huggingface_files import EXTRA, read_json

PROCESSOR = "preprocessor_config.json"
RESAMPLE = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # by their numbers in Pillow
LOCAL = {"local_files_only": True, "trust_remote_code": False}
PROBES = ((37, 53), (301, 200))  # height and width of the images that processors are compared on
TOLERANCE = 1e-4  # of normalized values; a different pixel is larger


class ImageProcessor(NamedTuple):
    """How images become the inputs of a model."""

    size: ImageSize
    mean: tuple[float, ...]
    std: tuple[float, ...]


def read_tokenizer_folder(folder: Path, length: int, texts: tuple[str, ...]) -> TokenizerFile:
    """Return the tokenizer of a folder that `save_pretrained` wrote, for texts of these names."""
    library = optional_import("transformers", extra=EXTRA)
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(str(folder), **LOCAL)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        definition = None if backend is None else backend.to_str()
    except Exception as error:  # untrusted files may be wrong in any way
        raise DataError(f"The tokenizer of {folder} cannot be read ({first_line(error)}). Save it again") from error
    if definition is None or tokenizer.pad_token is None:
        missing = "form as tokenizer.json" if definition is None else "pad_token"
        raise DataError(f"The tokenizer of {folder} has no {missing}, which is needed. Use another tokenizer")
    outputs = tuple(name for name in BERT_INPUTS if name in {"input_ids", *tokenizer.model_input_names})
    return TokenizerFile(definition, length, str(tokenizer.pad_token), texts, outputs)


def has_image_processor(folder: Path) -> bool:
    """Return whether a folder describes how its model's images are prepared."""
    return (folder / PROCESSOR).is_file()


def read_image_processor(folder: Path) -> ImageProcessor:
    """Return the steps of a folder's image processor, after comparing them with the processor itself."""
    read_json(folder / PROCESSOR)
    library = optional_import("transformers", extra=EXTRA)
    try:
        processor = library.AutoImageProcessor.from_pretrained(str(folder), backend="pil", **LOCAL)
        found = _describe(processor)
        _compare(processor, found)
    except PlateauxError:
        raise
    except Exception as error:  # untrusted files may be wrong in any way
        raise DataError(f"The image processor of {folder} cannot be used ({first_line(error)})") from error
    return found


def _describe(processor: Any) -> ImageProcessor:
    size = dict(processor.size or {}) if processor.do_resize else {}
    crop = dict(getattr(processor, "crop_size", None) or {}) if getattr(processor, "do_center_crop", False) else {}
    resize: tuple[int, int] | int | None = None
    if size.get("height") and size.get("width"):
        resize = (int(size["height"]), int(size["width"]))
    elif size.get("shortest_edge"):
        resize = int(size["shortest_edge"])
    if resize is not None and isinstance(resize, int) and not crop:  # as ConvNeXT: the size of the crop is given
        share = getattr(processor, "crop_pct", None) or 1.0
        crop = {"height": resize, "width": resize}
        resize = int(resize / share) if resize < 384 else (resize, resize)
    height, width = (crop.get("height"), crop.get("width")) if crop else resize if isinstance(resize, tuple) else (0, 0)
    if not height or not width:
        raise RecipeError(
            f"{type(processor).__name__} does not give images of one size. Set size and do_resize in {PROCESSOR}"
        )
    normalizes = bool(processor.do_normalize)
    return ImageProcessor(
        ImageSize(int(height), int(width), resize, RESAMPLE[int(processor.resample)]),  # type: ignore[arg-type]
        tuple(map(float, processor.image_mean)) if normalizes else (),
        tuple(map(float, processor.image_std)) if normalizes else (),
    )


def _compare(processor: Any, found: ImageProcessor) -> None:
    """Raise an error if other steps than resizing, cropping, scaling, and normalization are part of a processor."""
    pillow = optional_import("PIL.Image", extra=EXTRA)
    random = np.random.default_rng(0)
    for shape in PROBES:
        image = pillow.fromarray(random.integers(0, 256, (*shape, 3), dtype=np.uint8))
        expected = np.asarray(processor(image, return_tensors="np")["pixel_values"])[0]
        values = to_pixels(image, size=found.size).astype(np.float32) / 255
        if found.mean:
            mean, std = (np.array(each, dtype=np.float32)[:, None, None] for each in (found.mean, found.std))
            values = (values - mean) / std
        if values.shape != expected.shape or np.abs(values - expected).max() > TOLERANCE:
            raise RecipeError(
                f"{type(processor).__name__} does more than resizing, cropping, scaling by 1/255, and normalization. "
                "Prepare the images before, and save them as a data set"
            )
