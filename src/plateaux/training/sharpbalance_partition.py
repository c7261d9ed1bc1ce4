"""The data partition of SharpBalance for custom training loops: a folder that all members' processes share.

scores/<member>.safetensors     one score per training sample
sam_sets/<member>.safetensors   one bit per training sample: whether the member applies SAM to it
summary.json                    fractions, overlaps, rank correlations; written last, so it marks completion
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from plateaux.core.errors import DataError, RunError
from plateaux.core.types import derive_seed
from plateaux.data.partition.masks import lookup
from plateaux.data.partition.rules import get_rule
from plateaux.storage.local_store import LocalStore
from plateaux.training.partition import StoredScores


class SharpBalancePartition:
    """The sharpness-aware sets of the members of an ensemble, built from the scores of all members.

    Every member calls `add_scores` with one score per training sample (see `SampleSharpness`), in the order of sample
    ids 0 .. N-1. After all of them, one process calls `build`. `sam_set(member)` then maps sample ids to booleans. The
    files are read in chunks, and the k-th largest score is exact. `rule` and `top_k` are those of `method.rule` and
    `method.top_k` in a recipe.

    >>> import tempfile
    >>> partition = SharpBalancePartition(tempfile.mkdtemp(), members=2, samples=4, top_k=0.5)
    >>> for member, scores in enumerate(([1, 2, 3, 4], [4, 3, 2, 1])):
    ...     partition.add_scores(member, torch.tensor(scores))
    >>> partition.build()["share"]
    [0.5, 0.5]
    >>> partition.sam_set(0)(torch.tensor([0, 3]))
    tensor([ True, False])
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        members: int,
        samples: int,
        top_k: float = 0.4,
        rule: str = "paper",
        seed: int = 0,
    ) -> None:
        self._store = LocalStore(os.fspath(folder))
        self._assign = get_rule(rule, top_k=top_k)
        self.members, self.samples, self.seed = members, samples, seed
        self._metadata = {"members": members, "samples": samples, "rule": rule, "top_k": top_k}

    def add_scores(self, member: int, scores: ArrayLike | Tensor | Iterable[ArrayLike | Tensor]) -> None:
        """Write the scores of a member: one array `[N]`, or chunks of it in order.

        A negative score excludes a sample; the same samples must be excluded for all members.
        """
        self._check(member)
        chunks = [scores] if isinstance(scores, Tensor | np.ndarray) else scores
        assert isinstance(chunks, Iterable)
        self._store.delete("summary.json")  # the sets of earlier scores are outdated
        written = 0
        metadata = {"samples": str(self.samples), "members": str(self.members), "member": str(member)}
        with self._store.array_writer(_scores_path(member), np.float32, self.samples, metadata) as write:
            for chunk in chunks:
                values = _float32(chunk)
                if not np.isfinite(values).all():
                    sample = written + int(np.flatnonzero(~np.isfinite(values))[0])
                    raise DataError(f"The score of member {member} for sample {sample} is NaN or infinite")
                written += len(values)
                if written > self.samples:
                    break
                write(values)
            if written != self.samples:
                raise DataError(
                    f"Member {member} has scores for {'more than ' if written > self.samples else ''}"
                    f"{min(written, self.samples)} samples; pass one score for each of the {self.samples} samples"
                )

    def missing(self) -> list[int]:
        """Return the members whose scores are not stored yet."""
        return [member for member in range(self.members) if not self._store.has_recorded(_scores_path(member))]

    def build(self) -> dict[str, Any]:
        """Build and store the sets of all members, and return their fractions, overlaps, and rank correlations."""
        if missing := self.missing():
            raise RunError(f"Members {missing} have no scores in {self._store.root}: call add_scores for each of them")
        names = [_scores_path(member) for member in range(self.members)]
        for name in names:
            self._load(name, self.samples, ("samples", "members"))
        scores = StoredScores(self._store, names, self.samples, derive_seed(self.seed, "meeting", 0))
        files = {_sam_set_path(m): {**self._text_metadata(), "member": str(m)} for m in range(self.members)}
        summary = {**self._metadata, **scores.write_sets(self._assign, files)}
        self._store.put_json("summary.json", summary)
        return summary

    @property
    def is_built(self) -> bool:
        """Whether the sets of all members are stored."""
        return self._store.has("summary.json")

    def sam_set(self, member: int) -> Callable[[Tensor], Tensor]:
        """Return a function from sample ids `[B]` to booleans `[B]`: whether the member applies SAM to the sample."""
        self._check(member)
        if not self.is_built:
            raise RunError(f"There are no sharpness-aware sets in {self._store.root}: call build() after add_scores")
        return partial(lookup, self._load(_sam_set_path(member), -(-self.samples // 8), tuple(self._metadata)))

    def _check(self, member: int) -> None:
        if not 0 <= member < self.members:
            raise RunError(f"There is no member {member}; members are numbered from 0 to {self.members - 1}")

    def _text_metadata(self) -> dict[str, str]:
        return {key: str(value) for key, value in self._metadata.items()}

    def _load(self, name: str, length: int, keys: Iterable[str]) -> NDArray[Any]:
        metadata, values = self._store.get_array(name)
        stored = {key: metadata.get(key) for key in keys}
        expected = {key: str(self._metadata[key]) for key in keys}
        if stored != expected or len(values) != length:
            raise RunError(
                f"{self._store.root / name} belongs to another partition: {stored}; this one has {expected}. "
                "Use another folder, or delete this one"
            )
        return values


def _float32(values: Any) -> NDArray[np.float32]:
    if isinstance(values, Tensor):
        values = values.detach().to(device="cpu", dtype=torch.float32).numpy()
    return np.atleast_1d(np.asarray(values, dtype=np.float32))


def _scores_path(member: int) -> str:
    return f"scores/{member}.safetensors"


def _sam_set_path(member: int) -> str:
    return f"sam_sets/{member}.safetensors"
