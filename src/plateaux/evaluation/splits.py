"""The splits that a run can be evaluated on: its own, corrupted ones, and other datasets.

test, train, validation          the splits of the run's dataset
corrupted[:fog[:3]]              its test samples under 15 corruptions (all) at five severities; extra: four more
./photos, list.txt, imagenet_a   images of the run's classes, or of some of them: by path, or a dataset by name
mnist, textures32, ...           OOD: the test samples of another dataset, resized to the shape of the run's inputs
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plateaux.config.builders.data import hub_options, train_val_split
from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.recipe import Recipe, fingerprint
from plateaux.config.schema import accepts
from plateaux.core import registry
from plateaux.core.errors import DataError, RunError, suggest
from plateaux.core.types import Inputs
from plateaux.data.corruptions.corrupt import CORRUPTIONS, EXTRA, VERSION, Corrupted
from plateaux.data.corruptions.published import open_published
from plateaux.data.data_summary import class_names
from plateaux.data.files import data_path, data_root
from plateaux.data.image_paths import is_image_path, open_images
from plateaux.data.labeled_images import LabeledImages, RelabeledSource, class_numbers, open_labeled_images
from plateaux.data.sources import DataSplits, Source
from plateaux.storage.image_cache import CachedImages
from plateaux.storage.run_info import DataInfo

SEVERITIES = (1, 2, 3, 4, 5)
GROUPS = {"all": CORRUPTIONS, "extra": EXTRA}  # corrupted:all:5 has the 15 corruptions at severity 5
OWN = ("test", "train", "validation", "corrupted")
ALL_CLASSES = ":all_classes"  # after the name of a labeled set: without a class mask
GENERATED = "generated, CIFAR-C-like"
PUBLISHED = "published files"
PUBLISHED_BY_NAME = ("cifar10", "cifar100", "tiny_imagenet")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EvalSplit:
    """Samples by name. They are loaded when `open` is called."""

    name: str
    family: str  # test, train, validation, corrupted, labeled, or the suite of an OOD dataset (near, far)
    open: Callable[[Recipe, DataSplits], tuple[Source, Tensor]]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    spec: str = ""  # the text that selects exactly this split
    limit: int | None = None  # use only the first N samples
    labeled: bool = True  # whether its labels are classes of the run
    classes: tuple[int, ...] | None = None  # class mask: the classes to evaluate over, ascending; None: all

    @property
    def is_own(self) -> bool:
        """Whether the samples are those of the run's dataset, perhaps corrupted."""
        return self.labeled and self.family in OWN


def eval_splits(
    recipe: Recipe,
    info: DataInfo,
    names: Sequence[str],
    *,
    cache: str | Path | None = None,
    components: Components = NO_COMPONENTS,
    own_only: bool = False,
) -> list[EvalSplit]:
    """Return the splits with these names. Generated corrupted images are kept in `cache`.

    The run's own samples are not loaded yet. The files of other labeled sets are looked up, so that a missing folder
    or an unknown class is an error here, before any evaluation.
    """
    splits: list[EvalSplit] = []
    for text in names:
        name, limit = parse_limit(text)
        new: list[EvalSplit]
        if name in ("test", "train", "validation"):
            new = [EvalSplit(name, name, _open_own(name), {"name": info.name}, name)]
        elif name.split(":")[0] == "corrupted":
            new = _corrupted_splits(recipe, info, name, cache)
        elif not _is_labeled_set(name):
            raise RunError(
                f"There is no split called {name!r}; allowed: test, train, validation (if the run has a validation "
                "split), corrupted, corrupted:<kind>, corrupted:<kind>:<severity>, a folder or list of labeled images "
                "(./photos), a dataset with classes of the run (imagenet_a), and test@N for the first N samples"
            )
        elif own_only:
            raise RunError(
                f"{name!r} is not a split of the run's own data. `plateaux evaluate` measures metrics on it, as do the "
                "splits of a study; this function needs test, train, validation, or corrupted:<kind>:<severity>"
            )
        else:
            new = [_labeled_split(recipe, info, name, components)]
        splits += [replace(split, limit=limit) for split in new]
    return splits


def parse_limit(text: str) -> tuple[str, int | None]:
    """Return the name of a split and its limit: `corrupted@2000`."""
    name, at, count = text.rpartition("@")
    if at and count.isdecimal() and int(count):
        return name, int(count)
    if at and not is_image_path(text):
        raise RunError(f"{text!r}: give the number of samples after @, such as {name}@2000")
    return text, None


def eval_split(recipe: Recipe, info: DataInfo, name: str) -> EvalSplit:
    """Return the one split of the run's own data with this name."""
    splits = eval_splits(recipe, info, [name], own_only=True)
    if len(splits) > 1:
        raise RunError(f"{name!r} selects {len(splits)} splits; give one, such as {splits[0].spec!r}")
    return splits[0]


def _is_labeled_set(name: str) -> bool:
    name = name.removesuffix(ALL_CLASSES)
    return is_image_path(name) or ":" in name or name in registry.dataset.names()


def _labeled_split(recipe: Recipe, info: DataInfo, text: str, components: Components) -> EvalSplit:
    """Return images of the run's classes, or of some of them. The logits of the other classes are then masked."""
    name = text.removesuffix(ALL_CLASSES)
    _require_images(name, info.shape)
    images = (_open_labeled_path if is_image_path(name) else _open_labeled_dataset)(recipe, info, name, components)
    metadata: dict[str, Any] = {"name": info.name}
    mask = images.classes if len(images.classes) < info.classes else None
    if mask is not None:
        metadata["classes"] = f"{len(mask):,} of {info.classes:,} classes"
    if mask is not None and text != name:
        metadata["classes"] += ", not masked"
        mask = None
    if mask is not None:
        if len(mask) == 1:
            raise DataError(
                f"{name} has images of one class only ({class_names(info.labels, info.classes)[mask[0]]!r}). With a "
                "mask of the other classes, every prediction would be correct. Evaluate over all classes: "
                f"--split {name}{ALL_CLASSES}"
            )
        metadata["class_mask"] = fingerprint({"classes": list(mask)})  # part of the key of cached logits
    ids = torch.arange(len(images.source))
    return EvalSplit(text, "labeled", lambda *_: (images.source, ids), metadata, text, classes=mask)


def _open_labeled_path(recipe: Recipe, info: DataInfo, path: str, _: Components) -> LabeledImages:
    names, root = class_names(info.labels, info.classes), recipe.data.options.get("root")
    images = open_labeled_images(path, names, size=info.shape[-1], channels=info.shape[0], root=root)
    return replace(images, source=ResizedSource(images.source, info.shape))


def _open_labeled_dataset(recipe: Recipe, info: DataInfo, name: str, components: Components) -> LabeledImages:
    factory = registry.dataset.get(name, allow=components.trust)
    options = {"root": recipe.data.options.get("root"), "size": info.shape[-1]}
    other: DataSplits = factory(
        **{key: value for key, value in options.items() if value is not None and accepts(factory, key)},
        **hub_options(factory, recipe, components),
    )
    if len(other.shape) != 3:
        raise DataError(f"The samples of {name!r} have shape {list(other.shape)}; only images can be evaluated here")
    names = class_names(info.labels, info.classes)
    numbers = class_numbers(class_names(other.labels, other.classes), names, name)
    source = ResizedSource(RelabeledSource(other.test, numbers), info.shape, other.shape)
    return LabeledImages(source, tuple(sorted(numbers)))


def _require_images(name: str, shape: Sequence[int]) -> None:
    if len(shape) != 3 or shape[0] not in (1, 3, 4):
        raise DataError(
            f"{name} are images, but the inputs of this run have shape {list(shape)}. Expected: images with 1, 3, or "
            "4 channels, [channels, height, width]"
        )


def ood_splits(
    recipe: Recipe, info: DataInfo, name: str, suite: str, components: Components = NO_COMPONENTS
) -> list[EvalSplit]:
    """Return the OOD sets of a name: another dataset or images by path, or corruptions of the run's test samples.

    Every corruption and severity is a set of its own: `corrupted:fog:3` is one, `corrupted:all:5` are 15.
    """
    if name.split(":")[0] != "corrupted":
        return [ood_split(name, suite, components)]
    own = eval_splits(recipe, info, [name], own_only=True)
    return [replace(split, name=split.spec, family=suite, labeled=False) for split in own]


def ood_set_names(info: DataInfo, names: Sequence[str]) -> list[str]:
    """Return the names with one for each set: `corrupted:all:5` gives `corrupted:gaussian_noise:5` and 14 others.

    A set that is missing can then be skipped by name, and the others of its group are kept.
    """
    return [single for name in names for single in _single_sets(info, name)]


def _single_sets(info: DataInfo, name: str) -> list[str]:
    if name.split(":")[0] != "corrupted":
        return [name]
    group, limit = parse_limit(name)
    suffix = "" if limit is None else f"@{limit}"
    return [f"corrupted:{kind}:{severity}{suffix}" for kind, severity in _corruptions(info, group)]


def ood_split(name: str, suite: str, components: Components = NO_COMPONENTS) -> EvalSplit:
    """Return the test samples of another dataset, or images by path, at the shape of the run's inputs."""
    if is_image_path(name):
        return EvalSplit(name, suite, _open_path(name), {"name": Path(name).name}, labeled=False)
    dataset = {"tin": "tinyimagenet32", "texture": "textures32", "fashionmnist": "fashion_mnist"}.get(name, name)
    if dataset not in registry.dataset.names() and data_path(name, None).is_dir():
        raise RunError(f"There is no dataset called {name!r}. For the images in the folder {name!r}, write ./{name}")
    factory = registry.dataset.get(dataset, allow=components.trust)  # fails on a wrong name before any evaluation

    def open_(recipe: Recipe, data: DataSplits) -> tuple[Source, Tensor]:
        has_root = "root" in recipe.data.options and accepts(factory, "root")
        root = {"root": recipe.data.options["root"]} if has_root else {}
        other = factory(**root, **hub_options(factory, recipe, components))
        return ResizedSource(other.test, data.shape, other.shape), torch.arange(len(other.test))

    return EvalSplit(name, suite, open_, {"name": dataset}, labeled=False)


def _open_path(path: str) -> Callable[[Recipe, DataSplits], tuple[Source, Tensor]]:
    def open_(recipe: Recipe, data: DataSplits) -> tuple[Source, Tensor]:
        _require_images(path, data.shape)
        source = open_images(path, size=data.shape[-1], channels=data.shape[0], root=recipe.data.options.get("root"))
        return ResizedSource(source, data.shape), torch.arange(len(source))

    return open_


class ResizedSource(Source):
    """Images of another dataset at the size and number of channels of the run."""

    def __init__(self, inner: Source, shape: tuple[int, ...], original: tuple[int, ...] | None = None) -> None:
        self.inner, self.shape, self.original = inner, shape, original

    @property
    def resizing(self) -> str | None:
        """How the samples are changed, such as "1x28x28 to 3x32x32"; None: they have the shape of the run."""
        if self.original is None or tuple(self.original) == tuple(self.shape):
            return None
        return " to ".join("x".join(map(str, shape)) for shape in (self.original, self.shape))

    @property
    def has_content_hash(self) -> bool:
        return self.inner.has_content_hash

    def __len__(self) -> int:
        return len(self.inner)

    def fetch(self, ids: Tensor, *, seed: int | None = None) -> tuple[Inputs, Tensor]:
        x, y = self.inner.fetch(ids)
        if not isinstance(x, Tensor) or x.dim() != 4 or len(self.shape) != 3:
            raise DataError(
                f"Samples of shape {tuple(x.shape[1:]) if isinstance(x, Tensor) else 'text'} cannot be resized to "
                f"{self.shape}; only images can. Use image datasets for --ood"
            )
        x = x.expand(-1, self.shape[0], -1, -1) if x.shape[1] == 1 else x
        if self.shape[0] == 1 and x.shape[1] == 3:
            x = x.float().mean(1, keepdim=True).round().to(x.dtype)
        if x.shape[2:] != self.shape[1:]:
            scaled = F.interpolate(x.float(), self.shape[1:], mode="bilinear", antialias=True, align_corners=False)
            x = scaled.round().clamp(0, 255).to(x.dtype) if x.dtype == torch.uint8 else scaled
        return x.contiguous(), y

    def fingerprint(self) -> str:
        return f"{self.inner.fingerprint()}-{'x'.join(str(side) for side in self.shape)}"


def _open_own(name: str) -> Callable[[Recipe, DataSplits], tuple[Source, Tensor]]:
    def open_(recipe: Recipe, data: DataSplits) -> tuple[Source, Tensor]:
        if name == "test":
            if not len(data.test):
                raise RunError(
                    "The run has no test samples, because it was trained on all of them. Evaluate on labeled samples "
                    'of your own: plateaux.evaluate(run, split={"new": (x, y)})'
                )
            return data.test, torch.arange(len(data.test))
        train, validation = train_val_split(recipe, data)
        if name == "train":
            return data.train, train
        if not len(validation):
            raise RunError(
                "The run has no validation samples, because its recipe sets no data.validation_split. Use the test "
                "samples: --split test, or to calibrate, a part of them: --split test --fraction 0.5"
            )
        return data.train, validation

    return open_


def _corrupted_splits(recipe: Recipe, info: DataInfo, name: str, cache: str | Path | None) -> list[EvalSplit]:
    root = data_root(recipe.data.options.get("root"))
    return [_corrupted_split(info, root, kind, severity, cache) for kind, severity in _corruptions(info, name)]


def _corruptions(info: DataInfo, name: str) -> list[tuple[str, int]]:
    """Return the kinds and severities of a name such as `corrupted:all:5`."""
    _, *rest = name.split(":")
    kinds = GROUPS.get(rest[0], (rest[0],)) if rest else CORRUPTIONS
    severities = SEVERITIES if len(rest) < 2 else (rest[1],)
    for kind in kinds:
        if kind not in (*CORRUPTIONS, *EXTRA):
            raise RunError(f"There is no corruption called {kind!r}; {suggest(kind, [*CORRUPTIONS, *EXTRA, *GROUPS])}")
    if "saturate" in kinds and len(info.shape) == 3 and info.shape[0] == 1:
        others = ",".join(f"corrupted:{kind}" for kind in EXTRA if kind != "saturate")
        raise RunError(
            f"{name!r}: 'saturate' needs color, and the images of this run are gray, which have no saturation. "
            f"Evaluate the other extra kinds: --split {others}"
        )
    if len(rest) > 2 or any(str(severity) not in ("1", "2", "3", "4", "5") for severity in severities):
        raise RunError(f"{name!r}: the severity must be 1, 2, 3, 4 or 5, as in corrupted:fog:3")
    return [(kind, int(severity)) for kind in kinds for severity in severities]


def _published(info: DataInfo, root: Path, kind: str, severity: int) -> Source | None:
    """Return the published corrupted images if they are there. A run with classes of ImageNet has those of ImageNet-C.

    ImageNet-C is recognized by the names of the classes (WordNet ids), so an `image_folder` may have some of them.
    """
    if info.name in PUBLISHED_BY_NAME:
        return open_published(info.name, root, kind, severity, classes=info.classes)
    if len(info.shape) != 3 or info.shape[0] != 3 or not (info.labels or info.name == "imagenet"):
        return None
    try:
        return open_published("imagenet", root, kind, severity, folders=info.labels, size=info.shape[-1])
    except DataError as problem:  # some classes are missing
        logger.warning("corrupted images are generated, because ImageNet-C cannot be used: %s", problem)
        return None


def _corrupted_split(info: DataInfo, root: Path, kind: str, severity: int, cache: str | Path | None) -> EvalSplit:
    published = _published(info, root, kind, severity)

    def open_(recipe: Recipe, data: DataSplits) -> tuple[Source, Tensor]:
        source: Source = published if published is not None else Corrupted(data.test, kind, severity)
        if cache is not None and isinstance(source, Corrupted):
            source = CachedImages(source, cache)
        return source, torch.arange(len(source))

    origin = PUBLISHED if published is not None else GENERATED
    metadata = {"name": info.name, "corruption": kind, "severity": severity, "source": origin}
    metadata |= {"version": VERSION} if published is None else {"published": published.fingerprint()}
    return EvalSplit(f"{kind} {severity}", "corrupted", open_, metadata, f"corrupted:{kind}:{severity}")


def is_corrupted_split(name: str) -> bool:
    """Return whether the name of a split in stored results is one corruption at one severity.

    >>> is_corrupted_split("fog 3"), is_corrupted_split("test"), is_corrupted_split("corrupted")
    (True, False, False)
    """
    kind, _, severity = name.rpartition(" ")
    return kind in (*CORRUPTIONS, *EXTRA) and severity in ("1", "2", "3", "4", "5")
