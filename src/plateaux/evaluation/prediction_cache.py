"""Cache of predictions: logits are stored next to the run, so that another metric needs no forward pass.

predictions/<samples>/samples.safetensors              ids and labels
predictions/<samples>/<weights>-logits.safetensors     [N, C] of one member
predictions/<samples>/<weights>-features.safetensors   [N, D] of one member, if a metric needed them

Both names are hashes, of the samples and of the weights, so predictions of other weights are never used.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from plateaux.config.recipe import fingerprint
from plateaux.core.errors import StorageError
from plateaux.core.executor import Collectives
from plateaux.core.metric import Metric
from plateaux.core.outputs import OutputFn, features, logits
from plateaux.core.process_info import is_rank_zero
from plateaux.core.types import Batch, TensorTree
from plateaux.evaluation.metric_loop import BatchOutputs, MetricState
from plateaux.storage.json_shapes import read_shape
from plateaux.storage.store import Store

CacheMode = Literal["float32", "float16", "off"]
"""The precision of cached logits; "off": they are neither read nor written."""

MAX_CACHE_BYTES = 512_000_000  # of the predictions for one split
CHUNK = 1 << 22  # numbers read at once
KINDS: dict[str, OutputFn] = {"logits": logits, "features": features}
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _CacheInfo:
    """What is read from about.json."""

    dtypes: dict[str, str]  # of the logits, by the hash of the weights


@dataclass(frozen=True, slots=True)
class PredictionCache:
    """The cached predictions of a run for one split."""

    store: Store
    samples: Mapping[str, Any]  # what identifies the samples

    @property
    def folder(self) -> str:
        return f"predictions/{fingerprint(dict(self.samples))}"

    def has(self, weights: Sequence[str], outputs: Sequence[OutputFn]) -> bool:
        """Return whether these outputs are cached for members with these weights."""
        if not set(outputs) <= set(KINDS.values()) or not self.store.has_recorded(f"{self.folder}/samples.safetensors"):
            return False
        names = [self._name(member, kind) for member in weights for kind, output in KINDS.items() if output in outputs]
        return all(self.store.has_recorded(name) for name in names)

    def read(self, weights: Sequence[str], outputs: Sequence[OutputFn]) -> Iterator[BatchOutputs]:
        """Yield the cached outputs, as a forward pass would."""
        samples = f"{self.folder}/samples.safetensors"
        all_ids, labels = (self.store.get_tensor(samples, key, dims=1, integers=True) for key in ("ids", "labels"))
        wanted = {kind: output for kind, output in KINDS.items() if output in outputs}
        rows = {
            output: [self.store.get_tensor(self._name(member, kind), kind, dims=2) for member in weights]
            for kind, output in wanted.items()
        }
        total = len(all_ids)
        if any(len(tensor) != total for tensor in (labels, *(row for members in rows.values() for row in members))):
            raise StorageError(
                f"The files in {self.store.root / self.folder} have different numbers of samples; delete this folder "
                "to predict again"
            )
        step = max(256, CHUNK // max(sum(row.shape[1] for row in members) for members in rows.values()))
        for start in range(0, total, step):
            part = slice(start, min(start + step, total))
            tensors = {output: _stacked([row[part] for row in members]) for output, members in rows.items()}
            ids = all_ids[part]
            yield BatchOutputs(tensors, Batch(ids, labels[part], ids), start, len(ids))

    def write(self, weights: Sequence[str], predictions: TensorTree) -> None:
        """Write predictions: `ids`, `labels`, and for each kind a tensor `[N, M, ...]`."""
        samples = {"ids": predictions["ids"], "labels": predictions["labels"]}
        self.store.put_tensors(f"{self.folder}/samples.safetensors", samples)
        dtype = str(predictions["logits"].dtype).removeprefix("torch.")
        dtypes = {**self._dtypes(), **dict.fromkeys(weights, dtype)}
        self.store.put_json(f"{self.folder}/about.json", {**self.samples, "dtypes": dtypes})
        for position, name in enumerate(weights):
            for kind in KINDS.keys() & predictions.keys():
                self.store.put_tensors(self._name(name, kind), {kind: predictions[kind][:, position].contiguous()})

    def ids(self) -> Tensor:
        """Return the ids of the samples."""
        return self.store.get_tensor(f"{self.folder}/samples.safetensors", "ids", dims=1, integers=True)

    def dtype(self, weights: Sequence[str]) -> str:
        """Return the dtype of these members' cached predictions."""
        dtypes = self._dtypes()
        return " and ".join(sorted({dtypes.get(member, "unknown") for member in weights}))

    def _dtypes(self) -> dict[str, str]:
        name = f"{self.folder}/about.json"
        if not self.store.has(name):
            return {}
        file = self.store.root / name
        return read_shape(_CacheInfo, self.store.get_json(name), file, "delete its folder to predict again").dtypes

    def _name(self, weights: str, kind: str) -> str:
        return f"{self.folder}/{weights}-{kind}.safetensors"


@dataclass(slots=True)
class PredictionWriter:
    """Passes batches through and writes their outputs to the cache, unless they are too large."""

    cache: PredictionCache
    weights: Sequence[str]
    dtype: torch.dtype
    samples: int
    max_bytes: int
    _kinds: Mapping[str, OutputFn] = field(default_factory=lambda: KINDS)
    _rows: MetricState | None = field(default=None)
    _is_off: bool = False

    def record(self, stream: Iterator[BatchOutputs], executor: Collectives) -> Iterator[BatchOutputs]:
        """Yield the batches of the stream; write the cache after the last one."""
        for batch in stream:
            self._add(batch)
            yield batch
        if self._rows is not None:
            predictions = self._rows.reduced(executor, self.samples)
            if is_rank_zero():
                self.cache.write(self.weights, {name: tensor.cpu() for name, tensor in predictions.items()})

    def _add(self, batch: BatchOutputs) -> None:
        if self._is_off:
            return
        if self._rows is None:
            y = batch.batch.y
            if logits not in batch.outputs or y.ndim != 1 or y.is_floating_point():  # labels are class numbers
                self._is_off = True
                return
            if self._bytes(batch) > self.max_bytes:  # features are larger than logits
                self._kinds = {"logits": logits}
            if self._bytes(batch) > self.max_bytes:
                self._is_off = True
                size, limit = self._bytes(batch) / 1e6, self.max_bytes / 1e6
                logger.info(
                    "logits are not cached: they take %s MB, the limit is %s MB", f"{size:,.0f}", f"{limit:,.0f}"
                )
                return
            self._rows = MetricState(Metric(lambda *_: {}, lambda _: {}, reduce="cat"), self.samples)
        outputs = {
            kind: batch.outputs[output].transpose(0, 1).to(self.dtype)
            for kind, output in self._kinds.items()
            if output in batch.outputs
        }
        self._rows.write_rows(batch.start, {**outputs, "ids": batch.batch.index, "labels": batch.batch.y})

    def _bytes(self, batch: BatchOutputs) -> int:
        tensors = [batch.outputs[output] for output in self._kinds.values() if output in batch.outputs]
        return sum(len(t) * t.shape[-1] for t in tensors) * self.samples * self.dtype.itemsize


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    """Stack members; features of different widths are padded with zeros."""
    width = max(row.shape[-1] for row in rows)
    return torch.stack([torch.nn.functional.pad(row, (0, width - row.shape[-1])) for row in rows])
