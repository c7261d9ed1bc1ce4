"""Whether errors coincide: against slow twins, scikit-learn and scipy, by hand, and errors by the bootstrap."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import diversity as slow
from reference.diversity import ALL_MEMBERS, MEAN, bootstrap, check_cuts, check_order, cut_tables, measured, table_of
from scipy.stats.contingency import odds_ratio
from sklearn.metrics import jaccard_score
from torch import Tensor

from plateaux.core.row_names import MEAN_LOGIT, MEAN_PROBABILITY
from plateaux.evaluation.metrics.error_overlap import best_member, eir, error_overlap, oracle, q_statistic

ALL = {"error_overlap": error_overlap, "q_statistic": q_statistic, "eir": eir, "oracle": oracle}
Cut = tuple[Tensor, Tensor, tuple[int, ...]]


def right_or_wrong(*members: str) -> tuple[Tensor, Tensor]:
    """Logits of two classes from lines of 1 (right) and 0 (wrong); the right class is the second."""
    right = torch.tensor([[int(sign) for sign in line] for line in members])
    return torch.stack([1 - right, right], -1).double(), torch.ones(right.shape[1], dtype=torch.int64)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("members", "samples", "classes"), [(2, 50, 3), (4, 60, 10), (3, 1, 2), (2, 30, 1)])
def test_every_row_is_what_the_slow_twin_says(name: str, members: int, samples: int, classes: int) -> None:
    table, y = table_of(members, samples, classes)
    rows, truth = measured(ALL[name](), table, y, [samples // 3]), getattr(slow, name)(table.numpy(), y.numpy())
    assert list(rows) == list(truth)
    for row, number in truth.items():
        assert rows[row].value == pytest.approx(number, rel=1e-10, abs=1e-14, nan_ok=True), row


def test_overlap_is_scikit_learns_jaccard_score() -> None:
    table, y = table_of(2, 90, 4)
    a, b = (table.argmax(-1) != y).numpy()
    value = measured(error_overlap(), table, y)["members 0 and 1"]
    assert value.value == pytest.approx(jaccard_score(a, b))
    # Of the samples in the union, a share: the delta method gives its binomial error.
    assert value.stderr == pytest.approx(math.sqrt(value.value * (1 - value.value) / (a | b).sum()))


def test_q_is_the_odds_ratio_on_another_scale() -> None:
    table, y = table_of(2, 120, 4)
    n11, n10, n01, n00 = slow.q_counts(table.numpy(), y.numpy(), 0, 1)
    odds = odds_ratio([[n11, n10], [n01, n00]], kind="sample").statistic
    value = measured(q_statistic(), table, y)["members 0 and 1"]
    assert value.value == pytest.approx((odds - 1) / (odds + 1))
    spread = math.sqrt(1 / n11 + 1 / n10 + 1 / n01 + 1 / n00)
    assert value.stderr == pytest.approx(0.5 * (1 - value.value**2) * spread)


def test_two_members_by_hand() -> None:
    table, y = right_or_wrong("1111100011", "1110110001")
    # both right 5, only the first 2, only the second 1, none 2
    assert measured(error_overlap(), table, y)["members 0 and 1"].value == pytest.approx(2 / 5)
    assert measured(q_statistic(), table, y)["members 0 and 1"].value == pytest.approx((10 - 2) / (10 + 2))
    assert measured(oracle(), table, y)[ALL_MEMBERS].value == pytest.approx(0.8)
    assert measured(oracle(), table, y)[ALL_MEMBERS].stderr == pytest.approx(math.sqrt(0.8 * 0.2 / 10))


def test_identical_members_err_together() -> None:
    table, y = table_of(1, 100, 4)
    same = table.expand(3, -1, -1)
    for value in measured(error_overlap(), same, y).values():
        assert value.value == 1
        assert value.stderr == pytest.approx(0, abs=1e-7)
    assert {value.value for value in measured(q_statistic(), same, y).values()} == {1.0}
    assert {value.stderr for value in measured(q_statistic(), same, y).values()} == {None}
    assert {value.value for value in measured(eir(), same, y).values()} == {0.0}
    assert measured(oracle(), same, y)[ALL_MEMBERS].value == float((table[0].argmax(-1) == y).double().mean())


def test_independent_errors_have_a_q_of_zero() -> None:
    table, y = right_or_wrong("11110000" * 3, "11001100" * 3)
    assert measured(q_statistic(), table, y)["members 0 and 1"].value == 0
    assert measured(error_overlap(), table, y)["members 0 and 1"].value == pytest.approx(1 / 3)


def test_errors_that_never_meet_have_a_q_of_minus_one() -> None:
    table, y = right_or_wrong("110", "011")
    assert measured(q_statistic(), table, y)["members 0 and 1"].value == -1
    assert measured(error_overlap(), table, y)["members 0 and 1"].value == 0


def test_a_pair_that_never_errs_is_left_out_of_the_mean() -> None:
    table, y = right_or_wrong("1111", "1111", "1100", "0110")
    overlap, q = measured(error_overlap(), table, y), measured(q_statistic(), table, y)
    assert math.isnan(overlap["members 0 and 1"].value)
    assert overlap["members 0 and 1"].stderr is None
    assert overlap[MEAN].value == pytest.approx((0 + 0 + 0 + 0 + 1 / 3) / 5)
    assert overlap[MEAN].stderr is not None
    assert [name for name, value in q.items() if not math.isnan(value.value)] == ["members 2 and 3", MEAN]
    table, y = right_or_wrong("1111", "1111")
    for make in (error_overlap, q_statistic):
        assert all(math.isnan(value.value) for value in measured(make(), table, y).values())


def test_a_pair_without_an_error_takes_it_from_the_mean() -> None:
    table, y = right_or_wrong("11110000", "11001100", "11110001")
    rows = measured(q_statistic(), table, y)
    assert rows["members 0 and 1"].stderr is not None
    assert rows["members 0 and 2"].stderr is None
    assert rows[MEAN].stderr is None


def test_an_ensemble_that_is_always_right_improves_by_all() -> None:
    # Three members of which one errs at a time: two outvote it.
    table, y = right_or_wrong("0110", "1010", "1100")
    y = torch.tensor([1, 1, 1, 0])
    table[:, 3] = torch.tensor([1.0, 0.0])
    rows = measured(eir(), table, y)
    assert list(rows) == [MEAN_PROBABILITY, MEAN_LOGIT]
    assert {value.value for value in rows.values()} == {1.0}
    y = torch.tensor([0, 0, 0, 0])  # and of three that are mostly wrong, the ensemble is wrong more often
    assert measured(eir(), table, y)[MEAN_LOGIT].value == pytest.approx((1 / 2 - 3 / 4) / (1 / 2))


def test_there_is_no_improvement_rate_without_errors() -> None:
    table, y = right_or_wrong("11", "11")
    assert all(math.isnan(value.value) for value in measured(eir(), table, y).values())


@pytest.mark.parametrize(
    ("name", "row"),
    [("error_overlap", "members 0 and 1"), ("error_overlap", MEAN), ("q_statistic", "members 0 and 2"),
     ("q_statistic", MEAN), ("eir", MEAN_PROBABILITY), ("oracle", ALL_MEMBERS)],
)  # fmt: skip
def test_standard_errors_are_what_the_bootstrap_finds(name: str, row: str) -> None:
    table, y = table_of(4, 500, 4, alike=0.4)
    measure = ALL[name]()
    assert measured(measure, table, y)[row].stderr == pytest.approx(bootstrap(measure, table, y, row), rel=0.12)


@pytest.mark.parametrize("name", ["error_overlap", "q_statistic"])
def test_the_mean_of_one_pair_is_that_pair_and_so_is_its_error(name: str) -> None:
    table, y = right_or_wrong("1" * 20 + "0" * 9, "1" * 12 + "0" * 11 + "1" * 2 + "0" * 4)  # 12, 8, 2, 7 samples
    rows = measured(ALL[name](), table, y)
    assert rows[MEAN].value == rows["members 0 and 1"].value
    assert rows[MEAN].stderr == pytest.approx(rows["members 0 and 1"].stderr, rel=1e-9)


def test_the_error_of_the_mean_knows_that_pairs_go_together() -> None:
    table, y = table_of(4, 500, 4)
    rows = measured(error_overlap(), table, y)
    errors = [value.stderr or 0.0 for name, value in rows.items() if name != MEAN]
    assert math.sqrt(sum(e * e for e in errors)) / 6 < (rows[MEAN].stderr or 0.0) < sum(errors) / 6


def test_probabilities_of_exactly_zero_and_one_and_float16() -> None:
    table, y = right_or_wrong("1111100011", "1110110001")
    for name, make in ALL.items():
        truth = getattr(slow, name)(table.numpy(), y.numpy())
        for row, value in measured(make(), (table * 1e4).half(), y).items():
            assert value.value == pytest.approx(truth[row]), (name, row)


@given(cut_tables(), st.permutations(range(4)))
@settings(deadline=None, max_examples=30)
def test_neither_batches_nor_the_order_of_members_matter(given: Cut, order: list[int]) -> None:
    table, y, cuts = given
    untied = table + torch.randn(table.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for name, make in ALL.items():
        # Where members' ties make classes of the ensemble tie, rounding chooses, and it knows the order of members.
        logits = untied if name == "eir" else table
        check_cuts(make(), logits, y, cuts)
        check_order(make(), logits, y, [i for i in order if i < len(table)])


def test_what_the_measures_say_of_themselves() -> None:
    better = {"error_overlap": None, "q_statistic": None, "eir": True, "oracle": True}
    assert {name: make().higher_is_better for name, make in ALL.items()} == better
    assert oracle().percent
    assert all(make().group == "diversity" and make().min_members == 2 and make().definition for make in ALL.values())


def test_the_best_member_is_the_most_accurate_one() -> None:
    table, y = table_of(4, 90, 5)
    best = float((table.argmax(-1) == y).double().mean(-1).max())
    assert measured(best_member(), table, y)[ALL_MEMBERS].value == best
