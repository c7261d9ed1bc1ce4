"""The data loader yields bit-identical samples with any number of workers, shard, or restart."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing
from reference import augment as reference
from torch import Tensor
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from plateaux.core.errors import DataError, RecipeError
from plateaux.core.types import Batch, derive_seed
from plateaux.data.augment import Augment
from plateaux.data.loader import MemberLoader, ordered_batches
from plateaux.data.random_split import split
from plateaux.data.sources import DatasetSource, InMemorySource, from_dataset

N = 23
X = torch.randint(0, 256, (N, 3, 6, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % 4
IN_MEMORY = InMemorySource(X, Y)
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)


class Noisy:
    """Rows of X plus noise from all three global generators; records the samples that were read."""

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


class KillsWorker(Plain):
    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if i == 3:
            os._exit(9)
        return super().__getitem__(i)


class Broken(Plain):
    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        raise RuntimeError(f"sample {i} is broken")


class DictInputs:
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[dict[str, Tensor], int]:
        return {"input_ids": torch.arange(3) + i, "mask": torch.ones(3)}, i % 2


def build_loader(source: Any = IN_MEMORY, **changes: Any) -> MemberLoader:
    options: dict[str, Any] = {"batch_size": 5, "seed": 42, "classes": 4, "mean": MEAN, "std": STD}
    ids = changes.pop("ids", torch.arange(N))
    return MemberLoader(source, ids, **{**options, **changes})


def is_equal(a: Batch, b: Batch) -> bool:
    assert isinstance(a.x, Tensor)
    assert isinstance(b.x, Tensor)
    return torch.equal(a.x, b.x) and torch.equal(a.y, b.y) and torch.equal(a.index, b.index) and a.seed == b.seed


def are_equal(a: Any, b: Any) -> bool:
    a, b = list(a), list(b)
    return len(a) == len(b) > 0 and all(map(is_equal, a, b))


def by_id(batches: Any) -> dict[int, tuple[Tensor, Tensor]]:
    return {int(i): (b.x[r], b.y[r]) for b in batches for r, i in enumerate(b.index)}


MIXED = Augment(crop=1, flip=True, mixup=0.5, cutmix=1.0)


def test_an_epoch_contains_every_sample_once_and_epochs_differ_in_order() -> None:
    first, second = (torch.cat([b.index for b in build_loader().epoch(e)]) for e in (0, 1))
    assert first.sort().values.tolist() == list(range(N))
    assert second.sort().values.tolist() == list(range(N))
    assert not torch.equal(first, second)
    assert torch.equal(first, torch.cat([b.index for b in build_loader().epoch(0)]))


def test_another_seed_gives_another_order() -> None:
    a, b = (torch.cat([b.index for b in build_loader(seed=k).epoch(0)]) for k in (1, 2))
    assert not torch.equal(a, b)


def test_batches_equal_the_reference() -> None:
    augment_seed = derive_seed(42, "augment", 3)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (MEAN, STD))
    for step, batch in enumerate(build_loader(augment=Augment(crop=2, flip=True)).epoch(3)):
        assert batch.seed == derive_seed(42, 3, step)
        assert isinstance(batch.x, Tensor)
        for x, y, i in zip(batch.x, batch.y, batch.index.tolist(), strict=True):
            augmented = reference.crop_and_flip(X[i], augment_seed, i, 2, True)
            assert torch.allclose(x, (augmented / 255 - mean) / std, atol=1e-5)
            assert y == Y[i]


@pytest.mark.parametrize(("drop_last", "steps", "samples"), [(False, 5, 23), (True, 4, 20)])
def test_steps_is_the_number_of_batches_per_epoch(drop_last: bool, steps: int, samples: int) -> None:
    loader = build_loader(drop_last=drop_last)
    batches = list(loader.epoch(0))
    assert loader.steps() == len(batches) == steps
    assert sum(map(len, batches)) == samples


def test_a_loader_of_a_split_yields_only_its_ids() -> None:
    ids = torch.tensor([2, 3, 5, 7, 11, 13])
    batches = list(build_loader(ids=ids, batch_size=4).epoch(0))
    assert torch.cat([b.index for b in batches]).sort().values.tolist() == ids.tolist()
    assert all(torch.equal(b.y, Y[b.index]) for b in batches)


def test_resuming_in_the_middle_of_an_epoch_reads_no_earlier_sample() -> None:
    expected = list(build_loader(DatasetSource(Noisy())).epoch(2))
    dataset = Noisy()
    rest = list(build_loader(DatasetSource(dataset)).epoch(2, start=3))
    assert are_equal(rest, expected[3:])
    assert dataset.read == torch.cat([b.index for b in expected[3:]]).tolist()
    assert list(build_loader().epoch(2, start=5)) == []


@pytest.mark.parametrize("source", [IN_MEMORY, DatasetSource(Noisy())])
def test_the_shards_of_a_batch_concatenate_to_the_batch(source: Any) -> None:
    loader = build_loader(source, augment=MIXED)
    expected = list(loader.epoch(1))
    left = list(loader.epoch(1, shard=lambda n: slice(0, n // 2)))
    right = list(loader.epoch(1, shard=lambda n: slice(n // 2, n)))
    for b, low, high in zip(expected, left, right, strict=True):
        assert all(isinstance(part.x, Tensor) for part in (b, low, high))
        assert torch.equal(torch.cat([low.x, high.x]), b.x)  # type: ignore[list-item, arg-type]
        assert torch.equal(torch.cat([low.y, high.y]), b.y)
        assert torch.equal(torch.cat([low.index, high.index]), b.index)
        assert low.seed == high.seed == b.seed


@pytest.mark.parametrize("source", [IN_MEMORY, DatasetSource(Plain())])
def test_an_empty_shard_keeps_the_shape_of_a_sample(source: Any) -> None:
    batch = next(build_loader(source, augment=MIXED).epoch(0, shard=lambda n: slice(0, 0)))
    assert isinstance(batch.x, Tensor)
    assert batch.x.shape == (0, 3, 6, 5)
    assert len(batch) == 0


def test_a_shard_reads_only_its_own_samples() -> None:
    noisy = Noisy()
    batches = list(build_loader(DatasetSource(noisy)).epoch(0, shard=lambda n: slice(0, 2)))
    assert noisy.read == torch.cat([b.index for b in batches]).tolist()


def test_augmentation_depends_on_the_epoch_and_not_on_the_batch_size() -> None:
    small, large = (by_id(build_loader(batch_size=n, augment=MIXED).epoch(4)) for n in (2, 11))
    assert all(torch.equal(small[i][0], large[i][0]) and torch.equal(small[i][1], large[i][1]) for i in range(N))
    other = by_id(build_loader(batch_size=2, augment=MIXED).epoch(5))
    assert sum(torch.equal(small[i][0], other[i][0]) for i in range(N)) < 3


def test_batches_of_selected_ids_are_augmented_as_in_that_epoch() -> None:
    expected = by_id(build_loader(augment=MIXED).epoch(4))
    few = list(build_loader(augment=MIXED).batches(torch.tensor([5, 2, 7]), 4, batch_size=2))
    assert [batch.index.tolist() for batch in few] == [[5, 2], [7]]
    for i, (x, y) in by_id(few).items():
        assert torch.equal(x, expected[i][0])
        assert torch.equal(y, expected[i][1])


def test_labels_are_soft_only_with_mixup_or_cutmix() -> None:
    hard = next(build_loader(augment=Augment(crop=1)).epoch(0))
    soft = next(build_loader(augment=Augment(mixup=0.3)).epoch(0))
    assert hard.y.dtype == torch.int64
    assert soft.y.shape == (5, 4)
    assert torch.allclose(soft.y.sum(1), torch.ones(5))


@pytest.mark.process
@pytest.mark.parametrize("augment", [Augment(), MIXED])
@pytest.mark.parametrize("dataset", [Noisy(), Plain()])
def test_worker_processes_do_not_change_a_bit(dataset: Noisy, augment: Augment) -> None:
    source = DatasetSource(dataset)
    expected = build_loader(source, augment=augment).epoch(1)
    assert are_equal(expected, build_loader(source, augment=augment, num_workers=2).epoch(1))


@pytest.mark.process
def test_spawned_worker_processes_do_not_change_a_bit() -> None:
    source = DatasetSource(Noisy())
    before = torch.multiprocessing.get_start_method()
    torch.multiprocessing.set_start_method("spawn", force=True)
    try:
        expected = build_loader(source, augment=MIXED).epoch(1)
        assert are_equal(expected, build_loader(source, augment=MIXED, num_workers=1).epoch(1))
    finally:
        torch.multiprocessing.set_start_method(before, force=True)


def test_in_memory_sources_never_use_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plateaux.data.loader.DataLoader", None)
    assert len(list(build_loader(num_workers=4).epoch(0))) == 5


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 1])
def test_loading_does_not_change_the_global_random_generators(workers: int) -> None:
    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index, union-attr]

    before = states()
    list(build_loader(DatasetSource(Noisy()), num_workers=workers, augment=MIXED).epoch(0))
    assert states() == before


def test_random_transforms_of_a_dataset_differ_between_samples() -> None:
    samples = by_id(build_loader(DatasetSource(Noisy()), mean=(), std=()).epoch(0))
    noise = torch.stack([(samples[i][0] - X[i] / 255).mean() for i in range(N)])
    assert noise.std() > 0.1  # the sum of three uniform numbers has 0.5


def test_random_transforms_of_a_dataset_differ_between_epochs_and_members() -> None:
    one = by_id(build_loader(DatasetSource(Noisy())).epoch(0))
    for other in (
        build_loader(DatasetSource(Noisy())).epoch(1),
        build_loader(DatasetSource(Noisy()), seed=43).epoch(0),
    ):
        assert not any(torch.equal(one[i][0], x) for i, (x, _) in by_id(other).items())


@pytest.mark.process
@pytest.mark.parametrize("batch", [1, 23])
def test_a_dead_worker_raises_a_data_error_that_suggests_num_workers_0(
    monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    # torch checks its workers every five seconds.
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))
    batches = build_loader(DatasetSource(KillsWorker()), num_workers=1, batch_size=batch).epoch(0)
    if batch == 1:
        next(batches)
        time.sleep(0.5)  # the worker prefetches and dies; no exception is raised in between
    with pytest.raises(DataError, match="workers = 0"):
        list(batches)


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_of_the_dataset_names_the_sample(workers: int) -> None:
    with pytest.raises(DataError, match=r"^Sample (\d+) of 'Broken' .*RuntimeError: sample \1 is broken"):
        list(build_loader(DatasetSource(Broken()), num_workers=workers).epoch(0))


def test_channels_last_changes_the_memory_format_and_no_value() -> None:
    for plain, last in zip(
        build_loader(augment=MIXED).epoch(0),
        build_loader(augment=MIXED, memory_format=torch.channels_last).epoch(0),
        strict=True,
    ):
        assert isinstance(plain.x, Tensor)
        assert isinstance(last.x, Tensor)
        assert torch.equal(plain.x, last.x)
        assert plain.x.is_contiguous()
        assert last.x.is_contiguous(memory_format=torch.channels_last)
        assert not last.x.is_contiguous()


def test_dict_inputs_are_batched_by_key() -> None:
    batch = next(build_loader(DatasetSource(DictInputs()), mean=(), std=(), memory_format=torch.channels_last).epoch(0))
    assert not isinstance(batch.x, Tensor)
    assert torch.equal(batch.x["input_ids"], torch.arange(3) + batch.index[:, None])


def test_in_memory_dict_inputs_are_batched_by_key() -> None:
    source = InMemorySource({"input_ids": torch.arange(N)[:, None] * 2}, Y)
    batch = next(build_loader(source, mean=(), std=()).epoch(0))
    assert not isinstance(batch.x, Tensor)
    assert torch.equal(batch.x["input_ids"][:, 0], batch.index * 2)


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 1])
def test_ordered_batches_follow_the_ids_without_augmentation(workers: int) -> None:
    ids = torch.tensor([9, 4, 4, 20, 1])
    batches = list(ordered_batches(DatasetSource(Plain()), ids, batch_size=2, mean=MEAN, std=STD, num_workers=workers))
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (MEAN, STD))
    assert torch.cat([b.index for b in batches]).tolist() == ids.tolist()
    x = torch.cat([b.x for b in batches])  # type: ignore[misc]
    assert torch.allclose(x, (X[ids] / 255 - mean) / std, atol=1e-5)


def test_ordered_batches_default_to_all_samples() -> None:
    assert torch.cat([b.index for b in ordered_batches(IN_MEMORY, batch_size=10)]).tolist() == list(range(N))


@pytest.mark.parametrize(("validation", "count"), [(0.25, 25), (10, 10), (0, 0), (0.0, 0)])
def test_a_split_partitions_the_ids_and_is_deterministic(validation: float, count: int) -> None:
    train, validation_ids = split(100, validation, seed=3)
    assert len(validation_ids) == count
    assert torch.cat([train, validation_ids]).sort().values.tolist() == list(range(100))
    assert torch.equal(train, train.sort().values)
    assert torch.equal(validation_ids, validation_ids.sort().values)
    assert torch.equal(split(100, validation, seed=3)[1], validation_ids)
    if count:
        assert not torch.equal(split(100, validation, seed=4)[1], validation_ids)


@pytest.mark.parametrize("validation", [1.0, -0.1, 100, -1])
def test_a_split_without_training_samples_is_rejected(validation: float) -> None:
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
def test_invalid_loader_options_are_rejected(changes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        build_loader(**changes)


def test_from_dataset_accepts_any_map_style_dataset() -> None:
    data = from_dataset(Plain(), Plain(), classes=4, shape=(3, 6, 5), mean=MEAN, std=STD)
    assert (data.name, data.classes, data.shape, len(data.train)) == ("Plain", 4, (3, 6, 5), N)
    assert data.train.fingerprint() != data.test.fingerprint()
    with pytest.raises(DataError, match="map-style"):
        from_dataset(iter([]), Plain(), classes=4, shape=(3,))
