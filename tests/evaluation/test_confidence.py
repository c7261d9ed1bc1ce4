"""What is kept of every sample: its order, its groups of equals, and numbers that do not feel how they are cut."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import selective as slow
from torch import Tensor

from plateaux.core import registry
from plateaux.core.types import Estimate
from plateaux.evaluation import confidence
from plateaux.evaluation.confidence import (
    decode_confidence,
    equal_mass,
    has_nan,
    pack_confidence,
    sort_by_confidence,
    tie_groups,
)
from plateaux.evaluation.metrics.selective import Moments, _harmonic

NAMES = ["aurc", "e_aurc", "risk_at_coverage", "adaptive_ece"]
Samples = list[tuple[float, bool]]

some_samples = st.lists(st.tuples(st.sampled_from([0.0, 1e-6, 0.1, 0.7, 2.0]), st.booleans()), min_size=1, max_size=30)


def packed_of(samples: Samples) -> Tensor:
    return pack_confidence(
        -torch.tensor([doubt for doubt, _ in samples]), torch.tensor([right for _, right in samples])
    )


def many(count: int, levels: int, *, seed: int = 0) -> Tensor:
    """Confidences of so many different levels, that are right the less often the less sure they are."""
    chance = torch.Generator().manual_seed(seed)
    doubt = torch.randint(1, levels + 1, (count,), generator=chance) / levels
    return pack_confidence(-doubt, torch.rand(count, generator=chance) > doubt**2)


def value_of(name: str, packed: Tensor) -> Estimate:
    return registry.metric.get(name)().compute({"packed": packed[:, None]})["member 0"]


@given(some_samples)
@settings(deadline=None, max_examples=50)
def test_the_surest_come_first_and_nothing_is_lost(samples: Samples) -> None:
    packed = packed_of(samples)
    before = packed.clone()
    doubt, right = decode_confidence(sort_by_confidence(packed))
    assert torch.equal(packed, before)  # others still need it as it was
    assert doubt.diff().ge(0).all()
    given_pairs = sorted(zip(packed.abs().tolist(), (packed < 0).tolist(), strict=True))
    assert list(zip(doubt.tolist(), (~right).tolist(), strict=True)) == given_pairs


@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_no_number_comes_last(sign: int) -> None:
    packed = torch.tensor([0.5, sign * float("nan"), -float("inf"), 0.1])
    codes = sort_by_confidence(packed)
    assert has_nan(codes)
    assert not has_nan(codes[:-1])
    assert decode_confidence(codes)[0][:3].tolist() == pytest.approx([0.1, 0.5, float("inf")])


@given(some_samples, st.integers(1, 9))
@settings(deadline=None, max_examples=80)
def test_no_group_of_equals_is_cut_in_two(samples: Samples, piece: int) -> None:
    packed = packed_of(samples)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(confidence, "CHUNK_SIZE", piece)
        found = list(tie_groups(sort_by_confidence(packed)))
    doubt = packed.abs().numpy().astype(np.float64)
    for each in found:
        assert len(each.start) <= piece
    levels = np.concatenate([each.neg_log_confidence for each in found])
    assert levels.tolist() == np.unique(doubt).tolist()
    assert np.concatenate([each.size for each in found]).tolist() == [(doubt == d).sum() for d in levels]
    assert np.concatenate([each.start for each in found]).tolist() == [(doubt < d).sum() for d in levels]
    wrong = packed.numpy() < 0
    assert np.concatenate([each.incorrect for each in found]).tolist() == [wrong[doubt == d].sum() for d in levels]


@given(some_samples, st.integers(1, 9))
@settings(deadline=None, max_examples=60)
def test_numbers_do_not_feel_how_the_samples_are_cut(samples: Samples, piece: int) -> None:
    packed = packed_of(samples)
    for name in NAMES:
        whole = value_of(name, packed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(confidence, "CHUNK_SIZE", piece)
            cut = value_of(name, packed)
        assert cut.value == pytest.approx(whole.value, rel=1e-12, abs=1e-14)
        assert cut.stderr == (None if whole.stderr is None else pytest.approx(whole.stderr, rel=1e-9, abs=1e-12))


@pytest.mark.parametrize("levels", [2, 1000, 1 << 23])
def test_many_samples_have_the_numbers_of_the_twin_that_keeps_everything(levels: int) -> None:
    packed = many(150_000, levels)
    doubt, wrong = packed.abs().double().numpy(), (packed < 0).double().numpy()
    (area, without), (least, least_without) = slow.areas(doubt, wrong), slow.best(wrong)
    calibration = slow.calibration(doubt, wrong, 15)
    truth = {
        "aurc": (area, slow.jackknife(without)),
        "e_aurc": (area - least, slow.jackknife(without - least_without)),
        "adaptive_ece": calibration,
    }
    for name, (number, error) in truth.items():
        found = value_of(name, packed)
        assert found.value == pytest.approx(number, rel=1e-10), name
        assert found.stderr == pytest.approx(error, rel=1e-7), name


def test_if_all_are_equally_sure_the_risk_is_the_error_everywhere() -> None:
    packed = many(200_000, 1)
    assert value_of("aurc", packed).value == pytest.approx(float((packed < 0).double().mean()), rel=1e-12)


@pytest.mark.parametrize("count", [0, 1, 2, 9, 10, 1000, 10**6])
def test_harmonic_numbers_are_sums_of_reciprocals(count: int) -> None:
    truth = float((1 / np.arange(count, 0, -1, dtype=np.longdouble)).sum())
    assert _harmonic(count) == pytest.approx(truth, rel=1e-14, abs=1e-15)


def test_what_follows_takes_no_more_memory_for_more_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confidence, "CHUNK_SIZE", 1 << 12)

    def most(name: str, count: int) -> int:
        codes = many(count, 1 << 23)
        measure = registry.metric.get(name)()
        tracemalloc.start()
        measure.compute({"packed": codes[:, None]})
        found = tracemalloc.get_traced_memory()[1]  # of NumPy: the copy of one row that is sorted is torch's
        tracemalloc.stop()
        return found

    for name in NAMES:
        assert most(name, 80_000) < 1.1 * most(name, 20_000), name


def values_in_bins(values: list[float], bins: int) -> list[int]:
    """The bin of every confidence."""
    log = torch.tensor(values).log()
    each, *rest = tie_groups(sort_by_confidence(pack_confidence(log, torch.ones(len(values), dtype=torch.bool))))
    assert not rest
    doubts = pack_confidence(log, torch.ones(len(values), dtype=torch.bool)).double().tolist()
    homes = dict(zip(each.neg_log_confidence.tolist(), equal_mass(each, len(values), bins).tolist(), strict=True))
    return [homes[doubt] for doubt in doubts]


@given(st.lists(st.sampled_from([0.1, 0.2, 0.5, 0.9, 1.0]), min_size=1, max_size=40), st.integers(1, 20))
@settings(deadline=None, max_examples=60)
def test_equals_share_a_bin_and_it_is_that_of_the_first_of_them(values: list[float], bins: int) -> None:
    truth = [sum(other < value for other in values) * bins // len(values) for value in values]
    assert values_in_bins(values, bins) == truth


def test_the_bin_of_equals_by_hand() -> None:
    assert values_in_bins([0.9, 0.2, 0.9, 0.4, 0.9, 0.9], 3) == [1, 0, 1, 0, 1, 1]


@given(samples=st.integers(1, 60), bins=st.integers(1, 20))
@settings(deadline=None, max_examples=40)
def test_without_equals_bins_hold_equally_many(samples: int, bins: int) -> None:
    counts = np.bincount(values_in_bins([(i + 1) / samples for i in range(samples)], bins), minlength=bins)
    assert counts.max() - counts.min() <= 1


@given(st.lists(st.tuples(st.floats(-9, 9), st.integers(0, 4)), min_size=1, max_size=12), st.integers(0, 12))
@settings(deadline=None, max_examples=60)
def test_tallies_that_are_joined_are_the_tally_of_all(pairs: list[tuple[float, int]], cut: int) -> None:
    values, weights = np.array([v for v, _ in pairs]), np.array([float(w) for _, w in pairs])
    both = Moments.from_weighted(values[:cut], weights[:cut]).merge(
        Moments.from_weighted(values[cut:], weights[cut:]).shift(0.0)
    )
    numbers = values.repeat(weights.astype(int))
    assert both.count == len(numbers)
    if len(numbers):
        assert (both.mean, both.squares) == pytest.approx(
            (numbers.mean(), ((numbers - numbers.mean()) ** 2).sum()), abs=1e-9
        )
