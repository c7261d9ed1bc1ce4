"""The data loader of a member: shuffling and augmentation depend only on its seed, the epoch, and the sample id.

    loader = MemberLoader(data.train, ids, batch_size=128, seed=seed, classes=10, mean=data.mean, std=data.std)
    for batch in loader.epoch(3, start=17): ...  # resumes in the middle of an epoch without reading earlier batches

Worker processes may read, crop, and flip samples; the batches are bit-identical for any number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from plateaux.core.errors import DataError, PlateauxError, RecipeError
from plateaux.core.types import Batch, Inputs, derive_seed, map_tensors
from plateaux.data.augment import Augment, crop_and_flip, mix_partners, mixup_cutmix, normalize
from plateaux.data.random_split import random_permutation
from plateaux.data.sources import Source, UnlabeledData

CPU = torch.device("cpu")
NO_AUGMENT = Augment()
ShardFn = Callable[[int], slice]
"""Maps a batch size to the slice of the batch that this process computes."""


@dataclass(frozen=True, slots=True)
class MemberLoader:
    """Yields the training batches of one member, epoch by epoch."""

    source: Source
    ids: Tensor  # [n] the training samples; a train split keeps the ids of the full source
    batch_size: int
    seed: int  # of shuffling and augmentation: the member's own, or one shared by all members
    classes: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augment: Augment = NO_AUGMENT
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format
    num_workers: int = 0
    drop_last: bool = False
    unlabeled: UnlabeledData | None = None  # unlabeled samples that are added to every batch
    unlabeled_batch_size: int = 0  # number of unlabeled samples per batch

    def __post_init__(self) -> None:
        _check(self.source, self.ids, self.batch_size, self.num_workers)
        if self.unlabeled is not None:
            _check(self.unlabeled.source, self.unlabeled.ids, self.unlabeled_batch_size, self.num_workers)
        if self.steps() == 0:
            raise RecipeError(
                f"{len(self.ids)} samples do not fill one batch of {self.batch_size}, and drop_last drops the rest. "
                f"Set the batch size to at most {len(self.ids)}, or drop_last = false."
            )

    def steps(self) -> int:
        """Return the number of batches per epoch."""
        full_batches, rest = divmod(len(self.ids), self.batch_size)
        return full_batches + (rest > 0 and not self.drop_last)

    def epoch(self, epoch: int, *, start: int = 0, shard: ShardFn | None = None) -> Iterator[Batch]:
        """Yield batches start, start + 1, ... of an epoch; `shard` selects the samples of this process."""
        order = self.ids.cpu()[random_permutation(len(self.ids), derive_seed(self.seed, "order", epoch))]
        batch_ids = _split_ids(order[: self.steps() * self.batch_size], self.batch_size, start, shard)
        return self._augmented(batch_ids, epoch, start, self._extras(epoch, range(start, self.steps()), shard))

    def batches(self, ids: Tensor, epoch: int, *, batch_size: int | None = None) -> Iterator[Batch]:
        """Yield the samples `ids` in the given order, augmented as in that epoch."""
        batch_ids = _split_ids(ids.cpu(), batch_size or self.batch_size, 0, None)
        return self._augmented(batch_ids, epoch, 0, ({} for _ in batch_ids))

    def _augmented(
        self, batch_ids: Sequence[Tensor], epoch: int, start: int, extras: Iterator[dict[str, Inputs]]
    ) -> Iterator[Batch]:
        train_ids = self.ids.cpu() if self.augment.mixes else None
        reader = _Reader(self.source, derive_seed(self.seed, "augment", epoch), self.augment, train_ids)
        samples = _read_batches(reader, batch_ids, self.num_workers, self.device)
        for step, (ids, batch, extra) in enumerate(zip(batch_ids, samples, extras, strict=True), start):
            x, y = self._finish(batch, ids, reader.seed)
            yield Batch(x, y, ids.to(self.device), derive_seed(self.seed, epoch, step), extra)

    def _extras(self, epoch: int, steps: range, shard: ShardFn | None) -> Iterator[dict[str, Inputs]]:
        """Yield the unlabeled inputs of these batches; computed from the step index, so that they can resume too."""
        if self.unlabeled is None:
            yield from ({} for _ in steps)
            return
        size, seed = self.unlabeled_batch_size, derive_seed(self.seed, "unlabelled")
        first_step = epoch * self.steps()
        batch_ids = [cyclic_indices(self.unlabeled.ids.cpu(), (first_step + step) * size, size, seed) for step in steps]
        batch_ids = [ids[shard(size)] if shard else ids for ids in batch_ids]
        reader = _Reader(self.unlabeled.source, derive_seed(seed, "augment", epoch), self.augment)
        for batch in _read_batches(reader, batch_ids, self.num_workers, self.device):
            x, _ = _to_device(batch, self.mean, self.std, self.device, self.dtype)
            yield {"unlabeled": _to_memory_format(x, self.memory_format)}

    def _finish(self, batch: tuple[Inputs, Tensor], ids: Tensor, augment_seed: int) -> tuple[Inputs, Tensor]:
        """Move a batch to the device, normalize it, and apply mixup and cutmix."""
        x, y = _to_device(batch, self.mean, self.std, self.device, self.dtype)
        if self.augment.mixes:
            n = len(ids)
            other, other_y = map_tensors(x, lambda t: t[n:]), y[n:]
            x, y = map_tensors(x, lambda t: t[:n]), y[:n]
            x, y = mixup_cutmix(
                x, y, other, other_y, ids, seed=augment_seed, classes=self.classes, augment=self.augment
            )
        return _to_memory_format(x, self.memory_format), y


def ordered_batches(
    source: Source,
    ids: Tensor | None = None,
    *,
    batch_size: int,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
    num_workers: int = 0,
    shard: ShardFn | None = None,
) -> Iterator[Batch]:
    """Yield the samples `ids` (default: all) in order, without augmentation."""
    source = source.without_augmentation()  # cached features exist with and without augmentation
    ids = torch.arange(len(source)) if ids is None else ids.cpu()
    _check(source, ids, batch_size, num_workers)
    batch_ids = _split_ids(ids, batch_size, 0, shard)
    reader = _Reader(source, derive_seed("evaluation"))
    samples = _read_batches(reader, batch_ids, num_workers, device)
    for step, (part, batch) in enumerate(zip(batch_ids, samples, strict=True)):
        x, y = _to_device(batch, mean, std, device, dtype)
        yield Batch(_to_memory_format(x, memory_format), y, part.to(device), derive_seed("evaluation", step))


def cyclic_indices(ids: Tensor, start: int, count: int, seed: int) -> Tensor:
    """Return entries start .. start + count - 1 of an infinite sequence of shuffled passes over `ids`."""
    first, last = start // len(ids), (start + count - 1) // len(ids)
    passes = [ids[random_permutation(len(ids), derive_seed(seed, "pass", number))] for number in range(first, last + 1)]
    return torch.cat(passes)[start - first * len(ids) :][:count]


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads, crops, and flips the samples of one epoch; small and picklable, so that each worker gets a copy."""

    source: Source
    seed: int
    augment: Augment = NO_AUGMENT
    train_ids: Tensor | None = None  # the candidates for mixing partners; None: no mixing

    def __getitem__(self, ids: Sequence[int]) -> tuple[Inputs, Tensor]:
        index = torch.tensor(ids, dtype=torch.int64)
        if self.train_ids is not None:  # a partner is cropped and flipped as elsewhere in this epoch
            index = torch.cat([index, mix_partners(index, self.train_ids, seed=self.seed)])
        x, y = self.source.fetch(index, seed=self.seed)
        return crop_and_flip(x, index, seed=self.seed, augment=self.augment), y


@dataclass(frozen=True, slots=True)
class _WorkerReader:
    """Reads samples in a worker. An error of Plateaux is returned, because a DataLoader would add its traceback."""

    reader: _Reader

    def __getitem__(self, ids: Sequence[int]) -> tuple[Inputs, Tensor] | PlateauxError:
        try:
            return self.reader[ids]
        except PlateauxError as error:
            return type(error)(str(error))


def _read_batches(
    reader: _Reader, batch_ids: Sequence[Tensor], num_workers: int, device: torch.device
) -> Iterator[tuple[Inputs, Tensor]]:
    if num_workers == 0 or not reader.source.needs_workers or not batch_ids:
        return (reader[ids.tolist()] for ids in batch_ids)
    return _read_in_workers(reader, batch_ids, num_workers, device)


def _read_in_workers(
    reader: _Reader, batch_ids: Sequence[Tensor], num_workers: int, device: torch.device
) -> Iterator[tuple[Inputs, Tensor]]:
    loader: DataLoader[Any] = DataLoader(
        _WorkerReader(reader),  # type: ignore[arg-type]  # indexed by the lists of ids that the sampler below yields
        sampler=(ids.tolist() for ids in batch_ids),
        batch_size=None,
        collate_fn=_identity,
        num_workers=min(num_workers, len(batch_ids)),
        pin_memory=device.type == "cuda",
        # Without its own generator a DataLoader draws a seed from the global one.
        generator=torch.Generator().manual_seed(reader.seed),
    )
    # When the iterator starts in the main thread, torch reports a dead worker through a signal handler that raises at
    # any point of the program, such as in the middle of a checkpoint. From another thread it raises at the next batch.
    iterators: list[Any] = []
    thread = Thread(target=lambda: iterators.append(iter(loader)))
    thread.start()
    thread.join()
    (iterator,) = iterators
    try:
        for _ in batch_ids:
            batch = _next_batch(iterator)
            if isinstance(batch, PlateauxError):
                raise batch
            yield batch
    finally:  # explicitly: garbage collection would leave the workers of a failed epoch running for seconds
        iterator._shutdown_workers()


def _next_batch(iterator: Any) -> Any:
    try:
        return next(iterator)
    except (RuntimeError, EOFError, OSError) as error:  # the last two: a batch in shared memory was lost
        if "Caught" in str(error):
            raise  # an exception of the data set
        raise DataError(
            f"A data loader worker process died ({type(error).__name__}: {error}). A common cause is running out of "
            "memory: use fewer workers or a smaller batch. Use num_workers = 0 to see the original error."
        ) from error


def _identity(batch: Any) -> Any:
    return batch


def _split_ids(ids: Tensor, batch_size: int, start: int, shard: ShardFn | None) -> list[Tensor]:
    batch_ids = torch.split(ids, batch_size)[start:] if len(ids) else ()
    return [part[shard(len(part))] if shard else part for part in batch_ids]


def _to_device(
    batch: tuple[Inputs, Tensor], mean: Sequence[float], std: Sequence[float], device: torch.device, dtype: torch.dtype
) -> tuple[Inputs, Tensor]:
    x, y = map_tensors(batch[0], lambda t: t.to(device, non_blocking=True)), batch[1].to(device, non_blocking=True)
    return normalize(x, mean, std, dtype), y


def _to_memory_format(x: Inputs, memory_format: torch.memory_format) -> Inputs:
    is_images = isinstance(x, Tensor) and x.dim() == 4
    return map_tensors(x, lambda t: t.contiguous(memory_format=memory_format if is_images else torch.contiguous_format))


def _check(source: Source, ids: Tensor, batch_size: int, num_workers: int) -> None:
    if batch_size < 1 or num_workers < 0:
        raise RecipeError(
            f"batch_size = {batch_size} and num_workers = {num_workers} were given. "
            "batch_size must be at least 1, num_workers at least 0."
        )
    if not len(ids):
        raise DataError("There are no training samples. Check data.limit and the validation fraction.")
    if not (int(ids.min()) >= 0 and int(ids.max()) < len(source)):
        raise DataError(
            f"Sample ids range from {int(ids.min())} to {int(ids.max())}; the source contains 0 to {len(source) - 1}."
        )
