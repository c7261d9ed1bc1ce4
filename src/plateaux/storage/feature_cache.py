"""A cache of backbone features: computed once, stored as memory-mapped shards, and shared by all runs.

<folder>/<hash>/about.json              description of the features
<folder>/<hash>/00000.safetensors       flat features [n * ...] of samples 0 .. SHARD_SAMPLES - 1
<folder>/<hash>/00000-labels.safetensors

The hash covers everything that determines the features: samples, weights and cut of the backbone, size, normalization
and augmentation of the images, and dtype. Shards are written atomically, so an interrupted build continues where it
stopped. A missing shard is computed at its first access.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
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
from plateaux.core.executor import Collectives, all_reduce_max
from plateaux.core.process_info import is_rank_zero, rank_and_world_size
from plateaux.core.runtime import FORMATS
from plateaux.core.types import Batch, Inputs, derive_seed
from plateaux.data.augment import Augment, uniforms
from plateaux.data.loader import CPU, NO_AUGMENT, MemberLoader, ordered_batches
from plateaux.data.sources import DataSplits, Source, UnlabeledData
from plateaux.models.backbone import Backbone
from plateaux.storage.remote_store import open_store
from plateaux.storage.store import Store

logger = logging.getLogger(__name__)

VERSION = 2  # incremented when the value of a feature or the layout of a shard changes
SHARD_SAMPLES = 1024
AUGMENT_SEED = derive_seed("features")  # the same for all runs, so that they share the augmented features
BATCH_SAMPLES = 64  # batch size of the backbone
LOCK_TIMEOUT_S = 3600.0  # wait for another process that builds the same features


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """Preprocessing of the inputs of the backbone, and the dtype of the stored features."""

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    memory_format: str = "contiguous"
    dtype: str = "float32"
    augment: Augment = NO_AUGMENT
    workers: int = 0
    device: torch.device = CPU


@dataclass(slots=True)
class FeatureTable:
    """The features of all samples of a source with one augmentation, or without augmentation (`number` is None)."""

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
        """Return everything that determines the features."""
        augment = self.spec.augment if self.number is not None else NO_AUGMENT
        return {
            "version": VERSION,
            "samples": self.source.fingerprint(),
            "backbone": self.backbone.hash(),
            "mean": list(self.spec.mean),
            "std": list(self.spec.std),
            "memory_format": self.spec.memory_format,
            "dtype": self.spec.dtype,
            "augmentation": {
                "crop": augment.crop,
                "flip": augment.flip,
                **({"crop_fill": augment.crop_fill} if augment.crop_fill else {}),
                **({"resized_crop": list(augment.resized_crop)} if augment.resized_crop else {}),
                "seed": AUGMENT_SEED,
                "number": self.number,
            },
        }

    def shards(self) -> range:
        return range(-(-len(self.source) // SHARD_SAMPLES))

    def missing(self, ids: Tensor | None = None) -> list[int]:
        """Return the missing shards among all shards, or among those with the samples `ids`."""
        shards = self.shards() if ids is None else sorted(set((ids // SHARD_SAMPLES).tolist()))
        return [shard for shard in shards if not self.store.has_recorded(self._name(shard))]

    def build(self, shard: int) -> int:
        """Compute the features of one shard, and return the number of its samples."""
        ids = torch.arange(shard * SHARD_SAMPLES, min((shard + 1) * SHARD_SAMPLES, len(self.source)))
        rows, labels = zip(*[(self._features(batch), batch.y.cpu()) for batch in self._batches(ids)], strict=True)
        flat = np.concatenate(rows).reshape(-1)
        if not np.isfinite(flat).all():
            raise DataError(
                f"Backbone features of samples {int(ids[0])} to {int(ids[-1])} are NaN or infinite in "
                f"{self.spec.dtype}; set model.cache_dtype = 'float32', or check the weights of the backbone"
            )
        self.store.put_json(f"{self.folder}/about.json", self.metadata(), skip_unchanged=True)
        self.store.put_tensors(self._name(shard, "-labels"), {"labels": torch.cat(labels)})
        # The features come last: their existence marks the shard as complete.
        with self.store.array_writer(self._name(shard), flat.dtype, flat.size) as write:
            write(flat)
        return len(ids)

    def open(self, shard: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return features and labels of a shard. The features are memory-mapped."""
        if shard not in self._maps:
            if not self.store.has_recorded(self._name(shard)):
                self.build(shard)
            _, flat = self.store.get_array(self._name(shard))
            labels = self.store.get_tensor(self._name(shard, "-labels"), "labels", dims=1, integers=True).numpy()
            self._maps[shard] = flat.reshape(-1, *self.backbone.shape), labels
        return self._maps[shard]

    def _name(self, shard: int, part: str = "") -> str:
        return f"{self.folder}/{shard:05d}{part}.safetensors"

    def _batches(self, ids: Tensor) -> Iterator[Batch]:
        spec = self.spec
        options: dict[str, Any] = {"mean": spec.mean, "std": spec.std, "device": spec.device}
        options |= {"num_workers": spec.workers, "memory_format": FORMATS[spec.memory_format]}
        if self.number is None:
            return ordered_batches(self.source, ids, batch_size=BATCH_SAMPLES, **options)
        loader = MemberLoader(
            self.source, ids, batch_size=BATCH_SAMPLES, seed=AUGMENT_SEED, classes=0, augment=spec.augment, **options
        )
        return loader.batches(ids, self.number)

    @torch.no_grad()
    def _features(self, batch: Batch) -> NDArray[Any]:
        features = self.backbone(batch.x) if isinstance(batch.x, Tensor) else self.backbone(**batch.x)
        return features.to("cpu", getattr(torch, self.spec.dtype)).numpy()  # type: ignore[no-any-return]

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """Omit the memory maps, which pickle would copy."""
        names = ("source", "backbone", "store", "spec", "number", "_folder")
        return None, {**{name: getattr(self, name) for name in names}, "_maps": {}}


class PrefixSource(Source):
    """The first samples of a source: less than a shard, so that the backbone runs on these samples only."""

    def __init__(self, source: Source, count: int) -> None:
        self.source, self.count = source, count

    def __len__(self) -> int:
        return self.count

    def fetch(self, ids: Tensor, *, seed: int | None = None) -> tuple[Inputs, Tensor]:
        return self.source.fetch(ids)

    def fingerprint(self) -> str:
        return f"{self.source.fingerprint()}-first-{self.count}"


class FeatureSource(Source):
    """A source of backbone features. With augmentation, the seed selects one of the cached augmentations per sample."""

    is_augmented = True
    needs_workers = False  # features are memory-mapped

    def __init__(
        self, source: Source, backbone: Backbone, store: Store, spec: FeatureSpec, *, augmentations: int = 0
    ) -> None:
        if not source.has_content_hash:
            raise RecipeError(
                "model.cache_features needs a content hash of the samples, and this data set has none: add a method "
                "fingerprint() that returns a hash of its samples, or remove model.cache_features"
            )
        self.source, self.backbone, self.store, self.spec = source, backbone, store, spec
        numbers = range(augmentations) if spec.augment.moves else range(0)
        self.augmented = [FeatureTable(source, backbone, store, spec, number) for number in numbers]

    def without_augmentation(self) -> FeatureSource:
        return self._plain

    @cached_property
    def _plain(self) -> FeatureSource:
        return FeatureSource(self.source, self.backbone, self.store, self.spec) if self.augmented else self

    @cached_property
    def _unaugmented(self) -> FeatureTable:
        return FeatureTable(self.source, self.backbone, self.store, self.spec)

    def __len__(self) -> int:
        return len(self.source)

    def fetch(self, ids: Tensor, *, seed: int | None = None) -> tuple[Inputs, Tensor]:
        tables = self.augmented if self.augmented and seed is not None else [self._unaugmented]
        if not len(ids):  # an empty shard of a batch has the shape of a sample
            return torch.zeros(0, *self.backbone.shape), torch.zeros(0, dtype=torch.int64)
        shards, rows = np.divmod(ids.numpy(), SHARD_SAMPLES)
        count = len(tables[0].shards())
        if len(tables) > 1 and seed is not None:
            shards = shards + count * (uniforms(seed, ids, 1)[:, 0] * len(tables)).long().numpy()
        order = shards.argsort(kind="stable")  # read every shard once
        shards, rows = shards[order], rows[order]
        ends = [0, *(np.flatnonzero(shards[1:] != shards[:-1]) + 1).tolist(), len(ids)]
        parts = [_take(tables, count, int(shards[a]), rows[a:b]) for a, b in pairwise(ends)]
        features, labels = zip(*parts, strict=True)
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        return torch.from_numpy(np.concatenate(features)[inverse]), torch.from_numpy(np.concatenate(labels)[inverse])

    def fingerprint(self) -> str:
        """Return the hash of the original samples."""
        return self.source.fingerprint()

    def tables(self) -> list[FeatureTable]:
        """Return the tables that training reads."""
        return self.augmented or [self._unaugmented]


def _take(
    tables: Sequence[FeatureTable], count: int, index: int, rows: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return features and labels of some rows of a shard; `index` counts the shards of all tables."""
    number, shard = divmod(index, count)
    features, labels = tables[number].open(shard)
    return features.take(rows, 0), labels.take(rows, 0)


def with_cached_features(
    recipe: Recipe, data: DataSplits, components: Components = NO_COMPONENTS, *, device: torch.device = CPU
) -> DataSplits:
    """Return the data with backbone features as inputs if `model.cache_features` is set, else unchanged."""
    if not recipe.model.cache_features:
        return data
    backbone = build_backbone(recipe, data, components)
    augmentations = recipe.model.cached_augmentations
    train = through_backbone(recipe, data, data.train, backbone, augmentations=augmentations, device=device)
    test = through_backbone(recipe, data, data.test, backbone, device=device)
    extra = data.unlabeled
    if extra is not None:
        source = through_backbone(recipe, data, extra.source, backbone, augmentations=augmentations, device=device)
        extra = UnlabeledData(extra.name, source, extra.ids)
    return replace(data, train=train, test=test, unlabeled=extra, mean=(), std=())


def through_backbone(
    recipe: Recipe,
    data: DataSplits,
    source: Source,
    backbone: Backbone,
    *,
    augmentations: int = 0,
    device: torch.device = CPU,
    ids: Tensor | None = None,
) -> FeatureSource:
    """Return a source of backbone features, cached in the folder of the recipe. `ids`: the required samples."""
    if ids is not None and len(ids) and int(ids.max()) + 1 < min(SHARD_SAMPLES, len(source)):
        source = PrefixSource(source, int(ids.max()) + 1)
    spec = FeatureSpec(
        data.mean,
        data.std,
        recipe.train.memory_format,
        recipe.model.cache_dtype,
        Augment(recipe.data.crop, recipe.data.crop_fill, recipe.data.resized_crop, recipe.data.flip),
        recipe.data.num_workers,
        device,
    )
    memory_format = FORMATS[recipe.train.memory_format]
    if any(tensor.is_floating_point() and tensor.dtype != torch.float32 for tensor in backbone.state_dict().values()):
        backbone = copy.deepcopy(backbone)  # the original keeps the dtype of the members
    backbone = backbone.to(device=device, dtype=torch.float32, memory_format=memory_format).eval()  # type: ignore[call-overload]
    return FeatureSource(source, backbone, open_store(cache_dir(recipe)), spec, augmentations=augmentations)


def cache_dir(recipe: Recipe) -> str:
    """Return the folder of the cache: run.feature_cache, else $PLATEAUX_CACHE/features, else ~/.cache/plateaux."""
    root = os.environ.get("PLATEAUX_CACHE") or Path("~/.cache/plateaux").expanduser()
    return recipe.run.feature_cache or str(Path(root) / "features")


def prepare_features(sources: Iterable[Source], executor: Collectives, *, ids: Tensor | None = None) -> int:
    """Compute the missing features of these sources, or of the samples `ids`, and return the number of samples.

    All processes of the executor share the work. If another run builds the same features, this waits for it.
    """
    tables = [table for source in sources if isinstance(source, FeatureSource) for table in source.tables()]
    samples = 0
    for table in {table.folder: table for table in tables}.values():
        if not all_reduce_max(executor, int(bool(table.missing(ids)))):
            continue
        with ExitStack() as stack:
            if is_rank_zero():
                stack.enter_context(table.store.lock(table.folder, timeout=LOCK_TIMEOUT_S))
                table.store.remove_partial(table.folder)
            executor.barrier()
            samples += _build_missing(table, ids)
            executor.barrier()  # all shards exist before any process reads
    return samples


def training_sources(recipe: Recipe, data: DataSplits) -> list[Source]:
    """Return the sources that training reads."""
    sources: list[Source] = [data.train]
    if recipe.data.validation_split and isinstance(data.train, FeatureSource):
        sources.append(data.train.without_augmentation())
    return sources if data.unlabeled is None else [*sources, data.unlabeled.source]


def _build_missing(table: FeatureTable, ids: Tensor | None) -> int:
    rank, world_size = rank_and_world_size()
    shards = [shard for shard in table.missing(ids) if shard % world_size == rank]
    samples = 0
    for count, shard in enumerate(shards, 1):
        samples += table.build(shard)
        logger.info("features of %s samples: shard %d of %d", f"{len(table.source):,}", count, len(shards))
    return samples
