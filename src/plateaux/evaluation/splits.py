"""What a run can be measured on: its own samples, corrupted ones, and samples from elsewhere.

test, train, validation          the run's own
corrupted[:fog[:3]]              its test samples under 15 corruptions at five severities; extra: four more
mnist, textures32, ...           the test samples of any data set, brought to the shape of the run's own
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plateaux.config.builders.data import train_val_split
from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.recipe import Recipe
from plateaux.config.schema import accepts
from plateaux.core import registry
from plateaux.core.errors import DataError, RunError, suggest
from plateaux.core.types import Inputs
from plateaux.data.corruptions.corrupt import CORRUPTIONS, EXTRA, VERSION, Corrupted
from plateaux.data.corruptions.published import open_published
from plateaux.data.files import data_root
from plateaux.data.sources import DataSplits, Source
from plateaux.storage.image_cache import CachedImages
from plateaux.storage.run_info import DataInfo

SEVERITIES = (1, 2, 3, 4, 5)
GENERATED = "generated, CIFAR-C-like"
PUBLISHED = "published files"


@dataclass(frozen=True, slots=True)
class EvalSplit:
    """Some samples by name, found only when they are needed."""

    name: str
    family: str  # what it is measured as part of: test, corrupted, near ...
    open: Callable[[Recipe, DataSplits], tuple[Source, Tensor]]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    word: str = ""  # that names it alone
    limit: int | None = None  # only so many of its samples
    labeled: bool = True  # whether its labels are classes of the run


def eval_splits(
    recipe: Recipe, facts: DataInfo, split: Sequence[str], *, cache: str | Path | None = None
) -> list[EvalSplit]:
    """Return what the words name; nothing is read yet. Corrupted images may be kept in the folder `cache`."""
    found: list[EvalSplit] = []
    for given_word in split:
        word, first = _counted(given_word)
        before = len(found)
        if word in ("test", "train", "validation"):
            found.append(EvalSplit(word, word, _own(word), {"name": facts.name}, word))
        elif word.split(":")[0] == "corrupted":
            found.extend(_corrupted(recipe, facts, word, cache))
        else:
            raise RunError(
                f"There are no samples called {word!r}; allowed: test, train, validation (where the run held some "
                "out), corrupted, corrupted:<kind>, corrupted:<kind>:<severity>, and of each the first N: test@N"
            )
        found[before:] = [replace(each, limit=first) for each in found[before:]]
    return found


def _counted(word: str) -> tuple[str, int | None]:
    """Return a word and how many samples it asks for: `corrupted@2000`."""
    name, at, count = word.partition("@")
    if at and not (count.isdigit() and int(count)):
        raise RunError(f"{word!r}: after @ stands how many samples to take, such as {name}@2000")
    return name, int(count) if at else None


def eval_split(recipe: Recipe, facts: DataInfo, split: str) -> EvalSplit:
    """Return the one set of samples that the word names."""
    found = eval_splits(recipe, facts, [split])
    if len(found) > 1:
        raise RunError(f"{split!r} names {len(found)} sets of samples, and one is needed, such as {found[0].word!r}")
    return found[0]


def ood_split(name: str, of: str, components: Components = NO_COMPONENTS) -> EvalSplit:
    """Return the test samples of another data set, brought to the shape of the run's own."""
    known = {"tin": "tinyimagenet32", "texture": "textures32", "fashionmnist": "fashion_mnist"}.get(name, name)
    factory = registry.dataset.get(known, allow=components.trust)  # a wrong name is told before anything is walked over

    def open_(recipe: Recipe, data: DataSplits) -> tuple[Source, Tensor]:
        rooted = "root" in recipe.data.options and accepts(factory, "root")
        source = factory(**({"root": recipe.data.options["root"]} if rooted else {})).test
        return ResizedSource(source, data.shape), torch.arange(len(source))

    return EvalSplit(name, of, open_, {"name": known}, labeled=False)


class ResizedSource(Source):
    """Images of another set at this run's size and number of channels."""

    def __init__(self, inner: Source, shape: tuple[int, ...]) -> None:
        self.inner, self.shape = inner, shape

    def __len__(self) -> int:
        return len(self.inner)

    def fetch(self, ids: Tensor, *, seed: int | None = None) -> tuple[Inputs, Tensor]:
        x, y = self.inner.fetch(ids)
        if not isinstance(x, Tensor) or x.dim() != 4 or len(self.shape) != 3:
            raise DataError(
                f"Samples of shape {tuple(x.shape[1:]) if isinstance(x, Tensor) else 'text'} cannot be brought to "
                f"{self.shape}: only images can; choose image sets for --ood"
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


def _own(word: str) -> Callable[[Recipe, DataSplits], tuple[Source, Tensor]]:
    def open_(recipe: Recipe, data: DataSplits) -> tuple[Source, Tensor]:
        if word == "test":
            return data.test, torch.arange(len(data.test))
        train, validation = train_val_split(recipe, data)
        if word == "train":
            return data.train, train
        if not len(validation):
            raise RunError("There are no samples called 'validation'; allowed: test, train")
        return data.train, validation

    return open_


def _corrupted(recipe: Recipe, facts: DataInfo, word: str, cache: str | Path | None) -> list[EvalSplit]:
    _, *rest = word.split(":")
    kinds = CORRUPTIONS if not rest else EXTRA if rest[0] == "extra" else (rest[0],)
    levels = SEVERITIES if len(rest) < 2 else (rest[1],)
    for kind in kinds:
        if kind not in (*CORRUPTIONS, *EXTRA):
            raise RunError(f"There is no corruption called {kind!r}; {suggest(kind, [*CORRUPTIONS, *EXTRA, 'extra'])}")
    if len(rest) > 2 or any(str(level) not in ("1", "2", "3", "4", "5") for level in levels):
        raise RunError(f"{word!r}: a severity is 1, 2, 3, 4 or 5, as in corrupted:fog:3")
    root = data_root(recipe.data.options.get("root"))
    return [_corruption(facts, root, kind, int(level), cache) for kind in kinds for level in levels]


def _published(facts: DataInfo, root: Path, kind: str, severity: int) -> Source | None:
    """Return the published images where they lie; a folder of images may be ImageNet, with ImageNet-C beside it."""
    if facts.name != "folder":
        return open_published(facts.name, root, kind, severity, classes=facts.classes)
    try:
        return open_published("imagenet", root, kind, severity, folders=facts.labels, size=int(facts.shape[-1]))
    except DataError:  # of other classes: not this set's
        return None


def _corruption(facts: DataInfo, root: Path, kind: str, severity: int, cache: str | Path | None) -> EvalSplit:
    published = _published(facts, root, kind, severity)
    source = PUBLISHED if published is not None else GENERATED

    def open_(recipe: Recipe, data: DataSplits) -> tuple[Source, Tensor]:
        found: Source = published if published is not None else Corrupted(data.test, kind, severity)
        if cache is not None and isinstance(found, Corrupted):
            found = CachedImages(found, cache)
        return found, torch.arange(len(found))

    about = {"name": facts.name, "corruption": kind, "severity": severity, "source": source}
    about |= {"version": VERSION} if published is None else {"published": published.fingerprint()}
    return EvalSplit(f"{kind} {severity}", "corrupted", open_, about, f"corrupted:{kind}:{severity}")
