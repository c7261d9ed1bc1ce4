"""Kept predictions: what members said lies beside the run, so that a new question needs no forward pass.

predictions/<samples>/samples.safetensors              ids and labels
predictions/<samples>/<weights>-logits.safetensors     [N, C] of one member
predictions/<samples>/<weights>-features.safetensors   [N, D] of one member, where they were asked for

Both names are hashes: of the samples, and of the weights that spoke. Other weights never find these predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from plateaux.config.recipe import fingerprint
from plateaux.core.executor import Executor
from plateaux.core.metric import Metric
from plateaux.core.outputs import OutputFn, features, logits
from plateaux.core.runtime import is_rank_zero
from plateaux.core.types import Batch, TensorTree
from plateaux.evaluation.metric_loop import BatchOutputs, MetricState
from plateaux.storage.store import Store

CacheDtype = Literal["float32", "float16", "no"]
MAX_CACHE_BYTES = 512_000_000  # bytes of predictions about one set of samples
CHUNK = 1 << 22  # numbers of one table at once
KINDS: dict[str, OutputFn] = {"logits": logits, "features": features}


@dataclass(frozen=True, slots=True)
class PredictionCache:
    """The kept predictions of a run about one set of samples."""

    store: Store
    samples: Mapping[str, Any]  # what tells these samples from others

    @property
    def folder(self) -> str:
        return f"predictions/{fingerprint(dict(self.samples))}"

    def has(self, weights: Sequence[str], offers: Sequence[OutputFn]) -> bool:
        """Say whether members of these weights have answered all of this."""
        if not set(offers) <= set(KINDS.values()) or not self.store.has(f"{self.folder}/samples.safetensors"):
            return False
        names = [self._name(each, kind) for each in weights for kind, offer in KINDS.items() if offer in offers]
        return all(self.store.has(name) for name in names)

    def read(self, weights: Sequence[str], offers: Sequence[OutputFn]) -> Iterator[BatchOutputs]:
        """Yield what was said, as if it were said now."""
        known = self.store.get_tensors(f"{self.folder}/samples.safetensors")
        wanted = {kind: offer for kind, offer in KINDS.items() if offer in offers}
        rows = {
            offer: [self.store.get_tensors(self._name(each, kind))[kind] for each in weights]
            for kind, offer in wanted.items()
        }
        total = len(known["ids"])
        step = max(256, CHUNK // max(sum(row.shape[1] for row in each) for each in rows.values()))
        for start in range(0, total, step):
            part = slice(start, min(start + step, total))
            tables = {offer: _stacked([row[part] for row in each]) for offer, each in rows.items()}
            ids = known["ids"][part]
            yield BatchOutputs(tables, Batch(ids, known["labels"][part], ids), start, len(ids))

    def write(self, weights: Sequence[str], found: TensorTree) -> None:
        """Keep what members said: `ids`, `labels`, and for each kind a table `[N, M, ...]`."""
        self.store.put_tensors(f"{self.folder}/samples.safetensors", {"ids": found["ids"], "labels": found["labels"]})
        kept = str(found["logits"].dtype).removeprefix("torch.")
        dtypes = {**self._dtypes(), **dict.fromkeys(weights, kept)}
        self.store.put_json(f"{self.folder}/about.json", {**self.samples, "dtypes": dtypes})
        for position, name in enumerate(weights):
            for kind in KINDS.keys() & found.keys():
                self.store.put_tensors(self._name(name, kind), {kind: found[kind][:, position].contiguous()})

    def ids(self) -> Tensor:
        """Return the ids of the samples."""
        return self.store.get_tensors(f"{self.folder}/samples.safetensors")["ids"]

    def dtype(self, weights: Sequence[str]) -> str:
        """Return the type these members' predictions are kept in."""
        known = self._dtypes()
        return " and ".join(sorted({known.get(each, "unknown") for each in weights}))

    def _dtypes(self) -> dict[str, str]:
        name = f"{self.folder}/about.json"
        return dict(self.store.get_json(name)["dtypes"]) if self.store.has(name) else {}

    def _name(self, weights: str, kind: str) -> str:
        return f"{self.folder}/{weights}-{kind}.safetensors"


@dataclass(slots=True)
class PredictionWriter:
    """Listens to a walk and keeps what was said, unless it grows too large."""

    cache: PredictionCache
    weights: Sequence[str]
    dtype: torch.dtype
    samples: int
    say: Callable[[str], None]
    below: int  # bytes
    _kinds: Mapping[str, OutputFn] = field(default_factory=lambda: KINDS)
    _sums: MetricState | None = field(default=None)
    _given_up: bool = False

    def record(self, heard: Iterator[BatchOutputs], executor: Executor) -> Iterator[BatchOutputs]:
        """Pass on what is heard; write it down once all is said."""
        for each in heard:
            self._add(each)
            yield each
        if self._sums is not None:
            found = self._sums.reduced(executor, self.samples)
            if is_rank_zero():
                self.cache.write(self.weights, {name: tensor.cpu() for name, tensor in found.items()})

    def _add(self, each: BatchOutputs) -> None:
        if self._given_up:
            return
        if self._sums is None:
            if logits not in each.outputs or each.batch.y.ndim != 1:
                self._given_up = True
                return
            if self._bytes(each) > self.below:  # features are the larger part
                self._kinds = {"logits": logits}
            if self._bytes(each) > self.below:
                self._given_up = True
                self.say(f"logits are not kept: {self._bytes(each) / 1e6:,.0f} MB, and at most {self.below / 1e6:,.0f}")
                return
            self._sums = MetricState(Metric(lambda *_: {}, lambda _: {}, reduce="cat"), self.samples)
        said = {kind: each.outputs[offer].transpose(0, 1).to(self.dtype) for kind, offer in self._kinds.items()
                if offer in each.outputs}  # fmt: skip
        self._sums.lay(each.start, {**said, "ids": each.batch.index, "labels": each.batch.y})

    def _bytes(self, each: BatchOutputs) -> int:
        tables = [each.outputs[offer] for offer in self._kinds.values() if offer in each.outputs]
        return sum(len(t) * t.shape[-1] for t in tables) * self.samples * self.dtype.itemsize


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    """Lay members side by side; features of different widths are filled up with zeros."""
    width = max(row.shape[-1] for row in rows)
    return torch.stack([torch.nn.functional.pad(row, (0, width - row.shape[-1])) for row in rows])
