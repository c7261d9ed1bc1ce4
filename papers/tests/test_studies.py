"""The studies of papers: found by name, with declared tables and figures; their dry run needs no data."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from plateaux.errors import RecipeError
from plateaux.studies import Study, StudyRunner, results_from_study
from plateaux_papers import PAPERS, ROOT, STUDIES
from plateaux_papers.claims.claim import evidence_folders, read_claims, read_evidence
from plateaux_papers.claims.contrasts import build_evidence

CLAIMS = {claim.number: claim for claim in read_claims()}
NAMES = sorted(file.stem for folder in STUDIES for file in folder.glob("*.toml"))
OF_PAPERS = [name for name in NAMES if re.match(r"(lu|sed|rethinking)20\d\d_", name)]


def test_every_table_and_figure_is_found_by_the_name_of_its_paper() -> None:
    found = {name: Study.load(name).name for name in ("lu2024_table3", "lu2024_figure15", "rethinking2025_table8.toml")}
    assert list(found.values()) == ["lu2024_figure7", "lu2024_figure8", "rethinking2025_table8"]
    with pytest.raises(RecipeError, match="lu2024_figure7"):
        Study.load("lu2024_figur7")


@pytest.mark.parametrize("name", OF_PAPERS)
def test_a_study_states_its_paper_and_shows_what_it_produces(name: str) -> None:
    study = Study.load(name)
    assert study.name == name
    assert study.paper
    assert study.question
    titles = " ".join([*(table.title for table in study.tables), *(figure.title for figure in study.figures.draw)])
    for product in study.produces:
        word, number = product.split(" ", 1)
        assert number in titles
        assert word in titles
    for table in study.tables:
        assert all(len(values) == len(table.columns) for values in table.paper.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_lists_the_passes_of_every_run_without_data(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "timm:" in str(Study.load(name).base) and find_spec("timm") is None:
        pytest.skip("timm is not installed")
    monkeypatch.setenv("PLATEAUX_DATA", str(tmp_path / "none"))
    runner = StudyRunner(Study.load(name), tmp_path / "study")
    runner.check(data=False)
    assert sum(runner.cost(spec) for spec, _ in runner.missing()) > 0
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_the_passes_of_a_dry_run(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "plateaux", "study", "rethinking2025_table1", "--dry-run", "--json"]
    found = json.loads(subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stdout)
    assert (len(found["runs"]), found["passes"]) == (6, 3 * 10 * 100 + 3 * 10 * 200)
    assert list(tmp_path.iterdir()) == []


def test_results_files_are_json_of_at_most_2_mb() -> None:
    files = [file for paper in PAPERS for file in (ROOT / paper / "results").iterdir()]
    assert {file.suffix for file in files} == {".json"}, "results are numbers: no weights, no pictures"
    assert {file.name: file.stat().st_size for file in files if file.stat().st_size > 2_000_000} == {}


@pytest.mark.parametrize("number", [number for number, claim in CLAIMS.items() if claim.compare])
def test_the_evidence_of_a_study_matches_its_results(number: int) -> None:
    claim = CLAIMS[number]
    assert claim.compare is not None
    found = read_evidence(claim, evidence_folders())
    assert found is not None
    name = f"{Path(claim.study).stem}.json"
    (file,) = [ROOT / paper / "results" / name for paper in PAPERS if (ROOT / paper / "results" / name).is_file()]
    again = build_evidence(claim, claim.compare, results_from_study(file))
    assert (again.cases, again.precondition) == (found.cases, found.precondition)
