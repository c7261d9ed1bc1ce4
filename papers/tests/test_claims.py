"""The command `plateaux claims`: its output, and the evidence that it reads from studies."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from claims.test_claim import CLAIMS, around, claim, evidence
from rich.console import Console
from typer.testing import CliRunner

from plateaux.cli.main import app
from plateaux.errors import RecipeError, RunError
from plateaux_papers import ROOT
from plateaux_papers.claims import evidence as studies
from plateaux_papers.claims.claim import ClaimEntry, read_evidence
from plateaux_papers.commands import claims
from plateaux_papers.theory import Setting
from plateaux_papers.theory.experiment import run_experiment as simulated
from plateaux_papers.theory.record import record


def call(*words: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def theory() -> dict[str, Any]:
    """Return what `plateaux theory` writes, of a small experiment."""
    return dict(
        json.loads(json.dumps(record(simulated(matrices=4, starts=3, density=2, steps=20, base=Setting(n=1200, d=60)))))
    )


# The command.


def test_the_command_shows_every_claim() -> None:
    code, out, _ = call("claims", "--json")
    found = json.loads(out)
    assert code == 0
    assert [each["number"] for each in found] == list(range(1, 18))
    assert all(each["verdicts"].keys() == set(each["cases"]) for each in found)


def test_the_command_shows_the_requested_claims() -> None:
    code, out, _ = call("claims", "7", CLAIMS[3].name, "--json")
    assert (code, [each["number"] for each in json.loads(out)]) == (0, [3, 7])
    code, _, message = call("claims", "sharpbalance")
    assert (code, "There is no claim 'sharpbalance'" in message) == (2, True)


def test_a_terminal_shows_a_table_with_our_values() -> None:
    lines = Console(width=200, record=True, file=io.StringIO())
    lines.print(claims.table([ClaimEntry(claim(), evidence(around(1.5, 1))), ClaimEntry(claim(number=2))]))
    text = lines.export_text()
    assert "1.5 (0.5 to 2.5)" in text
    assert "reproduced" in text
    assert "not yet run" in text


def test_a_page_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    code, _, message = call("claims", "--out", tmp_path)
    assert (code, "Cannot write" in message) == (4, True)


# Evidence from the folder of a study.


def test_a_claim_is_judged_by_the_results_of_a_study_and_the_evidence_is_stored(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_bytes((ROOT / "rethinking2025" / "results" / "six_controls.json").read_bytes())
    code, out, message = call("claims", "11", "12", "--study", tmp_path, "--store", tmp_path / "found", "--json")
    assert (code, message) == (0, "")
    for each in json.loads(out):
        stored = read_evidence(CLAIMS[each["number"]], [ROOT / "rethinking2025" / "evidence"])
        again = read_evidence(CLAIMS[each["number"]], [tmp_path / "found"])
        assert stored is not None
        assert again is not None
        assert again.cases == stored.cases
        assert again.command == "plateaux study six_controls"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--study", "here"], 2, "--study needs the claims that it is about"),
        (["1", "--store", "here"], 2, "give its folder with --study"),
        (["8", "--study", "here"], 2, "The script of a claim runs at the commit that it names"),
        (["1", "--study", "here"], 4, "has no results.json"),
        (["14", "--study", "here"], 4, "Give the folder that `plateaux theory --out` wrote"),
    ],
)
def test_a_study_that_says_nothing_about_a_claim_is_an_error(words: list[str], code: int, message: str) -> None:
    found, _, text = call("claims", *words)
    assert (found, message in " ".join(text.split())) == (code, True), text


def test_a_record_that_is_not_one_of_the_theory_is_named(tmp_path: Path) -> None:
    (tmp_path / "theory.json").write_text("{}", encoding="utf-8")
    with pytest.raises(RunError, match="is not a record of the theory"):
        studies.evidence_from_study([CLAIMS[14]], tmp_path)
    with pytest.raises(RecipeError, match=r"no section \[compare\]"):
        studies.evidence_from_study([claim(study="studies/lead.toml")], tmp_path)


def test_the_commit_is_that_of_the_clone_with_the_papers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (ROOT.parent / ".git").exists():
        assert len(studies.commit()) == 12
    monkeypatch.setattr(studies, "ROOT", tmp_path / "papers")  # not the root of a clone
    assert studies.commit() == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert studies.commit() == ""


def test_theory_results_become_evidence(theory: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "theory.json").write_text(json.dumps(theory), encoding="utf-8")
    asked = [CLAIMS[number] for number in (14, 15, 16, 17)]
    written = studies.evidence_from_study(asked, tmp_path)
    for each, found, answer in zip(asked, written, theory["claims"], strict=True):
        assert found.claim == each.name
        assert found.command == "plateaux theory --matrices 400"
        verdicts = ClaimEntry(each, found).verdicts
        for formula, words in studies.FORMULAS.items():
            for regime, tail in studies.REGIMES.items():
                if regime in answer[formula]:
                    said = answer[formula][regime]["verdict"]
                    # The theory calls a difference in the other direction not reproduced, the ledger contradicted.
                    assert verdicts[f"{words}, {tail}"].replace("contradicted", "not reproduced") == said
    case = written[2].cases["as printed, SAM converges"]
    answer = theory["claims"][2]["printed"]["converging"]
    assert case.primary[0].value == pytest.approx(answer["simulation / formula - 1"]["mean"], rel=1e-5)
    assert case.also[0].value == pytest.approx(answer["simulation / upper bound"]["mean"], rel=1e-5)
    outside, settings = answer["settings whose interval excludes the formula"], answer["settings"]
    assert case.primary[0].what == f"{outside} of {settings} settings exclude the formula, mean"
    above = answer["settings above the upper bound"]
    assert case.also[0].what == f"{above} of {settings} settings beyond a bound, mean"
    assert [each.what for each in written[3].cases["as printed, SAM converges"].primary] == [
        f"bound {bound:.2f}" for bound in (0.2, 0.3, 0.4, 0.5)
    ]  # fmt: skip
