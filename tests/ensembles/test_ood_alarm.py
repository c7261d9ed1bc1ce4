"""The alarm of an OOD score is false for at most the given fraction of samples like those it was fitted on."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from plateaux.core.errors import DataError, RecipeError
from plateaux.ensembles.ood_alarm import OodOptions, fit


@pytest.mark.parametrize("rate", [0.05, 0.2])
def test_the_mean_rate_of_false_alarms_over_splits_is_at_most_the_nominal_one(rate: float) -> None:
    scores = np.random.default_rng(0).normal(size=(2000, 150))
    found = np.array([(row[100:] > fit(row[:100], rate).threshold).mean() for row in scores])
    error = found.std() / np.sqrt(len(found))
    assert rate - 0.015 - 3 * error < found.mean() <= rate + 3 * error


def test_the_interval_is_that_of_clopper_and_pearson_and_contains_the_rate_of_a_threshold() -> None:
    scores = np.random.default_rng(0).normal(size=(400, 100))
    alarms = [fit(row, 0.1) for row in scores]
    interval = stats.binomtest(9, 100).proportion_ci(method="exact")  # nine of 100 samples are above the threshold
    for alarm in alarms:
        assert (alarm.low, alarm.high) == pytest.approx((interval.low, interval.high), abs=1e-6)
    rates = [stats.norm.sf(alarm.threshold) for alarm in alarms]
    inside = [alarm.low <= rate <= alarm.high for alarm, rate in zip(alarms, rates, strict=True)]
    assert np.mean(inside) > 0.92


def test_equal_scores_raise_no_alarm_and_too_few_samples_have_no_threshold() -> None:
    alarm = fit(np.zeros(100), 0.05)
    assert (alarm.threshold, alarm.mean, alarm.std, alarm.low, alarm.remark) == (0.0, 0.0, 0.0, 0.0, "")
    assert fit(np.arange(19.0), 0.05).threshold == 18
    few = fit(np.arange(18.0), 0.05)
    assert (few.threshold, few.samples) == (None, 18)
    assert few.remark == (
        "no OOD alarm (is_ood): 18 held-out samples are too few for a rate of 0.05, which needs at least 19"
    )


@pytest.mark.parametrize("rate", [0.0, 1.0, 5])
def test_no_samples_and_a_rate_that_is_not_between_zero_and_one_are_refused(rate: float) -> None:
    with pytest.raises(DataError, match="No held-out sample is left"):
        fit(np.zeros(0), 0.05)
    with pytest.raises(RecipeError, match=r"false_alarms = .*: give a rate between 0 and 1, such as 0\.05"):
        OodOptions(false_alarms=rate)
