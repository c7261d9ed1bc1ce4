"""Areas under risk-coverage curves against slow twins: every order of ties, every sample left out, the bootstrap."""

from __future__ import annotations

import math
from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plateaux.core import registry
from plateaux.core.errors import RecipeError
from plateaux.core.row_names import MEAN_PROBABILITY
from plateaux.core.types import Batch
from tests.evaluation.metrics.test_every_metric import measured, probabilities, table_of

NAMES = ["aurc", "e_aurc", "risk_at_coverage"]


def area(wrong: np.ndarray) -> float:
    """The slow twin: the mean of the risks of the first one, two, three ... in this order."""
    return float(np.mean([wrong[:k].mean() for k in range(1, len(wrong) + 1)]))


def slow(confidence: np.ndarray, wrong: np.ndarray) -> dict[str, float]:
    """The slow twin of all three where no two confidences are equal."""
    ordered = wrong[np.argsort(-confidence)].astype(float)
    kept = math.ceil(round(0.8 * len(wrong), 6))
    return {"aurc": area(ordered), "e_aurc": area(ordered) - area(np.sort(ordered)),
            "risk_at_coverage": float(ordered[:kept].mean())}  # fmt: skip


def of_confidences(confidence: list[float], wrong: list[bool]) -> tuple[Tensor, Tensor]:
    """One member's logits for two classes that guess class 0 with these confidences above a half."""
    p = torch.tensor(confidence, dtype=torch.float64)
    return torch.stack([p.log(), (1 - p).log()], -1)[None], torch.tensor(wrong).long()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("members", "samples", "classes"), [(1, 50, 3), (3, 120, 10), (2, 1, 2), (2, 7, 2)])
def test_every_row_is_what_the_slow_twin_says(name: str, members: int, samples: int, classes: int) -> None:
    table, y = table_of(members, samples, classes)
    rows, truth = measured(name, table, y), probabilities(table)
    assert list(rows) == list(truth)
    for row, p in truth.items():
        expected = slow(p.max(-1), p.argmax(-1) != y.numpy())[name]
        assert rows[row].value == pytest.approx(expected, rel=1e-9, abs=1e-14), row


def test_by_hand() -> None:
    table, y = of_confidences([0.9, 0.6, 0.8, 0.7], [False, True, True, False])
    # risks of the first 1, 2, 3, 4: 0, 1/2, 1/3, 1/2; the best order has 0, 0, 1/3, 1/2
    assert measured("aurc", table, y)["member 0"].value == pytest.approx(4 / 3 / 4)
    assert measured("e_aurc", table, y)["member 0"].value == pytest.approx((4 / 3 - 5 / 6) / 4)
    risk = measured("risk_at_coverage", table, y, coverage=0.7)["member 0"]
    assert (risk.value, risk.stderr) == pytest.approx((1 / 3, math.sqrt(2 / 9 / 3)))


@given(st.lists(st.tuples(st.sampled_from([0.6, 0.7, 1.0]), st.booleans()), min_size=1, max_size=6))
@settings(deadline=None, max_examples=25)
def test_ties_count_as_the_mean_over_all_their_orders(pairs: list[tuple[float, bool]]) -> None:
    confidence, wrong = [c for c, _ in pairs], [w for _, w in pairs]
    table, y = of_confidences(confidence, wrong)
    orders = [o for o in permutations(range(len(pairs))) if all(
        confidence[a] >= confidence[b] for a, b in pairwise(o))]  # fmt: skip
    values = [np.array(wrong, dtype=float)[list(order)] for order in orders]
    kept = math.ceil(round(0.8 * len(pairs), 6))
    best = area(np.sort(np.array(wrong, dtype=float)))
    assert measured("aurc", table, y)["member 0"].value == pytest.approx(np.mean([area(v) for v in values]))
    assert measured("e_aurc", table, y)["member 0"].value == pytest.approx(
        np.mean([area(v) for v in values]) - best, abs=1e-14
    )
    assert measured("risk_at_coverage", table, y)["member 0"].value == pytest.approx(
        np.mean([v[:kept].mean() for v in values])
    )


@given(st.lists(st.tuples(st.sampled_from([0.6, 0.7, 0.8, 0.9, 1.0]), st.booleans()), min_size=2, max_size=8))
@settings(deadline=None, max_examples=30)
def test_the_jackknife_is_each_sample_left_out_in_turn(pairs: list[tuple[float, bool]]) -> None:
    table, y = of_confidences([c for c, _ in pairs], [w for _, w in pairs])
    count = len(pairs)
    for name in ("aurc", "e_aurc"):
        without = [
            measured(name, table[:, others], y[others])["member 0"].value
            for others in (torch.arange(count) != left for left in range(count))
        ]
        truth = math.sqrt((count - 1) * np.var(without))
        assert measured(name, table, y)["member 0"].stderr == pytest.approx(truth, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_standard_errors_are_what_the_bootstrap_finds(name: str) -> None:
    table, y = table_of(1, 500, 4)
    table = table + 2 * torch.nn.functional.one_hot(y, 4)
    measure = registry.metric.get(name)()
    chance = torch.Generator().manual_seed(1)
    again = []
    for _ in range(300):
        some = torch.randint(500, (500,), generator=chance)
        again.append(measure.compute(measure.update(table[:, some], Batch(some, y[some], some)))["member 0"].value)
    # The binomial error takes the samples that are covered for given.
    tolerance = 0.25 if name == "risk_at_coverage" else 0.15
    assert measured(name, table, y)["member 0"].stderr == pytest.approx(float(np.std(again)), rel=tolerance)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("right", [True, False])
def test_certain_guesses_are_all_right_or_all_wrong(name: str, dtype: torch.dtype, members: int, right: bool) -> None:
    table = torch.zeros(members, 9, 3, dtype=dtype)
    table[..., 1] = 1e4
    y = torch.full((9,), 1 if right else 2)
    for value in measured(name, table, y).values():
        assert value.value == pytest.approx(0 if right or name == "e_aurc" else 1, abs=1e-14)
        assert value.stderr == pytest.approx(0, abs=1e-12)


def test_confidence_that_knows_the_errors_has_no_excess() -> None:
    table, y = of_confidences([0.95, 0.9, 0.85, 0.7, 0.6], [False, False, False, True, True])
    assert measured("e_aurc", table, y)["member 0"].value == pytest.approx(0, abs=1e-15)
    assert measured("risk_at_coverage", table, y, coverage=0.6)["member 0"].value == 0


def test_the_risk_of_answering_everything_is_the_error() -> None:
    table, y = table_of(3, 90, 5)
    risks, shares = measured("risk_at_coverage", table, y, coverage=1.0), measured("accuracy", table, y)
    for row, value in risks.items():
        assert value.value == pytest.approx(1 - shares[row].value)
        assert value.stderr == pytest.approx(shares[row].stderr)


def test_useless_confidence_risks_the_error_everywhere() -> None:
    table = torch.tensor([[[1.0, 0.0]]]).expand(1, 8, 2)
    y = torch.tensor([0, 1, 0, 0, 1, 0, 0, 0])
    assert measured("aurc", table, y)["member 0"].value == pytest.approx(1 / 4)


def test_a_coverage_that_is_a_whole_number_of_samples_is_not_rounded_up() -> None:
    confidence = np.linspace(0.99, 0.51, 100).tolist()
    table, y = of_confidences(confidence, [i == 7 for i in range(100)])
    assert 0.07 * 100 > 7
    assert measured("risk_at_coverage", table, y, coverage=0.07)["member 0"].value == 0
    assert measured("risk_at_coverage", table, y, coverage=0.071)["member 0"].value == 1 / 8
    assert measured("risk_at_coverage", table, y, coverage=1e-12)["member 0"].value == 0


@pytest.mark.parametrize("coverage", [0.0, -0.5, 1.01, float("nan")])
def test_a_coverage_that_is_no_share_is_refused(coverage: float) -> None:
    with pytest.raises(RecipeError, match="above 0 and at most 1"):
        registry.metric.get("risk_at_coverage")(coverage=coverage)


@given(members=st.integers(1, 3), samples=st.integers(1, 30), seed=st.integers(0, 99), data=st.data())
@settings(deadline=None, max_examples=20)
def test_how_samples_are_cut_into_batches_does_not_matter(
    members: int, samples: int, seed: int, data: st.DataObject
) -> None:
    table, y = table_of(members, samples, 3, seed=seed)
    cuts = tuple(sorted(data.draw(st.sets(st.integers(1, samples), max_size=4))))
    for name in NAMES:
        assert measured(name, table, y, cuts=cuts) == measured(name, table, y)  # the same rows are kept, bit for bit


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_members_and_samples_does_not_matter(name: str) -> None:
    chance = torch.Generator().manual_seed(0)
    table, y = torch.randint(3, (3, 60, 4), generator=chance).double(), torch.randint(4, (60,), generator=chance)
    order = torch.randperm(60, generator=chance)
    rows, other = measured(name, table, y), measured(name, table[[2, 0, 1]][:, order], y[order])
    for here, there in {"member 0": "member 1", "member 2": "member 0", MEAN_PROBABILITY: MEAN_PROBABILITY}.items():
        assert rows[here].value == pytest.approx(other[there].value, rel=1e-9)
        assert rows[here].stderr == pytest.approx(other[there].stderr, rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_number_stays_none(name: str) -> None:
    table = torch.zeros(1, 4, 3)
    table[0, 2] = float("nan")
    assert math.isnan(measured(name, table, torch.zeros(4, dtype=torch.int64))["member 0"].value)


def test_no_more_than_four_bytes_are_kept_of_a_sample_and_row() -> None:
    table, y = table_of(3, 100, 10)
    for name in NAMES:
        kept = registry.metric.get(name)().update(table, Batch(y, y, y))
        assert sum(tensor.nbytes for tensor in kept.values()) == 4 * 100 * 5


def test_every_measure_says_how_it_is_to_be_read() -> None:
    found = {name: registry.metric.get(name)() for name in NAMES}
    assert {measure.group for measure in found.values()} == {"uncertainty"}
    assert {measure.higher_is_better for measure in found.values()} == {False}
    assert [measure.percent for measure in found.values()] == [False, False, True]
    assert all("ties" in measure.definition and measure.reduce == "cat" for measure in found.values())
    assert "most confident fraction 0.5 of all" in registry.metric.get("risk_at_coverage")(coverage=0.5).definition
