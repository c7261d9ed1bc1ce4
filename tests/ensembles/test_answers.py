"""All answers at once are equal to the functions that compute each of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from plateaux.core.errors import RecipeError
from plateaux.ensembles import conformal
from plateaux.ensembles.answers import Answers, AnswerSettings, is_randomized
from plateaux.ensembles.conformal import KINDS, Conformal, Kind
from plateaux.ensembles.log_probs import log_probabilities
from plateaux.ensembles.ood_scores import OOD_SCORES
from plateaux.ensembles.temperature import (
    ORDERS,
    Order,
    Temperatures,
    apply,
    calibrate_then_pool,
    pool_then_calibrate,
)

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
        assert torch.allclose(found[name], OOD_SCORES[name](LOGITS), atol=1e-14)
    assert torch.allclose(found["ood_score"], OOD_SCORES[score](LOGITS), atol=1e-14)
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
    settings = AnswerSettings("energy", temperatures, fitted, 0.5, max_ood_score=-6.0)
    found = answers(settings)
    values = torch.tensor(temperatures.values)[:, None, None]
    assert torch.allclose(found["ood_score"], OOD_SCORES["energy"](LOGITS / values), atol=1e-6)
    assert torch.equal(found["is_ood"], found["ood_score"] > -6.0)
    assert 0 < int(found["is_ood"].sum()) < 400
    assert torch.allclose(found["probabilities"], log_p.exp(), atol=1e-14)
    expected = fitted.sets(log_p, IDS)
    assert 0 < int(expected.sum()) < expected.numel()
    assert torch.equal(found["prediction_set"], expected)
    assert torch.equal(found["abstain"], (1 - log_p.exp().amax(-1)) > 0.5)
    assert 0 < int(found["abstain"].sum()) < 400
    single = answers(settings, torch.float32)
    assert torch.allclose(single["probabilities"].double(), found["probabilities"], atol=2e-6)
    assert int((single["prediction_set"] != expected).sum()) <= 2  # scores within rounding of the threshold


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_all_answers_of_a_row_come_from_its_probabilities(order: Order, temperature: float) -> None:
    values = (temperature,) if order == "pool then calibrate" else (temperature, 0.7 * temperature, 1.1)
    fitted = Temperatures(order, 3, values)
    found = {score: answers(AnswerSettings(score, fitted)) for score in OOD_SCORES}
    row = found["max_probability"]
    p = row["probabilities"]
    assert torch.allclose(p.log(), apply(LOGITS, fitted), atol=1e-12)
    total = -(p * p.log()).sum(1)
    assert torch.allclose(row["entropy"], total, atol=1e-12)
    assert torch.equal(row["label"], p.argmax(1))
    assert torch.equal(row["probability"], p.amax(1))
    assert torch.allclose(row["ood_score"], -row["probability"], atol=1e-12)
    for name in ("entropy", "mutual_information"):
        assert torch.equal(found[name]["ood_score"], row[name])
    # The joint distribution of member and class, whose classes have the probabilities of the row.
    members = (LOGITS.double() / torch.tensor(values, dtype=torch.float64)[:, None, None]).softmax(-1)
    joint = members * p / members.sum(0)
    assert torch.allclose(joint.sum(0), p, atol=1e-12)
    share = joint.sum(-1)
    by_member = joint / share[..., None]
    mean_entropy = (share * -(by_member * by_member.log()).sum(-1)).sum(0)
    assert torch.allclose(row["mutual_information"], total - mean_entropy, atol=1e-12)
    assert ((row["mutual_information"] > 0) & (row["mutual_information"] < total)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.01, 1.0, 30.0])
def test_members_that_agree_or_are_alone_have_no_mutual_information(temperature: float, dtype: torch.dtype) -> None:
    settings = AnswerSettings(temperatures=Temperatures("pool then calibrate", 3, (temperature,)))
    position = settings.outputs.index("mutual_information")
    for logits in (LOGITS[:1], LOGITS[:1].expand(3, -1, -1), 100 * LOGITS[:1]):
        assert (Answers(settings, dtype)(logits)[position] == 0).all()
    far = 300.0 * torch.tensor([[[1.0, 0.0, 0.0]], [[0.0, 0.99, -math.inf]], [[0.0, 0.98, 0.0]]])
    found = dict(zip(settings.outputs, Answers(settings, dtype)(far), strict=True))
    assert all(found[name].isfinite().all() for name in ("probability", "entropy", "mutual_information"))


def test_raw_answers_are_those_without_a_calibration_under_other_names() -> None:
    temperatures = pool_then_calibrate(LOGITS, LABELS)
    found, bare = answers(AnswerSettings("pds", temperatures, raw=True)), answers(AnswerSettings("pds"))
    assert set(found) == {*bare, *(f"raw_{name}" for name in bare)}
    for name, values in bare.items():
        assert torch.equal(found[f"raw_{name}"], values)
    assert not torch.allclose(found["raw_entropy"], found["entropy"], atol=1e-3)


@pytest.mark.parametrize("kind", ["aps", "raps"])
def test_sets_of_all_classes_are_complete_in_float32(kind: Kind) -> None:
    logits = torch.randn(3, 2000, 40, generator=torch.Generator().manual_seed(0))
    fitted = Conformal(kind, 0.1, 1.0, 100, k_reg=40, randomized=False)
    settings = AnswerSettings(temperatures=Temperatures("pool then calibrate", 3, (1.3,)), conformal=fitted)
    for dtype in (torch.float64, torch.float32):
        found = dict(zip(settings.outputs, Answers(settings, dtype)(logits), strict=True))
        assert found["prediction_set"].all()


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
