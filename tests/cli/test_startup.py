"""Version, help, lists, completion, and the status of a run do not import torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from cases import recipe, trained

from plateaux.cli.main import KINDS, app
from plateaux.core import registry, tensor_tree
from plateaux.storage.run import Run

SLOW = {"torch", "numpy", "safetensors", "matplotlib", "ray", "rich"}
COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
HELP_OF_ALL = """
import sys
from plateaux.cli.main import app
for words in ([], ["recipe", "check"], ["recipe", "schema"], *([name] for name in sys.argv[1:])):
    app([*words, "--help"], prog_name="plateaux", standalone_mode=False)
"""
REGISTRIES = [getattr(registry, name) for name in ("method", "metric", "dataset", "model", "probe", "executor")]


def imported(*arguments: str, **environment: str) -> tuple[set[str], str]:
    """Run Python with `-X importtime`; return the top-level packages that were imported, and the output."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(command, env={**env, **environment}, capture_output=True, text=True, timeout=250, check=True)
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}, done.stdout


@pytest.mark.parametrize(
    "words", [["--version"], ["--help"], *(["list", kind, "--json"] for kind in (*KINDS, "recipes", "studies"))]
)
def test_informational_commands_do_not_import_torch(words: list[str]) -> None:
    packages, out = imported("-m", "plateaux", *words)
    assert "plateaux" in packages
    assert packages & SLOW == set()
    assert out


def test_help_of_every_command_is_printed_without_torch() -> None:
    packages, out = imported("-c", HELP_OF_ALL, *COMMANDS)
    assert packages & SLOW == set()
    assert out.count("Usage: plateaux") == len(COMMANDS) + 3


def test_the_shell_completes_commands_without_torch() -> None:
    program = "from plateaux.cli.main import app; app([], prog_name='plateaux')"
    question = {"_PLATEAUX_COMPLETE": "complete_bash", "COMP_WORDS": "plateaux sta", "COMP_CWORD": "1"}
    packages, out = imported("-c", program, **question)
    assert packages & SLOW == set()
    assert out.split() == ["status"]


def test_status_of_a_local_run_is_printed_without_torch(tmp_path: Path) -> None:
    silent = {"silence": ["many-classes"]}  # rich prints warnings
    trained(recipe("deep_ensemble", "adapted", run=silent), tmp_path / "run")
    packages, out = imported("-m", "plateaux", "status", str(tmp_path / "run"), "--json")
    status = json.loads(out)
    assert packages & SLOW == set()
    assert {member["state"] for member in status["members"]} == {"finished"}
    assert status["shared_bytes"] == tensor_tree.size(Run.open(tmp_path / "run").shared().values()) > 0


def test_importing_plateaux_imports_no_torch_until_a_name_needs_it() -> None:
    assert imported("-c", "import plateaux; plateaux.method, plateaux.Recipe, plateaux.Run")[0] & SLOW == set()
    assert "torch" in imported("-c", "import plateaux; plateaux.train")[0]


@pytest.mark.parametrize("kind", REGISTRIES, ids=lambda each: each.kind)
def test_descriptions_read_from_source_are_those_of_the_imported_plug_ins(kind: registry.Registry) -> None:
    unscanned = registry.Registry(kind.kind, kind.package, group="plateaux.nothing")
    described = unscanned.describe()
    kind.names()  # imports all plug-ins
    builtin = {name: text for name, text in kind.describe().items() if _is_builtin(kind, name)}
    assert described == builtin
    assert len(described) > 1


def _is_builtin(kind: registry.Registry, name: str) -> bool:
    """Return whether a plug-in belongs to the package of its kind; other tests may have registered some."""
    factory = kind.prefixes.get(name.removesuffix("<name>")) or kind.get(name)
    return factory.__module__.startswith(kind.package)
