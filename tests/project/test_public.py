"""The public API: its names, and eight lines of Python that match the command line."""

from __future__ import annotations

import ast
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import plateaux
from plateaux.errors import PlateauxError


def test_all_public_names_exist_and_are_sorted() -> None:
    assert plateaux.__all__ == sorted(plateaux.__all__)
    missing = [name for name in plateaux.__all__ if not hasattr(plateaux, name)]
    assert missing == []
    modules = {path.stem for path in Path(plateaux.__file__).parent.iterdir()}
    extra = {name for name in vars(plateaux) if not name.startswith("_")} - set(plateaux.__all__) - modules
    assert extra == set()


def test_there_are_at_most_45_public_names() -> None:
    assert len(plateaux.__all__) <= 45


@pytest.mark.parametrize("package", [plateaux, plateaux.optim, plateaux.studies], ids=lambda package: package.__name__)
def test_the_stub_of_a_package_lists_its_public_names_once(package: ModuleType) -> None:
    assert package.__file__ is not None
    tree = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    aliases = [alias for node in imports for alias in node.names]
    assert sorted(alias.name for alias in aliases) == package.__all__
    assert all(alias.name == alias.asname for alias in aliases)  # otherwise a type checker keeps the name private
    assert all(hasattr(package, name) for name in package.__all__)


def test_packages_are_attributes_and_unknown_names_are_errors() -> None:
    assert plateaux.stats.t_interval
    assert set(plateaux.__all__) <= set(dir(plateaux))
    with pytest.raises(AttributeError, match="module 'plateaux' has no attribute 'trian'"):
        plateaux.trian  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'trian'"):
        from plateaux import trian  # noqa: F401


def test_eight_lines_train_evaluate_and_predict(tmp_path: Path) -> None:
    recipe = plateaux.Recipe.load("recipes/quickstart.toml", ["train.epochs=1", "members=2"])
    plateaux.train(recipe, out=tmp_path / "run")
    measured = plateaux.evaluate(tmp_path / "run")
    ensemble = plateaux.load_predictor(tmp_path / "run").ensemble
    probabilities = ensemble.predict(torch.randint(0, 255, (4, 1, 8, 8), dtype=torch.uint8))
    assert {each.metric for each in measured} == {"accuracy", "nll", "brier", "ece"}
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(4))


def test_the_run_returned_by_train_can_be_evaluated_and_loaded(tmp_path: Path) -> None:
    recipe = plateaux.Recipe.load("recipes/quickstart.toml", ["train.epochs=1", "members=2"])
    run = plateaux.train(recipe, out=tmp_path / "run")
    # Both without cached logits, whose batches are summed in another order.
    by_run, by_path = (plateaux.evaluate(each, cache_logits="off") for each in (run, tmp_path / "run"))
    assert [each.rows for each in by_run] == [each.rows for each in by_path]
    assert len(plateaux.load_predictor(run).ensemble.members) == 2


class Line(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """A data set of one's own: the sign of the first number."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        x = torch.tensor([index - 31.5, 1.0]) / 32
        return x, int(x[0] > 0)


def own_model(*, classes: int, width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, classes))


def test_a_custom_model_and_data_set_can_be_used(tmp_path: Path) -> None:
    data = plateaux.from_dataset(Line(), Line(), classes=2, shape=(2,))
    recipe = plateaux.Recipe.from_dict(
        {"members": 2, "data": {"name": "mine", "batch_size": 16}, "model": {"name": "mine", "width": [4, 8]}}
    )
    run = plateaux.train(recipe, tmp_path / "run", data=data, model=own_model)
    accuracy = plateaux.evaluate(run, metrics=["accuracy"])[0]
    assert accuracy.rows["ensemble (mean probability)"].value > 0.9
    members = plateaux.load_predictor(plateaux.open_run(tmp_path / "run", data=data, model=own_model)).ensemble.members
    assert [member[0].out_features for member in members] == [4, 8]  # type: ignore[index, union-attr]


def test_the_error_for_a_run_with_a_custom_model_states_which_model_to_pass(tmp_path: Path) -> None:
    data = plateaux.from_dataset(Line(), Line(), classes=2, shape=(2,))
    recipe = plateaux.Recipe.from_dict({"members": 1, "data": {"name": "mine"}, "model": {"name": "resnet_mine"}})
    run = plateaux.train(recipe.replaced(train={"epochs": 1}), tmp_path / "run", data=data, model=own_model)
    assert run.info.model == f"{__name__}:own_model"
    for use in (plateaux.load_predictor, plateaux.evaluate, partial(plateaux.predict, split="test")):
        with pytest.raises(PlateauxError) as error:
            use(plateaux.open_run(run, data=data))  # type: ignore[operator]
        assert f"was trained with '{__name__}:own_model', a model that was passed in Python" in str(error.value)
        assert "plateaux.open_run(path, model=own_model)" in str(error.value)
        assert "did you mean" not in str(error.value)
    assert len(plateaux.load_predictor(plateaux.open_run(run, model=own_model)).ensemble.members) == 1
