"""How a member is fed: batches in an order and with variations that depend on its key, the epoch and the sample only.

    feed = Feed(data.train, ids, batch=128, key=key(run, member), classes=data.classes, mean=data.mean, std=data.std)
    for batch in feed.epoch(3, start=17): ...  # carries on in the middle of an epoch, reading nothing before

Reading, cropping and flipping may happen in worker processes; the batches are the same, bit for bit, for any number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from plateaux.core.errors import DataError, RecipeError
from plateaux.core.types import Batch, Inputs, derive_seed, map_tensors
from plateaux.data.augment import Augment, crop_and_flip, mix_partners, mixup_cutmix, normalize
from plateaux.data.sources import Source, UnlabeledData
from plateaux.data.splits import _permutation

CPU = torch.device("cpu")
NO_AUGMENT = Augment()
ShardFn = Callable[[int], slice]
"""Which samples of a batch of so many are worked on here."""


@dataclass(frozen=True, slots=True)
class MemberLoader:
    """The training samples of one member, epoch by epoch."""

    source: Source
    ids: Tensor  # [n] the samples to draw from: a train split keeps the ids of the whole source
    batch_size: int
    seed: int  # of this member's own order and augmentation, or the shared one
    classes: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augment: Augment = NO_AUGMENT
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format
    num_workers: int = 0
    drop_last: bool = False
    unlabeled: UnlabeledData | None = None  # other samples that go along with every batch
    unlabeled_batch_size: int = 0  # so many of them

    def __post_init__(self) -> None:
        _check(self.source, self.ids, self.batch_size, self.num_workers)
        if self.unlabeled is not None:
            _check(self.unlabeled.source, self.unlabeled.ids, self.unlabeled_batch_size, self.num_workers)
        if self.steps() == 0:
            raise RecipeError(
                f"{len(self.ids)} samples make no whole batch of {self.batch_size}, and drop_last drops the rest; "
                f"give a batch of at most {len(self.ids)}, or drop_last = false."
            )

    def steps(self) -> int:
        """Return the batches of one epoch."""
        whole, rest = divmod(len(self.ids), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def epoch(self, epoch: int, *, start: int = 0, shard: ShardFn | None = None) -> Iterator[Batch]:
        """Yield batches start, start + 1, ... of an epoch; `shard` says which samples of each are wanted here."""
        order = self.ids.cpu()[_permutation(len(self.ids), derive_seed(self.seed, "order", epoch))]
        parts = _parts(order[: self.steps() * self.batch_size], self.batch_size, start, shard)
        return self._augmented(parts, epoch, start, self._extras(epoch, range(start, self.steps()), shard))

    def some(self, ids: Tensor, epoch: int, *, batch: int | None = None) -> Iterator[Batch]:
        """Yield the samples `ids` in their order, each as it looks in that epoch."""
        parts = _parts(ids.cpu(), batch or self.batch_size, 0, None)
        return self._augmented(parts, epoch, 0, ({} for _ in parts))

    def _augmented(
        self, parts: Sequence[Tensor], epoch: int, start: int, extras: Iterator[dict[str, Inputs]]
    ) -> Iterator[Batch]:
        among = self.ids.cpu() if self.augment.mixes else None
        reader = _Reader(self.source, derive_seed(self.seed, "augment", epoch), self.augment, among)
        read = _read_all(reader, parts, self.num_workers, self.device)
        for step, (ids, each, extra) in enumerate(zip(parts, read, extras, strict=True), start):
            x, y = self._finish(each, ids, reader.seed)
            yield Batch(x, y, ids.to(self.device), derive_seed(self.seed, epoch, step), extra)

    def _extras(self, epoch: int, steps: range, shard: ShardFn | None) -> Iterator[dict[str, Inputs]]:
        """Yield what goes along with each of these batches; found by counting, so it carries on anywhere too."""
        if self.unlabeled is None:
            yield from ({} for _ in steps)
            return
        size, own = self.unlabeled_batch_size, derive_seed(self.seed, "unlabelled")
        done = epoch * self.steps()
        parts = [cyclic_indices(self.unlabeled.ids.cpu(), (done + step) * size, size, own) for step in steps]
        parts = [part[shard(size)] if shard else part for part in parts]
        reader = _Reader(self.unlabeled.source, derive_seed(own, "augment", epoch), self.augment)
        for read in _read_all(reader, parts, self.num_workers, self.device):
            x, _ = _place(read, self.mean, self.std, self.device, self.dtype)
            yield {"unlabeled": _laid_out(x, self.memory_format)}

    def _finish(self, read: tuple[Inputs, Tensor], ids: Tensor, augment_key: int) -> tuple[Inputs, Tensor]:
        """Bring what was read to the device, and do there what takes floating point numbers."""
        x, y = _place(read, self.mean, self.std, self.device, self.dtype)
        if self.augment.mixes:
            n = len(ids)
            other, other_y = map_tensors(x, lambda t: t[n:]), y[n:]
            x, y = map_tensors(x, lambda t: t[:n]), y[:n]
            x, y = mixup_cutmix(x, y, other, other_y, ids, seed=augment_key, classes=self.classes, augment=self.augment)
        return _laid_out(x, self.memory_format), y


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
    """Yield the samples `ids` (all of them when None) in their order, as they are."""
    source = source.without_augmentation()  # features are kept of samples varied and not
    ids = torch.arange(len(source)) if ids is None else ids.cpu()
    _check(source, ids, batch_size, num_workers)
    parts = _parts(ids, batch_size, 0, shard)
    reader = _Reader(source, derive_seed("evaluation"))
    for step, (part, read) in enumerate(zip(parts, _read_all(reader, parts, num_workers, device), strict=True)):
        x, y = _place(read, mean, std, device, dtype)
        yield Batch(_laid_out(x, memory_format), y, part.to(device), derive_seed("evaluation", step))


def cyclic_indices(ids: Tensor, start: int, count: int, seed: int) -> Tensor:
    """Return samples start .. start + count - 1 of an endless row of passes over `ids`, each in an order of its own."""
    first, last = start // len(ids), (start + count - 1) // len(ids)
    passes = [ids[_permutation(len(ids), derive_seed(seed, "pass", number))] for number in range(first, last + 1)]
    return torch.cat(passes)[start - first * len(ids) :][:count]


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads, crops and flips the samples of one epoch; small and picklable, so that a worker can have its own."""

    source: Source
    seed: int
    augment: Augment = NO_AUGMENT
    among: Tensor | None = None  # where partners come from, if samples are mixed

    def __getitem__(self, ids: Sequence[int]) -> tuple[Inputs, Tensor]:
        wanted = torch.tensor(ids, dtype=torch.int64)
        if self.among is not None:  # each partner looks as it does in this epoch's own turn
            wanted = torch.cat([wanted, mix_partners(wanted, self.among, seed=self.seed)])
        x, y = self.source.fetch(wanted, seed=self.seed)
        return crop_and_flip(x, wanted, seed=self.seed, augment=self.augment), y


def _read_all(
    reader: _Reader, parts: Sequence[Tensor], workers: int, device: torch.device
) -> Iterator[tuple[Inputs, Tensor]]:
    if workers == 0 or not reader.source.needs_workers or not parts:
        return (reader[part.tolist()] for part in parts)
    return _read_by_workers(reader, parts, workers, device)


def _read_by_workers(
    reader: _Reader, parts: Sequence[Tensor], workers: int, device: torch.device
) -> Iterator[tuple[Inputs, Tensor]]:
    loader: DataLoader[Any] = DataLoader(
        reader,  # type: ignore[arg-type]  # indexed by lists of ids, which the sampler below hands out
        sampler=(part.tolist() for part in parts),
        batch_size=None,
        collate_fn=_as_is,
        num_workers=min(workers, len(parts)),
        pin_memory=device.type == "cuda",
        # Without its own generator a DataLoader draws a seed from the global one.
        generator=torch.Generator().manual_seed(reader.seed),
    )
    # From its main thread torch reports a dead worker by a signal handler that raises wherever the program happens to
    # be, in the middle of a checkpoint too; from another thread it reports when the next batch is asked for.
    started: list[Any] = []
    thread = Thread(target=lambda: started.append(iter(loader)))
    thread.start()
    thread.join()
    (running,) = started
    try:
        for _ in parts:
            yield _next(running)
    finally:  # at once, whatever happened: left to the garbage collector they linger, a failed epoch's for seconds
        running._shutdown_workers()


def _next(running: Any) -> Any:
    try:
        return next(running)
    except (RuntimeError, EOFError, OSError) as error:  # the last two: what it had read is gone with it
        if "Caught" in str(error):
            raise  # the data set's own complaint
        raise DataError(
            f"A worker process that reads samples died ({type(error).__name__}: {error}). Often memory ran out: use "
            "fewer workers or a smaller batch, or workers = 0 to see the failure itself."
        ) from error


def _as_is(read: Any) -> Any:
    return read


def _parts(ids: Tensor, batch: int, start: int, shard: ShardFn | None) -> list[Tensor]:
    parts = torch.split(ids, batch)[start:] if len(ids) else ()
    return [part[shard(len(part))] if shard else part for part in parts]


def _place(
    read: tuple[Inputs, Tensor], mean: Sequence[float], std: Sequence[float], device: torch.device, dtype: torch.dtype
) -> tuple[Inputs, Tensor]:
    x, y = map_tensors(read[0], lambda t: t.to(device, non_blocking=True)), read[1].to(device, non_blocking=True)
    return normalize(x, mean, std, dtype), y


def _laid_out(x: Inputs, memory_format: torch.memory_format) -> Inputs:
    images = isinstance(x, Tensor) and x.dim() == 4
    return map_tensors(x, lambda t: t.contiguous(memory_format=memory_format if images else torch.contiguous_format))


def _check(source: Source, ids: Tensor, batch: int, workers: int) -> None:
    if batch < 1 or workers < 0:
        raise RecipeError(
            f"batch = {batch} and workers = {workers}: a batch needs at least 1 sample, workers at least 0."
        )
    if not len(ids):
        raise DataError("There are no samples to draw from; check the data's limit and the validation share.")
    if not (int(ids.min()) >= 0 and int(ids.max()) < len(source)):
        raise DataError(
            f"Sample ids run from {int(ids.min())} to {int(ids.max())}; the source holds 0 to {len(source) - 1}."
        )
