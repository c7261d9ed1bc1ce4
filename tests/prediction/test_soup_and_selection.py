"""Soups of members without a loss barrier, and selections of members, evaluated on samples not used for selection."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import plateaux
from plateaux.config.recipe import Recipe
from plateaux.core.errors import RecipeError, RunError
from plateaux.core.row_names import MEAN_PROBABILITY
from plateaux.deploy.load_predictor import load_predictor
from plateaux.evaluation.evaluate import evaluate
from plateaux.prediction.selection import EnsembleSelection, evaluate_selection, select_members
from plateaux.prediction.soup import soup
from plateaux.storage.run import Run
from plateaux.training.train import train
from tests.cli.test_main import call

RECIPE = {
    "members": 3,
    "data": {"name": "digits", "batch_size": 64, "validation_split": 200},
    "model": {"name": "mlp", "hidden_sizes": [16]},
    "optimizer": {"name": "SGD", "lr": 0.1, "momentum": 0.9},
    "train": {"epochs": 2},
    "executor": {"threads": 1},
}


pytestmark = pytest.mark.xdist_group("soup")  # one worker trains the run once


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three members that share no start."""
    return _trained(tmp_path_factory.mktemp("apart"))


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three members trained on, a little, from one network; with BatchNorm."""
    folder = tmp_path_factory.mktemp("near")
    net = {"name": "resnet8", "width": 4}
    first = train(Recipe.from_dict({**RECIPE, "members": 1, "model": net, "train": {"epochs": 6}}), folder / "first")
    save_file(first.weights(0), folder / "start.safetensors")
    model = {**net, "weights": str(folder / "start.safetensors")}
    recipe = {**RECIPE, "model": model, "optimizer": {"name": "SGD", "lr": 0.01}, "train": {"epochs": 1}}
    train(Recipe.from_dict(recipe), folder / "run")
    return folder / "run"


def _trained(out: Path, **changes: object) -> Path:
    train(Recipe.from_dict({**RECIPE, **changes}), out)
    return out


def test_a_soup_of_members_with_a_loss_barrier_is_rejected(apart: Path, tmp_path: Path, log_lines: list[str]) -> None:
    log_lines.clear()
    with pytest.raises(RecipeError, match=r"barrier|initiali|start"):
        soup(apart, tmp_path / "soup")
    assert log_lines[0].startswith("loss barrier between members 0 and 1: ")
    assert not (tmp_path / "soup").exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["uniform", "greedy"])
def test_a_soup_is_a_run_of_one_member(near: Path, how: str, tmp_path: Path) -> None:
    made = soup(near, tmp_path / "soup", strategy=how)  # type: ignore[arg-type]
    about = json.loads((tmp_path / "soup/selection.json").read_text())
    assert about["kind"] == f"{how} soup"
    assert len(about["ids"]) == 200
    if how == "greedy":
        with pytest.raises(RunError, match="were selected on these samples"):
            evaluate(tmp_path / "soup", split="validation", metrics=["nll"])
    old = [Run.open(near).weights(number) for number in about["members"]]
    for name, tensor in made.weights(0).items():
        if "running" not in name and "num_batches" not in name:
            wanted = torch.stack([each[name].double() for each in old]).mean(0)
            assert torch.allclose(tensor.double(), wanted, atol=1e-7), name
    (one,) = evaluate(made.store.root, metrics=["accuracy"])
    (many,) = evaluate(near, metrics=["accuracy"])
    assert one.rows["member 0"].value > many.rows["mean of members"].value - 0.03


def test_batchnorm_statistics_of_a_soup_are_recomputed(near: Path, tmp_path: Path) -> None:
    made = soup(near, tmp_path / "soup")
    names = [name for name in made.weights(0) if name.endswith("running_mean")]
    old = torch.stack([Run.open(near).weights(n)[names[0]] for n in range(3)]).mean(0)
    assert not torch.equal(made.weights(0)[names[0]], old)


def test_different_architectures_and_training_samples_are_rejected(tmp_path: Path, apart: Path) -> None:
    mixed = _trained(tmp_path / "mixed", model={"name": "mlp", "hidden_sizes": [[8], [16], [16]]})
    with pytest.raises(RunError, match="differ in architecture"):
        soup(mixed, tmp_path / "soup")
    with pytest.raises(RecipeError, match="Use validation or test"):
        soup(apart, tmp_path / "soup", split="train")
    with pytest.raises(RecipeError, match="Use validation or test"):
        select_members([apart], size=2, split="train@20")


def test_a_soup_of_a_recipe_with_values_per_member_has_a_valid_recipe(apart: Path, tmp_path: Path) -> None:
    named = _trained(
        tmp_path / "named", model={"name": ["mlp"] * 3, "hidden_sizes": [8]}, optimizer={"lr": [0.1, 0.2, 0.3]}
    )
    soup(named, tmp_path / "soup", max_barrier=1e9)
    assert len(load_predictor(tmp_path / "soup").ensemble) == 1
    assert Recipe.load(tmp_path / "soup/recipe.toml").model.name == "mlp"


def test_runs_with_different_test_samples_cannot_be_evaluated_together(tmp_path: Path) -> None:
    data = {"name": "blobs", "samples": 90, "validation_split": 30, "batch_size": 16}
    for name, count in (("a", 101), ("b", 77)):
        _trained(tmp_path / name, members=1, data={**data, "test_samples": count})
    select_members([tmp_path / "a", tmp_path / "b"], size=2).write(tmp_path / "c.json")
    with pytest.raises(RunError, match="has other test samples than the others"):
        evaluate_selection(tmp_path / "c.json")


def test_members_of_several_runs_form_one_ensemble(apart: Path, tmp_path: Path) -> None:
    other = _trained(tmp_path / "other", model={"name": "mlp", "hidden_sizes": [32]})
    chosen = select_members([apart, other], size=4)
    assert len(chosen.members) == 6
    assert sum(chosen.selection.weights) == pytest.approx(1)
    chosen.write(tmp_path / "chosen.json")
    assert EnsembleSelection.read(tmp_path / "chosen.json") == chosen
    ensemble = EnsembleSelection.read(tmp_path / "chosen.json").load()
    assert len(ensemble) == sum(weight > 0 for weight in chosen.selection.weights)
    x, y = plateaux.dataset.get("digits")().test.fetch(torch.arange(599))
    p = ensemble.predict(x)
    judged = evaluate_selection(tmp_path / "chosen.json")
    assert judged["accuracy"] == pytest.approx(float((p.argmax(-1) == y).double().mean()))
    assert judged["nll"] == pytest.approx(float(-p.double()[torch.arange(599), y].log().mean()), rel=1e-4)
    with pytest.raises(RunError, match="results on them are optimistically biased"):
        evaluate_selection(tmp_path / "chosen.json", split="validation")


def test_a_selection_is_no_worse_than_the_best_member_on_its_own_samples(apart: Path) -> None:
    chosen = select_members([apart], size=5)
    (found,) = evaluate(apart, split="validation", metrics=["nll"])
    best = min(found.rows[f"member {n}"].value for n in range(3))
    assert chosen.selection.scores[-1] <= best + 1e-6
    assert MEAN_PROBABILITY in found.rows


def test_runs_with_different_validation_samples_cannot_be_pooled(apart: Path, tmp_path: Path) -> None:
    other = _trained(tmp_path / "other", seed=3)
    with pytest.raises(RunError, match="has other validation samples than"):
        select_members([apart, other], size=2)
    with pytest.raises(RecipeError, match="No runs were given"):
        select_members([], size=2)


def test_a_missing_or_invalid_selection_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"does not exist\. Run: plateaux select"):
        EnsembleSelection.read(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(RunError, match="is not a selection"):
        EnsembleSelection.read(tmp_path / "bad.json")


def test_an_ensemble_is_combined_by_the_named_rule(apart: Path) -> None:
    x, _ = plateaux.dataset.get("digits")().test.fetch(torch.arange(9))
    ensemble = load_predictor(apart).ensemble
    table = ensemble.logits(x)
    assert torch.allclose(ensemble.predict(x), table.softmax(-1).mean(0), atol=1e-6)
    assert torch.allclose(ensemble.predict(x, combine="logit"), table.mean(0).softmax(-1), atol=1e-6)
    votes = ensemble.predict(x, combine="majority")
    assert torch.allclose(votes.sum(-1), torch.ones(9), atol=1e-5)
    ensemble.weights = (1.0, 0.0, 0.0)
    assert torch.allclose(ensemble.predict(x), table[0].softmax(-1), atol=1e-6)


def test_the_soup_and_select_commands_print_their_results(near: Path, apart: Path, tmp_path: Path) -> None:
    code, out, message = call("soup", str(near), "-o", str(tmp_path / "soup"), "--strategy", "greedy", "--json")
    assert code == 0, message
    assert "greedy soup of members" in json.loads(out)["weights"]
    code, out, message = call("select", str(apart), "-o", str(tmp_path / "c.json"), "--size", "3", "--json")
    assert code == 0, message
    assert 0 <= json.loads(out)["test"]["accuracy"] <= 1
    assert call("soup", str(apart), "-o", str(tmp_path / "no"))[0] == 2
