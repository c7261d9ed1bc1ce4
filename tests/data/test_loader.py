"""Feeding: the same samples, bit for bit, in any worker, shard or restart."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing
from reference import augment as slow
from torch import Tensor
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from plateaux.core.errors import DataError, RecipeError
from plateaux.core.types import Batch, derive_seed
from plateaux.data.augment import Augment
from plateaux.data.loader import MemberLoader, ordered_batches
from plateaux.data.sources import DatasetSource, InMemorySource, from_dataset
from plateaux.data.splits import split

N = 23
X = torch.randint(0, 256, (N, 3, 6, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % 4
RESIDENT = InMemorySource(X, Y)
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)


class Noisy:
    """Rows of X with randomness of its own from all three generators; remembers what was read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        self.read.append(i)
        noise = torch.rand(()) + float(np.random.rand()) + random.random()
        return X[i] / 255 + noise, int(Y[i])


class Plain(Noisy):
    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        self.read.append(i)
        return X[i], int(Y[i])


class Deadly(Plain):
    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if i == 3:
            os._exit(9)
        return super().__getitem__(i)


class Broken(Plain):
    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        raise RuntimeError(f"sample {i} is rotten")


class Words:
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[dict[str, Tensor], int]:
        return {"input_ids": torch.arange(3) + i, "mask": torch.ones(3)}, i % 2


def feed(source: Any = RESIDENT, **changes: Any) -> MemberLoader:
    options: dict[str, Any] = {"batch_size": 5, "seed": 42, "classes": 4, "mean": MEAN, "std": STD}
    ids = changes.pop("ids", torch.arange(N))
    return MemberLoader(source, ids, **{**options, **changes})


def same(a: Batch, b: Batch) -> bool:
    assert isinstance(a.x, Tensor)
    assert isinstance(b.x, Tensor)
    return torch.equal(a.x, b.x) and torch.equal(a.y, b.y) and torch.equal(a.index, b.index) and a.seed == b.seed


def all_same(a: Any, b: Any) -> bool:
    a, b = list(a), list(b)
    return len(a) == len(b) > 0 and all(map(same, a, b))


def by_id(batches: Any) -> dict[int, tuple[Tensor, Tensor]]:
    return {int(i): (b.x[r], b.y[r]) for b in batches for r, i in enumerate(b.index)}


MIXED = Augment(crop=1, flip=True, mixup=0.5, cutmix=1.0)


def test_an_epoch_holds_every_sample_once_and_in_another_order_each_time() -> None:
    first, second = (torch.cat([b.index for b in feed().epoch(e)]) for e in (0, 1))
    assert first.sort().values.tolist() == list(range(N))
    assert second.sort().values.tolist() == list(range(N))
    assert not torch.equal(first, second)
    assert torch.equal(first, torch.cat([b.index for b in feed().epoch(0)]))


def test_another_key_gives_another_order() -> None:
    a, b = (torch.cat([b.index for b in feed(seed=k).epoch(0)]) for k in (1, 2))
    assert not torch.equal(a, b)


def test_batches_equal_the_slow_twin() -> None:
    augment_key = derive_seed(42, "augment", 3)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (MEAN, STD))
    for step, batch in enumerate(feed(augment=Augment(crop=2, flip=True)).epoch(3)):
        assert batch.seed == derive_seed(42, 3, step)
        assert isinstance(batch.x, Tensor)
        for x, y, i in zip(batch.x, batch.y, batch.index.tolist(), strict=True):
            moved = slow.move(X[i], augment_key, i, 2, True)
            assert torch.allclose(x, (moved / 255 - mean) / std, atol=1e-5)
            assert y == Y[i]


@pytest.mark.parametrize(("drop_last", "steps", "seen"), [(False, 5, 23), (True, 4, 20)])
def test_steps_are_the_batches_an_epoch_gives(drop_last: bool, steps: int, seen: int) -> None:
    given = feed(drop_last=drop_last)
    batches = list(given.epoch(0))
    assert given.steps() == len(batches) == steps
    assert sum(map(len, batches)) == seen


def test_a_split_is_drawn_from_alone_and_keeps_its_ids() -> None:
    ids = torch.tensor([2, 3, 5, 7, 11, 13])
    batches = list(feed(ids=ids, batch_size=4).epoch(0))
    assert torch.cat([b.index for b in batches]).sort().values.tolist() == ids.tolist()
    assert all(torch.equal(b.y, Y[b.index]) for b in batches)


def test_starting_in_the_middle_gives_the_rest_and_reads_nothing_before() -> None:
    whole = list(feed(DatasetSource(Noisy())).epoch(2))
    late = Noisy()
    rest = list(feed(DatasetSource(late)).epoch(2, start=3))
    assert all_same(rest, whole[3:])
    assert late.read == torch.cat([b.index for b in whole[3:]]).tolist()
    assert list(feed().epoch(2, start=5)) == []


@pytest.mark.parametrize("source", [RESIDENT, DatasetSource(Noisy())])
def test_shards_of_a_batch_make_up_the_batch(source: Any) -> None:
    given = feed(source, augment=MIXED)
    whole = list(given.epoch(1))
    left = list(given.epoch(1, shard=lambda n: slice(0, n // 2)))
    right = list(given.epoch(1, shard=lambda n: slice(n // 2, n)))
    for b, low, high in zip(whole, left, right, strict=True):
        assert all(isinstance(part.x, Tensor) for part in (b, low, high))
        assert torch.equal(torch.cat([low.x, high.x]), b.x)  # type: ignore[list-item, arg-type]
        assert torch.equal(torch.cat([low.y, high.y]), b.y)
        assert torch.equal(torch.cat([low.index, high.index]), b.index)
        assert low.seed == high.seed == b.seed


@pytest.mark.parametrize("source", [RESIDENT, DatasetSource(Plain())])
def test_an_empty_share_has_no_samples_but_their_shape(source: Any) -> None:
    batch = next(feed(source, augment=MIXED).epoch(0, shard=lambda n: slice(0, 0)))
    assert isinstance(batch.x, Tensor)
    assert batch.x.shape == (0, 3, 6, 5)
    assert len(batch) == 0


def test_a_shard_reads_only_its_share() -> None:
    noisy = Noisy()
    batches = list(feed(DatasetSource(noisy)).epoch(0, shard=lambda n: slice(0, 2)))
    assert noisy.read == torch.cat([b.index for b in batches]).tolist()


def test_a_sample_varies_alike_in_any_batch_size_and_differently_in_another_epoch() -> None:
    small, large = (by_id(feed(batch_size=n, augment=MIXED).epoch(4)) for n in (2, 11))
    assert all(torch.equal(small[i][0], large[i][0]) and torch.equal(small[i][1], large[i][1]) for i in range(N))
    other = by_id(feed(batch_size=2, augment=MIXED).epoch(5))
    assert sum(torch.equal(small[i][0], other[i][0]) for i in range(N)) < 3


def test_some_samples_in_their_order_look_as_they_do_in_that_epoch() -> None:
    whole = by_id(feed(augment=MIXED).epoch(4))
    few = list(feed(augment=MIXED).some(torch.tensor([5, 2, 7]), 4, batch=2))
    assert [batch.index.tolist() for batch in few] == [[5, 2], [7]]
    for number, (x, y) in by_id(few).items():
        assert torch.equal(x, whole[number][0])
        assert torch.equal(y, whole[number][1])


def test_labels_are_soft_only_when_samples_are_mixed() -> None:
    hard = next(feed(augment=Augment(crop=1)).epoch(0))
    soft = next(feed(augment=Augment(mixup=0.3)).epoch(0))
    assert hard.y.dtype == torch.int64
    assert soft.y.shape == (5, 4)
    assert torch.allclose(soft.y.sum(1), torch.ones(5))


@pytest.mark.parametrize("augment", [Augment(), MIXED])
@pytest.mark.parametrize("dataset", [Noisy(), Plain()])
def test_workers_change_no_bit(dataset: Noisy, augment: Augment) -> None:
    given = DatasetSource(dataset)
    assert all_same(feed(given, augment=augment).epoch(1), feed(given, augment=augment, num_workers=2).epoch(1))


def test_workers_change_no_bit_when_they_are_spawned() -> None:
    given = DatasetSource(Noisy())
    before = torch.multiprocessing.get_start_method()
    torch.multiprocessing.set_start_method("spawn", force=True)
    try:
        assert all_same(feed(given, augment=MIXED).epoch(1), feed(given, augment=MIXED, num_workers=1).epoch(1))
    finally:
        torch.multiprocessing.set_start_method(before, force=True)


def test_resident_sources_never_use_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plateaux.data.loader.DataLoader", None)
    assert len(list(feed(num_workers=4).epoch(0))) == 5


@pytest.mark.parametrize("workers", [0, 1])
def test_feeding_leaves_the_global_generators_alone(workers: int) -> None:
    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index, union-attr]

    before = states()
    list(feed(DatasetSource(Noisy()), num_workers=workers, augment=MIXED).epoch(0))
    assert states() == before


def test_a_data_sets_own_randomness_differs_from_sample_to_sample() -> None:
    seen = by_id(feed(DatasetSource(Noisy()), mean=(), std=()).epoch(0))
    noise = torch.stack([(seen[i][0] - X[i] / 255).mean() for i in range(N)])
    assert noise.std() > 0.1  # three uniform numbers have 0.5


def test_a_data_sets_own_randomness_is_new_in_every_epoch_and_for_every_member() -> None:
    one = by_id(feed(DatasetSource(Noisy())).epoch(0))
    for other in (feed(DatasetSource(Noisy())).epoch(1), feed(DatasetSource(Noisy()), seed=43).epoch(0)):
        assert not any(torch.equal(one[i][0], x) for i, (x, _) in by_id(other).items())


@pytest.mark.parametrize("batch", [1, 23])
def test_a_worker_that_dies_is_a_data_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    # torch looks after its workers every five seconds.
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))
    batches = feed(DatasetSource(Deadly()), num_workers=1, batch_size=batch).epoch(0)
    if batch == 1:
        next(batches)
        time.sleep(0.5)  # it reads ahead and dies, and nothing is raised in between
    with pytest.raises(DataError, match="workers = 0"):
        list(batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_sets_own_complaint_comes_through(workers: int) -> None:
    with pytest.raises(RuntimeError, match="is rotten"):
        list(feed(DatasetSource(Broken()), num_workers=workers).epoch(0))


def test_channels_last_is_a_layout_and_changes_no_number() -> None:
    for plain, last in zip(
        feed(augment=MIXED).epoch(0), feed(augment=MIXED, memory_format=torch.channels_last).epoch(0), strict=True
    ):
        assert isinstance(plain.x, Tensor)
        assert isinstance(last.x, Tensor)
        assert torch.equal(plain.x, last.x)
        assert plain.x.is_contiguous()
        assert last.x.is_contiguous(memory_format=torch.channels_last)
        assert not last.x.is_contiguous()


def test_named_inputs_pass_through_whole() -> None:
    batch = next(feed(DatasetSource(Words()), mean=(), std=(), memory_format=torch.channels_last).epoch(0))
    assert not isinstance(batch.x, Tensor)
    assert torch.equal(batch.x["input_ids"], torch.arange(3) + batch.index[:, None])


def test_resident_named_inputs_are_fed_by_name() -> None:
    source = InMemorySource({"input_ids": torch.arange(N)[:, None] * 2}, Y)
    batch = next(feed(source, mean=(), std=()).epoch(0))
    assert not isinstance(batch.x, Tensor)
    assert torch.equal(batch.x["input_ids"][:, 0], batch.index * 2)


@pytest.mark.parametrize("workers", [0, 1])
def test_evaluation_goes_in_order_without_augmentation(workers: int) -> None:
    ids = torch.tensor([9, 4, 4, 20, 1])
    batches = list(ordered_batches(DatasetSource(Plain()), ids, batch_size=2, mean=MEAN, std=STD, num_workers=workers))
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (MEAN, STD))
    assert torch.cat([b.index for b in batches]).tolist() == ids.tolist()
    x = torch.cat([b.x for b in batches])  # type: ignore[misc]
    assert torch.allclose(x, (X[ids] / 255 - mean) / std, atol=1e-5)


def test_evaluation_of_everything_needs_no_ids() -> None:
    assert torch.cat([b.index for b in ordered_batches(RESIDENT, batch_size=10)]).tolist() == list(range(N))


@pytest.mark.parametrize(("validation", "count"), [(0.25, 25), (10, 10), (0, 0), (0.0, 0)])
def test_a_split_parts_the_ids_and_is_the_same_each_time(validation: float, count: int) -> None:
    train, held = split(100, validation, seed=3)
    assert len(held) == count
    assert torch.cat([train, held]).sort().values.tolist() == list(range(100))
    assert torch.equal(train, train.sort().values)
    assert torch.equal(held, held.sort().values)
    assert torch.equal(split(100, validation, seed=3)[1], held)
    if count:
        assert not torch.equal(split(100, validation, seed=4)[1], held)


@pytest.mark.parametrize("validation", [1.0, -0.1, 100, -1])
def test_a_split_that_leaves_nothing_is_refused(validation: float) -> None:
    with pytest.raises(RecipeError):
        split(100, validation, seed=0)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"batch_size": 0}, RecipeError),
        ({"num_workers": -1}, RecipeError),
        ({"batch_size": 24, "drop_last": True}, RecipeError),
        ({"ids": torch.tensor([], dtype=torch.int64)}, DataError),
        ({"ids": torch.tensor([N])}, DataError),
    ],
)
def test_a_feed_that_cannot_be_is_refused(changes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        feed(**changes)


def test_any_torch_dataset_becomes_data() -> None:
    data = from_dataset(Plain(), Plain(), classes=4, shape=(3, 6, 5), mean=MEAN, std=STD)
    assert (data.name, data.classes, data.shape, len(data.train)) == ("Plain", 4, (3, 6, 5), N)
    assert data.train.fingerprint() != data.test.fingerprint()
    with pytest.raises(DataError, match="map-style"):
        from_dataset(iter([]), Plain(), classes=4, shape=(3,))
