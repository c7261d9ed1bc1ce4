"""All answers at once are equal to the functions that compute each of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from plateaux.core.errors import RecipeError
from plateaux.ensembles import conformal
from plateaux.ensembles.answers import Answers, AnswerSettings, is_randomized
from plateaux.ensembles.conformal import KINDS, Kind
from plateaux.ensembles.log_probs import log_probabilities
from plateaux.ensembles.ood_scores import OOD_SCORES
from plateaux.ensembles.temperature import ORDERS, Order, apply, calibrate_then_pool, pool_then_calibrate

BASE = 3 * torch.randn(1, 400, 6, generator=torch.Generator().manual_seed(2))
LOGITS = BASE + torch.randn(3, 400, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.multinomial(LOGITS.softmax(-1).mean(0), 1, generator=torch.Generator().manual_seed(1))[:, 0]
IDS = torch.arange(400)


def answers(settings: AnswerSettings, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    return dict(zip(settings.outputs, Answers(settings, dtype)(LOGITS), strict=True))


@pytest.mark.parametrize("score", OOD_SCORES)
def test_answers_without_a_calibration_are_the_mean_probability_and_the_scores(score: str) -> None:
    found = answers(AnswerSettings(score))
    log_p = log_probabilities(LOGITS.double())[-2]
    assert torch.allclose(found["probabilities"], log_p.exp(), atol=1e-14)
    assert torch.equal(found["label"], log_p.argmax(-1))
    assert torch.equal(found["probability"], found["probabilities"].amax(-1))
    for name in ("entropy", "mutual_information"):
        assert torch.equal(found[name], OOD_SCORES[name](LOGITS))
    assert torch.equal(found["ood_score"], OOD_SCORES[score](LOGITS))
    assert set(found) == {"label", "probability", "probabilities", "entropy", "mutual_information", "ood_score"}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("never_empty", [False, True])
def test_calibrated_answers_use_the_fitted_temperatures_sets_and_threshold(
    order: Order, kind: Kind, never_empty: bool
) -> None:
    fit = pool_then_calibrate if order == "pool then calibrate" else calibrate_then_pool
    temperatures = fit(LOGITS, LABELS)
    log_p = apply(LOGITS, temperatures)
    fitted = conformal.fit(
        log_p, LABELS, IDS, 0.6, kind, randomized=False, never_empty=never_empty, k_reg=2, penalty=0.05
    )
    settings = AnswerSettings("energy", temperatures, fitted, 0.5)
    found = answers(settings)
    assert torch.allclose(found["probabilities"], log_p.exp(), atol=1e-14)
    expected = fitted.sets(log_p, IDS)
    assert 0 < int(expected.sum()) < expected.numel()
    assert torch.equal(found["prediction_set"], expected)
    assert torch.equal(found["abstain"], (1 - log_p.exp().amax(-1)) > 0.5)
    assert 0 < int(found["abstain"].sum()) < 400
    single = answers(settings, torch.float32)
    assert torch.allclose(single["probabilities"].double(), found["probabilities"], atol=2e-6)
    assert int((single["prediction_set"] != expected).sum()) <= 2  # scores within rounding of the threshold


def test_sets_without_a_threshold_contain_every_class_and_a_threshold_below_zero_rejects_every_sample() -> None:
    temperatures = pool_then_calibrate(LOGITS, LABELS)
    fitted = conformal.fit(apply(LOGITS, temperatures)[:3], LABELS[:3], IDS[:3], 0.1, "aps")
    found = answers(AnswerSettings("pds", temperatures, fitted, -1.0))
    assert found["prediction_set"].all()
    assert found["abstain"].all()


def test_randomized_sets_and_unknown_scores_are_refused() -> None:
    fitted = conformal.fit(apply(LOGITS, pool_then_calibrate(LOGITS, LABELS)), LABELS, IDS, 0.1, "aps")
    assert is_randomized(fitted)
    assert not is_randomized(replace(fitted, kind="lac"))
    with pytest.raises(RecipeError, match="--conformal lac, or with --no-randomized"):
        Answers(AnswerSettings(conformal=fitted))
    with pytest.raises(RecipeError, match="There is no OOD score called 'smoke'"):
        AnswerSettings("smoke")
