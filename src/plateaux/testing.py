"""Small generated files in the published layouts of data sets, to test a study or a method without downloads.

The images are noise around a color of their class: large enough for every code path, of no use for a result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plateaux.core.errors import RecipeError, suggest
from plateaux.core.imports import optional_import
from plateaux.core.plain_types import derive_seed
from plateaux.data.corruptions.corrupt import CORRUPTIONS

__all__ = ["write_data"]

TRAIN, TEST = 20, 8  # images of a data set
FEW = 4  # classes and images per class in layouts with a folder per class
SEVERITIES = (1, 2, 3, 4, 5)
Images = NDArray[np.uint8]


def _images(count: int, labels: Sequence[int], side: int, *seed: str | int) -> Images:
    """Return images `[N, side, side, 3]`: the color of the class, and noise."""
    noise = np.random.default_rng(derive_seed("generated", *seed)).integers(-40, 41, (count, side, side, 3))
    colors = np.array([[40 + 53 * label % 176, 40 + 97 * label % 176, 40 + 31 * label % 176] for label in labels])
    return np.clip(colors[:, None, None, :] + noise, 0, 255).astype(np.uint8)


def _cifar(folder: str, batches: Sequence[str], title: str, classes: int, label_bytes: int) -> Callable[..., None]:
    def write(root: Path, options: Mapping[str, Any]) -> None:
        (root / folder).mkdir(parents=True, exist_ok=True)
        for file in (*batches, "test" if label_bytes == 2 else "test_batch"):
            count = TEST if file.startswith("test") else TRAIN // len(batches)
            labels = [i % classes for i in range(count)]
            planes = _images(count, labels, 32, folder, file).transpose(0, 3, 1, 2).reshape(count, -1)
            records = np.concatenate([np.array(labels, np.uint8)[:, None]] * label_bytes + [planes], axis=1)
            (root / folder / f"{file}.bin").write_bytes(records.tobytes())
        _corrupted_arrays(root / title, classes)

    return write


def _corrupted_arrays(folder: Path, classes: int) -> None:
    """Write one file per corruption: five severities, one after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    labels = [i % classes for i in range(TEST)] * len(SEVERITIES)
    np.save(folder / "labels.npy", np.array(labels, np.uint8))
    for kind in CORRUPTIONS:
        np.save(folder / f"{kind}.npy", _images(len(labels), labels, 32, kind))


def _class_folders(folder: Path, names: Sequence[str], count: int, side: int, subfolder: str = "") -> None:
    image = optional_import("PIL.Image", extra="vision")
    for label, name in enumerate(names):
        place = folder / name / subfolder
        place.mkdir(parents=True, exist_ok=True)
        for i, pixels in enumerate(_images(count, [label] * count, side, folder.name, name)):
            image.fromarray(pixels).save(place / f"{name}_{i}.JPEG", format="JPEG")


def _corrupted_folders(folder: Path, names: Sequence[str], side: int) -> None:
    for kind in CORRUPTIONS:
        for severity in SEVERITIES:
            _class_folders(folder / kind / str(severity), names, 2, side)


def _wordnet_ids(count: int) -> list[str]:
    return [f"n{1_440_764 + i:08d}" for i in range(count)]


def _tiny_imagenet(root: Path, options: Mapping[str, Any]) -> None:
    folder, names = root / "tiny-imagenet-200", _wordnet_ids(FEW)
    _class_folders(folder / "train", names, TRAIN // FEW, 64, "images")
    (folder / "wnids.txt").write_text("\n".join(names) + "\n")
    images = folder / "val" / "images"
    images.mkdir(parents=True, exist_ok=True)
    labels, image = [i % FEW for i in range(TEST)], optional_import("PIL.Image", extra="vision")
    for i, pixels in enumerate(_images(TEST, labels, 64, "val")):
        image.fromarray(pixels).save(images / f"val_{i}.JPEG", format="JPEG")
    lines = [f"val_{i}.JPEG\t{names[label]}\t0\t0\t63\t63\n" for i, label in enumerate(labels)]
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    _corrupted_folders(root / "Tiny-ImageNet-C", names, 64)


def _image_folder(root: Path, options: Mapping[str, Any]) -> None:
    """Write ImageNet and the sets that its networks are evaluated on."""
    names, side = _wordnet_ids(FEW), 32
    _class_folders(root / str(options.get("path", ".")) / "train", names, TRAIN // FEW, side)
    _class_folders(root / str(options.get("path", ".")) / "val", names, TEST // FEW, side)
    _corrupted_folders(root / "ImageNet-C", names, side)
    for folder in ("imagenet-a", "imagenet-r"):
        _class_folders(root / folder, names[: FEW // 2], 2, side)
    lists = root / "benchmark_imglist" / "imagenet"
    lists.mkdir(parents=True, exist_ok=True)
    for name, file in (("inaturalist", "test_inaturalist.txt"), ("openimage_o", "test_openimage_o.txt")):
        _class_folders(root / "images_largescale" / name, ["images"], TEST, side)
        lines = [f"{name}/images/images_{i}.JPEG -1\n" for i in range(TEST)]
        (lists / file).write_text("".join(lines))


def _mrpc(root: Path, options: Mapping[str, Any]) -> None:
    """Write the corpus, GLUE's files of it, and the vocabulary that the options name."""
    (root / "MRPC").mkdir(parents=True, exist_ok=True)
    words = [f"word{i}" for i in range(20)]
    for file, count in (
        ("msr_paraphrase_train.txt", TRAIN), ("msr_paraphrase_test.txt", TEST), ("train.tsv", TRAIN), ("dev.tsv", TEST),
    ):  # fmt: skip
        lines = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
        for i in range(count):
            first, second = " ".join(words[i % 7 : i % 7 + 6]), " ".join(words[i % 5 : i % 5 + 6])
            lines.append(f"{i % 2}\t{2 * i}\t{2 * i + 1}\t{first}\t{first if i % 2 else second}")
        (root / "MRPC" / file).write_text("\n".join(lines) + "\n", encoding="utf-8")
    vocabulary = root / str(options.get("vocabulary", "vocab.txt"))
    vocabulary.parent.mkdir(parents=True, exist_ok=True)
    special = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [
        [piece, -1.0]
        for piece in (*special, *(f"\u2581{word}" for word in words), "\u2581", *"abcdefghijklmnopqrstuvwxyz0123456789")
    ]
    steps = [{"type": name} for name in ("NFKD", "StripAccents", "Lowercase")]
    tree = {"normalizer": {"type": "Sequence", "normalizers": steps}, "model": {"type": "Unigram", "vocab": pieces}}
    vocabulary.write_text(json.dumps(tree), encoding="utf-8")


def write_data(name: str, root: str | Path, **options: Any) -> None:
    """Write a data set of some tiny images or sentences to a folder: `data = { name = NAME, root = ROOT }` reads it.

    Args:
        name: cifar10, cifar100, tiny_imagenet, image_folder, or mrpc. Sets of shifted images are written with it.
        root: The folder, which is created if it does not exist.
        options: The options of the recipe that name files, such as `path` and `vocabulary`.
    """
    if name not in _WRITERS:
        raise RecipeError(f"There are no generated files for {name!r}; {suggest(name, _WRITERS)}")
    _WRITERS[name](Path(root), options)


_WRITERS: Mapping[str, Callable[[Path, Mapping[str, Any]], None]] = {  # called with the data root and the options
    "cifar10": _cifar("cifar-10-batches-bin", [f"data_batch_{i}" for i in range(1, 6)], "CIFAR-10-C", 10, 1),
    "cifar100": _cifar("cifar-100-binary", ["train"], "CIFAR-100-C", 100, 2),
    "tiny_imagenet": _tiny_imagenet,
    "image_folder": _image_folder,
    "mrpc": _mrpc,
}
