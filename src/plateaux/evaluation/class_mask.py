"""Class masks: evaluate images of some of a run's classes over these classes only.

ImageNet-A and ImageNet-R have 200 of the 1,000 classes of ImageNet. Their published accuracy ignores the logits of the
other 800. Here the columns of the other classes are removed before any metric, for members and ensemble alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from plateaux.core.errors import RunError
from plateaux.core.metric import Metric
from plateaux.core.outputs import features, logits
from plateaux.core.row_names import RowName
from plateaux.core.types import Estimate
from plateaux.evaluation.metric_loop import BatchOutputs


def mask_classes(stream: Iterator[BatchOutputs], classes: Sequence[int] | None) -> Iterator[BatchOutputs]:
    """Yield the batches with the logits of some classes, in ascending order; labels become positions among them.

    None keeps all classes.
    """
    for batch in stream:
        if classes is None:
            yield batch
            continue
        y = batch.batch.y
        columns = torch.tensor(classes, device=y.device)
        assert bool(torch.isin(y, columns).all()), "a label outside of the class mask"
        outputs = {
            output: values.index_select(-1, columns.to(values.device)) if output is logits else values
            for output, values in batch.outputs.items()
        }
        yield replace(batch, outputs=outputs, batch=replace(batch.batch, y=torch.searchsorted(columns, y)))


def check_maskable(metrics: Mapping[str, Metric], split: str) -> None:
    """Raise an error for metrics of other outputs than logits and features, whose classes cannot be masked."""
    names = [name for name, metric in metrics.items() if metric.output not in (logits, features)]
    if names:
        raise RunError(
            f"{split} has some of the run's classes only, and {', '.join(names)} uses an output other than logits, "
            f"which cannot be masked. Leave it out, or evaluate over all classes: --split {split}:all_classes"
        )


def with_class_numbers(rows: Mapping[RowName, Estimate], classes: Sequence[int] | None) -> dict[RowName, Estimate]:
    """Return the rows with the run's class numbers instead of positions among the classes of a mask.

    >>> rows = {RowName.member(0).with_part("class 1", "recall"): Estimate(0.5)}
    >>> [str(name) for name in with_class_numbers(rows, [2, 7])]
    ['member 0 · class 7 · recall']
    """
    if classes is None:
        return dict(rows)
    return {_renamed(name, classes): value for name, value in rows.items()}


def _renamed(name: RowName, classes: Sequence[int]) -> RowName:
    first, *rest = name.part or ("",)
    found = re.fullmatch(r"class (\d{1,9})", first)
    return name.base.with_part(f"class {classes[int(found[1])]}", *rest) if found else name
