"""The types of the public API, as the type checker of a user sees them although names are imported at first use."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly  # mypy reads the package again, for more than a minute
BENCHMARKS = sorted(Path(__file__).parents[2].glob("benchmarks/*.py"))
MISSING = {"attr-defined", "call-arg", "import-not-found", "name-defined"}  # errors that would stop a script
RIGHT = """\
from pathlib import Path

import torch

import plateaux
from plateaux import Ensemble, Recipe, Run

recipe: Recipe = plateaux.Recipe.load("quickstart", ["members=2"])
members: int = recipe.members
run: Run = plateaux.train(recipe, out=Path("runs/demo"))
result = plateaux.evaluate(run, limit=100)
accuracy: float = result["accuracy"].ensemble.value
risk: float = plateaux.calibrate(run, target_risk=0.1).threshold.risk
ensemble: Ensemble = plateaux.load_predictor(run).ensemble
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
print(plateaux.load_predictor("runs/demo").ensemble.members + 1)
"""


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Return the files and codes of the errors of mypy, with the settings and the cache of the project.

    One process checks all files: reading the modules that they import takes it most of its time.
    """
    folder = tmp_path_factory.mktemp("typing")
    (folder / "right.py").write_text(RIGHT)
    (folder / "wrong.py").write_text(WRONG)
    files = [folder / "right.py", folder / "wrong.py", *BENCHMARKS]
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", *map(str, files)]
    env = {**os.environ, "MYPYPATH": "src"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=env)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if ": error: " in line]
    return [(Path(line.partition(":")[0]).name, line.rpartition("[")[2].rstrip("]")) for line in found]


@pytest.mark.xdist_group("mypy")
def test_mypy_accepts_a_file_of_twenty_lines_that_uses_the_public_api(errors: list[tuple[str, str]]) -> None:
    assert len(RIGHT.splitlines()) == 20
    assert [code for name, code in errors if name == "right.py"] == []


@pytest.mark.xdist_group("mypy")
def test_mypy_finds_a_wrong_name_and_wrong_types_in_the_public_api(errors: list[tuple[str, str]]) -> None:
    codes = [code for name, code in errors if name == "wrong.py"]
    assert codes == ["attr-defined", "arg-type", "assignment", "operator"]


@pytest.mark.xdist_group("mypy")
def test_benchmarks_use_names_and_arguments_that_exist(errors: list[tuple[str, str]]) -> None:
    """CI does not run all of them; the benchmarks are not typed strictly, so other errors are left aside."""
    names = {path.name for path in BENCHMARKS}
    assert len(names) > 20
    assert [(name, code) for name, code in errors if name in names and code in MISSING] == []


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
