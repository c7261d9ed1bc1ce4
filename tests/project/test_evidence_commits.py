"""Evidence and claims name commits of this repository, so that code and registered settings can be read again."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from plateaux.studies.claims.claim import read_claims

ROOT = Path(__file__).resolve().parents[2]


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)


@pytest.fixture(autouse=True)
def _whole_history() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("This is not a git checkout.")
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("The clone is shallow: older commits are missing. Run `git fetch --unshallow` for this test.")


def unknown(commits: dict[str, str]) -> dict[str, str]:
    return {name: each for name, each in commits.items() if git("merge-base", "--is-ancestor", each, "HEAD").returncode}


def test_evidence_names_commits_of_the_history() -> None:
    files = sorted((ROOT / "claims" / "evidence").glob("*.json"))
    commits = {file.name: json.loads(file.read_text(encoding="utf-8"))["commit"] for file in files}
    assert files
    assert unknown(commits) == {}, "run the studies again from a commit of the history, or restore it"


def test_claims_name_registering_commits_of_the_history() -> None:
    commits = {f"claim {claim.number}": claim.registered for claim in read_claims() if claim.registered}
    assert {f"claim {number}" for number in range(2, 8)} <= set(commits)
    assert unknown(commits) == {}
    assert unknown({"claim 0": "0" * 40}) != {}
