"""A cascade is fitted on one half of the held-out samples, calibrated on the other, and evaluated on neither."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from digit_runs import SMALL_MLP, digits_recipe
from reference import cascade as reference

import plateaux
from plateaux.config.recipe import Recipe
from plateaux.core.errors import RecipeError, RunError, StorageError
from plateaux.core.registry import dataset
from plateaux.data.corruptions.corrupt import CORRUPTIONS
from plateaux.data.sources import from_tensors
from plateaux.deploy.predict import predict
from plateaux.ensembles import cascade as cascades
from plateaux.ensembles import conformal, selective, temperature
from plateaux.ensembles.answers import OF_PROBABILITIES, Answers, AnswerSettings
from plateaux.ensembles.cascade import CascadeOptions
from plateaux.ensembles.ood_scores import OOD_SCORES
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.member_outputs import MemberOutputs, error_probability, predict_all
from plateaux.evaluation.splits import eval_split
from plateaux.evaluation.tables import to_markdown
from plateaux.prediction.calibration import Calibration, calibrate, evaluate_calibration
from plateaux.prediction.cascade import ROW, cascade_rows, evaluate_cascade
from plateaux.storage.local_store import LocalStore
from plateaux.storage.run import Run
from plateaux.testing import write_data
from plateaux.training.train import train

RECIPE = digits_recipe(members=4, epochs=3, model=SMALL_MLP)
OPTIONS = CascadeOptions(max_harm=0.05)
FIT: dict[str, Any] = {"cascade": {"max_harm": 0.05}, "target_risk": 0.1}


pytestmark = pytest.mark.xdist_group("cascade")  # one worker trains the run once


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    train(Recipe.from_dict(RECIPE), out)
    return out


def outputs_on(run: Path, split: str) -> MemberOutputs:
    evaluator = Evaluator(Run.open(run))
    return predict_all(evaluator, eval_split(evaluator.recipe, evaluator.data_info, split))


def select(outputs: MemberOutputs, ids: torch.Tensor) -> MemberOutputs:
    return outputs.take(torch.isin(outputs.ids, ids))


@pytest.mark.slow
def test_the_cascade_and_the_calibration_are_fitted_on_two_halves(run: Path) -> None:
    made = calibrate(run, **FIT)
    assert made.cascade is not None
    assert made.cascade_ids is not None
    outputs = outputs_on(run, "validation")
    held, rest = select(outputs, made.cascade_ids), select(outputs, made.ids)
    assert (len(held.ids), len(rest.ids)) == (150, 150)
    assert not torch.isin(held.ids, rest.ids).any()
    assert made.cascade == cascades.fit(held.logits, held.y, OPTIONS)
    assert made.cascade.threshold is not None
    assert 2 <= made.cascade.queried < 4
    # The rest is fitted to the outputs of the cascade, not of all members.
    pooled = made.cascade.log_p(rest.logits)
    value = temperature.fit(pooled, rest.y)
    assert made.temperatures["pool then calibrate"].values == pytest.approx((value,), abs=1e-12)
    assert value != pytest.approx(temperature.pool_then_calibrate(rest.logits, rest.y).values[0], abs=1e-6)
    log_p = (pooled / value).log_softmax(-1)
    assert torch.allclose(made.log_p(rest.logits), log_p, atol=1e-12)
    again = made.log_p(rest.logits)
    expected = tuple(conformal.fit(again, rest.y, rest.ids, alpha, "lac", never_empty=True) for alpha in (0.1, 0.05))
    assert made.sets == expected
    # The OOD scores of a sample come from the members that were queried for it, and from no others.
    queried = made.cascade.members_queried(rest.logits).tolist()
    assert len(set(queried)) > 1
    for name, alarm in made.ood_alarms.items():
        rows = [rest.logits[:count, i : i + 1].double() / value for i, count in enumerate(queried)]
        p = log_p[:, None, None] if name in OF_PROBABILITIES else rows
        scores = [float(OOD_SCORES[name](row)) for row in p]
        if name != "mutual_information":  # see tests/ensembles/test_answers.py
            assert (alarm.mean, alarm.std) == pytest.approx((np.mean(scores), np.std(scores)))
            assert alarm.threshold == pytest.approx(sorted(scores)[143])  # ceil(151 * 0.95) = 144
    risk = error_probability(made.log_p(rest.logits))
    assert made.threshold == selective.fit(risk, made.log_p(rest.logits).argmax(-1) != rest.y, 0.1)


def test_both_lists_of_ids_are_stored_and_read_back(run: Path) -> None:
    made, again = calibrate(run, **FIT), Calibration.read(Run.open(run))
    assert again.to_dict() == made.to_dict() == LocalStore(run).get_json("calibration.json")
    assert again.cascade == made.cascade
    assert made.cascade_ids is not None
    assert again.cascade_ids is not None
    assert torch.equal(again.ids, made.ids)
    assert torch.equal(again.cascade_ids, made.cascade_ids)
    tensors = LocalStore(run).get_tensors("calibration-ids.safetensors")
    assert set(tensors) == {"ids", "cascade_ids"}


def test_a_calibration_without_a_cascade_stores_no_cascade(run: Path) -> None:
    made = calibrate(run)
    stored = LocalStore(run).get_json("calibration.json")
    assert list(stored) == [
        *("split", "fingerprint", "samples", "hashes", "order", "temperatures", "sets", "threshold"),
        *("ood_score", "ood_alarms", "ood_aurocs"),
    ]
    assert set(LocalStore(run).get_tensors("calibration-ids.safetensors")) == {"ids"}
    assert stored["samples"] == 300
    outputs = outputs_on(run, "validation")
    assert set(made.ood_alarms) == set(OOD_SCORES)
    assert made.temperatures["pool then calibrate"] == temperature.pool_then_calibrate(outputs.logits, outputs.y)
    answers = predict(run, split="test")
    assert answers.members_queried is None
    assert "members_queried" not in answers.to_records()[0]
    with pytest.raises(RunError, match=r"has no cascade\. Run: plateaux calibrate .* --cascade"):
        evaluate_cascade(run)


def test_with_too_few_samples_all_members_are_queried_and_the_needed_number_is_reported(
    run: Path, log_lines: list[str]
) -> None:
    log_lines.clear()
    made = calibrate(run, cascade=True)
    assert made.cascade is not None
    assert made.cascade.threshold is None
    (line,) = [line for line in log_lines if "too few" in line and "harm" in line]
    assert "150 held-out samples are too few" in line
    assert "at least 460" in line
    assert "give 920 or more" in line
    answers = predict(run, split="test")
    assert answers.members_queried is not None
    assert answers.members_queried.tolist() == [4] * 599


def test_an_unknown_setting_of_a_cascade_is_refused(run: Path) -> None:
    with pytest.raises(RecipeError, match="cascade has no setting 'max_ham'; did you mean 'max_harm'"):
        calibrate(run, cascade={"max_ham": 0.1})


def test_labels_are_not_used_for_disagreement(run: Path) -> None:
    options = CascadeOptions(max_harm=0.1, kind="differs")
    made = calibrate(run, cascade={"max_harm": 0.1, "kind": "differs"})
    assert made.cascade is not None
    assert made.cascade_ids is not None
    held = select(outputs_on(run, "validation"), made.cascade_ids)
    assert made.cascade == cascades.fit(held.logits, None, options)
    assert made.cascade.kind == "differs"


def test_predictions_come_from_the_members_that_were_queried(run: Path, tmp_path: Path) -> None:
    made = calibrate(run, **FIT)
    assert made.cascade is not None
    outputs, answers = outputs_on(run, "test"), predict(run, split="test", ood_score="variance")
    assert answers.members_queried is not None
    assert len(set(answers.members_queried.tolist())) > 1
    value = made.temperatures["pool then calibrate"].values[0]
    for i in range(0, 599, 7):
        logits = outputs.logits[:, i].double()
        count, p = reference.ask(logits.numpy(), made.cascade.stages, made.cascade.threshold)
        assert answers.members_queried[i] == count
        scaled = (torch.from_numpy(p).log() / value).softmax(-1)
        assert np.allclose(answers.probabilities[i], scaled.numpy(), atol=1e-9)
        members = logits[:count, None] / value
        assert answers.ood_score[i] == pytest.approx(float(OOD_SCORES["variance"](members)), abs=1e-12)
        assert answers.uncertainty.entropy[i] == pytest.approx(float(-(scaled * scaled.log()).sum()), abs=1e-9)
        alone = Answers(AnswerSettings(temperatures=made.temperatures["pool then calibrate"]))(logits[:count, None])
        assert answers.uncertainty.mutual_information[i] == pytest.approx(float(alone[4]), abs=1e-12)
    assert np.array_equal(answers.prediction_set, made.sets[0].sets(made.log_p(outputs.logits), outputs.ids))
    for suffix in (".csv", ".jsonl", ".npz"):
        answers.write(tmp_path / f"a{suffix}")
    table = list(csv.DictReader((tmp_path / "a.csv").open()))
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [int(row["members_queried"]) for row in table] == answers.members_queried.tolist()
    assert [row["members_queried"] for row in lines] == answers.members_queried.tolist()
    assert np.array_equal(np.load(tmp_path / "a.npz")["members_queried"], answers.members_queried)
    assert answers.take(slice(3, 5)).members_queried.tolist() == answers.members_queried[3:5].tolist()  # type: ignore[union-attr]


def test_one_member_has_no_mutual_information_and_no_score_that_compares_members(run: Path) -> None:
    calibrate(run, cascade={"max_harm": 0.2, "stages": (1, 2)})
    answers = predict(run, split="test")
    assert answers.members_queried is not None
    single = answers.members_queried == 1
    assert single.any()
    assert (answers.uncertainty.mutual_information[single] == 0).all()
    assert "mutual information is 0 where members_queried is 1" in answers.remark
    with pytest.raises(RecipeError, match=r"'pds' compares members.*max_probability"):
        predict(run, split="test", ood_score="pds")


def test_a_cascade_requires_pool_then_calibrate(run: Path) -> None:
    with pytest.raises(RecipeError, match=r"order = 'calibrate then pool' was given with a cascade.*--order pool"):
        calibrate(run, **FIT, order="calibrate then pool")


def test_a_shared_backbone_is_refused(tmp_path: Path) -> None:
    model = {"name": "cnn", "backbone": "features", "head": "linear"}
    train(Recipe.from_dict({**RECIPE, "model": model, "train": {"epochs": 1}}), tmp_path)
    with pytest.raises(RecipeError, match=r"share a backbone.*a cascade would save nothing"):
        calibrate(tmp_path, **FIT)


def test_results_equal_a_loop_over_samples(run: Path) -> None:
    made = calibrate(run, **FIT)
    assert made.cascade is not None
    (found,) = evaluate_cascade(run)
    outputs = outputs_on(run, "test")
    queried, right, was_right, harm, differs = 0, 0, 0, 0, 0
    for i, y in enumerate(outputs.y.tolist()):
        logits = outputs.logits[:, i].double().numpy()
        count, p = reference.ask(logits, made.cascade.stages, made.cascade.threshold)
        _, full = reference.ask(logits, made.cascade.stages, None)
        queried, differs = queried + count, differs + (p.argmax() != full.argmax())
        right, was_right = right + (p.argmax() == y), was_right + (full.argmax() == y)
        harm += full.argmax() == y != p.argmax()
    expected = {
        "members queried": queried / 599,
        "differs": differs / 599,
        "accuracy": right / 599,
        "accuracy of all members": was_right / 599,
        "accuracy lost": (was_right - right) / 599,
        "harm": harm / 599,
    }
    assert {name.part[0]: value.value for name, value in found.rows.items()} == pytest.approx(expected)
    assert "with confidence 0.9" in found.definition
    assert found.data["guaranteed"] is True
    assert (found.data["samples"], found.data["cascade"]) == (599, made.cascade.to_dict())


def test_samples_of_both_halves_are_excluded(run: Path) -> None:
    calibrate(run, split="test", fraction=0.5, **FIT)
    with pytest.raises(RunError, match=r"fitted on 300 of the 599 test samples"):
        evaluate_cascade(run)
    with pytest.raises(RunError, match=r"fitted on 300 of the 599 test samples"):
        evaluate_calibration(run)
    (found,) = evaluate_cascade(run, exclude_calibration_ids=True)
    (calibrated,) = evaluate_calibration(run, exclude_calibration_ids=True)
    assert found.data["samples"] == calibrated.data["samples"] == 299
    assert "of the cascade" in calibrated.definition
    assert not any("calibrate then pool" in name for name in calibrated.rows)


def test_other_datasets_need_no_labels_and_have_no_guarantee(run: Path) -> None:
    calibrate(run, **FIT)
    own, other = evaluate_cascade(run, suites={"near": ["digits"]})
    assert other.split == "digits (near)"
    assert {name.part[0] for name in other.rows} == {"members queried", "differs"}
    assert other.definition == "the guarantee of the cascade does not hold for out-of-distribution inputs"
    assert other.data["guaranteed"] is False
    assert other.rows[ROW.with_part("members queried")] == own.rows[ROW.with_part("members queried")]
    x = dataset.get("digits")().test.fetch(torch.arange(20))[0]
    _, array = evaluate_cascade(run, suites={"near": {"first 20": x}})
    assert (array.split, array.data["samples"]) == ("first 20 (near)", 20)
    text = to_markdown([own, other])
    assert "digits: cascade" in text
    assert "does not hold" in text


def test_only_missing_corruptions_are_skipped(tmp_path: Path, log_lines: list[str]) -> None:
    write_data("cifar10", tmp_path / "data")
    data = {"name": "cifar10", "root": str(tmp_path / "data"), "batch_size": 8}
    train(Recipe.from_dict({**RECIPE, "members": 3, "data": data, "train": {"epochs": 1}}), tmp_path / "run")
    calibrate(tmp_path / "run", split="test", fraction=0.5, **FIT)
    (tmp_path / "data" / "CIFAR-10-C" / "fog.npy").write_bytes(b"")
    suites = {"C-5": ["corrupted:all:5"]}
    _, *found = evaluate_cascade(tmp_path / "run", suites=suites, skip_missing=True, exclude_calibration_ids=True)
    assert [each.split for each in found] == [f"corrupted:{kind}:5 (C-5)" for kind in CORRUPTIONS if kind != "fog"]
    assert [line for line in log_lines if line.startswith("corrupted:fog:5 is skipped: ")]


def test_corrupted_samples_have_no_guarantee_and_exclude_the_calibration_samples(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (200, 3, 16, 16), generator=generator, dtype=torch.uint8)
    y = torch.randint(3, (200,), generator=generator)
    data = from_tensors((x[:80], y[:80]), (x[80:], y[80:]), classes=3)
    recipe = {**RECIPE, "members": 3, "data": {"name": "tensors", "batch_size": 64}, "train": {"epochs": 1}}
    train(Recipe.from_dict(recipe), tmp_path, data=data)
    calibrate(plateaux.open_run(tmp_path, data=data), split="test", fraction=0.5, cascade={"max_harm": 0.3})
    splits = ["test", "corrupted:gaussian_noise:5", "corrupted:fog:1"]
    with pytest.raises(RunError, match="fitted on 60 of the 120"):
        evaluate_cascade(plateaux.open_run(tmp_path, data=data), split=splits[1:])
    own, noise, fog = evaluate_cascade(
        plateaux.open_run(tmp_path, data=data), split=splits, exclude_calibration_ids=True
    )
    assert [result.split for result in (own, noise, fog)] == ["test", "gaussian_noise 5", "fog 1"]
    assert {result.data["samples"] for result in (own, noise, fog)} == {60}
    assert [result.data["guaranteed"] for result in (own, noise, fog)] == [True, False, False]
    assert fog.definition == "the guarantee of the cascade does not hold under corruption"
    assert ROW.with_part("accuracy lost") in noise.rows
    assert "| fog 1 (60) |" in to_markdown([own, noise, fog])


def test_a_damaged_cascade_is_refused(run: Path, tmp_path: Path) -> None:
    calibrate(run, **FIT)
    for name, value in (("threshold", 2.0), ("stages", [4]), ("members", 9), ("kind", "hurt")):
        copy = tmp_path / name
        shutil.copytree(run, copy)
        tree = json.loads((copy / "calibration.json").read_text())
        tree["cascade"][name] = value
        opened = Run.open(copy)
        opened.update_info({"calibration_digest": opened.store.put_json("calibration.json", tree)})
        with pytest.raises(StorageError, match=r"calibration\.json"):
            Calibration.read(Run.open(copy))


def test_rows_without_labels_have_no_accuracy() -> None:
    logits = torch.randn(3, 50, 4, generator=torch.Generator().manual_seed(0))
    cascade = cascades.Cascade(3, (2,), 0.0, "differs", 0.1, 0.9, 100, 2, 2.2)
    rows = cascade_rows(logits, None, cascade)
    assert [name.part[0] for name in rows] == ["members queried", "differs"]
    assert 2 < rows[ROW.with_part("members queried")].value < 3
