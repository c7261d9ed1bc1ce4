"""Accuracy, likelihood, Brier score and calibration against scikit-learn and slow twins, edge tables included."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss
from torch import Tensor

from plateaux.core import registry
from plateaux.core.member import MemberModule
from plateaux.core.metric import Metric
from plateaux.core.row_names import MEAN_LOGIT, MEAN_PROBABILITY, row_names
from plateaux.core.types import Batch, Estimate
from plateaux.distributed.executors.local import SINGLE_PROCESS
from plateaux.ensembles.log_probs import log_probabilities
from plateaux.evaluation.metric_loop import evaluate_metrics

NAMES = ["accuracy", "nll", "brier", "ece"]
Rows = Mapping[str, Estimate]


def measured(name: str, table: Tensor, y: Tensor, *, cuts: tuple[int, ...] = (), **options: int) -> Rows:
    """Return what the measure says of a table `[M, N, C]`, taken in batches that end at `cuts`."""
    measure: Metric = registry.metric.get(name)(**options)
    ids = torch.arange(len(y))
    edges = [0, *cuts, len(y)]
    parts = [ids[a:b] for a, b in pairwise(edges) if b > a]
    batches = [Batch(part, y[part], part) for part in parts]
    views = [MemberModule(lambda x, row=row: row[x]) for row in table]
    return evaluate_metrics(SINGLE_PROCESS, views, batches, {name: measure})[name]


def near(error: float | None, *, rel: float, abs: float) -> Any:
    """What an error is to be close to; of one sample there is none."""
    return error if error is None else pytest.approx(error, rel=rel, abs=abs)


def table_of(members: int, samples: int, classes: int, *, seed: int = 0, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    table = scale * torch.randn(members, samples, classes, generator=chance, dtype=torch.float64)
    return table, torch.randint(classes, (samples,), generator=chance)


def probabilities(table: Tensor) -> dict[str, np.ndarray]:
    """The slow twin of a table's rows: probabilities `[N, C]` by name."""
    members = [np.exp(row - row.max(-1, keepdims=True)) for row in table.double().numpy()]
    members = [row / row.sum(-1, keepdims=True) for row in members]
    rows = {f"member {i}": row for i, row in enumerate(members)}
    if len(members) > 1:
        mean = table.double().numpy().mean(0)
        pooled = np.exp(mean - mean.max(-1, keepdims=True))
        rows[MEAN_PROBABILITY] = np.mean(members, 0)
        rows[MEAN_LOGIT] = pooled / pooled.sum(-1, keepdims=True)
    return rows


def twin(name: str, p: np.ndarray, y: np.ndarray, bins: int = 15) -> float:
    """The slow twin of a measure on one row."""
    if name == "accuracy":
        return float(accuracy_score(y, p.argmax(-1)))
    if name == "nll":
        return float(log_loss(y, p, labels=np.arange(p.shape[1])))
    if name == "brier":
        return float(np.mean([((np.eye(p.shape[1])[label] - row) ** 2).sum() for row, label in zip(p, y, strict=True)]))
    total = 0.0
    for i in range(bins):
        low, high = i / bins, (i + 1) / bins
        conf = p.max(-1)
        inside = (conf >= low) & ((conf < high) | (i == bins - 1))
        if inside.any():
            total += inside.mean() * abs((p.argmax(-1) == y)[inside].mean() - conf[inside].mean())
    return total


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("members", "samples", "classes"), [(1, 50, 3), (3, 200, 10), (2, 1, 2), (5, 40, 2), (4, 30, 100)]
)
def test_every_row_is_what_scikit_learn_or_the_slow_twin_says(
    name: str, members: int, samples: int, classes: int
) -> None:
    table, y = table_of(members, samples, classes)
    rows, truth = measured(name, table, y), probabilities(table)
    assert list(rows) == list(truth)
    for row, p in truth.items():
        assert rows[row].value == pytest.approx(twin(name, p, y.numpy()), rel=1e-9, abs=1e-12), row


def test_brier_of_two_classes_is_twice_scikit_learns() -> None:
    from sklearn.metrics import brier_score_loss

    table, y = table_of(1, 80, 2)
    p = probabilities(table)["member 0"]
    assert measured("brier", table, y)["member 0"].value == pytest.approx(2 * brier_score_loss(y, p[:, 1]))


def test_one_member_is_no_ensemble() -> None:
    table, y = table_of(1, 5, 3)
    assert list(measured("nll", table, y)) == ["member 0"]
    assert row_names(1) == ["member 0"]
    assert row_names(4) == ["member 0", "member 1", "ensemble (mean probability)", "ensemble (mean logit)"]


def test_mean_probability_and_mean_logit_are_two_things() -> None:
    # One member is sure, the other is not: the mean of logits follows the sure one.
    table = torch.tensor([[[6.0, 0.0]], [[0.0, 2.0]]])
    p = log_probabilities(table).exp()[:, 0, 0].tolist()
    sure, unsure = 1 / (1 + math.exp(-6)), 1 / (1 + math.exp(2))
    assert p == pytest.approx([sure, unsure, (sure + unsure) / 2, 1 / (1 + math.exp(-2))], rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_one_class_is_always_right(name: str) -> None:
    table, y = torch.randn(3, 7, 1), torch.zeros(7, dtype=torch.int64)
    for value in measured(name, table, y).values():
        assert value.value == pytest.approx(1.0 if name == "accuracy" else 0.0, abs=1e-7)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("right", [True, False])
def test_probabilities_of_exactly_zero_and_one(name: str, right: bool) -> None:
    table = torch.zeros(2, 4, 3)
    table[..., 0] = 1e4
    y = torch.zeros(4, dtype=torch.int64) if right else torch.ones(4, dtype=torch.int64)
    assert log_probabilities(table).exp().unique().tolist() == [0.0, 1.0]
    wanted = {"accuracy": (1, 0), "nll": (0, 1e4), "brier": (0, 2), "ece": (0, 1)}[name][0 if right else 1]
    for value in measured(name, table, y).values():
        assert value.value == wanted
        assert value.stderr in (None, 0.0)


def test_a_confidence_of_exactly_one_has_a_bin() -> None:
    table = torch.tensor([[[1e4, 0.0], [1e4, 0.0], [0.2, 0.0]]])
    settled = registry.metric.get("ece")(bins=10).update(
        table, Batch(torch.zeros(3), torch.tensor([0, 1, 0]), torch.arange(3))
    )
    count, confidence, right = settled["sums"][0].unbind(-1)
    assert count.tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 2]
    assert (confidence[9], right[9]) == (2, 1)


def test_of_equal_classes_the_first_is_the_guess() -> None:
    table = torch.zeros(2, 3, 4)
    rows = measured("accuracy", table, torch.tensor([0, 1, 3]))
    assert {value.value for value in rows.values()} == {1 / 3}
    assert measured("ece", table, torch.tensor([0, 1, 3]))["member 0"].value == pytest.approx(abs(1 / 3 - 1 / 4))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_logits_of_few_digits_are_measured_in_many(name: str, dtype: torch.dtype) -> None:
    table, y = table_of(3, 300, 10, scale=4)
    table = table.to(dtype)
    truth = probabilities(table.double())
    for row, value in measured(name, table, y).items():
        assert value.value == pytest.approx(twin(name, truth[row], y.numpy()), abs=2e-6), row


@given(
    members=st.integers(1, 4),
    samples=st.integers(1, 30),
    classes=st.integers(1, 5),
    seed=st.integers(0, 99),
    data=st.data(),
)
@settings(deadline=None, max_examples=40)
def test_how_samples_are_cut_into_batches_does_not_matter(
    members: int, samples: int, classes: int, seed: int, data: st.DataObject
) -> None:
    table, y = table_of(members, samples, classes, seed=seed)
    cuts = tuple(sorted(data.draw(st.sets(st.integers(1, samples), max_size=4))))
    for name in NAMES:
        whole, parts = measured(name, table, y), measured(name, table, y, cuts=cuts)
        for row in whole:
            assert parts[row].value == pytest.approx(whole[row].value, rel=1e-12, abs=1e-14)
            assert parts[row].stderr == near(whole[row].stderr, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_members_and_samples_does_not_matter(name: str) -> None:
    table, y = table_of(4, 60, 5)
    shuffled = torch.randperm(60)
    rows, other = measured(name, table, y), measured(name, table[[2, 0, 3, 1]][:, shuffled], y[shuffled])
    for here, there in {"member 0": "member 1", "member 2": "member 0", MEAN_PROBABILITY: MEAN_PROBABILITY,
                        MEAN_LOGIT: MEAN_LOGIT}.items():  # fmt: skip
        assert rows[here].value == pytest.approx(other[there].value, rel=1e-9)


@pytest.mark.parametrize("name", ["accuracy", "nll", "brier"])
def test_standard_errors_are_what_the_bootstrap_finds(name: str) -> None:
    table, y = table_of(2, 400, 4)
    value = measured(name, table, y)["member 1"]
    chance, p = np.random.default_rng(0), probabilities(table)["member 1"]
    again = [twin(name, p[i], y.numpy()[i]) for i in chance.integers(0, 400, (400, 400))]
    assert value.stderr == pytest.approx(float(np.std(again)), rel=0.1)


def test_standard_errors_by_formula() -> None:
    table, y = table_of(1, 90, 3)
    p = probabilities(table)["member 0"]
    losses = -np.log(p[np.arange(90), y.numpy()])
    assert measured("nll", table, y)["member 0"].stderr == pytest.approx(losses.std(ddof=1) / math.sqrt(90), rel=1e-9)
    share = measured("accuracy", table, y)["member 0"]
    assert share.stderr == pytest.approx(math.sqrt(share.value * (1 - share.value) / 90))
    assert measured("ece", table, y, bins=1)["member 0"].stderr == pytest.approx(
        np.std((p.argmax(-1) == y.numpy()) - p.max(-1), ddof=1) / math.sqrt(90), rel=1e-9
    )


@pytest.mark.parametrize("name", NAMES)
def test_one_sample_has_no_spread(name: str) -> None:
    table, y = table_of(3, 1, 4)
    for value in measured(name, table, y).values():
        assert math.isfinite(value.value)
        assert value.stderr in (None, 0.0)


@pytest.mark.parametrize("bins", [1, 5, 100])
def test_the_number_of_bins_is_an_option(bins: int) -> None:
    table, y = table_of(2, 150, 3)
    for row, p in probabilities(table).items():
        assert measured("ece", table, y, bins=bins)[row].value == pytest.approx(twin("ece", p, y.numpy(), bins))


def test_scores_are_never_negative() -> None:
    table = torch.randn(3, 2000, 4) * 30
    y = table[0].argmax(-1)
    for name in ("nll", "brier", "ece"):
        measure = registry.metric.get(name)()
        sums = measure.update(table, Batch(y, y, y))
        assert all(value.value >= 0 for value in measure.compute(sums).values())


def test_every_measure_says_which_way_is_better() -> None:
    assert {name: registry.metric.get(name)().higher_is_better for name in NAMES} == {
        "accuracy": True,
        "nll": False,
        "brier": False,
        "ece": False,
    }


def test_measures_of_one_offer_share_one_forward_pass() -> None:
    table, y = table_of(2, 12, 3)
    calls = []

    def member(x: Tensor) -> Tensor:
        calls.append(len(x))
        return table[0][x]

    batches = [Batch(torch.arange(6), y[:6], torch.arange(6)), Batch(torch.arange(6, 12), y[6:], torch.arange(6, 12))]
    seen: list[int] = []
    found = evaluate_metrics(
        SINGLE_PROCESS,
        [MemberModule(member), MemberModule(member)],
        batches,
        {name: registry.metric.get(name)() for name in NAMES},
        on_batch=seen.append,
    )
    assert list(found) == NAMES
    assert calls == [6, 6, 6, 6]
    assert seen == [6, 6]


def test_rows_to_keep_are_laid_end_to_end() -> None:
    kept = Metric(
        lambda table, batch: {"best": table.argmax(-1).T},
        lambda sums: {"count": Estimate(float(len(sums["best"])))},
        reduce="cat",
    )
    table, y = table_of(2, 9, 3)
    batches = [Batch(torch.arange(a, b), y[a:b], torch.arange(a, b)) for a, b in ((0, 4), (4, 9))]
    views = [MemberModule(lambda x, row=row: row[x]) for row in table]
    assert evaluate_metrics(SINGLE_PROCESS, views, batches, {"kept": kept}) == {"kept": {"count": Estimate(9.0)}}
