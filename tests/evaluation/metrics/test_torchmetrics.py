"""Comparison with torchmetrics: equal values, and the one known bug of torchmetrics."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plateaux.core.imports import optional_import
from tests.evaluation.metrics.test_every_metric import evaluate, random_logits


@pytest.fixture(scope="module")
def functional() -> Any:
    return optional_import("torchmetrics.functional.classification", extra="dev")


@pytest.mark.parametrize("classes", [2, 5, 12])
def test_accuracies_and_f1_equal_torchmetrics(functional: Any, classes: int) -> None:
    logits, y = random_logits(1, 400, classes)
    p, options = logits[0].softmax(-1), {"num_classes": classes}
    assert evaluate("accuracy", logits, y)["member 0"].value == pytest.approx(
        float(functional.multiclass_accuracy(p, y, average="micro", **options))
    )
    assert evaluate("balanced_accuracy", logits, y)["member 0"].value == pytest.approx(
        float(functional.multiclass_accuracy(p, y, average="macro", **options))
    )
    assert evaluate("macro_f1", logits, y)["member 0"].value == pytest.approx(
        float(functional.multiclass_f1_score(p, y, average="macro", **options))
    )
    if classes > 5:
        assert evaluate("top5", logits, y)["member 0"].value == pytest.approx(
            float(functional.multiclass_accuracy(p, y, average="micro", top_k=5, **options))
        )


def test_ece_equals_torchmetrics_below_a_confidence_of_one(functional: Any) -> None:
    logits, y = random_logits(1, 500, 4)
    expected = float(functional.multiclass_calibration_error(logits[0].softmax(-1), y, num_classes=4, n_bins=15))
    assert evaluate("ece", logits, y)["member 0"].value == pytest.approx(expected, rel=1e-5)


def test_torchmetrics_puts_a_confidence_of_one_into_an_extra_bin(functional: Any) -> None:
    # Samples 0 and 1 have confidence 1, one is incorrect; sample 2 is in the last bin too. One bin: |2/3 - 0.98...|.
    logits = torch.tensor([[[1e4, 0.0], [1e4, 0.0], [3.0, 0.0]]])
    y = torch.tensor([0, 1, 0])
    p = logits[0].softmax(-1)
    truth = abs(2 / 3 - float(p.max(-1).values.mean()))
    assert evaluate("ece", logits, y, bins=10)["member 0"].value == pytest.approx(truth, rel=1e-5)
    torchmetrics_value = float(functional.multiclass_calibration_error(p, y, num_classes=2, n_bins=10))
    assert torchmetrics_value != pytest.approx(truth, rel=1e-3)  # torchmetrics#3510: two bins where there is one


def test_auroc_and_aupr_equal_torchmetrics(functional: Any) -> None:
    from plateaux.core.stats.ranking import aupr, auroc

    generator = torch.Generator().manual_seed(1)
    inside = torch.randn(300, generator=generator, dtype=torch.float64)
    outside = torch.randn(200, generator=generator, dtype=torch.float64) + 0.7
    scores = torch.cat([inside, outside])
    positive = torch.cat([torch.zeros(300), torch.ones(200)]).long()
    squeezed = scores.sigmoid()  # torchmetrics treats values outside [0, 1] as logits
    expected = float(functional.binary_auroc(squeezed, positive))
    assert auroc(inside.numpy(), outside.numpy()).value == pytest.approx(expected, rel=1e-6)
    expected = float(functional.binary_average_precision(squeezed, positive))
    assert aupr(inside.numpy(), outside.numpy()).value == pytest.approx(expected, rel=1e-6)
