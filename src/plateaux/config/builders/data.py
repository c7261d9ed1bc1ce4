"""Build the data set of a recipe, its splits, and the loaders of its members."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from plateaux.config.builders.training import build_method
from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.recipe import DataConfig, Recipe
from plateaux.config.schema import accepts, check
from plateaux.core import registry
from plateaux.core.errors import RecipeError
from plateaux.core.method import Method
from plateaux.core.registry import HUB_PREFIX, HubAccess
from plateaux.core.runtime import FORMATS, param_dtype
from plateaux.core.types import Batch, Inputs, derive_seed
from plateaux.data.augment import Augment
from plateaux.data.image_paths import is_image_path, open_images
from plateaux.data.label_noise import with_label_noise
from plateaux.data.loader import CPU, NO_AUGMENT, MemberLoader, ShardFn, ordered_batches
from plateaux.data.random_split import bootstrap, split
from plateaux.data.sources import DatasetSource, DataSplits, InMemorySource, Source, UnlabeledData

BN_UPDATE_BATCHES = 20  # batches from which BatchNorm statistics are recomputed


def build_loader(
    recipe: Recipe, data: DataSplits, number: int, *, shared: bool, device: torch.device, ids: torch.Tensor
) -> MemberLoader:
    """Return the training loader of a member, with its own sample order or the shared one."""
    config, owner = recipe.data, "shared" if shared else number
    augment = Augment(
        config.crop, config.crop_fill, config.resized_crop, config.flip, mixup=config.mixup, cutmix=config.cutmix
    )
    return MemberLoader(
        data.train,
        ids if config.bootstrap is None else bootstrap(ids, config.bootstrap, derive_seed(recipe.seed, "bag", owner)),
        batch_size=config.batch_size,
        seed=derive_seed(recipe.seed, "feed", owner),
        classes=data.classes,
        mean=data.mean,
        std=data.std,
        augment=NO_AUGMENT if data.train.is_augmented else augment,  # cached features are augmented
        device=device,
        dtype=param_dtype(recipe.train.precision),
        memory_format=FORMATS[recipe.train.memory_format],
        num_workers=config.num_workers,
        drop_last=config.drop_last,
        unlabeled=data.unlabeled,
        unlabeled_batch_size=config.unlabeled_batch_size or config.batch_size,
    )


def uses_shared_order(recipe: Recipe, method: Method) -> bool:
    """Return whether all members train on the same batches."""
    order = recipe.data.shuffle
    return order == "shared" or (order == "auto" and method.objective.gather != "none")


def on_device(data: DataSplits, device: torch.device) -> DataSplits:
    """Return the data with in-memory sources moved to the device, once for all members."""
    if device.type == "cpu":
        return data
    train, test = (s.to(device) if isinstance(s, InMemorySource) else s for s in (data.train, data.test))  # cuda-only
    return replace(data, train=train, test=test)  # cuda-only


def train_val_split(recipe: Recipe, data: DataSplits) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of the training and of the validation samples."""
    share = recipe.data.validation_split
    return split(len(data.train), share if share < 1 else int(share), derive_seed(recipe.seed, "validation"))


def bn_update_batches(
    recipe: Recipe, data: DataSplits, device: torch.device, shard: ShardFn | None = None
) -> Iterator[Inputs]:
    """Yield inputs without augmentation for BatchNorm statistics: the same random training samples in every call."""
    train, _ = train_val_split(recipe, data)
    rng = torch.Generator().manual_seed(derive_seed(recipe.seed, "statistics"))
    ids = train[torch.randperm(len(train), generator=rng)]  # sources may be sorted by class
    batches = eval_batches(recipe, data, data.train, ids, device=device, shard=shard)
    return (batch.x for batch in islice(batches, BN_UPDATE_BATCHES))


def build_data(recipe: Recipe, components: Components = NO_COMPONENTS) -> DataSplits:
    """Return the recipe's data set, with the label noise of the recipe."""
    data, noise = _build_clean_data(recipe, components), recipe.data.label_noise
    if not noise:
        return data
    seed = derive_seed(recipe.seed, "label noise")
    return replace(data, train=with_label_noise(data.train, noise, classes=data.classes, seed=seed))


def _build_clean_data(recipe: Recipe, components: Components) -> DataSplits:
    if components.data is not None:
        return components.data
    config = recipe.data
    factory = registry.dataset.get(config.name, allow=components.trust)
    options = check("data", factory, config.options, also=DataConfig.model_fields)
    data = factory(**options, **hub_options(factory, recipe, components))
    if not isinstance(data, DataSplits):
        raise RecipeError(
            f"data set {config.name!r} returned {type(data).__name__}; it must return plateaux.DataSplits"
        )
    return data


def hub_options(factory: Callable[..., Any], recipe: Recipe, components: Components) -> dict[str, HubAccess]:
    """Return what a Hugging Face data set is told besides its options: the model, and whether it may be downloaded."""
    if not accepts(factory, "hub_access"):
        return {}
    names = {recipe.model.name} if isinstance(recipe.model.name, str) else set(recipe.model.name)
    name = names.pop() if len(names) == 1 and components.model is None else ""
    model = name.removeprefix(HUB_PREFIX) if name.startswith(HUB_PREFIX) else None
    return {"hub_access": HubAccess(download=components.download, model=model)}


def build_training_data(recipe: Recipe, components: Components = NO_COMPONENTS) -> DataSplits:
    """Return the recipe's data set, with the unlabeled samples if its method needs them."""
    return with_unlabeled(build_data(recipe, components), build_method(recipe, 0, components), recipe, components)


def with_unlabeled(data: DataSplits, method: Method, recipe: Recipe, components: Components) -> DataSplits:
    """Return data with the unlabeled samples of the recipe, if its method needs them."""
    if "unlabeled" not in method.objective.extra_inputs:
        return data
    name, _, count = (recipe.data.unlabeled or "").partition("@")
    source = components.unlabeled or _build_unlabeled(name, data, recipe, components)
    source = source.ignoring_labels() if isinstance(source, DatasetSource) else source
    size = int(count) if count.isdigit() else len(source)
    if (count and not count.isdigit()) or not 0 < size <= len(source):
        raise RecipeError(
            f"data.unlabeled = {recipe.data.unlabeled!r}: write name@count, with a count from 1 to {len(source)}, "
            "or the name alone for all samples"
        )
    rng = torch.Generator().manual_seed(derive_seed(recipe.seed, "unlabelled"))
    ids = torch.randperm(len(source), generator=rng)[:size].sort().values
    return replace(data, unlabeled=UnlabeledData(name or "given", source, ids))


def _build_unlabeled(name: str, data: DataSplits, recipe: Recipe, components: Components) -> Source:
    """Return the training samples of a data set, or its test samples if it has no training samples.

    It lies in the data root of the recipe, and its images are read at the size of the recipe's.
    """
    root = recipe.data.options.get("root")
    if is_image_path(name):
        if len(data.shape) != 3:
            raise RecipeError(f"data.unlabeled = {name!r} are images, but the samples of {data.name!r} are not")
        return open_images(name, size=data.shape[-1], channels=data.shape[0], root=root)
    factory = registry.dataset.get(name, allow=components.trust)
    options: dict[str, Any] = {"root": root} if root is not None and accepts(factory, "root") else {}
    options |= {"size": data.shape[-1]} if len(data.shape) == 3 and accepts(factory, "size") else {}
    other: DataSplits = factory(**check("data", factory, options), **hub_options(factory, recipe, components))
    if other.shape != data.shape:
        raise RecipeError(
            f"data.unlabeled = {name!r} has samples of shape {list(other.shape)}, but {data.name!r} has shape "
            f"{list(data.shape)}: the shapes must be equal"
        )
    return other.train if len(other.train) else other.test


def eval_batches(
    recipe: Recipe,
    data: DataSplits,
    source: Source,
    ids: torch.Tensor,
    *,
    batch_size: int | None = None,
    device: torch.device = CPU,
    shard: ShardFn | None = None,
) -> Iterator[Batch]:
    """Yield batches of the samples `ids` in this order, without augmentation, in the dtype and format of the recipe."""
    return ordered_batches(
        source,
        ids,
        batch_size=batch_size or max(recipe.data.batch_size, 256),
        mean=data.mean,
        std=data.std,
        device=device,
        dtype=param_dtype(recipe.train.precision),
        memory_format=FORMATS[recipe.train.memory_format],
        num_workers=recipe.data.num_workers,
        shard=shard,
    )
