"""Top-k, balanced accuracy, F1 and values of each class against scikit-learn, by hand, and the bootstrap."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import (
    balanced_accuracy_score,
    f1_score,
    precision_recall_fscore_support,
    recall_score,
    top_k_accuracy_score,
)
from torch import Tensor

from plateaux.core import registry
from plateaux.core.errors import RecipeError
from plateaux.core.row_names import MEAN_LOGIT, MEAN_PROBABILITY, row_name
from plateaux.core.types import Batch
from plateaux.evaluation.metrics.per_class import MAX_CONFUSION_CLASSES
from tests.evaluation.metrics.test_every_metric import evaluate, probabilities, random_logits

NAMES = ["accuracy", "top5", "balanced_accuracy", "macro_f1", "per_class"]
SHAPES = [(1, 50, 3), (3, 200, 10), (2, 60, 2), (2, 30, 40)]


def logits_from_predictions(preds: list[int], classes: int) -> Tensor:
    """Logits of one member with these predictions."""
    return torch.nn.functional.one_hot(torch.tensor(preds), classes).double()[None]


@pytest.mark.parametrize(("members", "samples", "classes"), SHAPES)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_top_k_accuracy_equals_scikit_learn(members: int, samples: int, classes: int, k: int) -> None:
    logits, y = random_logits(members, samples, classes)
    rows = evaluate("top5", logits, y, k=k)
    for row, p in probabilities(logits).items():
        truth = 1.0 if k >= classes else top_k_accuracy_score(
            y, p[:, 1] if classes == 2 else p, k=k, labels=np.arange(classes)
        )  # fmt: skip
        assert rows[row].value == pytest.approx(truth)
        assert rows[row].stderr == pytest.approx(math.sqrt(truth * (1 - truth) / samples))


@pytest.mark.parametrize(("members", "samples", "classes"), SHAPES)
def test_means_over_classes_equal_scikit_learn(members: int, samples: int, classes: int) -> None:
    logits, y = random_logits(members, samples, classes)
    balanced, macro = evaluate("balanced_accuracy", logits, y), evaluate("macro_f1", logits, y)
    for row, p in probabilities(logits).items():
        pred = p.argmax(-1)
        # scikit-learn warns about classes that are predicted and never occur; the mean without them is the same.
        occur = np.unique(y)
        truth = recall_score(y, pred, labels=occur, average="macro")
        assert balanced[row].value == pytest.approx(truth)
        assert macro[row].value == pytest.approx(f1_score(y, pred, average="macro", zero_division=0))


def test_balanced_accuracy_equals_scikit_learn() -> None:
    logits, y = random_logits(1, 300, 4)
    truth = balanced_accuracy_score(y, logits[0].argmax(-1))
    assert evaluate("balanced_accuracy", logits, y)["member 0"].value == pytest.approx(truth)


@pytest.mark.parametrize(("members", "samples", "classes"), SHAPES)
def test_per_class_values_equal_scikit_learn(members: int, samples: int, classes: int) -> None:
    logits, y = random_logits(members, samples, classes)
    rows = evaluate("per_class", logits, y)
    assert len(rows) == len(probabilities(logits)) * classes * 4
    for row, p in probabilities(logits).items():
        pred, labels = p.argmax(-1), np.arange(classes)
        truth = precision_recall_fscore_support(y, pred, labels=labels, zero_division=np.nan)
        for number in range(classes):
            for part, numbers in zip(("precision", "recall", "f1", "samples"), truth, strict=True):
                value = rows[row_name(row, f"class {number}", part)]
                assert value.value == pytest.approx(numbers[number], nan_ok=True), (row, number, part)


@pytest.mark.parametrize("positive", [0, 1])
def test_binary_f1_equals_scikit_learn(positive: int) -> None:
    logits, y = random_logits(3, 80, 2)
    rows = evaluate("binary_f1", logits, y, positive=positive)
    for row, p in probabilities(logits).items():
        assert rows[row].value == pytest.approx(f1_score(y, p.argmax(-1), pos_label=positive))


def test_f1_of_an_absent_class_is_nan() -> None:
    rows = evaluate("binary_f1", logits_from_predictions([0, 0, 0], 2), torch.tensor([0, 0, 0]))
    assert math.isnan(rows["member 0"].value)
    assert (
        evaluate("binary_f1", logits_from_predictions([0, 0, 0], 2), torch.tensor([0, 0, 0]), positive=0)[
            "member 0"
        ].value
        == 1
    )


def test_binary_f1_is_refused_for_other_numbers_of_classes() -> None:
    with pytest.raises(RecipeError, match=r"needs 2 classes, and the data have 3; use macro_f1"):
        evaluate("binary_f1", *random_logits(2, 5, 3))
    with pytest.raises(RecipeError, match="positive = 2"):
        registry.metric.get("binary_f1")(positive=2)
    with pytest.raises(RecipeError, match="k = 0"):
        registry.metric.get("top5")(k=0)


def test_metrics_of_a_small_example_equal_hand_computed_values() -> None:
    #           hits:   0  0  1  1  1  2; class 3 neither occurs nor is predicted, class 2 has one false positive
    logits, y = logits_from_predictions([0, 2, 1, 1, 0, 2], 4), torch.tensor([0, 0, 1, 1, 1, 2])
    recalls, f1s = [1 / 2, 2 / 3, 1], [1 / 2, 4 / 5, 2 / 3]
    balanced = evaluate("balanced_accuracy", logits, y)["member 0"]
    assert balanced.value == pytest.approx(sum(recalls) / 3)
    assert balanced.stderr == pytest.approx(math.sqrt(1 / 4 / 2 + 2 / 9 / 3) / 3)
    assert evaluate("macro_f1", logits, y)["member 0"].value == pytest.approx(sum(f1s) / 3)
    rows = evaluate("per_class", logits, y)
    assert rows["member 0 · class 2 · precision"].value == 1 / 2
    assert rows["member 0 · class 1 · recall"].stderr == pytest.approx(math.sqrt(2 / 9 / 3))
    assert rows["member 0 · class 3 · samples"].value == 0
    assert all(math.isnan(rows[f"member 0 · class 3 · {part}"].value) for part in ("recall", "precision", "f1"))


def test_ties_in_top_k_go_to_the_first_classes() -> None:
    rows = evaluate("top5", torch.zeros(2, 4, 4), torch.tensor([0, 1, 2, 3]), k=2)
    assert {value.value for value in rows.values()} == {1 / 2}


@given(seed=st.integers(0, 999), members=st.integers(1, 3), classes=st.integers(1, 6))
@settings(max_examples=30)
def test_top_1_equals_accuracy_with_many_ties(seed: int, members: int, classes: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(3, (members, 40, classes), generator=generator).float()
    y = torch.randint(classes, (40,), generator=generator)
    assert evaluate("top5", logits, y, k=1) == evaluate("accuracy", logits, y)
    accuracies = [evaluate("top5", logits, y, k=k)["member 0"].value for k in range(1, classes + 2)]
    assert accuracies == sorted(accuracies)
    assert accuracies[classes - 1 :] == [1, 1]


def test_nan_predicts_the_first_class_in_top_k_and_accuracy() -> None:
    logits, y = torch.full((1, 4, 3), float("nan")), torch.tensor([0, 1, 2, 0])
    assert evaluate("top5", logits, y, k=1) == evaluate("accuracy", logits, y)


def reference_macro_f1_stderr(y: np.ndarray, pred: np.ndarray) -> float:
    """Reference: the influence of every sample, summed over classes."""
    classes = sorted(set(y) | set(pred))
    total = 0.0
    for label, g in zip(y, pred, strict=True):
        influence = 0.0
        for c in classes:
            f1 = f1_score(y == c, pred == c, zero_division=0)
            both = (y == c).sum() + (pred == c).sum()
            influence += (2 * (label == g == c) - f1 * (int(label == c) + int(g == c))) / both * len(y) / len(classes)
        total += influence**2
    return math.sqrt(total) / len(y)


@pytest.mark.parametrize(("samples", "classes"), [(30, 3), (20, 8), (1, 2)])
def test_the_standard_error_of_macro_f1_equals_the_reference(samples: int, classes: int) -> None:
    logits, y = random_logits(1, samples, classes)
    truth = reference_macro_f1_stderr(y.numpy(), logits[0].argmax(-1).numpy())
    assert evaluate("macro_f1", logits, y)["member 0"].stderr == pytest.approx(truth, abs=1e-15)


@pytest.mark.parametrize("name", ["balanced_accuracy", "macro_f1", "binary_f1", "per_class"])
def test_standard_errors_agree_with_the_bootstrap(name: str) -> None:
    logits, y = random_logits(1, 500, 2 if name == "binary_f1" else 4)
    logits = logits + 2 * torch.nn.functional.one_hot(y, logits.shape[-1])
    row = "member 0 · class 2 · f1" if name == "per_class" else "member 0"
    metric = registry.metric.get(name)()
    generator = torch.Generator().manual_seed(1)
    resampled = []
    for _ in range(300):
        ids = torch.randint(500, (500,), generator=generator)
        resampled.append(metric.compute(metric.update(logits[:, ids], Batch(ids, y[ids], ids)))[row].value)
    assert evaluate(name, logits, y)[row].stderr == pytest.approx(float(np.std(resampled)), rel=0.15)


def test_macro_f1_of_many_classes_has_no_standard_error() -> None:
    for classes in (MAX_CONFUSION_CLASSES, MAX_CONFUSION_CLASSES + 1):
        logits, y = random_logits(1, 100, classes)
        logits = logits + 3 * torch.nn.functional.one_hot(y, classes)
        value = evaluate("macro_f1", logits, y)["member 0"]
        assert value.value == pytest.approx(f1_score(y, logits[0].argmax(-1), average="macro", zero_division=0))
        assert (value.stderr is None) == (classes > MAX_CONFUSION_CLASSES)


@given(members=st.integers(1, 3), samples=st.integers(1, 30), classes=st.integers(1, 5), seed=st.integers(0, 99),
       data=st.data())  # fmt: skip
@settings(max_examples=25)
def test_the_batch_size_does_not_matter(
    members: int, samples: int, classes: int, seed: int, data: st.DataObject
) -> None:
    logits, y = random_logits(members, samples, classes, seed=seed)
    cuts = tuple(sorted(data.draw(st.sets(st.integers(1, samples), max_size=4))))
    for name in NAMES:
        full, parts = evaluate(name, logits, y), evaluate(name, logits, y, cuts=cuts)
        assert str(parts) == str(full)  # counts are integers; as text because NaN is not equal to itself


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_members_does_not_matter(name: str) -> None:
    logits, y = random_logits(3, 60, 5)
    rows, other = evaluate(name, logits, y), evaluate(name, logits[[2, 0, 1]], y)
    for original, permuted in {
        "member 0": "member 1",
        MEAN_PROBABILITY: MEAN_PROBABILITY,
        MEAN_LOGIT: MEAN_LOGIT,
    }.items():
        values = [value for row, value in rows.items() if row.startswith(original)]
        assert values == [value for row, value in other.items() if row.startswith(permuted)]


@pytest.mark.parametrize("name", [*NAMES, "binary_f1"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_certain_and_correct_predictions_score_one(name: str, dtype: torch.dtype) -> None:
    y = torch.tensor([0, 1, 1, 0])
    logits = (1e4 * torch.nn.functional.one_hot(y, 2)).to(dtype).expand(2, 4, 2)
    for row, value in evaluate(name, logits, y).items():
        assert value.value == (2 if row.endswith("samples") else 1)
        assert value.stderr in (None, 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_one_class_and_one_sample_are_enough(name: str) -> None:
    for value in evaluate(name, torch.randn(2, 1, 1), torch.zeros(1, dtype=torch.int64)).values():
        assert value.value == 1
        assert value.stderr in (None, 0.0)
