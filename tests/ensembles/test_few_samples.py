"""Rejection thresholds fitted on few samples: guaranteed and actual risk."""

from __future__ import annotations

import pytest
import torch

from plateaux.ensembles.selective import fit, min_samples


@pytest.mark.slow
def test_with_72_samples_only_the_default_bound_controls_the_risk() -> None:
    """Errors have probability u at error probability u, so a threshold t accepts samples with a risk of t / 2."""
    exceeded = {"none": 0, "clopper-pearson": 0}
    for seed in range(200):
        u = torch.rand(72, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / 2
        wrong = torch.rand(72, generator=torch.Generator().manual_seed(1000 + seed), dtype=torch.float64) < u
        for bound in exceeded:
            found = fit(u, wrong, 0.05, bound=bound)  # type: ignore[arg-type]
            exceeded[bound] += (found.at or 0.0) / 2 > 0.05
    assert exceeded["none"] > 60
    assert exceeded["clopper-pearson"] <= 20  # at most 5 %, and its binomial error


def test_the_remark_of_a_threshold_without_a_bound_states_the_possible_risk() -> None:
    found = fit(torch.arange(72.0), torch.zeros(72), 0.05, bound="none")
    assert found.remark.startswith(
        "The risk of 0.05 is not guaranteed without a bound: 0 errors in 72 accepted held-out samples are consistent "
        "with a risk of up to 0.041."
    )
    assert fit(torch.arange(72.0), torch.zeros(72), 0.05).remark == ""


def test_the_smallest_number_of_samples_is_the_first_that_passes() -> None:
    for bound in ("clopper-pearson", "hoeffding"):
        needed = min_samples(0.1, bound=bound)  # type: ignore[arg-type]
        assert needed is not None
        for count in (needed - 1, needed):
            found = fit(torch.arange(float(count)), torch.zeros(count), 0.1, bound=bound)  # type: ignore[arg-type]
            assert (found.at is not None) is (count == needed)
    assert f"at least {min_samples(0.1)} are needed" in fit(torch.arange(9.0), torch.zeros(9), 0.1).remark
