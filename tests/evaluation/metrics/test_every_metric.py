"""Accuracy, NLL, Brier score and ECE against scikit-learn and reference implementations, with edge cases."""

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
from plateaux.core.outputs import features
from plateaux.core.row_names import MEAN_LOGIT, MEAN_PROBABILITY, row_names
from plateaux.core.types import Batch, Estimate
from plateaux.distributed.executors.local import SINGLE_PROCESS
from plateaux.ensembles.log_probs import log_probabilities
from plateaux.evaluation.metric_loop import evaluate_metrics
from plateaux.evaluation.metric_specs import get_metrics

NAMES = ["accuracy", "nll", "brier", "ece"]
Rows = Mapping[str, Estimate]


def evaluate(name: str, logits: Tensor, y: Tensor, *, cuts: tuple[int, ...] = (), **options: int) -> Rows:
    """Evaluate a metric on logits `[M, N, C]`, in batches that end at `cuts`."""
    metric: Metric = registry.metric.get(name)(**options)
    ids = torch.arange(len(y))
    edges = [0, *cuts, len(y)]
    parts = [ids[a:b] for a, b in pairwise(edges) if b > a]
    batches = [Batch(part, y[part], part) for part in parts]
    modules = [MemberModule(lambda x, row=row: row[x]) for row in logits]
    return evaluate_metrics(SINGLE_PROCESS, modules, batches, {name: metric})[name]


def approx_or_none(error: float | None, *, rel: float, abs: float) -> Any:
    """`pytest.approx` of a standard error; None stays None."""
    return error if error is None else pytest.approx(error, rel=rel, abs=abs)


def random_logits(
    members: int, samples: int, classes: int, *, seed: int = 0, scale: float = 2.0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(members, samples, classes, generator=generator, dtype=torch.float64)
    return logits, torch.randint(classes, (samples,), generator=generator)


def probabilities(logits: Tensor) -> dict[str, np.ndarray]:
    """Reference probabilities `[N, C]` of every row."""
    members = [np.exp(row - row.max(-1, keepdims=True)) for row in logits.double().numpy()]
    members = [row / row.sum(-1, keepdims=True) for row in members]
    rows = {f"member {i}": row for i, row in enumerate(members)}
    if len(members) > 1:
        mean = logits.double().numpy().mean(0)
        pooled = np.exp(mean - mean.max(-1, keepdims=True))
        rows[MEAN_PROBABILITY] = np.mean(members, 0)
        rows[MEAN_LOGIT] = pooled / pooled.sum(-1, keepdims=True)
    return rows


def reference_value(name: str, p: np.ndarray, y: np.ndarray, bins: int = 15) -> float:
    """Reference value of a metric for one row."""
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
def test_every_row_equals_scikit_learn_or_the_reference(name: str, members: int, samples: int, classes: int) -> None:
    logits, y = random_logits(members, samples, classes)
    rows, truth = evaluate(name, logits, y), probabilities(logits)
    assert list(rows) == list(truth)
    for row, p in truth.items():
        assert rows[row].value == pytest.approx(reference_value(name, p, y.numpy()), rel=1e-9, abs=1e-12), row


def test_brier_of_two_classes_is_twice_that_of_scikit_learn() -> None:
    from sklearn.metrics import brier_score_loss

    logits, y = random_logits(1, 80, 2)
    p = probabilities(logits)["member 0"]
    assert evaluate("brier", logits, y)["member 0"].value == pytest.approx(2 * brier_score_loss(y, p[:, 1]))


def test_one_member_has_no_ensemble_rows() -> None:
    logits, y = random_logits(1, 5, 3)
    assert list(evaluate("nll", logits, y)) == ["member 0"]
    assert row_names(1) == ["member 0"]
    assert row_names(4) == ["member 0", "member 1", "ensemble (mean probability)", "ensemble (mean logit)"]


def test_mean_probability_and_mean_logit_differ() -> None:
    # One member is confident, the other is not: the mean of logits follows the confident one.
    logits = torch.tensor([[[6.0, 0.0]], [[0.0, 2.0]]])
    p = log_probabilities(logits).exp()[:, 0, 0].tolist()
    high, low = 1 / (1 + math.exp(-6)), 1 / (1 + math.exp(2))
    assert p == pytest.approx([high, low, (high + low) / 2, 1 / (1 + math.exp(-2))], rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_one_class_is_always_correct(name: str) -> None:
    logits, y = torch.randn(3, 7, 1), torch.zeros(7, dtype=torch.int64)
    for value in evaluate(name, logits, y).values():
        assert value.value == pytest.approx(1.0 if name == "accuracy" else 0.0, abs=1e-7)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("correct", [True, False])
def test_probabilities_of_exactly_zero_and_one(name: str, correct: bool) -> None:
    logits = torch.zeros(2, 4, 3)
    logits[..., 0] = 1e4
    y = torch.zeros(4, dtype=torch.int64) if correct else torch.ones(4, dtype=torch.int64)
    assert log_probabilities(logits).exp().unique().tolist() == [0.0, 1.0]
    expected = {"accuracy": (1, 0), "nll": (0, 1e4), "brier": (0, 2), "ece": (0, 1)}[name][0 if correct else 1]
    for value in evaluate(name, logits, y).values():
        assert value.value == expected
        assert value.stderr in (None, 0.0)


def test_a_confidence_of_one_is_in_the_last_bin() -> None:
    logits = torch.tensor([[[1e4, 0.0], [1e4, 0.0], [0.2, 0.0]]])
    state = registry.metric.get("ece")(bins=10).update(
        logits, Batch(torch.zeros(3), torch.tensor([0, 1, 0]), torch.arange(3))
    )
    count, confidence, correct = state["sums"][0].unbind(-1)
    assert count.tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 2]
    assert (confidence[9], correct[9]) == (2, 1)


def test_ties_go_to_the_first_class() -> None:
    logits = torch.zeros(2, 3, 4)
    rows = evaluate("accuracy", logits, torch.tensor([0, 1, 3]))
    assert {value.value for value in rows.values()} == {1 / 3}
    assert evaluate("ece", logits, torch.tensor([0, 1, 3]))["member 0"].value == pytest.approx(abs(1 / 3 - 1 / 4))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_logits_equal_the_reference(name: str, dtype: torch.dtype) -> None:
    logits, y = random_logits(3, 300, 10, scale=4)
    logits = logits.to(dtype)
    truth = probabilities(logits.double())
    for row, value in evaluate(name, logits, y).items():
        assert value.value == pytest.approx(reference_value(name, truth[row], y.numpy()), abs=2e-6), row


@given(
    members=st.integers(1, 4),
    samples=st.integers(1, 30),
    classes=st.integers(1, 5),
    seed=st.integers(0, 99),
    data=st.data(),
)
@settings(max_examples=40)
def test_the_batch_size_does_not_matter(
    members: int, samples: int, classes: int, seed: int, data: st.DataObject
) -> None:
    logits, y = random_logits(members, samples, classes, seed=seed)
    cuts = tuple(sorted(data.draw(st.sets(st.integers(1, samples), max_size=4))))
    for name in NAMES:
        full, parts = evaluate(name, logits, y), evaluate(name, logits, y, cuts=cuts)
        for row in full:
            assert parts[row].value == pytest.approx(full[row].value, rel=1e-12, abs=1e-14)
            assert parts[row].stderr == approx_or_none(full[row].stderr, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_members_and_samples_does_not_matter(name: str) -> None:
    logits, y = random_logits(4, 60, 5)
    shuffled = torch.randperm(60)
    rows, other = evaluate(name, logits, y), evaluate(name, logits[[2, 0, 3, 1]][:, shuffled], y[shuffled])
    for original, permuted in {"member 0": "member 1", "member 2": "member 0", MEAN_PROBABILITY: MEAN_PROBABILITY,
                        MEAN_LOGIT: MEAN_LOGIT}.items():  # fmt: skip
        assert rows[original].value == pytest.approx(other[permuted].value, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accuracy", "nll", "brier"])
def test_standard_errors_agree_with_the_bootstrap(name: str) -> None:
    logits, y = random_logits(2, 400, 4)
    value = evaluate(name, logits, y)["member 1"]
    generator, p = np.random.default_rng(0), probabilities(logits)["member 1"]
    resampled = [reference_value(name, p[i], y.numpy()[i]) for i in generator.integers(0, 400, (400, 400))]
    assert value.stderr == pytest.approx(float(np.std(resampled)), rel=0.1)


def test_standard_errors_by_formula() -> None:
    logits, y = random_logits(1, 90, 3)
    p = probabilities(logits)["member 0"]
    losses = -np.log(p[np.arange(90), y.numpy()])
    assert evaluate("nll", logits, y)["member 0"].stderr == pytest.approx(losses.std(ddof=1) / math.sqrt(90), rel=1e-9)
    accuracy = evaluate("accuracy", logits, y)["member 0"]
    assert accuracy.stderr == pytest.approx(math.sqrt(accuracy.value * (1 - accuracy.value) / 90))
    assert evaluate("ece", logits, y, bins=1)["member 0"].stderr == pytest.approx(
        np.std((p.argmax(-1) == y.numpy()) - p.max(-1), ddof=1) / math.sqrt(90), rel=1e-9
    )


@pytest.mark.parametrize("name", NAMES)
def test_one_sample_has_no_standard_error(name: str) -> None:
    logits, y = random_logits(3, 1, 4)
    for value in evaluate(name, logits, y).values():
        assert math.isfinite(value.value)
        assert value.stderr in (None, 0.0)


@pytest.mark.parametrize("bins", [1, 5, 100])
def test_the_number_of_bins_is_an_option(bins: int) -> None:
    logits, y = random_logits(2, 150, 3)
    for row, p in probabilities(logits).items():
        assert evaluate("ece", logits, y, bins=bins)[row].value == pytest.approx(
            reference_value("ece", p, y.numpy(), bins)
        )


def test_scores_are_never_negative() -> None:
    logits = torch.randn(3, 2000, 4) * 30
    y = logits[0].argmax(-1)
    for name in ("nll", "brier", "ece"):
        metric = registry.metric.get(name)()
        sums = metric.update(logits, Batch(y, y, y))
        assert all(value.value >= 0 for value in metric.compute(sums).values())


def test_every_metric_has_a_direction() -> None:
    assert {name: registry.metric.get(name)().higher_is_better for name in NAMES} == {
        "accuracy": True,
        "nll": False,
        "brier": False,
        "ece": False,
    }


def test_metrics_of_one_output_function_share_one_forward_pass() -> None:
    logits, y = random_logits(2, 12, 3)
    calls = []

    def member(x: Tensor) -> Tensor:
        calls.append(len(x))
        return logits[0][x]

    batches = [Batch(torch.arange(6), y[:6], torch.arange(6)), Batch(torch.arange(6, 12), y[6:], torch.arange(6, 12))]
    batch_sizes: list[int] = []
    results = evaluate_metrics(
        SINGLE_PROCESS,
        [MemberModule(member), MemberModule(member)],
        batches,
        {name: registry.metric.get(name)() for name in NAMES},
        on_batch=batch_sizes.append,
    )
    assert list(results) == NAMES
    assert calls == [6, 6, 6, 6]
    assert batch_sizes == [6, 6]


def test_reduce_cat_concatenates_rows() -> None:
    metric = Metric(
        lambda logits, batch: {"best": logits.argmax(-1).T},
        lambda sums: {"count": Estimate(float(len(sums["best"])))},
        reduce="cat",
    )
    logits, y = random_logits(2, 9, 3)
    batches = [Batch(torch.arange(a, b), y[a:b], torch.arange(a, b)) for a, b in ((0, 4), (4, 9))]
    modules = [MemberModule(lambda x, row=row: row[x]) for row in logits]
    assert evaluate_metrics(SINGLE_PROCESS, modules, batches, {"kept": metric}) == {"kept": {"count": Estimate(9.0)}}


# By group: whether values are in percent, the fewest members, whether higher is better, and words of the definition.
ATTRIBUTES = {
    "uncertainty": (
        ("ece(bins=7)", True, 1, False, "7"),
        ("adaptive_ece(bins=7)", True, 1, False, "7"),
        ("classwise_ece(bins=7)", True, 1, False, "7"),
        ("reliability(bins=7)", True, 1, None, "7"),
        ("nll", False, 1, False, ""),
        ("brier", False, 1, False, ""),
        ("brier_parts(bins=7)", False, 1, None, "7 equal-width bins"),
        ("aurc", False, 1, False, "ties"),
        ("e_aurc", False, 1, False, "ties"),
        ("risk_at_coverage(coverage=0.5)", True, 1, False, "most confident fraction 0.5 of all"),
    ),
    "performance": (
        ("accuracy", True, 1, True, ""),
        ("top5(k=3)", True, 1, True, "k = 3"),
        ("balanced_accuracy", True, 1, True, ""),
        ("macro_f1", True, 1, True, ""),
        ("binary_f1", True, 1, True, ""),
        ("per_class", False, 1, None, ""),
    ),
    "diversity": (
        ("disagreement", True, 2, None, ""),
        ("der", False, 2, None, ""),
        ("kl", False, 2, None, ""),
        ("cka", None, 2, None, "no standard error"),
        ("variance(ddof=0)", None, 2, None, "ddof = 0"),
        ("variance(space=probabilities)", None, 2, None, "probabilities"),
        ("unique", None, 2, None, ""),
        ("pds", None, 2, None, ""),
        ("error_overlap", None, 2, None, ""),
        ("q_statistic", None, 2, None, ""),
        ("eir", None, 2, True, ""),
        ("oracle", True, 2, True, ""),
        ("predictive_entropy", None, 1, None, "nats"),
        ("expected_entropy", None, 1, None, "nats"),
        ("mutual_information", None, 1, None, "nats"),
    ),
}


def test_attributes_of_the_metrics() -> None:
    for group, rows in ATTRIBUTES.items():
        for spec, percent, members, higher, words in rows:
            metric = get_metrics([spec])[spec]
            assert (metric.group, metric.min_members, metric.higher_is_better) == (group, members, higher), spec
            assert percent in (None, metric.percent), spec
            assert metric.definition, spec
            assert words in metric.definition, spec
    assert get_metrics(["cka"])["cka"].output is features
    assert {get_metrics([name])[name].reduce for name in ("aurc", "e_aurc", "risk_at_coverage")} == {"cat"}
