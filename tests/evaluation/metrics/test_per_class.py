"""Top-k, balanced accuracy, F1 and the table of classes against scikit-learn, by hand, and against the bootstrap."""

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
from tests.evaluation.metrics.test_every_metric import measured, probabilities, table_of

NAMES = ["accuracy", "top5", "balanced_accuracy", "macro_f1", "per_class"]
SHAPES = [(1, 50, 3), (3, 200, 10), (2, 60, 2), (2, 30, 40)]


def guessing(guesses: list[int], classes: int) -> Tensor:
    """One member's logits that make these guesses."""
    return torch.nn.functional.one_hot(torch.tensor(guesses), classes).double()[None]


@pytest.mark.parametrize(("members", "samples", "classes"), SHAPES)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_top_k_is_what_scikit_learn_says(members: int, samples: int, classes: int, k: int) -> None:
    table, y = table_of(members, samples, classes)
    rows = measured("top5", table, y, k=k)
    for row, p in probabilities(table).items():
        truth = 1.0 if k >= classes else top_k_accuracy_score(
            y, p[:, 1] if classes == 2 else p, k=k, labels=np.arange(classes)
        )  # fmt: skip
        assert rows[row].value == pytest.approx(truth)
        assert rows[row].stderr == pytest.approx(math.sqrt(truth * (1 - truth) / samples))


@pytest.mark.parametrize(("members", "samples", "classes"), SHAPES)
def test_means_over_classes_are_what_scikit_learn_says(members: int, samples: int, classes: int) -> None:
    table, y = table_of(members, samples, classes)
    balanced, macro = measured("balanced_accuracy", table, y), measured("macro_f1", table, y)
    for row, p in probabilities(table).items():
        guess = p.argmax(-1)
        # scikit-learn warns of classes that are guessed and never occur; leaving them out is the same mean.
        occur = np.unique(y)
        truth = recall_score(y, guess, labels=occur, average="macro")
        assert balanced[row].value == pytest.approx(truth)
        assert macro[row].value == pytest.approx(f1_score(y, guess, average="macro", zero_division=0))


def test_balanced_accuracy_has_scikit_learns_name() -> None:
    table, y = table_of(1, 300, 4)
    truth = balanced_accuracy_score(y, table[0].argmax(-1))
    assert measured("balanced_accuracy", table, y)["member 0"].value == pytest.approx(truth)


@pytest.mark.parametrize(("members", "samples", "classes"), SHAPES)
def test_the_table_of_classes_is_what_scikit_learn_says(members: int, samples: int, classes: int) -> None:
    table, y = table_of(members, samples, classes)
    rows = measured("per_class", table, y)
    assert len(rows) == len(probabilities(table)) * classes * 4
    for row, p in probabilities(table).items():
        guess, labels = p.argmax(-1), np.arange(classes)
        truth = precision_recall_fscore_support(y, guess, labels=labels, zero_division=np.nan)
        for number in range(classes):
            for what, numbers in zip(("precision", "recall", "f1", "samples"), truth, strict=True):
                value = rows[row_name(row, f"class {number}", what)]
                assert value.value == pytest.approx(numbers[number], nan_ok=True), (row, number, what)


@pytest.mark.parametrize("positive", [0, 1])
def test_f1_of_two_classes_is_what_scikit_learn_says(positive: int) -> None:
    table, y = table_of(3, 80, 2)
    rows = measured("binary_f1", table, y, positive=positive)
    for row, p in probabilities(table).items():
        assert rows[row].value == pytest.approx(f1_score(y, p.argmax(-1), pos_label=positive))


def test_f1_of_a_class_that_nobody_names_is_no_number() -> None:
    rows = measured("binary_f1", guessing([0, 0, 0], 2), torch.tensor([0, 0, 0]))
    assert math.isnan(rows["member 0"].value)
    assert measured("binary_f1", guessing([0, 0, 0], 2), torch.tensor([0, 0, 0]), positive=0)["member 0"].value == 1


def test_f1_of_two_classes_is_refused_where_there_are_not_two() -> None:
    with pytest.raises(RecipeError, match=r"needs 2 classes, and the data have 3; use macro_f1"):
        measured("binary_f1", *table_of(2, 5, 3))
    with pytest.raises(RecipeError, match="positive = 2"):
        registry.metric.get("binary_f1")(positive=2)
    with pytest.raises(RecipeError, match="k = 0"):
        registry.metric.get("top5")(k=0)


def test_by_hand() -> None:
    #           hits:   0  0  1  1  1  2; class 3 neither occurs nor is guessed, class 2 is guessed once too often
    table, y = guessing([0, 2, 1, 1, 0, 2], 4), torch.tensor([0, 0, 1, 1, 1, 2])
    recalls, f1s = [1 / 2, 2 / 3, 1], [1 / 2, 4 / 5, 2 / 3]
    balanced = measured("balanced_accuracy", table, y)["member 0"]
    assert balanced.value == pytest.approx(sum(recalls) / 3)
    assert balanced.stderr == pytest.approx(math.sqrt(1 / 4 / 2 + 2 / 9 / 3) / 3)
    assert measured("macro_f1", table, y)["member 0"].value == pytest.approx(sum(f1s) / 3)
    rows = measured("per_class", table, y)
    assert rows["member 0 · class 2 · precision"].value == 1 / 2
    assert rows["member 0 · class 1 · recall"].stderr == pytest.approx(math.sqrt(2 / 9 / 3))
    assert rows["member 0 · class 3 · samples"].value == 0
    assert all(math.isnan(rows[f"member 0 · class 3 · {what}"].value) for what in ("recall", "precision", "f1"))


def test_of_equal_classes_the_first_are_the_likeliest() -> None:
    rows = measured("top5", torch.zeros(2, 4, 4), torch.tensor([0, 1, 2, 3]), k=2)
    assert {value.value for value in rows.values()} == {1 / 2}


@given(seed=st.integers(0, 999), members=st.integers(1, 3), classes=st.integers(1, 6))
@settings(deadline=None, max_examples=30)
def test_the_likeliest_one_of_many_ties_is_the_guess(seed: int, members: int, classes: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    table = torch.randint(3, (members, 40, classes), generator=chance).float()
    y = torch.randint(classes, (40,), generator=chance)
    assert measured("top5", table, y, k=1) == measured("accuracy", table, y)
    shares = [measured("top5", table, y, k=k)["member 0"].value for k in range(1, classes + 2)]
    assert shares == sorted(shares)
    assert shares[classes - 1 :] == [1, 1]


def test_what_is_no_number_is_a_guess_of_the_first_class_for_both() -> None:
    table, y = torch.full((1, 4, 3), float("nan")), torch.tensor([0, 1, 2, 0])
    assert measured("top5", table, y, k=1) == measured("accuracy", table, y)


def slow_macro_f1_error(y: np.ndarray, guess: np.ndarray) -> float:
    """The slow twin: every sample's influence, added up class by class."""
    there = sorted(set(y) | set(guess))
    total = 0.0
    for label, g in zip(y, guess, strict=True):
        influence = 0.0
        for c in there:
            f1 = f1_score(y == c, guess == c, zero_division=0)
            both = (y == c).sum() + (guess == c).sum()
            influence += (2 * (label == g == c) - f1 * (int(label == c) + int(g == c))) / both * len(y) / len(there)
        total += influence**2
    return math.sqrt(total) / len(y)


@pytest.mark.parametrize(("samples", "classes"), [(30, 3), (20, 8), (1, 2)])
def test_the_error_of_macro_f1_is_what_influences_add_up_to(samples: int, classes: int) -> None:
    table, y = table_of(1, samples, classes)
    truth = slow_macro_f1_error(y.numpy(), table[0].argmax(-1).numpy())
    assert measured("macro_f1", table, y)["member 0"].stderr == pytest.approx(truth, abs=1e-15)


@pytest.mark.parametrize("name", ["balanced_accuracy", "macro_f1", "binary_f1", "per_class"])
def test_standard_errors_are_what_the_bootstrap_finds(name: str) -> None:
    table, y = table_of(1, 500, 2 if name == "binary_f1" else 4)
    table = table + 2 * torch.nn.functional.one_hot(y, table.shape[-1])
    row = "member 0 · class 2 · f1" if name == "per_class" else "member 0"
    measure = registry.metric.get(name)()
    chance = torch.Generator().manual_seed(1)
    again = []
    for _ in range(300):
        some = torch.randint(500, (500,), generator=chance)
        again.append(measure.compute(measure.update(table[:, some], Batch(some, y[some], some)))[row].value)
    assert measured(name, table, y)[row].stderr == pytest.approx(float(np.std(again)), rel=0.15)


def test_macro_f1_of_very_many_classes_has_a_number_and_no_error() -> None:
    for classes in (MAX_CONFUSION_CLASSES, MAX_CONFUSION_CLASSES + 1):
        table, y = table_of(1, 100, classes)
        table = table + 3 * torch.nn.functional.one_hot(y, classes)
        value = measured("macro_f1", table, y)["member 0"]
        assert value.value == pytest.approx(f1_score(y, table[0].argmax(-1), average="macro", zero_division=0))
        assert (value.stderr is None) == (classes > MAX_CONFUSION_CLASSES)


@given(members=st.integers(1, 3), samples=st.integers(1, 30), classes=st.integers(1, 5), seed=st.integers(0, 99),
       data=st.data())  # fmt: skip
@settings(deadline=None, max_examples=25)
def test_how_samples_are_cut_into_batches_does_not_matter(
    members: int, samples: int, classes: int, seed: int, data: st.DataObject
) -> None:
    table, y = table_of(members, samples, classes, seed=seed)
    cuts = tuple(sorted(data.draw(st.sets(st.integers(1, samples), max_size=4))))
    for name in NAMES:
        whole, parts = measured(name, table, y), measured(name, table, y, cuts=cuts)
        assert str(parts) == str(whole)  # counts are whole numbers; nan is not equal to itself


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_members_does_not_matter(name: str) -> None:
    table, y = table_of(3, 60, 5)
    rows, other = measured(name, table, y), measured(name, table[[2, 0, 1]], y)
    for here, there in {"member 0": "member 1", MEAN_PROBABILITY: MEAN_PROBABILITY, MEAN_LOGIT: MEAN_LOGIT}.items():
        ours = [value for row, value in rows.items() if row.startswith(here)]
        assert ours == [value for row, value in other.items() if row.startswith(there)]


@pytest.mark.parametrize("name", [*NAMES, "binary_f1"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_certain_and_right_is_everything(name: str, dtype: torch.dtype) -> None:
    y = torch.tensor([0, 1, 1, 0])
    table = (1e4 * torch.nn.functional.one_hot(y, 2)).to(dtype).expand(2, 4, 2)
    for row, value in measured(name, table, y).items():
        assert value.value == (2 if row.endswith("samples") else 1)
        assert value.stderr in (None, 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_one_class_and_one_sample_are_enough(name: str) -> None:
    for value in measured(name, torch.randn(2, 1, 1), torch.zeros(1, dtype=torch.int64)).values():
        assert value.value == 1
        assert value.stderr in (None, 0.0)


def test_every_measure_says_how_it_is_to_be_read() -> None:
    found = {name: registry.metric.get(name)() for name in [*NAMES, "binary_f1"]}
    assert {measure.group for measure in found.values()} == {"performance"}
    assert [name for name, measure in found.items() if not measure.percent] == ["per_class"]
    assert [name for name, measure in found.items() if measure.higher_is_better is not True] == ["per_class"]
    assert found["per_class"].higher_is_better is None
    assert all(measure.definition and measure.min_members == 1 for measure in found.values())
    assert "k = 3" in registry.metric.get("top5")(k=3).definition
