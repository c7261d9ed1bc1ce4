"""Cascades compared with a loop over samples, and their guarantee over many draws of held-out samples."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from reference import cascade as reference
from scipy.stats import binom
from torch import Tensor

from plateaux.core.errors import DataError, RecipeError
from plateaux.ensembles.cascade import GRID, Cascade, CascadeOptions, default_stages, fit, needed_samples
from plateaux.ensembles.selective import binomial_lower_tail


def draw(samples: int, members: int = 5, *, seed: int = 0, noise: float = 1.5) -> tuple[Tensor, Tensor]:
    """Draw logits [M, N, C] of members that share a signal of varying strength, and labels."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(6, (samples,), generator=generator)
    strength = 8 * torch.rand(samples, 1, generator=generator)
    signal = strength * torch.nn.functional.one_hot(y, 6) + torch.randn(samples, 6, generator=generator)
    return signal + noise * torch.randn(members, samples, 6, generator=generator), y


def build(stages: tuple[int, ...], threshold: float | None, members: int = 5) -> Cascade:
    return Cascade(members, stages, threshold, "harm", 0.01, 0.9, 1000, 3, 2.5)


@pytest.mark.parametrize("threshold", [None, 1.0, 0.95, 0.7, 0.4, 0.0])
@pytest.mark.parametrize("stages", [(1, 2, 3, 4), (2, 3, 4), (2,), (1, 3)])
def test_the_rule_equals_a_loop_over_samples(stages: tuple[int, ...], threshold: float | None) -> None:
    logits, _ = draw(100)
    cascade = build(stages, threshold)
    queried, log_p = cascade.members_queried(logits), cascade.log_p(logits)
    for i in range(100):
        count, p = reference.ask(logits[:, i].double().numpy(), stages, threshold)
        assert int(queried[i]) == count
        assert np.allclose(log_p[i].exp().numpy(), p, atol=1e-12)
    if threshold == 0.7:
        assert {stages[0], 5} < set(queried.tolist()) <= {*stages, 5} or stages == (2,)


@pytest.mark.parametrize("is_labeled", [True, False])
@pytest.mark.parametrize(("max_harm", "samples"), [(0.05, 60), (0.2, 60), (0.03, 60)])
def test_the_fit_equals_the_slow_sequence_of_tests(max_harm: float, samples: int, is_labeled: bool) -> None:
    logits, y = draw(samples, seed=3)
    kind = "harm" if is_labeled else "differs"
    options = CascadeOptions(max_harm=max_harm, kind=kind, stages=(1, 3))  # type: ignore[arg-type]
    found = fit(logits, y if is_labeled else None, options)
    labels = y.tolist() if is_labeled else None
    expected = reference.fit(logits.double().numpy(), (1, 3), labels, max_harm, 0.9)
    assert (found.threshold, found.count) == expected
    assert found.queried == float(found.members_queried(logits).double().mean())
    assert (found.stages, found.samples, found.kind) == ((1, 3), samples, kind)


def test_stopped_samples_get_the_class_of_the_first_member_and_losses_grow_as_the_threshold_falls() -> None:
    logits, y = draw(2000, seed=1)
    every, losses = build((1, 2, 3, 4), None).log_p(logits).argmax(-1), []
    for threshold in GRID:
        cascade = build((1, 2, 3, 4), threshold)
        label, stopped = cascade.log_p(logits).argmax(-1), cascade.members_queried(logits) < 5
        assert torch.equal(label, torch.where(stopped, logits[0].argmax(-1), every))
        losses.append(int(((label != every) & (every == y)).sum()))
    assert losses == sorted(losses)
    assert losses[-1] > 50


def test_the_grid_is_fixed_and_decreases_from_one_to_zero() -> None:
    assert len(GRID) == 50
    assert list(GRID) == sorted(set(GRID), reverse=True)
    assert (GRID[0], GRID[-1]) == (1.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["harm", "differs"])
def test_the_guarantee_holds_over_many_draws_of_held_out_samples(kind: str) -> None:
    population, labels = draw(20_000, seed=7)
    stages = (1, 2, 3, 4)
    options = CascadeOptions(max_harm=0.02, kind=kind, stages=stages)  # type: ignore[arg-type]
    every = build(stages, None).log_p(population).argmax(-1)
    is_counted = (every == labels) | (kind == "differs")

    @cache
    def true_loss(threshold: float | None) -> float:
        label = build(stages, threshold).log_p(population).argmax(-1)
        return float(((label != every) & is_counted).double().mean())

    draws, above, queried = 200, 0, 0.0
    for seed in range(draws):
        rows = torch.randint(20_000, (500,), generator=torch.Generator().manual_seed(seed))
        found = fit(population[:, rows], labels[rows], options)
        above += true_loss(found.threshold) > 0.02
        queried += found.queried / draws
    assert above / draws <= 0.1 + 2 * math.sqrt(0.1 * 0.9 / draws)
    assert above > 0, "a fit that never comes near the bound is too conservative, or does nothing"
    assert queried < 3.5


def test_too_few_samples_give_a_cascade_of_all_members_and_report_how_many_are_needed() -> None:
    logits, y = draw(100)
    found = fit(logits, y)
    assert needed_samples(CascadeOptions()) == 460
    assert (1 - 0.005) ** 460 <= 0.1 < (1 - 0.005) ** 459
    assert found.threshold is None
    assert found.remark.startswith("100 held-out samples are too few")
    assert "at least 460" in found.remark
    assert found.members_queried(logits).tolist() == [5] * 100
    assert (found.queried, found.count) == (5.0, 0)
    same = logits[:1].expand(5, -1, -1)
    enough = fit(same.repeat(1, 5, 1)[:, :460], y.repeat(5)[:460])
    assert (enough.threshold, enough.remark, enough.queried) == (0.0, "", 2.0)
    assert fit(same.repeat(1, 5, 1)[:, :459], y.repeat(5)[:459]).threshold is None


def test_no_threshold_is_found_if_the_most_confident_samples_exceed_the_bound() -> None:
    confident = torch.zeros(3, 1000, 2)
    confident[:2, :, 0], confident[2, :, 1] = 1e4, 1e4
    confident[2, :, 1] += 1e4
    found = fit(confident, torch.zeros(1000, dtype=torch.int64))
    # The mean of two against one is class 0: nothing is harmed, and everything stops at two.
    assert (found.threshold, found.count, found.queried) == (0.0, 0, 2.0)
    outvoted = torch.cat([confident[:1], confident[2:], confident[2:]])
    found = fit(outvoted, torch.ones(1000, dtype=torch.int64), CascadeOptions(stages=(1,)))
    assert found.threshold is None
    assert "even for the most confident samples" in found.remark


def test_nan_logits_query_all_members() -> None:
    logits, _ = draw(4)
    logits[0, 2] = math.nan
    assert int(build((2, 3), 0.0).members_queried(logits)[2]) == 5


def test_default_stages_begin_at_two_members() -> None:
    assert default_stages(5) == (2, 3, 4)
    assert default_stages(3) == (2,)
    logits, y = draw(10, members=2)
    with pytest.raises(RecipeError, match=r"A cascade over 2 members saves nothing.*mutual information"):
        fit(logits, y)
    assert fit(logits, y, CascadeOptions(stages=(1,))).stages == (1,)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (CascadeOptions(stages=(3, 2)), r"stages = \[3, 2\].*from 1 to 4"),
        (CascadeOptions(stages=(0, 2)), "from 1 to 4"),
        (CascadeOptions(stages=(2, 5)), "from 1 to 4"),
        (CascadeOptions(stages=()), "from 1 to 4"),
        (CascadeOptions(max_harm=0), "max_harm = 0"),
        (CascadeOptions(confidence=1), "confidence = 1"),
        (CascadeOptions(kind="hurt"), "harm, differs"),  # type: ignore[arg-type]
    ],
)
def test_invalid_options_are_rejected(options: CascadeOptions, words: str) -> None:
    logits, y = draw(10)
    with pytest.raises(RecipeError, match=words):
        fit(logits, y, options)


def test_invalid_arrays_are_rejected() -> None:
    logits, y = draw(10)
    with pytest.raises(DataError, match=r"\[M, N, C\]"):
        fit(logits[0], y)
    with pytest.raises(DataError, match="Labels are not given"):
        fit(logits, None)
    with pytest.raises(DataError, match=r"of shape \[9\]"):
        fit(logits, y[:9])
    with pytest.raises(DataError, match=r"\[5, N, C\]"):
        build((2,), 0.5).members_queried(logits[:3])


def test_a_cascade_round_trips_through_json_and_an_invalid_one_is_rejected() -> None:
    for cascade in (build((2, 3), 0.5), build((1,), None)):
        assert Cascade.from_dict(json.loads(json.dumps(cascade.to_dict()))) == cascade
    with pytest.raises(RecipeError, match=r"threshold of a cascade is 1\.5"):
        Cascade.from_dict(replace(build((2,), 0.5), threshold=1.5).to_dict())
    with pytest.raises(RecipeError, match="stages"):
        Cascade.from_dict(build((5,), 0.5).to_dict())


def test_the_binomial_tail_equals_scipy() -> None:
    for count, samples, risk in ((0, 10, 0.1), (3, 460, 0.005), (40, 5000, 0.01), (5, 5, 0.5)):
        assert binomial_lower_tail(count, samples, risk) == pytest.approx(binom.cdf(count, samples, risk), rel=1e-9)
