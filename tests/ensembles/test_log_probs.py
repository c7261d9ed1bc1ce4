"""What is worked out of a table: once while it is shared, and never of another or an older one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from plateaux.core.metric import Metric
from plateaux.core.outputs import logits
from plateaux.core.types import Batch, TensorTree
from plateaux.distributed.executors.local import SINGLE_PROCESS
from plateaux.ensembles.log_probs import log_probabilities, log_probs, log_probs_float64, memo_scope, predictions
from plateaux.evaluation.metric_loop import BatchOutputs, accumulate

WORKS = [log_probs, log_probs_float64, log_probabilities, predictions]


def table_of(members: int = 3) -> Tensor:
    return torch.randn(members, 7, 4, generator=torch.Generator().manual_seed(members))


@pytest.mark.parametrize("work", WORKS)
def test_it_is_worked_out_once_while_the_table_is_shared(work: Callable[[Tensor], Tensor]) -> None:
    table = table_of()
    alone = work(table)
    assert work(table) is not alone
    with memo_scope(table):
        first = work(table)
        assert work(table) is first
        with memo_scope(table_of(2)):
            assert work(table) is not first
        assert work(table) is first
        assert torch.equal(work(table.clone()), first)
        assert work(table.clone()) is not first
    assert torch.equal(first, alone)
    assert work(table) is not first


@pytest.mark.parametrize("work", WORKS)
def test_what_was_written_into_is_worked_out_anew(work: Callable[[Tensor], Tensor]) -> None:
    table = table_of()
    with memo_scope(table):
        truth = work(table).clone()
        work(table).zero_()
        assert torch.equal(work(table), truth)
        table.neg_()
        assert torch.equal(work(table), work(table.clone()))
        assert not torch.equal(work(table), truth)


def test_inference_tensors_do_not_count_and_are_not_shared() -> None:
    with torch.inference_mode():
        table = table_of()
        with memo_scope(table):
            assert torch.equal(log_probabilities(table), log_probabilities(table.clone()))


def test_nothing_is_shared_after_a_failure() -> None:
    table = table_of()
    found: list[Tensor] = []

    def fail() -> None:
        with memo_scope(table):
            found.append(log_probs(table))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert log_probs(table) is not found[0]


def test_in_float64_there_are_float64_probabilities() -> None:
    table = table_of()
    assert log_probs_float64(table).dtype == torch.float64
    assert torch.equal(log_probs_float64(table), table.double().log_softmax(-1))
    assert log_probs(table.half()).dtype == torch.float32


def test_guesses_are_of_members_and_of_both_ensembles() -> None:
    table = table_of()
    assert torch.equal(predictions(table)[:3], table.argmax(-1))
    assert torch.equal(predictions(table)[3], table.softmax(-1).mean(0).argmax(-1))
    assert torch.equal(predictions(table)[4], table.mean(0).argmax(-1))
    assert predictions(table[:1]).shape == (1, 7)


def test_measures_of_one_walk_share_a_table_and_casts_do_not() -> None:
    seen: list[tuple[int, int]] = []
    kept: list[Tensor] = []  # so that no address is used twice

    def asks() -> Metric:
        def measured(table: Tensor, batch: Batch) -> TensorTree:
            kept.append(log_probabilities(table))
            seen.append((len(table), id(kept[-1])))
            return {"sum": kept[-1].sum()}

        return Metric(measured, lambda _: {})

    ids = torch.arange(7)
    heard = [BatchOutputs({logits: table_of()}, Batch(ids, ids % 4, ids), 0, 7)]
    accumulate(SINGLE_PROCESS, heard, {"one": asks(), "other": asks()}, [(0, 1, 2), (0, 2)])
    assert [members for members, _ in seen] == [3, 3, 2, 2]
    assert seen[0] == seen[1]
    assert seen[2] == seen[3] != seen[0]
