"""Features of a frozen trunk, computed once: memory-mapped shards that any number of runs are trained from.

<folder>/<hash>/about.json              what the features are of
<folder>/<hash>/00000.safetensors       [n, ...] of samples 0 .. SHARD - 1, flat
<folder>/<hash>/00000-labels.safetensors

The hash is of all that decides the numbers: the samples, the trunk's weights and cut, size and normalisation of the
images, how and with what key they are varied, and the type. A shard is put whole or not at all, so a killed build goes
on where it was. A shard that is not there is made when it is asked for.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plateaux.config.builders.model import build_backbone
from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.recipe import Recipe, fingerprint
from plateaux.core.errors import DataError, RecipeError
from plateaux.core.executor import Executor, all_reduce_max
from plateaux.core.runtime import FORMATS, is_rank_zero, rank_and_world_size
from plateaux.core.types import Batch, Inputs, derive_seed
from plateaux.data.augment import Augment, uniforms
from plateaux.data.loader import CPU, NO_AUGMENT, MemberLoader, ordered_batches
from plateaux.data.sources import DataSplits, Source, UnlabeledData
from plateaux.models.backbone import Backbone
from plateaux.storage.backends import open_store
from plateaux.storage.store import Store

VERSION = 1  # goes up whenever a feature changes by a bit, or lies elsewhere in its shard
SHARD = 1024  # samples
AUGMENT_SEED = derive_seed("features")  # of all variations: a round is the same for every run
CHUNK = 64  # samples that go through the trunk at once
LOCK_TIMEOUT_S = 3600.0  # seconds to wait for another process that builds the same

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """How samples are laid out for the trunk, and how its answers are kept."""

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    memory_format: str = "contiguous"
    dtype: str = "float32"
    augment: Augment = NO_AUGMENT
    workers: int = 0
    device: torch.device = CPU


@dataclass(slots=True)
class FeatureTable:
    """The features of every sample of a source, varied in one way, or not at all (`number` is None)."""

    source: Source
    backbone: Backbone
    store: Store
    spec: FeatureSpec
    number: int | None = None
    _maps: dict[int, tuple[NDArray[Any], NDArray[Any]]] = field(default_factory=dict)
    _folder: str = ""

    @property
    def folder(self) -> str:
        if not self._folder:
            self._folder = fingerprint(self.metadata())
        return self._folder

    def metadata(self) -> dict[str, Any]:
        """Return all that decides the numbers."""
        varied = self.spec.augment if self.number is not None else NO_AUGMENT
        return {
            "version": VERSION,
            "samples": self.source.fingerprint(),
            "backbone": self.backbone.hash(),
            "mean": list(self.spec.mean),
            "std": list(self.spec.std),
            "memory_format": self.spec.memory_format,
            "dtype": self.spec.dtype,
            "varied": {"crop": varied.crop, "flip": varied.flip, "key": AUGMENT_SEED, "round": self.number},
        }

    def shards(self) -> range:
        return range(-(-len(self.source) // SHARD))

    def missing(self, ids: Tensor | None = None) -> list[int]:
        """Return the shards that are not there yet, of all or of those that hold the samples `ids`."""
        wanted = self.shards() if ids is None else sorted(set((ids // SHARD).tolist()))
        return [shard for shard in wanted if not self.store.has(self._name(shard))]

    def make(self, shard: int) -> int:
        """Run the trunk over the samples of one shard; return how many they were."""
        ids = torch.arange(shard * SHARD, min((shard + 1) * SHARD, len(self.source)))
        rows, labels = zip(*[(self._seen(batch), batch.y.cpu()) for batch in self._batches(ids)], strict=True)
        flat = np.concatenate(rows).reshape(-1)
        if not np.isfinite(flat).all():
            raise DataError(
                f"The trunk's features of samples {int(ids[0])} to {int(ids[-1])} are no numbers in {self.spec.dtype}; "
                "use model.cache_dtype = 'float32', or look at the trunk's weights"
            )
        self.store.put_json(f"{self.folder}/about.json", self.metadata(), skip_unchanged=True)
        self.store.put_tensors(self._name(shard, "-labels"), {"labels": torch.cat(labels)})
        with self.store.array_writer(self._name(shard), flat.dtype, flat.size) as write:  # the shard is there now
            write(flat)
        return len(ids)

    def opened(self, shard: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return features and labels of a shard, read where they are looked at."""
        if shard not in self._maps:
            if not self.store.has(self._name(shard)):
                self.make(shard)
            _, flat = self.store.get_array(self._name(shard))
            labels = self.store.get_tensors(self._name(shard, "-labels"))["labels"].numpy()
            self._maps[shard] = flat.reshape(-1, *self.backbone.shape), labels
        return self._maps[shard]

    def _name(self, shard: int, part: str = "") -> str:
        return f"{self.folder}/{shard:05d}{part}.safetensors"

    def _batches(self, ids: Tensor) -> Iterator[Batch]:
        look = self.spec
        laid: dict[str, Any] = {"mean": look.mean, "std": look.std, "device": look.device, "num_workers": look.workers}
        laid["memory_format"] = FORMATS[look.memory_format]
        if self.number is None:
            return ordered_batches(self.source, ids, batch_size=CHUNK, **laid)
        feed = MemberLoader(
            self.source, ids, batch_size=CHUNK, seed=AUGMENT_SEED, classes=0, augment=look.augment, **laid
        )
        return feed.batches(ids, self.number)

    @torch.no_grad()
    def _seen(self, batch: Batch) -> NDArray[Any]:
        found = self.backbone(batch.x) if isinstance(batch.x, Tensor) else self.backbone(**batch.x)
        return found.to("cpu", getattr(torch, self.spec.dtype)).numpy()  # type: ignore[no-any-return]

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """Leave out what is mapped: pickled, it would be copied whole."""
        kept = ("source", "backbone", "store", "spec", "number", "_folder")
        return None, {**{name: getattr(self, name) for name in kept}, "_maps": {}}


class PrefixSource(Source):
    """The first samples of a source: fewer than a shard, so that no more than those go through the trunk."""

    def __init__(self, source: Source, count: int) -> None:
        self.source, self.count = source, count

    def __len__(self) -> int:
        return self.count

    def fetch(self, ids: Tensor, *, seed: int | None = None) -> tuple[Inputs, Tensor]:
        return self.source.fetch(ids)

    def fingerprint(self) -> str:
        return f"{self.source.fingerprint()}-first-{self.count}"


class FeatureSource(Source):
    """A source of features in place of inputs: each sample, in each epoch, in one of so many rounds of variation."""

    is_augmented = True
    needs_workers = False  # features are memory-mapped

    def __init__(self, source: Source, backbone: Backbone, store: Store, spec: FeatureSpec, *, rounds: int = 0) -> None:
        if not source.has_content_hash:
            raise RecipeError(
                "model.cache_features keeps features by what the samples are, and this data set does not say: give it "
                "a method fingerprint() that returns a hash of its samples, or leave model.cache_features out"
            )
        self.source, self.backbone, self.store, self.spec = source, backbone, store, spec
        numbers = range(rounds) if spec.augment.crop or spec.augment.flip else range(0)
        self.rounds = [FeatureTable(source, backbone, store, spec, number) for number in numbers]

    def without_augmentation(self) -> FeatureSource:
        return self._plain

    @cached_property
    def _plain(self) -> FeatureSource:
        return FeatureSource(self.source, self.backbone, self.store, self.spec) if self.rounds else self

    @cached_property
    def _unvaried(self) -> FeatureTable:
        return FeatureTable(self.source, self.backbone, self.store, self.spec)

    def __len__(self) -> int:
        return len(self.source)

    def fetch(self, ids: Tensor, *, seed: int | None = None) -> tuple[Inputs, Tensor]:
        among = self.rounds if self.rounds and seed is not None else [self._unvaried]
        if not len(ids):  # an empty share of a batch still has the shape of a sample
            return torch.zeros(0, *self.backbone.shape), torch.zeros(0, dtype=torch.int64)
        whole, places = np.divmod(ids.numpy(), SHARD)
        count = len(among[0].shards())
        if len(among) > 1 and seed is not None:
            whole = whole + count * (uniforms(seed, ids, 1)[:, 0] * len(among)).long().numpy()
        order = whole.argsort(kind="stable")
        slots, places = whole[order], places[order]
        ends = [0, *(np.flatnonzero(slots[1:] != slots[:-1]) + 1).tolist(), len(ids)]
        rows, labels = zip(*[_taken(among, count, slots, places, a, b) for a, b in pairwise(ends)], strict=True)
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return torch.from_numpy(np.concatenate(rows)[back]), torch.from_numpy(np.concatenate(labels)[back])

    def fingerprint(self) -> str:
        """Return the hash of the samples themselves: features are another way to look at them."""
        return self.source.fingerprint()

    def tables(self) -> list[FeatureTable]:
        """Return what training reads."""
        return self.rounds or [self._unvaried]


def _taken(
    among: Sequence[FeatureTable], count: int, slots: NDArray[Any], places: NDArray[Any], start: int, stop: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return what lies at some places of one shard."""
    number, shard = divmod(int(slots[start]), count)
    features, labels = among[number].opened(shard)
    return features.take(places[start:stop], 0), labels.take(places[start:stop], 0)


def with_cached_features(
    recipe: Recipe, data: DataSplits, components: Components = NO_COMPONENTS, *, device: torch.device = CPU
) -> DataSplits:
    """Return the data as training sees them: features of the trunk, where the recipe keeps them."""
    if not recipe.model.cache_features:
        return data
    trunk = build_backbone(recipe, data, components)
    train = through_backbone(recipe, data, data.train, trunk, rounds=recipe.model.cached_augmentations, device=device)
    test = through_backbone(recipe, data, data.test, trunk, device=device)
    extra = data.unlabeled
    if extra is not None:
        other = through_backbone(
            recipe, data, extra.source, trunk, rounds=recipe.model.cached_augmentations, device=device
        )
        extra = UnlabeledData(extra.name, other, extra.ids)
    return replace(data, train=train, test=test, unlabeled=extra, mean=(), std=())


def through_backbone(
    recipe: Recipe,
    data: DataSplits,
    source: Source,
    backbone: Backbone,
    *,
    rounds: int = 0,
    device: torch.device = CPU,
    ids: Tensor | None = None,
) -> FeatureSource:
    """Return samples as the trunk sees them, kept where the recipe says; `ids`: which of them will be asked for."""
    if ids is not None and len(ids) and int(ids.max()) + 1 < min(SHARD, len(source)):
        source = PrefixSource(source, int(ids.max()) + 1)
    look = FeatureSpec(
        data.mean,
        data.std,
        recipe.train.memory_format,
        recipe.model.cache_dtype,
        Augment(crop=recipe.data.crop, flip=recipe.data.flip),
        recipe.data.num_workers,
        device,
    )
    layout = FORMATS[recipe.train.memory_format]
    if any(tensor.is_floating_point() and tensor.dtype != torch.float32 for tensor in backbone.state_dict().values()):
        backbone = copy.deepcopy(backbone)  # that of members in float64 is theirs
    backbone = backbone.to(device=device, dtype=torch.float32, memory_format=layout).eval()  # type: ignore[call-overload]
    return FeatureSource(source, backbone, open_store(cache_dir(recipe)), look, rounds=rounds)


def cache_dir(recipe: Recipe) -> str:
    """Return where features are kept: run.feature_cache, else PLATEAUX_CACHE, else a folder of the user's."""
    usual = os.environ.get("PLATEAUX_CACHE") or Path("~/.cache/plateaux").expanduser()
    return recipe.run.feature_cache or str(Path(usual) / "features")


def prepare(
    sources: Iterable[Source], executor: Executor, say: Say = lambda _: None, *, ids: Tensor | None = None
) -> int:
    """Make what is missing of these sources' features, each process its share; return of how many samples.

    With `ids` only what these need is made. Another process that builds the same is waited for, and what it has made is
    not made again.
    """
    tables = [table for each in sources if isinstance(each, FeatureSource) for table in each.tables()]
    made = 0
    for table in {table.folder: table for table in tables}.values():
        if not all_reduce_max(executor, int(bool(table.missing(ids)))):
            continue
        with ExitStack() as held:
            if is_rank_zero():
                held.enter_context(table.store.lock(table.folder, timeout=LOCK_TIMEOUT_S))
                table.store.remove_partial(table.folder)  # what a killed builder left half-written
            executor.barrier()
            made += _make(table, say, ids)
            executor.barrier()  # nobody reads before everything is there
    return made


def training_sources(recipe: Recipe, data: DataSplits) -> list[Source]:
    """Return the sources that training reads."""
    found: list[Source] = [data.train]
    if recipe.data.validation_split and isinstance(data.train, FeatureSource):
        found.append(data.train.without_augmentation())
    return found if data.unlabeled is None else [*found, data.unlabeled.source]


def _make(table: FeatureTable, say: Say, ids: Tensor | None) -> int:
    rank, ranks = rank_and_world_size()
    mine = [shard for shard in table.missing(ids) if shard % ranks == rank]
    made = 0
    for count, shard in enumerate(mine, 1):
        made += table.make(shard)
        say(f"features of {len(table.source):,} samples: {count} of {len(mine)} shards")
    return made
