"""How a recipe's samples reach its members: splits, loaders, batches in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import torch

from plateaux.config.builders.model import in_order
from plateaux.config.recipe import Recipe
from plateaux.core.method import Method
from plateaux.core.runtime import FORMATS, dtype_of
from plateaux.core.types import Inputs, key
from plateaux.data.augment import Augment
from plateaux.data.loader import UNVARIED, Feed, Shard, split
from plateaux.data.sources import Data, Resident
from plateaux.data.splits import bag

STATISTICS = 20  # batches that BatchNorm's statistics are taken from


def feed_of(recipe: Recipe, data: Data, number: int, *, shared: bool, device: torch.device, ids: torch.Tensor) -> Feed:
    """Return how a member is fed: in an order of its own, or in the one all share."""
    part, who = recipe.data, "shared" if shared else number
    varied = Augment(crop=part.crop, flip=part.flip, mixup=part.mixup, cutmix=part.cutmix)
    return Feed(
        data.train,
        ids if part.bag is None else bag(ids, part.bag, key(recipe.seed, "bag", who)),
        batch=part.batch,
        key=key(recipe.seed, "feed", who),
        classes=data.classes,
        mean=data.mean,
        std=data.std,
        augment=UNVARIED if getattr(data.train, "augmented", False) else varied,  # features are kept of varied images
        device=device,
        dtype=dtype_of(recipe.train.precision),
        memory_format=FORMATS[recipe.train.memory_format],
        workers=part.workers,
        drop_last=part.drop_last,
        unlabelled=data.unlabelled,
        unlabelled_batch=part.unlabelled_batch or part.batch,
    )


def shares_order(recipe: Recipe, method: Method) -> bool:
    """Say whether all members are fed the same batches."""
    order = recipe.data.order
    return order == "shared" or (order == "auto" and method.objective.sees != "own")


def on_device(data: Data, device: torch.device) -> Data:
    """Return the data with what is small enough to be held in memory moved to the device, once for all members."""
    if device.type == "cpu":
        return data
    train, test = (s.to(device) if isinstance(s, Resident) else s for s in (data.train, data.test))  # cuda-only
    return replace(data, train=train, test=test)  # cuda-only


def split_of(recipe: Recipe, data: Data) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of the training and of the validation samples."""
    share = recipe.data.validation
    return split(len(data.train), share if share < 1 else int(share), key(recipe.seed, "validation"))


def statistics_batches(
    recipe: Recipe, data: Data, device: torch.device, shard: Shard | None = None
) -> Iterator[Inputs]:
    """Yield the inputs of some training samples, drawn by the seed and always the same, as they are."""
    train, _ = split_of(recipe, data)
    chance = torch.Generator().manual_seed(key(recipe.seed, "statistics"))
    ids = train[torch.randperm(len(train), generator=chance)]  # sources may be sorted by class
    batches = in_order(recipe, data, data.train, ids, device=device, shard=shard)
    return (batch.x for batch in islice(batches, STATISTICS))
