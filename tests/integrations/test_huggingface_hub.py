"""Models and data sets of a hub: downloaded if the user allows it, used without a connection afterwards."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hf_folders import save_bert, save_texts
from hub_server import Hub, running_hub
from typer.testing import CliRunner

import plateaux
from plateaux.cli.main import app
from plateaux.core.imports import optional_import

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("huggingface_hub")
MODEL, DATA = "someone/bert", "someone/texts"
RECIPE = f"""
members = 1
[data]
name = "hf:{DATA}"
length = 12
batch_size = 12
[model]
name = "hf:{MODEL}"
[train]
epochs = 1
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """Run a hub with a model and a data set, and with files that must not be downloaded."""
    save_bert(tmp_path / "bert")
    made = save_texts(tmp_path / "texts")
    (tmp_path / "parquet").mkdir()
    for split, part in made.items():
        part.to_parquet(tmp_path / "parquet" / f"{split}-00000-of-00001.parquet")
    with running_hub() as found:
        for repo, folder in ((MODEL, "bert"), (DATA, "parquet")):
            files = {file.name: file.read_bytes() for file in (tmp_path / folder).iterdir()}
            files |= {"modeling.py": b"raise SystemExit", "pytorch_model.bin": b"pickled", "script.py": b""}
            found.commits[repo] = []
            found.commit(repo, files)
        yield found
    for folder in ("bert", "texts", "parquet"):
        shutil.rmtree(tmp_path / folder)


@pytest.fixture
def here(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a current folder with a recipe, in a process that knows this hub and a cache below the folder."""
    constants = optional_import("huggingface_hub.constants", extra="hf")
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path


def run(*words: object) -> tuple[int, str, str]:
    """Run the command line in this process."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.slow
def test_a_download_needs_the_option_and_happens_once(hub: Hub, here: Path) -> None:
    words = ("train", "recipe.toml", "--out", "run", "--json")
    code, _, message = run(*words)
    assert code == 2
    assert "allow the download with --download" in message
    assert hub.requests == []
    assert not (here / "run").exists()

    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(here / "cache"), "HF_HUB_DISABLE_XET": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(plateaux.__file__).parents[1]), os.environ["PYTHONPATH"]])
    line = [sys.executable, "-m", "plateaux", *words, "--download"]  # as a user does
    done = subprocess.run(line, capture_output=True, text=True, env=env, check=False, cwd=here)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["metrics"]
    read = {request.rpartition("/")[2] for request in hub.requests if "/resolve/" in request}
    assert {"config.json", "model.safetensors", "tokenizer.json", "train-00000-of-00001.parquet"} <= read
    assert not {name for name in read if name.endswith((".py", ".bin"))}
    assert {request.split()[0] for request in hub.requests} <= {"GET", "HEAD"}  # nothing is sent
    count = len(hub.requests)

    code, _, message = run("train", "recipe.toml", "--out", "again", "--json")
    assert code == 0, message
    assert run("predict", "again", "--split", "test", "-o", "p.csv")[0] == 0
    assert len(hub.requests) == count


def test_studies_have_the_option_and_a_revision_can_be_named(hub: Hub, here: Path) -> None:
    commit = hub.commits[MODEL][0][0]
    hub.commit(MODEL, {"config.json": b"{}"})  # a newer, broken revision
    study = f"""
[base]
members = 1
data = {{name = "hf:{DATA}", length = 12}}
model = {{name = "hf:{MODEL}@{commit}"}}
train = {{epochs = 1}}
[grid]
"optimizer.lr" = [0.1]
[evaluate]
metrics = ["accuracy"]
"""
    (here / "study.toml").write_text(study)
    code, _, message = run("study", "study.toml", "--out", "s")
    assert (code, hub.requests) == (2, [])
    assert "--download" in message
    code, _, message = run("study", "study.toml", "--out", "s", "--download", "--json")
    assert code == 0, message
    assert hub.requests


def test_checks_and_imports_have_the_option_and_failures_are_explained(hub: Hub, here: Path) -> None:
    words = ("recipe", "check", "recipe.toml", "--data")
    assert run(*words)[0] == 2
    assert hub.requests == []
    assert run(*words, "--download")[0] == 0
    assert hub.requests
    code, _, message = run(*words, "--download", "--set", "model.name=hf:no/model")
    assert code == 2
    assert "data.name" not in message
    assert "'hf:no/model' cannot be downloaded: RepositoryNotFoundError" in message.replace("\n", " ")
    options = ("--model", f"hf:{MODEL}", "--data", f"hf:{DATA}", "--set", "data.length=12", "--out", "run")
    code, _, message = run("import-weights", "--weights", here / "bert" / "model.safetensors", *options, "--download")
    assert code == 0, message
    shutil.rmtree(here / "cache")
    assert run("evaluate", "run")[0] == 2  # the data are needed
    assert plateaux.load_predictor("run")(["w1 w2", "w9"]).probabilities.shape == (2, 2)
