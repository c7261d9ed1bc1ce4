"""Top-1 and top-k accuracy: by hand, and with ties, which go to the first class."""

from __future__ import annotations

import pytest
import torch

from plateaux.core.row_names import MEAN_LOGIT, MEAN_PROBABILITY, RowName
from tests.evaluation.metrics.test_every_metric import evaluate, random_logits

MEMBER = RowName.member(0)


def test_accuracy_counts_correct_predictions_of_members_and_ensembles() -> None:
    logits = torch.tensor([[[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [[0.0, 5.0], [0.0, 1.0], [0.0, 1.0]]])
    rows = evaluate("accuracy", logits, torch.tensor([0, 1, 1]))
    assert rows[MEMBER].value == pytest.approx(2 / 3)
    assert rows[RowName.member(1)].value == pytest.approx(2 / 3)
    assert rows[MEAN_LOGIT].value == pytest.approx(1 / 3)
    assert rows[MEAN_PROBABILITY].value == pytest.approx(1 / 3)
    assert rows[MEMBER].stderr == pytest.approx((2 / 3 * 1 / 3 / 3) ** 0.5)


def test_tied_classes_rank_in_order() -> None:
    """All classes are equally likely: the label 2 has rank 2, so it is among the top three and not the top two."""
    logits, y = torch.zeros(1, 4, 5), torch.tensor([0, 1, 2, 4])
    assert [evaluate("top5", logits, y, k=k)[MEMBER].value for k in (1, 2, 3, 4, 5)] == [0.25, 0.5, 0.75, 0.75, 1.0]
    assert evaluate("accuracy", logits, y)[MEMBER].value == 0.25


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_correct_class_is_among_the_k_most_likely(k: int) -> None:
    logits, y = random_logits(1, 60, 6)
    inside = (logits[0].topk(k).indices == y[:, None]).any(1).double().mean()
    assert evaluate("top5", logits, y, k=k)[MEMBER].value == pytest.approx(float(inside))
