"""Trackers in a recipe: unknown ones are errors, and an untrusted recipe starts none that connects or is code."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from typer.testing import CliRunner

import plateaux
from plateaux.cli.main import app
from plateaux.config.components import Components
from plateaux.config.recipe import Recipe
from plateaux.config.tracker_check import check_trackers
from plateaux.core.errors import RecipeError, UnknownNameError, UntrustedCodeError
from plateaux.core.tracker import BUILT_IN
from plateaux.studies.runner import StudyRunner
from plateaux.studies.study import Study
from plateaux.training import trackers

SMALL = {
    "members": 1,
    "data": {"name": "blobs", "samples": 20, "test_samples": 6, "batch_size": 10},
    "model": {"name": "mlp", "hidden_sizes": [4]},
    "train": {"epochs": 1},
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the modules of trackers that were imported."""
    modules: list[str] = []

    def start(module: str) -> None:
        modules.append(module)
        raise ImportError(module)

    monkeypatch.setattr(trackers, "import_module", start)
    return modules


def tracked(*names: str) -> Recipe:
    return Recipe.from_dict({**SMALL, "run": {"trackers": list(names)}})


def everything_is_installed(name: str, package: str | None = None) -> ModuleSpec:
    return ModuleSpec(name, None)


@pytest.mark.parametrize("name", ["wandb", "mlflow", "toy_trackers:Recorder"])
def test_a_tracker_that_is_not_trusted_is_not_started(
    name: str, tmp_path: Path, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plateaux.config.tracker_check.find_spec", everything_is_installed)
    needed = name.partition(":")[0]
    with pytest.raises(UntrustedCodeError, match=f"--trust {needed} "):
        plateaux.train(tracked("tensorboard", name), tmp_path / "run")
    with pytest.raises(UntrustedCodeError):
        plateaux.train(tracked(name), tmp_path / "run", trust=["cases", f"{needed}2"])
    assert not (tmp_path / "run").exists()
    assert started == []
    check_trackers(tracked(name), Components(trust=(needed,)))


def test_a_study_with_a_tracker_that_is_not_trusted_does_not_begin(tmp_path: Path, started: list[str]) -> None:
    pytest.importorskip("wandb", reason='W&B is not installed: pip install "plateaux[wandb]"')
    text = '[base]\ndata = {name = "blobs"}\nmodel = {name = "mlp"}\nrun = {trackers = ["wandb"]}\n'
    (tmp_path / "study.toml").write_text(f'{text}[grid]\n"optimizer.lr" = [0.1]\n[evaluate]\nmetrics = ["nll"]\n')
    with pytest.raises(UntrustedCodeError, match="--trust wandb"):
        StudyRunner(Study.load(str(tmp_path / "study.toml")), tmp_path / "out").run()
    assert not (tmp_path / "out").exists()
    assert started == []


@pytest.mark.slow
def test_on_the_command_line_a_tracker_is_allowed_by_trust_or_by_its_name(tmp_path: Path, started: list[str]) -> None:
    pytest.importorskip("wandb", reason='W&B is not installed: pip install "plateaux[wandb]"')
    (tmp_path / "recipe.toml").write_text(tracked("wandb").to_toml())
    call = ["train", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "run"), "--no-evaluate"]
    assert CliRunner().invoke(app, call).exit_code == 6
    assert CliRunner().invoke(app, ["recipe", "check", call[1]]).exit_code == 6
    assert CliRunner().invoke(app, [*call, "--set", "run.trackers=['toy_trackers:Recorder']"]).exit_code == 6
    assert started == []
    for own in (["--trust", "wandb"], ["--set", "run.trackers=['wandb']"]):
        assert CliRunner().invoke(app, ["recipe", "check", call[1], *own]).exit_code == 0
    assert CliRunner().invoke(app, [*call, "--trust", "wandb"]).exit_code == 0
    assert set(started) == {"plateaux.integrations.wandb"}


def test_commands_on_a_run_with_trackers_start_none(tmp_path: Path, started: list[str]) -> None:
    run = plateaux.train(tracked("tensorboard"), tmp_path / "run")
    started.clear()
    plateaux.evaluate(run, metrics=["accuracy"])
    assert CliRunner().invoke(app, ["status", str(tmp_path / "run")]).exit_code == 0
    assert started == []


def test_an_unknown_tracker_is_reported_with_close_names() -> None:
    with pytest.raises(UnknownNameError, match="There is no tracker called 'wandbb'; did you mean 'wandb'"):
        check_trackers(tracked("wandbb"))
    with pytest.raises(UnknownNameError, match="There is no module 'no_such_module'"):
        check_trackers(tracked("no_such_module:Tracker"), Components(trust=("no_such_module",)))
    with pytest.raises(RecipeError, match="names a tracker twice"):
        check_trackers(tracked("tensorboard", "tensorboard"))


@pytest.mark.parametrize("name", BUILT_IN)
def test_an_error_says_how_to_install_a_tracker(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plateaux.config.tracker_check.find_spec", lambda _: None)
    with pytest.raises(RecipeError, match=rf'not installed; run: pip install "plateaux\[{name}\]", or remove it'):
        check_trackers(tracked(name), Components(trust=(name,)))


def test_trackers_do_not_change_the_members() -> None:
    recipe = tracked()
    assert recipe.identity() == tracked("wandb").replaced(run={"group": "seeds"}).identity()
