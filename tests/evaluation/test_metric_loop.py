"""The metric loop stores rows per sample, for any expected number of samples."""

from __future__ import annotations

import pytest
import torch

from plateaux.core.metric import Metric
from plateaux.core.outputs import logits
from plateaux.core.types import Batch
from plateaux.distributed.executors.local import SINGLE_PROCESS
from plateaux.evaluation.metric_loop import BatchOutputs, MetricState, accumulate

KEEP = Metric(lambda table, _: {"row": table.transpose(0, 1)}, lambda _: {}, reduce="cat")
TABLE = torch.randn(2, 30, 3, generator=torch.Generator().manual_seed(0))


def heard(cuts: list[int]) -> list[BatchOutputs]:
    ends = [*cuts, 30]
    parts = [torch.arange(start, end) for start, end in zip([0, *cuts], ends, strict=True)]
    return [BatchOutputs({logits: TABLE[:, part]}, Batch(part, part, part), int(part[0]), len(part)) for part in parts]


@pytest.mark.parametrize("expected", [0, 1, 17, 30, 99])
@pytest.mark.parametrize("cuts", [[], [1, 2, 3, 4, 5], [10, 29]])
def test_rows_are_concatenated_for_any_expected_number_of_samples(expected: int, cuts: list[int]) -> None:
    sums = accumulate(SINGLE_PROCESS, heard(cuts), {"keep": KEEP}, samples=expected)
    assert torch.equal(sums[None, "keep"]["row"], TABLE.transpose(0, 1))


def test_rows_of_the_expected_number_are_never_copied() -> None:
    sums = MetricState(KEEP, 30)
    batches = heard([4, 9])
    sums.add(batches[0].outputs[logits], batches[0])
    place = sums.total["row"].data_ptr()
    for each in batches[1:]:
        sums.add(each.outputs[logits], each)
    whole = sums.reduced(SINGLE_PROCESS, 30)["row"]
    assert whole.data_ptr() == place
    assert whole.untyped_storage().nbytes() == TABLE.nbytes
    assert not sums.total


def test_rows_may_be_written_in_any_order_and_missing_rows_are_zero() -> None:
    sums = MetricState(KEEP)
    sums.write_rows(5, {"row": torch.ones(2, 3)})
    sums.write_rows(0, {"row": torch.full((1, 3), 2.0)})
    assert sums.reduced(SINGLE_PROCESS, 9)["row"][:, 0].tolist() == [2, 0, 0, 0, 0, 1, 1, 0, 0]
