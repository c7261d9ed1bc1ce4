"""Evidence names commits of this repository, so that its code can be read and run again."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)


def test_evidence_names_commits_of_the_history() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("This is not a git checkout.")
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("The clone is shallow: older commits are missing. Run `git fetch --unshallow` for this test.")
    files = sorted((ROOT / "claims" / "evidence").glob("*.json"))
    commits = {file.name: json.loads(file.read_text(encoding="utf-8"))["commit"] for file in files}
    assert files
    unknown = {
        name: each for name, each in commits.items() if git("merge-base", "--is-ancestor", each, "HEAD").returncode
    }
    assert unknown == {}, "run the studies again from a commit of the history, or restore it"
