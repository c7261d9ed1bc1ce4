"""The types of the public API, as the type checker of a user sees them although names are imported at first use."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RIGHT = """\
from pathlib import Path

import torch

import plateaux
from plateaux import Ensemble, EvalOptions, Recipe, Run

recipe: Recipe = plateaux.Recipe.load("quickstart", ["members=2"])
members: int = recipe.members
run: Run = plateaux.train(recipe, out=Path("runs/demo"))
result: plateaux.Evaluation = plateaux.evaluate(run, options=EvalOptions(limit=100))
accuracy: float = result["accuracy"].ensemble.value
calibration: plateaux.Calibration = plateaux.calibrate(run)
ensemble: Ensemble = plateaux.load(run)
probabilities: torch.Tensor = ensemble.predict(torch.zeros(1, 1, 8, 8))


@plateaux.method
def mine(loss: object, *, rho: float = 0.05) -> plateaux.Method:
    raise NotImplementedError
"""
WRONG = """\
import plateaux

plateaux.trian("quickstart")
plateaux.evaluate(run=3)
error: int = plateaux.Recipe.load("quickstart").optimizer
print(plateaux.load("runs/demo").members + 1)
"""


def checked(file: Path, text: str) -> list[str]:
    """Return the errors of mypy in a file, with the settings and the cache of the project."""
    file.write_text(text)
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(file)]
    env = {**os.environ, "MYPYPATH": "src"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=env)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if ": error: " in line]


def test_mypy_accepts_a_file_of_twenty_lines_that_uses_the_public_api(tmp_path: Path) -> None:
    assert len(RIGHT.splitlines()) == 20
    assert checked(tmp_path / "right.py", RIGHT) == []


def test_mypy_finds_a_wrong_name_and_wrong_types_in_the_public_api(tmp_path: Path) -> None:
    errors = checked(tmp_path / "wrong.py", WRONG)
    assert [line.rpartition("[")[2].rstrip("]") for line in errors] == [
        "attr-defined", "arg-type", "assignment", "operator"
    ], errors  # fmt: skip


@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed")
def test_pyright_finds_the_same_mistakes(tmp_path: Path) -> None:
    settings = {"pythonVersion": "3.11", "extraPaths": [str(Path("src").resolve())], "include": ["."]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    command = ["pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=tmp_path)
    found = [(Path(each["file"]).name, each["rule"]) for each in json.loads(done.stdout)["generalDiagnostics"]]
    rules = ("reportAttributeAccessIssue", "reportArgumentType", "reportAssignmentType", "reportOperatorIssue")
    assert found == [("wrong.py", rule) for rule in rules]
