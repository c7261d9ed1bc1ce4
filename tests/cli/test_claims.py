"""The command `plateaux claims`: its output, its page, and the studies it runs."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Script
from rich.console import Console

from plateaux.cli import claims
from plateaux.core.errors import RecipeError, RunError
from plateaux.studies.claims import claim as ledger
from plateaux.studies.claims import evidence as studies
from plateaux.studies.claims.claim import (
    Case,
    ClaimEntry,
    Evidence,
    MeasuredValue,
    claims_dir,
    read_entries,
    read_evidence,
)
from plateaux.studies.claims.page import page, section
from plateaux.theory import Setting
from plateaux.theory.experiment import run_experiment as simulated
from plateaux.theory.record import record
from tests.cli.test_main import call
from tests.studies.claims.test_claim import CLAIMS, STATED, around, claim, evidence

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, pathlib, sys
out = pathlib.Path(sys.argv[1]) / "evidence"
out.mkdir(parents=True, exist_ok=True)
figure = {"value": 1.5, "interval": [0.5, 2.5]}
found = {"claim": "1-lead", "cases": {"as stated": {"primary": [figure]}}}
(out / "1-lead.json").write_text(json.dumps(found))
"""
TOML = """
number = 1
source = "a paper"
statement = "It leads."
where = "Table 1"
study = "studies/lead.py"
criterion = "above zero"
scale = "small"
consistent_with_own_tables = "yes"
why = "It says so."
[primary]
metric = "lead"
unit = "points"
direction = "above"
effect = 1.0
paper = "3 against 2"
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project of one claim and one study, which the command takes for its own."""
    for folder in ("claims", "studies"):
        (tmp_path / folder).mkdir()
    (tmp_path / "claims" / "1-lead.toml").write_text(TOML, encoding="utf-8")
    (tmp_path / "studies" / "lead.py").write_text(SCRIPT, encoding="utf-8")
    monkeypatch.setattr(ledger, "claims_dir", lambda: tmp_path / "claims")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def theory() -> dict[str, Any]:
    """Return what `plateaux theory` writes, of a small experiment."""
    return dict(
        json.loads(json.dumps(record(simulated(matrices=4, starts=3, density=2, steps=20, base=Setting(n=1200, d=60)))))
    )


# The command.


def test_the_command_shows_every_claim() -> None:
    code, out, _ = call("claims")
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


def test_run_studies_runs_the_study_and_updates_the_verdict(project: Path) -> None:
    assert json.loads(call("claims")[1])[0]["verdicts"] == {STATED: "not yet run"}
    code, out, message = call("claims", "1", "--run-studies", "--out", "pages/claims.md")
    assert (code, message) == (0, "")
    found = json.loads(out)[0]
    assert found["verdicts"] == {STATED: "reproduced"}
    assert found["evidence"]["command"] == "python studies/lead.py runs/claims/lead"
    assert found["evidence"]["seconds"] >= 0  # a trivial study may take none
    assert (project / "claims" / "evidence" / "1-lead.json").is_file()
    written = (project / "pages" / "claims.md").read_text(encoding="utf-8")
    assert "1.5 (0.5 to 2.5) points | **reproduced** |" in written
    assert json.loads(call("claims")[1])[0]["evidence"] == found["evidence"]


def test_evidence_can_be_stored_in_another_folder(project: Path) -> None:
    assert call("claims", "--run-studies", "--evidence", "mine", "--workdir", "there")[0] == 0
    assert (project / "mine" / "1-lead.json").is_file()
    assert (project / "there" / "lead" / "evidence" / "1-lead.json").is_file()
    assert json.loads(call("claims")[1])[0]["evidence"] is None
    assert json.loads(call("claims", "--evidence", "mine")[1])[0]["evidence"] is not None


def test_a_page_that_cannot_be_written_is_a_storage_error(project: Path) -> None:
    code, _, message = call("claims", "--out", "claims")
    assert (code, "Cannot write" in message) == (4, True)


# Studies.


def test_a_study_that_fails_is_missing_or_writes_no_evidence_is_an_error(project: Path) -> None:
    (project / "studies" / "lead.py").write_text("raise SystemExit(3)", encoding="utf-8")
    code, _, message = call("claims", "--run-studies")
    assert (code, "failed with exit code 3" in message) == (4, True)
    (project / "studies" / "lead.py").write_text("", encoding="utf-8")
    code, _, message = call("claims", "--run-studies")
    assert (code, "wrote no evidence" in message) == (4, True)
    (project / "studies" / "lead.py").unlink()
    code, _, message = call("claims", "--run-studies")
    assert (code, "clone of the repository" in message) == (2, True)


def test_claims_that_share_a_study_run_it_once(project: Path) -> None:
    calls: list[Sequence[str]] = []

    def pretend(words: Sequence[str]) -> int:
        calls.append(words)
        return subprocess.call([sys.executable, str(project / "studies" / "lead.py"), words[-1]])

    twice = [claim(study="studies/lead.toml"), claim(study="studies/lead.toml", number=2)]
    (project / "studies" / "lead.toml").touch()
    written = studies.gather(twice, project / "out", project / "found", project, pretend)
    assert len(calls) == 1
    assert calls[0][:4] == ["-m", "plateaux", "study", str(project / "studies" / "lead.toml")]
    found = read_evidence(twice[0], project / "found")
    assert found is not None
    assert found.command == "plateaux study studies/lead.toml --out out/lead"
    assert written == [project / "found" / "1-lead.json"] * 2
    assert found.seconds is not None
    studies.gather(twice, project / "out", project / "found", project, pretend)
    again = read_evidence(twice[0], project / "found")
    assert again is not None
    assert again.seconds is None  # the time of the second call is not that of the study


def test_evidence_does_not_contain_folders_outside_the_project(project: Path, tmp_path_factory: Any) -> None:
    out = tmp_path_factory.mktemp("elsewhere")
    studies.gather([claim(study="studies/lead.py")], out, project / "found", project)
    found = read_evidence(claim(), project / "found")
    assert found is not None
    assert found.command == "python studies/lead.py runs/lead"


def test_command_and_duration_reported_by_a_study_are_kept(project: Path) -> None:
    own = SCRIPT.replace('"cases"', '"command": "by hand", "seconds": 9000, "cases"')
    (project / "studies" / "lead.py").write_text(own, encoding="utf-8")
    assert call("claims", "--run-studies")[0] == 0
    found = read_entries(project / "claims")[0].evidence
    assert found is not None
    assert (found.command, found.seconds) == ("by hand", 9000)


def test_the_commit_is_empty_outside_of_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert studies.commit(tmp_path) == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    assert len(studies.commit(tmp_path)) == 12
    (tmp_path / "inside").mkdir()
    assert studies.commit(tmp_path / "inside") == ""  # of another project, within which this one lies
    monkeypatch.setenv("PATH", str(tmp_path))
    assert studies.commit(tmp_path) == ""


def test_theory_results_become_evidence(theory: dict[str, Any], tmp_path: Path) -> None:
    def pretend(words: Sequence[str]) -> int:
        folder = Path(words[words.index("--out") + 1])
        folder.mkdir(parents=True)
        (folder / "theory.json").write_text(json.dumps(theory), encoding="utf-8")
        return 0

    asked = [CLAIMS[number] for number in (14, 15, 16, 17)]
    written = studies.gather(asked, tmp_path / "out", tmp_path / "found", tmp_path, pretend)
    assert [file.stem for file in written] == [each.name for each in asked]
    for each, answer in zip(asked, theory["claims"], strict=True):
        found = read_evidence(each, tmp_path / "found")
        assert found is not None
        assert found.command == "plateaux theory --out out/theory --matrices 400"
        verdicts = ClaimEntry(each, found).verdicts
        for formula, words in studies.FORMULAS.items():
            for regime, tail in studies.REGIMES.items():
                if regime in answer[formula]:
                    said = answer[formula][regime]["verdict"]
                    # The theory calls a difference in the other direction not reproduced, the ledger contradicted.
                    assert verdicts[f"{words}, {tail}"].replace("contradicted", "not reproduced") == said
    shares = read_evidence(CLAIMS[16], tmp_path / "found")
    assert shares is not None
    case = shares.cases["as printed, SAM converges"]
    answer = theory["claims"][2]["printed"]["converging"]
    assert case.primary[0].value == pytest.approx(answer["simulation / formula - 1"]["mean"], rel=1e-5)
    assert case.also[0].value == pytest.approx(answer["simulation / upper bound"]["mean"], rel=1e-5)
    outside, settings = answer["settings whose interval excludes the formula"], answer["settings"]
    assert case.primary[0].what == f"{outside} of {settings} settings exclude the formula, mean"
    above = answer["settings above the upper bound"]
    assert case.also[0].what == f"{above} of {settings} settings beyond a bound, mean"
    apart = read_evidence(CLAIMS[17], tmp_path / "found")
    assert apart is not None
    assert [each.what for each in apart.cases["as printed, SAM converges"].primary] == [
        f"bound {bound:.2f}" for bound in (0.2, 0.3, 0.4, 0.5)
    ]  # fmt: skip


def test_only_the_theory_study_is_part_of_the_package(tmp_path: Path) -> None:
    assert studies.study_command("theory", tmp_path, tmp_path)[:3] == ["-m", "plateaux", "theory"]
    with pytest.raises(RecipeError, match="not part of the package"):
        studies.study_command("studies/flat.toml", tmp_path, tmp_path)
    with pytest.raises(RunError, match="wrote no evidence"):
        studies.collect([claim()], tmp_path)


def test_the_scoring_cost_study_writes_valid_evidence(tmp_path: Path, script: Script) -> None:
    done = script(ROOT / "studies" / "scoring_cost.py", str(tmp_path), "--quick")
    assert done.returncode == 0, done.stderr
    found = read_evidence(CLAIMS[8], tmp_path / "evidence")
    assert found is not None
    figure = found.cases[STATED].primary[0]
    costs = [float(line.split()[-2]) for line in done.stdout.splitlines() if line.startswith("round")]
    assert len(costs) == 3
    assert figure.interval is not None
    assert figure.value == pytest.approx(sum(costs) / 3 / 4, rel=0.01)  # a pass is a quarter of a percent of 400


# The page.


def test_the_page_of_claims_is_current() -> None:
    text = (ROOT / "docs" / "results" / "claims.md").read_text(encoding="utf-8")
    assert text == page(read_entries()), "make it again: plateaux claims --out docs/results/claims.md"


def test_the_page_shows_every_claim_with_its_criterion() -> None:
    text = page(read_entries())
    for each in CLAIMS.values():
        assert f"\n## {each.number}. {each.statement}\n" in text
        assert each.criterion in text
        assert each.primary.paper in text


def test_a_section_states_criterion_result_and_command() -> None:
    beside = {"metric": "members", "direction": "below", "zero": 2, "effect": 1.0, "paper": "1"}
    asked = claim(also=[beside], precondition={"metric": "training accuracy", "at_least": 0.99})
    case = Case(primary=(around(1.5, 1.0),), also=(MeasuredValue(value=3.0),))
    found = Evidence(
        claim="1-lead",
        command="plateaux theory --out x",
        seconds=90,
        commit="abc",
        precondition=0.995,
        cases={STATED: case},
    )
    text = "\n".join(section(ClaimEntry(asked, found)))
    assert "| as stated | lead, claimed > 0 | 1.0 | 1.5 (0.5 to 2.5) | **reproduced** |" in text
    assert "|  | members, claimed < 2 | 1 | 3 (no interval) | (inconclusive) |" in text
    assert "at least 0.99; here 0.995." in text
    assert "`plateaux theory --out x`; 1 min 30 s; commit abc." in text
    bare = "\n".join(section(ClaimEntry(asked, evidence(around(1, 1), precondition=0.5))))
    assert "time not recorded." in bare
    assert "**not testable at this scale**" in bare
    assert "|  | members, claimed < 2 | 1 |  |  |" in bare
    failed = "\n".join(section(ClaimEntry(asked, found.model_copy(update={"precondition": 0.5}))))
    assert "|  | members, claimed < 2 | 1 | 3 (no interval) |  |" in failed  # what cannot be tested is not judged


def test_a_section_states_the_required_effect_and_where_the_criterion_was_registered() -> None:
    required = {"metric": "SAM minus plain", "unit": "percentage points", "direction": "above", "paper": "+1"}
    asked = claim(required_effect=required, registered="abc", note="Repetitions were cut.")
    case = Case(primary=(around(1, 0.5),), required_effect=around(2, 1))
    text = "\n".join(section(ClaimEntry(asked, evidence(cases={STATED: case}))))
    assert "fixed before running (commit abc): above zero" in text
    assert "**Required effect**: SAM minus plain, claimed > 0; here 2 (1 to 3) percentage points." in text
    assert "**Note**: Repetitions were cut." in text
    two = asked.model_copy(update={"cases": (STATED, "again")})
    other = case.model_copy(update={"required_effect": around(0, 1)})
    text = "\n".join(section(ClaimEntry(two, evidence(cases={STATED: case, "again": other}))))
    assert "; as stated: 2 (1 to 3) percentage points; again: 0 (-1 to 1) percentage points." in text


def test_the_page_counts_its_verdicts() -> None:
    entries = [ClaimEntry(claim(), evidence(around(1.5, 1))), ClaimEntry(claim(number=2)), ClaimEntry(claim(number=3))]
    assert "3 claims, 3 cases: 1 reproduced, 2 not yet run." in page(entries)


def test_the_claims_folder_is_at_the_root_of_the_project() -> None:
    assert claims_dir() == ROOT / "claims"


def test_the_sed_step_time_study_writes_valid_evidence(tmp_path: Path, script: Script) -> None:
    done = script(ROOT / "studies" / "sed_steps.py", str(tmp_path), "--quick")
    assert done.returncode == 0, done.stderr
    found = read_evidence(CLAIMS[10], tmp_path / "evidence")
    assert found is not None
    slopes = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("round")]
    assert len(slopes) == 3
    assert found.cases[STATED].primary[0].value == pytest.approx(sum(slopes) / 3, abs=1e-3)
