"""Conformal sets have their nominal coverage on random data and CIFAR-10, and equal a slow reference."""

from __future__ import annotations

import json
import math
import os
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plateaux.core.errors import DataError, RecipeError
from plateaux.core.types import Estimate, derive_seed
from plateaux.ensembles.conformal import KINDS, Conformal, Kind, coverage, fit, mean_size
from plateaux.models.architectures.resnet import resnet
from plateaux.models.surgery import load_weights

DATA = Path(os.environ.get("PLATEAUX_DATA", "/nonexistent"))
WEIGHTS = DATA / "weights" / "resnet20_32_44_56_cifar10.safetensors"
TEST_BATCH = DATA / "cifar-10-batches-bin" / "test_batch.bin"
needs_cifar = pytest.mark.skipif(
    not (WEIGHTS.exists() and TEST_BATCH.exists()), reason="PLATEAUX_DATA has no resnet weights or no CIFAR-10"
)


def drawn(samples: int, classes: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities that are too sure of themselves, labels, ids."""
    chance = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(samples, classes, generator=chance, dtype=torch.float64)
    y = torch.multinomial(logits.softmax(1), 1, generator=chance)[:, 0]
    return (1.5 * logits).log_softmax(1), y, torch.arange(samples) + 1000 * seed


@cache
def cifar() -> tuple[Tensor, Tensor, Tensor]:
    """The first 2,000 test images as resnet20 sees them."""
    rows = torch.from_numpy(np.fromfile(TEST_BATCH, dtype=np.uint8, count=2000 * 3073)).view(2000, 3073)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    x = (rows[:, 1:].view(-1, 3, 32, 32) / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    net = resnet(depth=20, shape=(3, 32, 32), classes=10).eval()
    load_weights(net, WEIGHTS, prefix="resnet20")
    with torch.no_grad():
        logits = torch.cat([net(part) for part in x.split(500)])
    return logits.log_softmax(1), rows[:, 0].long(), torch.arange(2000)


def covered(
    log_p: Tensor, y: Tensor, ids: Tensor, *, held_out: int, splits: int, alpha: float, kind: Kind, **options: Any
) -> float:
    """Return the mean coverage over random splits: whichever way samples fall, they are exchangeable."""
    found = []
    for split in range(splits):
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(split))
        a, b = order[:held_out], order[held_out:]
        fitted = fit(log_p[a], y[a], ids[a], alpha, kind, **options)
        found.append(coverage(fitted.sets(log_p[b], ids[b]), y[b]).value)
    return float(np.mean(found))


def reference(kind: Kind, p: list[float], u: float, *, k_reg: int, penalty: float) -> list[float]:
    """The slow reference: how strange each class of one sample is."""
    order = sorted(range(len(p)), key=lambda c: (-p[c], c))
    scores = []
    for c in range(len(p)):
        rank = order.index(c) + 1
        likelier = sum(p[other] for other in order[: rank - 1])
        score = 1 - p[c] if kind == "lac" else likelier + u * p[c]
        scores.append(score + penalty * max(0, rank - k_reg) if kind == "raps" else score)
    return scores


@pytest.mark.parametrize("alpha", [0.1, 0.05])
@pytest.mark.parametrize("kind", KINDS)
def test_coverage_on_random_samples_is_the_nominal_one(kind: Kind, alpha: float) -> None:
    mean = covered(*drawn(2000, 10), held_out=1000, splits=40, alpha=alpha, kind=kind)
    assert mean == pytest.approx(1 - alpha, abs=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("never_empty", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_coverage_over_2000_splits_is_at_least_nominal_in_both_forms(kind: Kind, never_empty: bool) -> None:
    splits, samples, held_out = 2000, 150, 99  # a multiple of 1 / alpha minus 1: the coverage is nominal, not above
    logits = 8 * torch.randn(splits * samples, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.multinomial(logits.softmax(1), 1, generator=torch.Generator().manual_seed(1))[:, 0]
    log_p, ids = logits.log_softmax(1), torch.arange(len(y))  # right in more than 9 of 10: some sets can be empty
    found, is_empty = [], []
    for rows in torch.arange(len(y)).split(samples):
        a, b = rows[:held_out], rows[held_out:]
        fitted = fit(log_p[a], y[a], ids[a], 0.1, kind, randomized=False, never_empty=never_empty)
        sets = fitted.sets(log_p[b], ids[b])
        found.append(coverage(sets, y[b]).value)
        is_empty.append(not sets.any(1).all())
        assert not never_empty or bool(sets.gather(1, log_p[b].argmax(1, keepdim=True)).all())
    error = np.std(found) / math.sqrt(splits)
    assert np.mean(found) >= 0.9 - 3 * error
    assert any(is_empty) is not never_empty


@pytest.mark.slow
@needs_cifar
@pytest.mark.parametrize("alpha", [0.1, 0.05])
@pytest.mark.parametrize("kind", KINDS)
def test_coverage_on_cifar_10_is_the_nominal_one(kind: Kind, alpha: float) -> None:
    mean = covered(*cifar(), held_out=1000, splits=40, alpha=alpha, kind=kind)
    assert mean == pytest.approx(1 - alpha, abs=0.005)


@pytest.mark.slow
@needs_cifar
@pytest.mark.parametrize("kind", KINDS)
def test_never_empty_sets_contain_the_most_likely_class(kind: Kind) -> None:
    log_p, y, ids = cifar()
    a, b = slice(0, 1000), slice(1000, 2000)
    bare = fit(log_p[a], y[a], ids[a], 0.1, kind).sets(log_p[b], ids[b])
    full = fit(log_p[a], y[a], ids[a], 0.1, kind, never_empty=True).sets(log_p[b], ids[b])
    top = log_p[b].argmax(1)
    assert not bare.any(1).all()  # the network is right more often than in 9 of 10: some sets are empty
    assert full.gather(1, top[:, None]).all()
    assert torch.equal(full | bare, full)
    assert (full & ~bare).sum() == (~bare.gather(1, top[:, None])).sum()
    assert coverage(full, y[b]).value >= float((top == y[b]).double().mean())


@needs_cifar
def test_hard_images_get_larger_sets_and_a_penalty_limits_them() -> None:
    log_p, y, ids = cifar()
    aps = fit(log_p, y, ids, 0.05, "aps", randomized=False).sets(log_p, ids).sum(1).double()
    raps = fit(log_p, y, ids, 0.05, "raps", randomized=False, k_reg=1, penalty=0.2).sets(log_p, ids).sum(1)
    incorrect = log_p.argmax(1) != y
    assert aps[incorrect].mean() > 1.5 * aps[~incorrect].mean()
    assert raps.max() < aps.max()


@pytest.mark.parametrize("randomized", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("classes", [1, 2, 7])
def test_thresholds_and_sets_equal_the_reference(kind: Kind, classes: int, randomized: bool) -> None:
    log_p, y, ids = drawn(60, classes)
    options = {"k_reg": 2, "penalty": 0.05}
    fitted = fit(log_p, y, ids, 0.2, kind, randomized=randomized, seed=5, **options)  # type: ignore[arg-type]
    rows = []
    for row, number in zip(log_p.exp().tolist(), ids.tolist(), strict=True):
        u = (derive_seed(5, "conformal", number) >> 10) / 2**53 if randomized else 1.0
        rows.append(reference(kind, row, u, k_reg=2, penalty=0.05))
    own = sorted(row[label] for row, label in zip(rows, y.tolist(), strict=True))
    assert fitted.threshold == pytest.approx(own[math.ceil(61 * 0.8) - 1], abs=1e-11)
    slack = torch.tensor(rows, dtype=torch.float64)
    sets = fitted.sets(log_p, ids)
    sure = (slack - fitted.threshold).abs() > 1e-10
    assert torch.equal(sets[sure], (slack <= fitted.threshold)[sure])


def test_the_threshold_is_the_finite_sample_quantile() -> None:
    # Right classes of probability 0.1, 0.2 ... 0.9 in nine samples: nine scores, 0.1 to 0.9.
    p = torch.arange(1, 10, dtype=torch.float64) / 10
    log_p = torch.stack([p, 1 - p], 1).log()
    y, ids = torch.zeros(9, dtype=torch.int64), torch.arange(9)
    for alpha, rank in ((0.1, 9), (0.11, 9), (0.2, 8), (0.5, 5), (0.9, 1), (0.95, 1)):
        assert fit(log_p, y, ids, alpha, "lac").threshold == pytest.approx(rank / 10)
    for alpha, rank in ((0.07, 93), (0.3, 70), (0.57, 43), (0.05, 95)):  # whatever floats make of 100 (1 - alpha)
        line = torch.linspace(0.999, 0.001, 99, dtype=torch.float64)
        fitted = fit(torch.stack([line, 1 - line], 1).log(), torch.zeros(99).long(), torch.arange(99), alpha, "lac")
        assert fitted.threshold == pytest.approx(1 - float(line[rank - 1]))


@pytest.mark.parametrize("kind", KINDS)
def test_too_few_samples_give_full_sets_and_a_remark(kind: Kind) -> None:
    log_p, y, ids = drawn(8, 4)
    fitted = fit(log_p, y, ids, 0.1, kind)
    assert fitted.threshold == math.inf
    assert fitted.remark == (
        "8 held-out samples are too few for a coverage of 90 %, which needs at least 9. Every set contains all classes."
    )
    assert fitted.sets(log_p, ids).all()
    log_p, y, ids = drawn(9, 4)
    assert math.isfinite(fit(log_p, y, ids, 0.1, kind).threshold)
    assert fit(log_p, y, ids, 0.1, kind).remark == ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("randomized", [True, False])
def test_held_out_samples_are_covered_exactly_by_rank(kind: Kind, randomized: bool) -> None:
    log_p, y, ids = drawn(199, 6)
    for alpha, inside in ((0.1, 180), (0.05, 190), (0.5, 100)):
        fitted = fit(log_p, y, ids, alpha, kind, randomized=randomized)
        assert coverage(fitted.sets(log_p, ids), y).value >= inside / 199
        if randomized and kind != "lac":  # no ties
            assert coverage(fitted.sets(log_p, ids), y).value == inside / 199


@pytest.mark.parametrize("kind", KINDS)
def test_a_set_does_not_depend_on_the_batch_or_the_order(kind: Kind) -> None:
    log_p, y, ids = drawn(300, 6)
    fitted, new = fit(log_p, y, ids, 0.1, kind), drawn(100, 6, seed=1)
    whole = fitted.sets(new[0], new[2])
    parts = torch.cat([fitted.sets(a, b) for a, b in zip(new[0].split(7), new[2].split(7), strict=True)])
    assert torch.equal(whole, parts)
    order = torch.randperm(100)
    assert torch.equal(fitted.sets(new[0][order], new[2][order]), whole[order])
    shuffled = torch.randperm(300)
    assert fit(log_p[shuffled], y[shuffled], ids[shuffled], 0.1, kind) == fitted


def test_random_numbers_depend_only_on_the_ids_and_the_seed(rng_unchanged: None) -> None:
    log_p, y, ids = drawn(300, 6)
    fitted = fit(log_p, y, ids, 0.1, "aps")
    assert fit(log_p, y, ids, 0.1, "aps") == fitted
    assert fit(log_p, y, ids, 0.1, "aps", seed=1).threshold != fitted.threshold
    assert fit(log_p, y, ids + 1, 0.1, "aps").threshold != fitted.threshold
    for kind, same in (("lac", True), ("aps", False)):
        a = fit(log_p, y, ids, 0.1, kind).sets(log_p, ids)  # type: ignore[arg-type]
        b = fit(log_p, y, ids, 0.1, kind).sets(log_p, ids + 1)  # type: ignore[arg-type]
        assert torch.equal(a, b) == same


def test_uniform_numbers_are_uniform() -> None:
    from plateaux.ensembles.conformal import _uniform

    u = _uniform(torch.arange(20_000), 0).numpy()
    assert u.min() >= 0
    assert u.max() < 1
    assert np.abs(np.sort(u) - np.linspace(0, 1, 20_000)).max() < 1.63 / math.sqrt(20_000)  # Kolmogorov, at 1 %
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03


def test_raps_with_penalty_zero_equals_aps() -> None:
    log_p, y, ids = drawn(200, 6)
    a, b = fit(log_p, y, ids, 0.1, "aps"), fit(log_p, y, ids, 0.1, "raps", penalty=0.0)
    c = fit(log_p, y, ids, 0.1, "raps", k_reg=6, penalty=9.0)
    assert a.threshold == b.threshold == c.threshold
    assert torch.equal(a.sets(log_p, ids), b.sets(log_p, ids))


def test_sets_contain_the_most_likely_classes() -> None:
    log_p, y, ids = drawn(200, 6)
    for kind in KINDS:
        sets = fit(log_p, y, ids, 0.1, kind).sets(log_p, ids)
        ordered = sets.gather(1, log_p.argsort(1, descending=True))
        assert (ordered.long().diff(dim=1) <= 0).all()


def test_rounding_does_not_change_sets_when_last_scores_are_one() -> None:
    # With two classes and a quarter of the labels the unlikelier one, the threshold is that class's score: 1 for all.
    log_p = torch.randn(400, 2, dtype=torch.float64).log_softmax(1)
    y = torch.where(torch.arange(400) % 4 == 0, log_p.argmin(1), log_p.argmax(1))
    fitted = fit(log_p, y, torch.arange(400), 0.1, "aps", randomized=False)
    assert fitted.threshold == 1.0
    assert fitted.sets(log_p, torch.arange(400)).all()


def test_equal_probabilities_are_ranked_by_class() -> None:
    log_p = torch.zeros(50, 4).log_softmax(1)
    y = torch.arange(50) % 4
    sets = fit(log_p, y, torch.arange(50), 0.3, "aps", randomized=False).sets(log_p, torch.arange(50))
    assert sets.tolist() == [[True, True, True, False]] * 50


@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_of_exactly_zero_and_one(kind: Kind) -> None:
    logits = torch.zeros(40, 3)
    logits[:, 0] = 1e4
    log_p, ids = logits.log_softmax(1), torch.arange(40)
    sure = fit(log_p, torch.zeros(40).long(), ids, 0.1, kind, never_empty=True).sets(log_p, ids)
    assert sure.tolist() == [[True, False, False]] * 40
    incorrect = fit(log_p, torch.full((40,), 2), ids, 0.1, kind)
    assert coverage(incorrect.sets(log_p, ids), torch.full((40,), 2)).value >= 0.9
    masked = torch.tensor([[0.0, -math.inf]]).expand(40, -1)
    assert fit(masked, torch.zeros(40).long(), ids, 0.1, kind, never_empty=True).sets(masked, ids)[:, 0].all()


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_log_probabilities_are_accepted(kind: Kind) -> None:
    log_p, y, ids = drawn(200, 6)
    assert fit(log_p.half(), y, ids, 0.1, kind) == fit(log_p.half().double(), y, ids, 0.1, kind)


def test_coverage_and_mean_size_of_a_small_example_equal_hand_computed_values() -> None:
    sets = torch.tensor([[True, True, False], [False, False, False], [False, True, False], [True, True, True]])
    y = torch.tensor([1, 0, 2, 2])
    assert coverage(sets, y) == Estimate(0.5, 0.25)
    found = mean_size(sets)
    assert found.value == 1.5
    assert found.stderr == pytest.approx(np.std([2, 0, 1, 3], ddof=1) / 2)
    assert mean_size(sets[:1]) == Estimate(2.0)


@pytest.mark.parametrize("kind", KINDS)
def test_fitted_thresholds_round_trip_through_json(kind: Kind) -> None:
    for samples in (5, 100):
        log_p, y, ids = drawn(samples, 4)
        fitted = fit(log_p, y, ids, 0.1, kind, k_reg=1, penalty=0.1, seed=3, never_empty=True)
        again = Conformal.from_dict(json.loads(json.dumps(fitted.to_dict(), allow_nan=False)))
        assert again == fitted
        assert torch.equal(again.sets(log_p, ids), fitted.sets(log_p, ids))
    with pytest.raises(RecipeError, match="did you mean 'lac'"):
        Conformal.from_dict({**fitted.to_dict(), "kind": "lca"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0.0}, r"in \(0, 1\)"),
        ({"alpha": 1.0}, r"in \(0, 1\)"),
        ({"alpha": 90}, "alpha = 90"),
        ({"kind": "rasp"}, "did you mean 'raps'"),
        ({"kind": "raps", "k_reg": -1}, "at least 0"),
        ({"kind": "raps", "penalty": math.inf}, "at least 0"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        fit(*drawn(20, 3), **options)


def test_invalid_samples_are_rejected() -> None:
    log_p, y, ids = drawn(20, 3)
    for p, labels, sample_ids, message in (
        (3 * log_p, y, ids, "not logits"),
        (log_p * math.nan, y, ids, "are NaN"),
        (log_p[:0], y[:0], ids[:0], "at least one sample"),
        (log_p, y, ids[:5], r"ids \[5\]"),
        (log_p, y[:5], ids, r"Labels have shape \[5\]"),
        (log_p, y + 2, ids, "allowed are 0 to 2"),
        (log_p, y.double(), ids, "float64"),
    ):
        with pytest.raises(DataError, match=message):
            fit(p, labels, sample_ids)
    with pytest.raises(DataError, match="not logits"):
        fit(log_p, y, ids).sets(5 + log_p, ids)
    with pytest.raises(DataError, match="The mean size needs"):
        mean_size(torch.zeros(0, 3, dtype=torch.bool))


@given(samples=st.integers(1, 40), classes=st.integers(1, 5), seed=st.integers(0, 99), kind=st.sampled_from(KINDS))
@settings(max_examples=60)
def test_a_smaller_alpha_never_makes_a_set_smaller(samples: int, classes: int, seed: int, kind: Kind) -> None:
    log_p, y, ids = drawn(samples, classes, seed=seed)
    sizes = [fit(log_p, y, ids, alpha, kind).sets(log_p, ids) for alpha in (0.5, 0.2, 0.05, 0.01)]
    assert all(torch.equal(small & large, small) for small, large in pairwise(sizes))
