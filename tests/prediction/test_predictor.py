"""A predictor of a run: equal to the ensemble and to `predict`, for every kind of input, from several threads."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from digit_runs import digits_recipe
from PIL import Image
from torch import nn

import plateaux
from plateaux.core.errors import DataError, RecipeError, RunError
from plateaux.deploy.load_predictor import load_predictor
from plateaux.deploy.predict import predict
from plateaux.prediction.calibration import calibrate
from plateaux.prediction.predictor import Predictor
from plateaux.storage.run import Run

RECIPE = digits_recipe(members=3)


pytestmark = pytest.mark.xdist_group("predictor")  # one worker trains the run once


@pytest.fixture(scope="module")
def uncalibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    plateaux.train(plateaux.Recipe.from_dict(RECIPE), out)
    return out


@pytest.fixture(scope="module")
def run(uncalibrated: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("calibrated") / "run"
    shutil.copytree(uncalibrated, out)
    calibrate(out, target_risk=0.1)
    return out


def test_a_predictor_gives_the_answers_of_predict_and_of_the_ensemble(run: Path, images: torch.Tensor) -> None:
    predictor = load_predictor(run, threads=1)
    found, expected = predictor(images), predict(run, split="test")
    assert len(found) == 599
    assert found.label.tolist() == expected.label.tolist()
    for name in ("probability", "probabilities", "ood_score"):
        assert np.allclose(getattr(found, name), getattr(expected, name), atol=1e-5), name
    assert np.allclose(found.uncertainty.entropy, expected.uncertainty.entropy, atol=1e-5)
    assert np.allclose(found.uncertainty.mutual_information, expected.uncertainty.mutual_information, atol=1e-5)
    assert found.prediction_set is not None
    assert expected.prediction_set is not None
    assert found.abstain is not None
    assert 0 < int(found.abstain.sum()) < 599
    assert int((found.prediction_set != expected.prediction_set).sum()) <= 1
    assert found.calibrated
    assert found.remark == ""
    assert found.prediction_set_names is not None
    sets = [set(row) for row in found.prediction_set_names]
    assert sets == [{str(n) for n in np.flatnonzero(row)} for row in found.prediction_set]
    assert all(row[0] == name for row, name in zip(found.prediction_set_names, found.label_name, strict=True))
    assert found.is_ood is not None
    assert 0 < int(found.is_ood.sum()) < 599
    assert int((found.is_ood != expected.is_ood).sum()) <= 1


def test_an_uncalibrated_run_gives_the_mean_probability_and_a_remark(uncalibrated: Path, images: torch.Tensor) -> None:
    predictor = load_predictor(uncalibrated, ood_score="pds")
    found = predictor(images[:70])
    assert np.allclose(found.probabilities, predictor.ensemble.predict(images[:70]).numpy(), atol=1e-5)
    assert (found.prediction_set, found.abstain, found.calibrated) == (None, None, False)
    assert "plateaux calibrate" in found.remark
    assert found.ood_score_name == "pds"
    record = found.to_records()[0]
    assert record["prediction_set"] is None
    assert record["abstain"] is None
    assert sum(record["probabilities"].values()) == pytest.approx(1)
    with pytest.raises(RecipeError, match="is not calibrated"):
        load_predictor(uncalibrated, alpha=0.1)


def test_batches_do_not_change_answers_and_one_input_is_one_row(run: Path, images: torch.Tensor) -> None:
    whole = load_predictor(run)(images[:50])
    parts = load_predictor(run, max_batch=7)(images[:50])
    assert np.allclose(whole.probabilities, parts.probabilities, atol=1e-6)
    assert len(parts) == 50
    one = load_predictor(run)(images[3])
    assert len(one) == 1
    assert np.allclose(one.probabilities[0], whole.probabilities[3], atol=1e-6)
    some = whole.take(slice(3, 5))
    assert some.label.tolist() == whole.label[3:5].tolist()
    assert len(some.uncertainty.entropy) == 2
    with pytest.raises(RecipeError, match="max_batch = 0"):
        load_predictor(run, max_batch=0)
    with pytest.raises(RecipeError, match="threads = 0"):
        load_predictor(run, threads=0)


def test_image_files_give_the_answers_of_arrays_and_keep_their_names(
    run: Path, images: torch.Tensor, tmp_path: Path
) -> None:
    files = [tmp_path / f"{number}.png" for number in range(3)]
    for file, image in zip(files, images, strict=False):
        Image.fromarray(image[0].numpy(), "L").save(file)
    predictor = load_predictor(run)
    found = predictor(files)
    assert found.names == tuple(str(file) for file in files)
    assert np.array_equal(found.probabilities, predictor(images[:3]).probabilities)
    assert [record["name"] for record in found.to_records()] == list(found.names)
    with pytest.raises(DataError, match="from 0 to 255"):
        predictor(images[:3].float())


def test_threads_share_a_predictor(run: Path, images: torch.Tensor) -> None:
    predictor = load_predictor(run, threads=1)
    expected = [predictor(image).probabilities for image in images[:24]]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(3):
            found = list(pool.map(lambda image: predictor(image).probabilities, images[:24]))
            assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def test_the_number_of_threads_is_restored(run: Path, images: torch.Tensor) -> None:
    before = torch.get_num_threads()
    load_predictor(run, threads=before + 1)(images[:2])
    assert torch.get_num_threads() == before


def test_sets_randomized_by_id_are_left_out_and_deterministic_ones_are_not(
    uncalibrated: Path, tmp_path: Path, images: torch.Tensor, log_lines: list[str]
) -> None:
    shutil.copytree(uncalibrated, tmp_path / "run")
    calibrate(tmp_path / "run", conformal="aps")
    found = load_predictor(tmp_path / "run")(images[:5])
    assert found.prediction_set is None
    assert "randomized by sample id" in found.remark
    assert any("--no-randomized" in line for line in log_lines)
    assert predict(tmp_path / "run", split="test").prediction_set is not None
    calibrate(tmp_path / "run", conformal={"kind": "aps", "randomized": False})
    found = load_predictor(tmp_path / "run", alpha=0.05)(images)
    assert found.prediction_set is not None
    assert found.prediction_set.any(1).all()
    expected = predict(tmp_path / "run", split="test", alpha=0.05).prediction_set
    assert int((found.prediction_set != expected).sum()) <= 2
    with pytest.raises(RecipeError, match=r"calibrated for 0\.1, 0\.05"):
        load_predictor(tmp_path / "run", alpha=0.2)


def test_a_run_without_a_record_of_its_inputs_is_refused(uncalibrated: Path) -> None:
    opened = Run.open(uncalibrated)
    bare = replace(opened, info=replace(opened.info, inputs=None))
    with pytest.raises(RunError, match="no record of the inputs"):
        plateaux.prediction.contract.InputContract.from_run(bare)


def test_nan_answers_are_an_error(run: Path, images: torch.Tensor) -> None:
    predictor = load_predictor(run)
    with torch.no_grad():
        next(predictor.ensemble.members[0].parameters()).fill_(float("nan"))
    with pytest.raises(DataError, match="returned NaN"):
        predictor(images[:2])


def test_a_model_passed_to_train_must_be_passed_to_load_predictor(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Any) -> Any:
            return self.layer(x)

    x = torch.randn(120, 4, generator=torch.Generator().manual_seed(0))
    data = plateaux.from_tensors((x, x.argmax(1) % 3), (x[:30], x[:30].argmax(1) % 3), classes=3)
    recipe = plateaux.Recipe.from_dict(
        {"members": 2, "train": {"epochs": 1}, "data": {"name": "own", "batch_size": 32}, "model": {"name": "net"}}
    )
    run = plateaux.train(recipe, tmp_path / "run", data=data, model=Net)
    with pytest.raises(RunError, match="Pass it again"):
        load_predictor(run.store.root)
    predictor = load_predictor(plateaux.open_run(run, model=Net))
    assert isinstance(predictor, Predictor)
    found = predictor(x[:5].numpy())
    assert np.allclose(found.probabilities, predictor.ensemble.predict(x[:5]).numpy(), atol=1e-6)
    assert found.class_names == ("0", "1", "2")
    with pytest.raises(DataError, match="another scale"):
        predictor(x[:5] * 1000)


def test_imported_weights_and_soups_have_an_input_contract(run: Path, tmp_path: Path, images: torch.Tensor) -> None:
    weights = [str(path) for path in sorted((run / "members").glob("*/*.safetensors")) if "weights" in path.name]
    recipe = plateaux.Recipe.from_dict({**RECIPE, "members": len(weights)})
    imported = plateaux.import_weights(tmp_path / "imported", recipe, weights)
    predictor = load_predictor(imported)
    expected = predictor.ensemble.predict(images[:9]).numpy()
    assert np.allclose(predictor(images[:9]).probabilities, expected, atol=1e-5)
    soup = plateaux.soup(run, tmp_path / "soup", max_barrier=100.0)
    assert len(load_predictor(soup)(images[:9])) == 9
