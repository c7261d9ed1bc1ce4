"""Refuse predictions that are NaN or infinite, instead of scoring them as if they were predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from plateaux.core.errors import DataError, PlateauxError, RunError
from plateaux.core.executor import Collectives
from plateaux.core.outputs import logits
from plateaux.core.tensor_tree import is_finite
from plateaux.core.types import Batch
from plateaux.evaluation.metric_loop import BatchOutputs

SHOWN_IDS = 5


def require_finite(
    stream: Iterator[BatchOutputs],
    executor: Collectives,
    numbers: Sequence[int],
    split: str,
    explain: Callable[[list[int]], str],
) -> Iterator[BatchOutputs]:
    """Yield the batches of a stream; raise an error at its end if logits do not define probabilities.

    A logit of -inf is allowed: it excludes a class. The error counts the samples of all processes, names the members,
    and ends with the result of `explain` for these members, unless inputs are the cause.
    """
    counts = torch.zeros(len(numbers) + 2, dtype=torch.int64)  # bad samples by member, samples, bad inputs
    ids: list[int] = []
    for batch in stream:
        counts[-2] += len(batch.batch)
        values = batch.outputs.get(logits)
        if values is None or bool(values.sum().isfinite()):  # a finite sum has only finite terms
            yield batch
            continue
        bad = ~values.float().logsumexp(2).isfinite()  # [M, B], or [M, B, T] for text
        bad = bad.flatten(2).any(2) if bad.ndim > 2 else bad
        if not bool(bad.any()):
            yield batch
            continue
        counts[:-2] += bad.sum(1).cpu()
        rows = bad.any(0)
        counts[-1] += int((rows & nonfinite_inputs(batch.batch)).sum())
        ids += batch.batch.index[rows][: SHOWN_IDS - len(ids)].tolist()
    total = executor.all_reduce({"counts": counts.to(executor.device or "cpu")})["counts"].tolist()
    if any(total[:-2]):
        raise _error(dict(zip(numbers, total[:-2], strict=True)), total[-2], total[-1], ids, split, explain)


def nonfinite_inputs(batch: Batch) -> Tensor:
    """Return a mask `[B]` of the samples whose inputs contain NaN or infinity."""
    tensors = [batch.x] if isinstance(batch.x, Tensor) else list(batch.x.values())
    bad = torch.zeros(len(batch), dtype=torch.bool, device=batch.index.device)
    for values in tensors:
        if values.is_floating_point():
            bad |= ~values.reshape(len(batch), -1).isfinite().all(1)
    return bad


def has_finite_weights(module: object) -> bool:
    """Return whether no weight or buffer of a network is NaN or infinite."""
    assert isinstance(module, nn.Module)
    return is_finite([values for values in module.state_dict().values() if values.is_floating_point()])


def _error(
    counts: dict[int, int], samples: int, inputs: int, ids: list[int], split: str, explain: Callable[[list[int]], str]
) -> PlateauxError:
    bad = [number for number, count in counts.items() if count]
    who = ("Member " if len(bad) == 1 else "Members ") + ", ".join(map(str, bad))
    most = max(counts.values())
    shown = ", ".join(map(str, ids)) + (", ..." if most > len(ids) else "")
    found = (
        f"{who} of {len(counts)} predicted NaN or infinity for {most:,} of {samples:,} samples of {split} "
        f"(samples {shown}), so no metric was computed."
    )
    if inputs:
        return DataError(
            f"{found} The inputs of {inputs:,} of these samples contain NaN or infinity. Remove these samples, or "
            "replace the missing values"
        )
    return RunError(f"{found} {explain(bad)}")
