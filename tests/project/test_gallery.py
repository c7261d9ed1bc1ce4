"""Notebooks of the documentation: their code runs, and the stored outputs are complete, small, and name no machine."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
GALLERY = ROOT / "docs" / "gallery"
NAMES = ("custom-loop", "images", "lightning", "text")


def read_cells(name: str, kind: str) -> list[dict[str, Any]]:
    notebook = json.loads((GALLERY / f"{name}.ipynb").read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def run_cells(sources: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "cells.py").write_text("\n\n".join(sources), encoding="utf-8")
    names = {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    return subprocess.run(
        [sys.executable, "cells.py"], cwd=folder, env={**os.environ, **names}, capture_output=True, text=True
    )


def test_every_notebook_is_tested() -> None:
    assert sorted(path.stem for path in GALLERY.glob("*.ipynb")) == sorted(NAMES)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_the_code_of_a_notebook_runs(name: str, tmp_path: Path) -> None:
    sources = ["".join(cell["source"]) for cell in read_cells(name, "code")]
    done = run_cells(sources, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_cell_with_an_error_fails(tmp_path: Path) -> None:
    done = run_cells(["x = 1", "print(y)"], tmp_path)
    assert done.returncode != 0
    assert "NameError" in done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_stored_outputs_are_complete(name: str) -> None:
    cells = read_cells(name, "code")
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = [output["output_type"] for cell in cells for output in cell["outputs"]]
    assert kinds
    assert "error" not in kinds
    pictures = [
        (base64.b64decode("".join(output["data"]["image/png"])), cell["metadata"].get("alt", ""))
        for cell in cells
        for output in cell["outputs"]
        if "image/png" in output.get("data", {})
    ]
    assert all(len(alt) >= 10 for _, alt in pictures)
    assert (GALLERY / f"{name}.png").read_bytes() in [picture for picture, _ in pictures]  # the thumbnail


@pytest.mark.parametrize("name", NAMES)
def test_stored_outputs_name_no_machine(name: str) -> None:
    outputs = json.dumps([cell["outputs"] for cell in read_cells(name, "code")])
    text = re.sub(r'"image/png": "[^"]*"', "", outputs)
    found = re.findall(
        r"/(?:work|home|root|tmp|Users|usr)\b|\b\d\d:\d\d:\d\d\b|\b20\d\d-\d\d-\d\d|runner|localhost", text
    )
    assert found == []
    assert "iopub" not in (GALLERY / f"{name}.ipynb").read_text(encoding="utf-8")  # times of execution


def test_the_gallery_is_small() -> None:
    assert sum(path.stat().st_size for path in GALLERY.iterdir()) < 1_500_000


@pytest.mark.parametrize("name", NAMES)
def test_every_relative_link_of_a_notebook_has_a_target(name: str) -> None:
    text = "".join("".join(cell["source"]) + "\n" for cell in read_cells(name, "markdown"))
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)", text) if not re.match(r"[a-z]+:", target)]
    assert targets
    assert [target for target in targets if not (GALLERY / target).exists()] == []
