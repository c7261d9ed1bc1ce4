"""Measures beside torchmetrics: where it is right they agree, and where it is wrong the test says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plateaux.core.optional import optional_import
from tests.evaluation.metrics.test_every_metric import measured, table_of


@pytest.fixture(scope="module")
def theirs() -> Any:
    return optional_import("torchmetrics.functional.classification", extra="dev")


@pytest.mark.parametrize("classes", [2, 5, 12])
def test_shares_of_right_answers_agree(theirs: Any, classes: int) -> None:
    table, y = table_of(1, 400, classes)
    p, options = table[0].softmax(-1), {"num_classes": classes}
    assert measured("accuracy", table, y)["member 0"].value == pytest.approx(
        float(theirs.multiclass_accuracy(p, y, average="micro", **options))
    )
    assert measured("balanced_accuracy", table, y)["member 0"].value == pytest.approx(
        float(theirs.multiclass_accuracy(p, y, average="macro", **options))
    )
    assert measured("macro_f1", table, y)["member 0"].value == pytest.approx(
        float(theirs.multiclass_f1_score(p, y, average="macro", **options))
    )
    if classes > 5:
        assert measured("top5", table, y)["member 0"].value == pytest.approx(
            float(theirs.multiclass_accuracy(p, y, average="micro", top_k=5, **options))
        )


def test_calibration_agrees_where_nobody_is_quite_sure(theirs: Any) -> None:
    table, y = table_of(1, 500, 4)
    found = float(theirs.multiclass_calibration_error(table[0].softmax(-1), y, num_classes=4, n_bins=15))
    assert measured("ece", table, y)["member 0"].value == pytest.approx(found, rel=1e-5)


def test_a_confidence_of_exactly_one_is_lost_in_a_bin_that_does_not_exist(theirs: Any) -> None:
    # Samples 0 and 1 are sure, one of them wrongly; sample 2 lies in the last bin too. One bin: |2/3 - 0.98...|.
    table = torch.tensor([[[1e4, 0.0], [1e4, 0.0], [3.0, 0.0]]])
    y = torch.tensor([0, 1, 0])
    p = table[0].softmax(-1)
    truth = abs(2 / 3 - float(p.max(-1).values.mean()))
    assert measured("ece", table, y, bins=10)["member 0"].value == pytest.approx(truth, rel=1e-5)
    found = float(theirs.multiclass_calibration_error(p, y, num_classes=2, n_bins=10))
    assert found != pytest.approx(truth, rel=1e-3)  # torchmetrics#3510: two bins where there is one


def test_alarms_are_told_apart_alike(theirs: Any) -> None:
    from plateaux.core.stats.ranking import aupr, auroc

    chance = torch.Generator().manual_seed(1)
    inside = torch.randn(300, generator=chance, dtype=torch.float64)
    outside = torch.randn(200, generator=chance, dtype=torch.float64) + 0.7
    scores = torch.cat([inside, outside])
    positive = torch.cat([torch.zeros(300), torch.ones(200)]).long()
    squeezed = scores.sigmoid()  # torchmetrics takes what is outside [0, 1] for logits
    wanted = float(theirs.binary_auroc(squeezed, positive))
    assert auroc(inside.numpy(), outside.numpy()).value == pytest.approx(wanted, rel=1e-6)
    wanted = float(theirs.binary_average_precision(squeezed, positive))
    assert aupr(inside.numpy(), outside.numpy()).value == pytest.approx(wanted, rel=1e-6)
