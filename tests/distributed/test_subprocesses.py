"""Processes that Plateaux starts import nothing from the current folder, and join no cluster that is not trusted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import plateaux
from plateaux.config.recipe import Recipe
from plateaux.core.errors import UntrustedCodeError
from plateaux.distributed.subprocesses import protected_children
from plateaux.errors import PlateauxError

NAMES = ("torch", "json", "numpy", "pickle", "socket", "multiprocessing", "typer", "sitecustomize", "encodings")
SMALL = {
    "members": 2,
    "data": {"name": "blobs", "samples": 20, "test_samples": 6, "batch_size": 10},
    "model": {"name": "mlp", "hidden_sizes": [4]},
    "method": {"name": "sam", "rho": 0.1},
    "optimizer": {"name": "SGD", "lr": 0.1},
    "train": {"epochs": 1},
    "executor": {"threads": 1},
}


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Return a folder with modules that write a file when they are imported."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r} + ' ')")
    return folder


def run_in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder as the installed script does: without the folder on its own path (-P)."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHONSAFEPATH")}
    command = [sys.executable, "-P", "-m", "plateaux", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False)


def test_a_study_on_a_mesh_imports_nothing_from_the_current_folder(hostile: Path, tmp_path: Path) -> None:
    recipe = Recipe.from_dict({**SMALL, "executor": {"name": "mesh", "processes": 2, "threads": 1}})
    (hostile / "base.toml").write_text(recipe.to_toml())
    text = 'base = "base.toml"\n[grid]\nmethod.rho = [0.1]\n[evaluate]\nmetrics = ["accuracy"]\n'
    (hostile / "study.toml").write_text(text)
    done = run_in(hostile, "study", "study.toml", "--out", str(tmp_path / "out"))
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("options", [["--processes", "2"], ["--executor", "mesh", "--processes", "2"]])
def test_training_in_processes_imports_nothing_from_the_current_folder(
    hostile: Path, tmp_path: Path, options: list[str]
) -> None:
    (hostile / "recipe.toml").write_text(Recipe.from_dict(SMALL).to_toml())
    done = run_in(hostile, "train", "recipe.toml", *options, "--out", str(tmp_path / "out"))
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()
    assert done.returncode == 0, done.stderr


def test_a_python_process_imports_nothing_from_the_current_folder(
    hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.chdir(hostile)
    with protected_children():
        assert os.environ["PYTHONSAFEPATH"] == "1"
        assert subprocess.call([sys.executable, "-c", "import json; raise SystemExit(5)"]) == 5
    assert "PYTHONSAFEPATH" not in os.environ
    assert not (tmp_path / "imported").exists()


# --- Clusters


def on_ray(**changes: object) -> Recipe:
    return Recipe.from_dict({**SMALL, "executor": {"name": "ray", "address": "203.0.113.1:6379", **changes}})


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Return the addresses of the clusters that this process tried to join."""
    addresses: list[str | None] = []

    def join(address: str | None) -> bool:
        addresses.append(address)
        raise PlateauxError("joined")

    pytest.importorskip("ray", reason='Ray is not installed: pip install "plateaux[ray]"')
    monkeypatch.setattr("plateaux.distributed.ray_cluster.connect", join)
    return addresses


def test_the_address_of_an_untrusted_recipe_is_not_connected_to(joined: list[str | None], tmp_path: Path) -> None:
    with pytest.raises(UntrustedCodeError, match=r"203\.0\.113\.1:6379.*--trust"):
        plateaux.train(on_ray(), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UntrustedCodeError):
        plateaux.train(on_ray(), tmp_path / "run", trust=["cases"])  # another name
    assert joined == []
    with pytest.raises(PlateauxError, match="joined"):
        plateaux.train(on_ray(), tmp_path / "run", trust=["203.0.113.1:6379"])
    assert joined == ["203.0.113.1:6379"]


def test_evaluation_on_a_cluster_is_refused_without_connecting_to_it(joined: list[str | None], tmp_path: Path) -> None:
    run = plateaux.train(on_ray(name="local"), tmp_path / "run")  # the local executor ignores the address
    with pytest.raises(PlateauxError, match="executor = 'ray': evaluation runs in this process"):
        plateaux.evaluate(run, executor={"name": "ray", "address": "mine:6379"})
    assert joined == []


def test_an_address_on_the_command_line_is_trusted(joined: list[str | None], tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from plateaux.cli.main import app

    (tmp_path / "recipe.toml").write_text(on_ray().to_toml())
    call = ["train", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "run")]
    assert CliRunner().invoke(app, call).exit_code == 6
    assert CliRunner().invoke(app, ["recipe", "check", call[1]]).exit_code == 6
    assert joined == []
    for own in (["--address", "mine:6379"], ["--set", "executor.address=mine:6379"], ["--trust", "203.0.113.1:6379"]):
        assert CliRunner().invoke(app, [*call, *own]).exit_code == 1
    assert joined == ["mine:6379", "mine:6379", "203.0.113.1:6379"]
