"""Evidence, claims, and scripts name commits of this repository, so that code and settings can be read again."""

from __future__ import annotations

import re
import subprocess

import pytest

from plateaux_papers import PAPERS, ROOT
from plateaux_papers.claims.claim import read_claims, read_entries


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT.parent), *words], capture_output=True, text=True, check=False)


@pytest.fixture(autouse=True)
def _whole_history() -> None:
    if not (ROOT.parent / ".git").exists():
        pytest.skip("This is not a git checkout.")
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("The clone is shallow: older commits are missing. Run `git fetch --unshallow` for this test.")


def unknown(commits: dict[str, str]) -> dict[str, str]:
    return {name: each for name, each in commits.items() if git("merge-base", "--is-ancestor", each, "HEAD").returncode}


def test_evidence_names_commits_of_the_history() -> None:
    commits = {each.claim.name: each.evidence.commit for each in read_entries() if each.evidence}
    assert len(commits) == 17
    assert unknown(commits) == {}, "run the studies again from a commit of the history, or restore it"


def test_claims_name_registering_commits_of_the_history() -> None:
    commits = {f"claim {claim.number}": claim.registered for claim in read_claims() if claim.registered}
    assert {f"claim {number}" for number in range(2, 8)} <= set(commits)
    assert unknown(commits) == {}
    assert unknown({"claim 0": "0" * 40}) != {}


def test_a_script_is_that_of_the_commit_which_it_names() -> None:
    files = [file for paper in PAPERS for file in sorted((ROOT / paper).glob("scripts/*.py"))]
    assert files
    for file in files:
        first, _, text = file.read_text(encoding="utf-8").partition("\n")
        commit = re.search(r"`git checkout (\w{12})`", first)
        assert commit, f"the first line of {file} names no commit"
        assert git("show", f"{commit[1]}:studies/{file.name}").stdout == text, file
