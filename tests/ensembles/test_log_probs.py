"""Memoized log-probabilities: computed once inside a scope, and never returned for other or modified logits."""

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


def random_logits(members: int = 3) -> Tensor:
    return torch.randn(members, 7, 4, generator=torch.Generator().manual_seed(members))


@pytest.mark.parametrize("work", WORKS)
def test_results_are_computed_once_inside_a_memo_scope(work: Callable[[Tensor], Tensor]) -> None:
    logits = random_logits()
    alone = work(logits)
    assert work(logits) is not alone
    with memo_scope(logits):
        first = work(logits)
        assert work(logits) is first
        with memo_scope(random_logits(2)):
            assert work(logits) is not first
        assert work(logits) is first
        assert torch.equal(work(logits.clone()), first)
        assert work(logits.clone()) is not first
    assert torch.equal(first, alone)
    assert work(logits) is not first


@pytest.mark.parametrize("work", WORKS)
def test_in_place_changes_invalidate_the_memo(work: Callable[[Tensor], Tensor]) -> None:
    logits = random_logits()
    with memo_scope(logits):
        truth = work(logits).clone()
        work(logits).zero_()
        assert torch.equal(work(logits), truth)
        logits.neg_()
        assert torch.equal(work(logits), work(logits.clone()))
        assert not torch.equal(work(logits), truth)


def test_inference_tensors_are_not_memoized() -> None:
    with torch.inference_mode():
        logits = random_logits()
        with memo_scope(logits):
            assert torch.equal(log_probabilities(logits), log_probabilities(logits.clone()))


def test_the_memo_is_dropped_after_an_exception() -> None:
    logits = random_logits()
    found: list[Tensor] = []

    def fail() -> None:
        with memo_scope(logits):
            found.append(log_probs(logits))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert log_probs(logits) is not found[0]


def test_float64_logits_give_float64_probabilities() -> None:
    logits = random_logits()
    assert log_probs_float64(logits).dtype == torch.float64
    assert torch.equal(log_probs_float64(logits), logits.double().log_softmax(-1))
    assert log_probs(logits.half()).dtype == torch.float32


def test_predictions_cover_members_and_both_ensembles() -> None:
    logits = random_logits()
    assert torch.equal(predictions(logits)[:3], logits.argmax(-1))
    assert torch.equal(predictions(logits)[3], logits.softmax(-1).mean(0).argmax(-1))
    assert torch.equal(predictions(logits)[4], logits.mean(0).argmax(-1))
    assert predictions(logits[:1]).shape == (1, 7)


def test_metrics_of_one_update_share_the_memo_and_subsets_do_not() -> None:
    calls: list[tuple[int, int]] = []
    results: list[Tensor] = []  # so that no address is used twice

    def build_metric() -> Metric:
        def update(logits: Tensor, batch: Batch) -> TensorTree:
            results.append(log_probabilities(logits))
            calls.append((len(logits), id(results[-1])))
            return {"sum": results[-1].sum()}

        return Metric(update, lambda _: {})

    ids = torch.arange(7)
    outputs = [BatchOutputs({logits: random_logits()}, Batch(ids, ids % 4, ids), 0, 7)]
    accumulate(SINGLE_PROCESS, outputs, {"one": build_metric(), "other": build_metric()}, [(0, 1, 2), (0, 2)])
    assert [members for members, _ in calls] == [3, 3, 2, 2]
    assert calls[0] == calls[1]
    assert calls[2] == calls[3] != calls[0]
