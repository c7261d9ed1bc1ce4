"""A calibration is fitted on held-out samples, stored with their ids, and never evaluated on the same samples."""

from __future__ import annotations

import csv
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from digit_runs import SMALL_MLP, digits_recipe
from sklearn.metrics import log_loss

from plateaux.config.recipe import Recipe
from plateaux.core.errors import RecipeError, RunError, StorageError
from plateaux.core.registry import dataset
from plateaux.core.row_names import MEAN_PROBABILITY, row_name
from plateaux.deploy.load_predictor import load_predictor
from plateaux.deploy.predict import predict
from plateaux.ensembles import conformal, selective
from plateaux.ensembles.conformal import KINDS
from plateaux.ensembles.ood_scores import DEFAULT_OOD_SCORE, OOD_SCORES
from plateaux.ensembles.temperature import ORDERS, Order, apply
from plateaux.evaluation.evaluate import evaluate
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.member_outputs import MemberOutputs, error_probability, predict_all
from plateaux.evaluation.splits import eval_split
from plateaux.prediction.calibration import Calibration, calibrate, evaluate_calibration
from plateaux.storage.local_store import LocalStore
from plateaux.storage.run import Run
from plateaux.training.train import train

RECIPE = digits_recipe(members=3, epochs=4, model=SMALL_MLP)


pytestmark = pytest.mark.xdist_group("calibration")  # one worker trains the run once


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    train(Recipe.from_dict(RECIPE), out)
    return out


@pytest.mark.slow
def test_a_calibration_is_stored_with_the_ids_of_its_samples(run: Path) -> None:
    made = calibrate(run)
    again = Calibration.read(Run.open(run))
    assert again.to_dict() == made.to_dict() == LocalStore(run).get_json("calibration.json")
    assert torch.equal(again.ids, made.ids)
    assert len(made.ids) == 300


def test_temperatures_lower_the_loss_on_the_samples_they_were_fitted_on(run: Path) -> None:
    made = calibrate(run)
    (raw,) = evaluate(run, split="validation", metrics=["nll"])
    said = outputs_of(run, "validation")
    # Calibrating first promises nothing for the pool: doubt is then added twice.
    log_p = made.log_p(said.logits, "pool then calibrate")
    loss = -float(log_p[torch.arange(300), said.y].mean())
    assert loss <= raw.rows[MEAN_PROBABILITY].value + 1e-9


def outputs_of(run: Path, split: str) -> MemberOutputs:
    evaluator = Evaluator(Run.open(run))
    return predict_all(evaluator, eval_split(evaluator.recipe, evaluator.data_info, split))


@pytest.mark.parametrize("order", ORDERS)
def test_sets_and_threshold_are_fitted_on_the_outputs_of_the_chosen_order(run: Path, order: Order) -> None:
    fitted = calibrate(run, order=order, alphas=[0.1], target_risk=0.1)
    outputs = outputs_of(run, "validation")
    log_p = apply(outputs.logits, fitted.temperatures[order])
    wrong = log_p.argmax(-1) != outputs.y
    assert fitted.sets == (conformal.fit(log_p, outputs.y, outputs.ids, 0.1, "lac", never_empty=True),)
    for name, alarm in fitted.ood_alarms.items():
        scores = predict(run, split="validation", ood_score=name).ood_score
        assert alarm.threshold == pytest.approx(float(np.sort(scores)[285]))  # ceil(301 * 0.95) = 286
        assert (alarm.mean, alarm.std) == pytest.approx((scores.mean(), scores.std()))
    assert fitted.threshold == selective.fit(error_probability(log_p), wrong, 0.1, bound="clopper-pearson")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("randomized", [True, False])
@pytest.mark.parametrize("allow_empty", [True, False])
def test_sets_contain_the_predicted_label_unless_they_may_be_empty(
    run: Path, kind: str, randomized: bool, allow_empty: bool
) -> None:
    options = {"kind": kind, "randomized": randomized, "allow_empty": allow_empty}
    (fitted,) = calibrate(run, conformal=options, alphas=[0.5]).sets
    assert (fitted.kind, fitted.randomized, fitted.never_empty) == (kind, randomized, not allow_empty)
    answers = predict(run, split="test")
    assert answers.prediction_set is not None
    has_label = answers.prediction_set[np.arange(599), answers.label]
    assert has_label.all() == (not allow_empty)
    assert answers.prediction_set.any(1).all() == (not allow_empty)


@pytest.mark.parametrize("order", ORDERS)
def test_all_answers_come_from_the_calibrated_probabilities_and_the_raw_ones_have_other_names(
    run: Path, images: torch.Tensor, order: Order
) -> None:
    made = calibrate(run, order=order)
    for answers in (predict(run, split="test", raw=True), load_predictor(run, raw=True)(images)):
        for prefix, read in (("", answers.to_arrays()), ("raw_", answers.raw)):
            p = read[f"{prefix}probabilities"]
            entropy = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(1)
            assert np.allclose(read[f"{prefix}entropy"], entropy, atol=1e-9)
            assert np.array_equal(read[f"{prefix}probability"], p.max(1))
            assert np.array_equal(read[f"{prefix}label"], p.argmax(1))
            assert np.allclose(read[f"{prefix}ood_score"], -p.max(1), atol=1e-12)
            information = read[f"{prefix}mutual_information"]
            assert ((information >= 0) & (information <= entropy + 1e-9)).all()
        p, outputs = answers.probabilities, outputs_of(run, "test")
        assert np.allclose(p, made.log_p(outputs.logits).exp().numpy(), atol=1e-6)
        assert np.allclose(answers.raw["raw_probabilities"], outputs.logits.softmax(-1).mean(0).numpy(), atol=1e-6)
        assert made.threshold.at is not None
        assert np.array_equal(answers.abstain, 1 - p.max(1) > made.threshold.at)
        assert np.array_equal(answers.prediction_set | np.eye(10, dtype=bool)[answers.label], answers.prediction_set)
    assert not load_predictor(run)(images[:2]).raw
    assert load_predictor(run)(images[:2]).to_records()[0].keys() < answers.to_records()[0].keys()


def test_the_alarm_is_the_score_above_its_threshold_for_every_score(run: Path) -> None:
    made = calibrate(run, ood={"false_alarms": 0.1})
    assert made.ood_score == DEFAULT_OOD_SCORE
    for name, alarm in made.ood_alarms.items():
        answers = predict(run, split="validation", ood_score=name)
        assert answers.is_ood is not None
        assert np.array_equal(answers.is_ood, answers.ood_score > alarm.threshold)
        assert answers.is_ood.sum() == 29  # 300 - ceil(301 * 0.9)
        assert alarm.low < 29 / 300 < alarm.high
    few = calibrate(run, fraction=0.05)
    answers = predict(run, split="test")
    assert (few.ood_alarms[DEFAULT_OOD_SCORE].threshold, answers.is_ood) == (None, None)
    assert "no OOD alarm (is_ood): 15 held-out samples are too few" in answers.remark
    assert answers.to_records()[0]["is_ood"] is None
    with pytest.raises(RecipeError, match="ood has no setting 'false_alarm'; did you mean 'false_alarms'"):
        calibrate(run, ood={"false_alarm": 0.1})


def test_the_score_is_chosen_on_ood_samples_and_its_alarm_fitted_on_other_held_out_samples(run: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (200, 1, 8, 8)).astype(np.uint8)
    made = calibrate(run, ood={"near": {"noise": noise}})
    assert made.ood_score == max(made.ood_aurocs, key=lambda name: made.ood_aurocs[name])
    assert set(made.ood_aurocs) == set(made.ood_alarms) == set(OOD_SCORES)
    assert {alarm.samples for alarm in made.ood_alarms.values()} == {150}
    answers = predict(run, split="test@50")
    assert (len(answers), answers.ood_score_name) == (50, made.ood_score)
    assert load_predictor(run).ood_score == made.ood_score
    assert Calibration.read(Run.open(run)).to_dict() == made.to_dict()


def test_a_calibration_of_an_older_version_is_refused(run: Path) -> None:
    calibrate(run)
    opened = Run.open(run)
    tree = opened.store.get_json("calibration.json")
    del tree["ood_alarms"]
    opened.update_info({"calibration_digest": opened.store.put_json("calibration.json", tree)})
    with pytest.raises(StorageError, match=r"lacks the field 'ood_alarms'.*run `plateaux calibrate` again"):
        predict(run, split="test")


def test_losses_before_and_after_calibration_equal_scikit_learn(run: Path) -> None:
    fitted = calibrate(run)
    (found,) = evaluate_calibration(run)
    outputs = outputs_of(run, "test")
    labels = range(10)
    temperatures = fitted.temperatures["calibrate then pool"].values
    assert len(set(temperatures)) == 3
    for number, logits in enumerate(outputs.logits.double()):
        for when, t in (("before", 1.0), ("after", temperatures[number])):
            truth = log_loss(outputs.y, (logits / t).softmax(-1), labels=labels)
            assert found.rows[row_name(f"member {number}", f"nll {when}")].value == pytest.approx(truth, abs=1e-9)
    mean = outputs.logits.double().softmax(-1).mean(0)
    assert found.rows[MEAN_PROBABILITY.with_part("nll before")].value == pytest.approx(
        log_loss(outputs.y, mean, labels=labels), abs=1e-9
    )


def test_evaluation_on_the_calibration_samples_is_refused(run: Path) -> None:
    calibrate(run, split="test", fraction=0.5)
    with pytest.raises(
        RunError, match=r"fitted on 300 of the 599 test samples.*optimistically biased.*--exclude-calibration-ids"
    ):
        evaluate_calibration(run, split="test")
    (found,) = evaluate_calibration(run, split="test", exclude_calibration_ids=True)
    assert found.data["samples"] == 599 - 300
    assert "fitted on 300 test samples" in found.definition
    calibrate(run, split="test")
    with pytest.raises(RunError, match="none are left"):
        evaluate_calibration(run, split="test", exclude_calibration_ids=True)


def test_coverage_and_risk_on_other_samples_are_close_to_their_targets(run: Path) -> None:
    # Other writers wrote what was trained on: not exchangeable. Sets that are never empty cover more.
    calibrate(run, split="test", fraction=0.5, target_risk=0.05, conformal={"allow_empty": True})
    (found,) = evaluate_calibration(run, exclude_calibration_ids=True)
    name = "ensemble (pool then calibrate)"
    for wanted in (90, 95):
        value = found.rows[row_name(name, f"{wanted} % sets: coverage")]
        assert value.value == pytest.approx(wanted / 100, abs=0.06)
    assert found.rows[row_name(name, "wrong of those answered")].value < 0.1
    for number in range(3):
        before, after = (found.rows[row_name(f"member {number}", f"nll {when}")] for when in ("before", "after"))
        assert after.value < before.value + 0.02


def test_fitting_on_training_samples_is_refused(run: Path) -> None:
    with pytest.raises(RecipeError, match="Fit on held-out samples"):
        calibrate(run, split="train")
    with pytest.raises(RecipeError, match="Fit on held-out samples"):
        calibrate(run, split="train@30")
    with pytest.raises(RecipeError, match="a number above 0"):
        calibrate(run, fraction=0)


def test_a_calibration_of_other_weights_is_refused(run: Path, tmp_path: Path) -> None:
    train(Recipe.from_dict({**RECIPE, "seed": 5}), tmp_path)
    with pytest.raises(RunError, match=r"is not calibrated\. Run: plateaux calibrate"):
        evaluate_calibration(tmp_path)
    calibrate(run)
    Calibration.read(Run.open(run)).write(Run.open(tmp_path))
    refusals = []
    for function in (evaluate_calibration, partial(predict, split="test"), load_predictor):
        with pytest.raises(RunError, match="have changed since it was calibrated") as refusal:
            function(tmp_path)
        refusals.append(str(refusal.value))
    assert len(set(refusals)) == 1


def test_predictions_without_calibration_are_the_mean_probabilities(tmp_path: Path, log_lines: list[str]) -> None:
    train(Recipe.from_dict(RECIPE), tmp_path)
    log_lines.clear()
    answers = predict(tmp_path, split="test")
    assert any("not calibrated" in words for words in log_lines)
    x, _ = dataset.get("digits")().test.fetch(torch.arange(599))
    p = load_predictor(tmp_path).ensemble.predict(x)
    assert answers.label.tolist() == p.argmax(-1).tolist()
    assert np.allclose(answers.probabilities, p.numpy(), atol=1e-6)
    assert np.array_equal(answers.probability, answers.probabilities.max(1))
    assert answers.prediction_set is None
    assert answers.abstain is None
    assert answers.is_ood is None
    assert not answers.calibrated
    assert "not calibrated" in answers.remark
    record = answers.to_records()[0]
    assert (record["prediction_set"], record["abstain"]) == (None, None)
    assert record["label_name"] == str(record["label"])


def test_predictions_are_equal_in_csv_jsonl_and_npz(run: Path, tmp_path: Path) -> None:
    calibrate(run, target_risk=0.02)
    answers = predict(run, split="test", alpha=0.05)
    assert answers.prediction_set is not None
    assert answers.abstain is not None
    assert answers.calibrated
    assert answers.remark == ""
    for suffix in (".csv", ".jsonl", ".npz"):
        answers.write(tmp_path / f"a{suffix}")
    table = list(csv.DictReader((tmp_path / "a.csv").open()))
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    arrays = np.load(tmp_path / "a.npz")
    assert len(table) == len(lines) == len(arrays["label"]) == 599
    for i in (0, 17, 598):
        assert int(table[i]["label"]) == lines[i]["label"] == arrays["label"][i]
        assert table[i]["name"] == lines[i]["name"] == arrays["name"][i] == str(i)
        classes = {str(c) for c in np.flatnonzero(arrays["prediction_set"][i])}
        assert set(table[i]["prediction_set"].split("|")) - {""} == set(lines[i]["prediction_set"]) == classes
        assert (table[i]["abstain"] == "True") == lines[i]["abstain"] == arrays["abstain"][i]
        assert table[i]["label_name"] == lines[i]["label_name"] == arrays["class_names"][arrays["label"][i]]
        assert lines[i]["entropy"] == arrays["entropy"][i]
    frame = answers.to_frame()
    assert list(frame["label"]) == answers.label.tolist()
    with pytest.raises(RecipeError, match=r"\.csv, \.jsonl, \.parquet, \.npz"):
        answers.write(tmp_path / "a.txt")


def test_predict_accepts_another_data_set_and_rejects_unknown_options(run: Path, log_lines: list[str]) -> None:
    calibrate(run)
    assert len(predict(run, split="digits@20")) == 20
    with pytest.raises(RecipeError, match="There is no OOD score called 'smoke'"):
        predict(run, split="test", ood_score="smoke")
    with pytest.raises(RecipeError, match=r"calibrated for 0\.1, 0\.05"):
        predict(run, split="test", alpha=0.2)
    log_lines.clear()
    some = predict(run, split="test", members=[0, 1])
    assert (some.prediction_set, some.calibrated) == (None, False)
    assert some.remark in log_lines
    assert "is for all members" in some.remark
    with pytest.raises(RecipeError, match=r"alpha = 0\.1 was given, but .* is for all members"):
        predict(run, split="test", alpha=0.1, members=[0, 1])


def test_the_default_bound_is_guaranteed_and_a_threshold_without_one_is_warned_about(
    run: Path, log_lines: list[str]
) -> None:
    log_lines.clear()
    made = calibrate(run)
    assert made.threshold.bound == "clopper-pearson"
    assert made.threshold.upper is None or made.threshold.upper <= 0.05
    assert not any("not guaranteed" in line for line in log_lines)
    few = calibrate(run, fraction=0.15, bound="none")
    assert (few.threshold.samples, few.threshold.bound) == (45, "none")
    (line,) = [line for line in log_lines if "not guaranteed" in line]
    assert "45 samples are too few: at least 59 are needed" in line
    assert "--bound clopper-pearson" in line
    log_lines.clear()
    rejected = calibrate(run, fraction=0.15)
    assert rejected.threshold.at is None
    assert any("45 held-out samples are too few even without an error; at least 59" in line for line in log_lines)
