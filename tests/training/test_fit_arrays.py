"""`plateaux.fit`: the recipe it writes, its data, and the run that the command line continues."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import Dataset
from typer.testing import CliRunner

import plateaux
from plateaux.cli.main import app
from plateaux.errors import PlateauxError
from plateaux.training.fit_arrays import build_recipe

FAST: dict[str, Any] = {"model": {"hidden_sizes": [8]}, "executor": {"threads": 1}}


def blobs(count: int = 120) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return four features of three classes, far from mean 0 and standard deviation 1."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, count)
    return rng.normal(size=(count, 4)) * [1, 10, 100, 1000] + 50 * y[:, None] * [1, 10, 100, 1000], y


def small_net(*, shape: tuple[int, ...], classes: int, width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], width), nn.ReLU(), nn.Linear(width, classes))


class Points(Dataset[tuple[torch.Tensor, int]]):
    """A data set in Python code."""

    classes = ("low", "high")

    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(i % 2), i / 60]), i % 2


def fit(out: Path, **changed: Any) -> plateaux.Run:
    x, y = blobs()
    return plateaux.fit(x, y, **{"model": "mlp", "members": 2, "epochs": 2, "settings": FAST, "out": out, **changed})


def weights(run: plateaux.Run) -> list[dict[str, torch.Tensor]]:
    return [run.weights(number) for number in range(run.recipe.members)]


def assert_equal_weights(first: plateaux.Run, second: plateaux.Run) -> None:
    for a, b in zip(weights(first), weights(second), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


def call(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout if "--json" in words else result.output


def test_fit_trains_the_weights_that_train_gives_for_the_recipe_it_writes(tmp_path: Path) -> None:
    run = fit(tmp_path / "fit")
    root = json.dumps(str(tmp_path / "fit"))
    recipe = plateaux.Recipe.load(tmp_path / "fit" / "recipe.toml", [f"data.root={root}"])
    assert_equal_weights(run, plateaux.train(recipe, tmp_path / "train"))


def test_fit_is_train_with_the_data_of_from_arrays(tmp_path: Path) -> None:
    run, data = fit(tmp_path / "fit"), plateaux.from_arrays(*blobs())
    assert_equal_weights(run, plateaux.train(run.recipe, tmp_path / "train", data=data))
    assert_equal_weights(run, plateaux.fit(data, model="mlp", members=2, epochs=2, settings=FAST, out=tmp_path / "b"))


def test_the_recipe_has_the_documented_defaults(tmp_path: Path) -> None:
    recipe = fit(tmp_path / "run").recipe
    short = plateaux.Recipe.from_dict({"data": {"name": "moons"}, "model": {"name": "mlp"}})
    assert (recipe.method.name, recipe.optimizer, recipe.lr_scheduler) == ("sam", short.optimizer, short.lr_scheduler)
    assert build_recipe(plateaux.from_arrays(*blobs()), "mlp", members=1, method="sam", seed=0, settings={}).train == (
        short.train
    )
    assert (recipe.data.batch_size, recipe.data.validation_split) == (32, 0.1)
    run = fit(tmp_path / "other", settings={**FAST, "optimizer": {"name": "AdamW", "lr": 0.01}})
    assert (run.recipe.optimizer.options, run.recipe.optimizer.lr) == ({}, 0.01)


def test_all_samples_are_for_training_if_there_is_no_test_set(tmp_path: Path) -> None:
    for number, test in enumerate((None, 0)):
        run = fit(tmp_path / f"all-{number}", test=test)
        data = run.info.data
        assert (data.train.samples, data.test.samples, run.recipe.data.validation_split) == (120, 0, 0.0)
        assert len(plateaux.load_predictor(run)(blobs()[0].astype("float32"))) == 120
        with pytest.raises(PlateauxError, match="has no test samples, because it was trained on all of them"):
            plateaux.evaluate(run)
    found = plateaux.evaluate(run, split={"again": blobs()}, metrics="accuracy")
    assert found[0].data["samples"] == 120
    code, output = call("train", str(run), "--set", "members=3")  # has nothing to evaluate
    assert (code, str(run) in output) == (0, True)
    points = plateaux.fit(Points(), model="mlp", members=1, epochs=1, test=None, settings=FAST, out=tmp_path / "p")
    assert (points.info.data.train.samples, points.info.data.test.samples) == (60, 0)


def test_a_run_without_out_is_in_a_temporary_folder_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = plateaux.fit(*blobs(), model="mlp", members=1, epochs=1, settings=FAST)
    assert Path(str(run)).parent == tmp_path
    assert f"The run is {run}, in a temporary folder" in caplog.text


@pytest.mark.parametrize(("samples", "size"), [(9_999, 32), (10_000, 128)])
def test_batches_are_larger_from_ten_thousand_training_samples_on(samples: int, size: int) -> None:
    x, y = torch.zeros(samples, 1), torch.arange(samples) % 2
    data = plateaux.from_tensors((x, y), (x[:2], y[:2]), classes=2)
    recipe = build_recipe(data, "mlp", members=1, method="sam", epochs=1, seed=0, settings={})
    assert recipe.data.batch_size == size


def test_the_test_samples_may_share_memory_with_the_training_samples(tmp_path: Path) -> None:
    x, y = blobs()
    x = x.astype(np.float32)
    run = fit(tmp_path / "run", test=(x[:50], y[:50]))
    stored = safetensors.torch.load_file(tmp_path / "run" / "data.safetensors")
    assert torch.equal(stored["x_test"], stored["x_train"][:50])
    assert_equal_weights(run, fit(tmp_path / "copy", test=(x[:50].copy(), y[:50].copy())))


@pytest.mark.process
def test_the_command_line_continues_a_run_of_arrays(tmp_path: Path) -> None:
    """Another process, in another folder, after the run folder has moved."""
    fit(tmp_path / "first")
    moved = (tmp_path / "first").rename(tmp_path / "moved")
    words = ("train", str(moved), "--set", "members=3", "--no-evaluate")
    subprocess.run([sys.executable, "-m", "plateaux", *words], check=True, cwd="/", capture_output=True)
    assert_equal_weights(plateaux.Run.open(moved), fit(tmp_path / "whole", members=3))
    code, output = call("status", str(moved), "--json")
    assert code == 0
    assert [row["state"] for row in json.loads(output)["members"]] == ["finished"] * 3
    code, output = call("evaluate", str(moved), "--metrics", "accuracy", "--json")
    assert code == 0
    assert json.loads(output)[0]["rows"] == plateaux.evaluate(moved, metrics="accuracy")[0].to_dict()["rows"]
    assert call("calibrate", str(moved), "--split", "test")[0] == 0
    assert call("predict", str(moved), "--split", "test", "-o", str(tmp_path / "p.csv"))[0] == 0
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 1 + 24
    code, output = call("verify", str(moved))
    assert code == 0, output


def test_the_same_call_resumes_and_other_data_are_refused(tmp_path: Path) -> None:
    first = weights(fit(tmp_path / "run"))
    assert all(
        torch.equal(a["1.weight"], b["1.weight"]) for a, b in zip(first, weights(fit(tmp_path / "run")), strict=True)
    )
    x, y = blobs(121)
    with pytest.raises(PlateauxError, match="was trained on other data"):
        plateaux.fit(x, y, model="mlp", members=2, epochs=2, settings=FAST, out=tmp_path / "run")


def test_stored_mean_and_std_standardize_new_inputs(tmp_path: Path) -> None:
    x, y = blobs()
    run = fit(tmp_path / "run", members=1)
    data = plateaux.from_arrays(x, y)
    train_x = data.train.x.double()  # type: ignore[attr-defined]
    module = plateaux.load_predictor(run).ensemble.members[0]
    scaled = ((torch.tensor(x) - train_x.mean(0)) / train_x.std(0, correction=0)).float()
    expected = module(scaled).softmax(1)
    predicted = plateaux.load_predictor(run)(x.astype("float32")).probabilities
    assert np.allclose(predicted, expected.detach().numpy(), atol=1e-5)


def test_class_names_of_text_labels_are_predicted(tmp_path: Path) -> None:
    x, y = blobs()
    run = plateaux.fit(
        x, np.array(["c", "a", "b"])[y], model="mlp", members=1, epochs=8, settings=FAST, out=tmp_path / "r"
    )
    assert run.info.data.labels == ("a", "b", "c")
    records = plateaux.load_predictor(run)(x[:20].astype("float32")).to_records()
    assert {record["label_name"] for record in records} <= {"a", "b", "c"}


def test_a_model_of_a_module_is_named_in_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fit_networks.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Sequential):\n"
        "    def __init__(self, *, shape, classes, width=4):\n"
        "        super().__init__(nn.Linear(shape[0], width), nn.ReLU(), nn.Linear(width, classes))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from fit_networks import Net  # type: ignore[import-not-found]

    run = fit(tmp_path / "run", model=Net, settings={"model": {"width": 5}})
    assert run.recipe.model.name == "fit_networks:Net"
    assert len(run.weights(0)["0.weight"]) == 5
    words = ("train", str(tmp_path / "run"), "--set", "members=3", "--no-evaluate")
    assert call(*words)[0] == 6  # untrusted
    assert call(*words, "--trust", "fit_networks")[0] == 0


def test_a_function_of_this_process_trains_and_the_command_line_names_the_call(tmp_path: Path) -> None:
    def local_net(*, shape: tuple[int, ...], classes: int) -> nn.Module:
        return small_net(shape=shape, classes=classes)

    run = fit(tmp_path / "run", model=local_net, settings={})
    assert len(run.weights(1)["0.weight"]) == 4
    code, output = call("train", str(tmp_path / "run"))
    assert code == 4
    assert f'plateaux.fit(x, y, model=local_net, out="{tmp_path}/run")' in output.replace("\n", "")


def test_data_in_python_code_are_named_in_the_error_of_the_command_line(tmp_path: Path) -> None:
    run = plateaux.fit(Points(), model="mlp", members=1, epochs=1, settings=FAST, out=tmp_path / "run")
    assert run.info.data.labels == ("low", "high")
    assert not (tmp_path / "run" / "data.safetensors").exists()
    code, output = call("train", str(run))
    assert code == 4
    assert "plateaux.fit(dataset, model='mlp'" in output
    code, output = call("evaluate", str(run))
    assert code == 3
    assert "data=plateaux.from_arrays(...)" in output
    assert (
        plateaux.evaluate(plateaux.open_run(run, data=plateaux.from_arrays(Points())), metrics="accuracy")[0].metric
        == "accuracy"
    )


def test_arrays_that_are_too_large_to_store_are_named_in_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plateaux.training.from_arrays.MAX_STORED_BYTES", 100)
    run = fit(tmp_path / "run")
    for command in ("train", "evaluate"):
        code, output = call(command, str(run))
        assert code in (3, 4)
        assert "passed in Python" in output
    assert (
        plateaux.evaluate(plateaux.open_run(run, data=plateaux.from_arrays(*blobs())), metrics="accuracy")[0].metric
        == "accuracy"
    )


def test_a_run_folder_is_resumed_in_place(tmp_path: Path) -> None:
    run = fit(tmp_path / "run")
    code, output = call("train", str(run), "--out", str(tmp_path / "other"))
    assert code == 2
    assert "leave out --out" in output


def test_replaced_data_are_refused(tmp_path: Path) -> None:
    run, other = fit(tmp_path / "run"), plateaux.from_arrays(*blobs(150))
    plateaux.train(run.recipe, tmp_path / "other", data=other)
    for name in ("data.safetensors", "data.json"):
        (tmp_path / "other" / name).rename(tmp_path / "run" / name)
    with pytest.raises(PlateauxError, match="samples have changed since"):
        plateaux.evaluate(run)


def test_damaged_data_are_refused(tmp_path: Path) -> None:
    run = fit(tmp_path / "run")
    file = tmp_path / "run" / "data.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(PlateauxError, match="is damaged"):
        plateaux.evaluate(run)
    assert call("verify", str(run))[0] == 4


def test_accepted_changes_of_the_data_replace_the_stored_ones(tmp_path: Path) -> None:
    run = fit(tmp_path / "run")
    data = plateaux.from_arrays(*blobs(150))
    plateaux.train(run.recipe, tmp_path / "run", data=data, accept_changes=True)
    stored = safetensors.torch.load_file(tmp_path / "run" / "data.safetensors")
    assert len(stored["y_train"]) == 120
    assert plateaux.evaluate(tmp_path / "run", metrics="accuracy")[0].metric == "accuracy"


def test_a_soup_has_the_data_of_its_run(tmp_path: Path) -> None:
    run = fit(tmp_path / "run")
    soup = plateaux.soup(run, tmp_path / "soup", split="test", max_barrier=100.0)
    assert (tmp_path / "soup" / "data.safetensors").read_bytes() == (tmp_path / "run" / "data.safetensors").read_bytes()
    assert call("evaluate", str(soup), "--metrics", "accuracy")[0] == 0


def test_label_noise_is_applied_to_the_stored_labels_once(tmp_path: Path) -> None:
    settings = {**FAST, "data": {"label_noise": 0.5}}
    run = fit(tmp_path / "run", settings=settings)
    stored = safetensors.torch.load_file(tmp_path / "run" / "data.safetensors")["y_train"]
    clean = plateaux.from_arrays(*blobs()).train
    assert torch.equal(stored, clean.y)  # type: ignore[attr-defined]
    assert plateaux.evaluate(run, split="train", metrics="accuracy")[0].metric == "accuracy"


def test_token_ids_for_an_mlp_are_refused(tmp_path: Path) -> None:
    x = np.arange(80).reshape(20, 4)
    with pytest.raises(PlateauxError, match=r"x.astype\('float32'\)"):
        plateaux.fit(x, np.arange(20) % 2, model="mlp", out=tmp_path / "run")


def test_settings_cannot_contradict_the_arguments(tmp_path: Path) -> None:
    for settings in ({"members": 3}, {"seed": 1}, {"model": {"name": "cnn"}}, {"data": {"name": "digits"}}):
        with pytest.raises(PlateauxError, match="use the argument of fit"):
            fit(tmp_path / "run", settings=settings)
    with pytest.raises(PlateauxError, match="did you mean"):
        fit(tmp_path / "run", settings={"optimiser": {"lr": 1}})
    with pytest.raises(PlateauxError, match="leave out y"):
        plateaux.fit(plateaux.from_arrays(*blobs()), blobs()[1], model="mlp", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
