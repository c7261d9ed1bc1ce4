"""The pages of the papers: links and commits exist, figures have alternative text, and READMEs repeat the ledger."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from plateaux_papers import PAPERS, ROOT
from plateaux_papers.claims.claim import ClaimEntry, Protocol, judge_case, read_entries

PAGES = [*sorted(ROOT.glob("*.md")), *(page for paper in PAPERS for page in sorted((ROOT / paper).glob("*.md")))]
STUDIES = [file for paper in PAPERS for file in (ROOT / paper / "studies").glob("*20??_*.toml")]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
for_pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)


@for_pages
def test_every_relative_link_of_a_page_has_a_target(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", page.read_text(encoding="utf-8")))
    local = [target.partition("#")[0] for target in targets if not re.match(r"[a-z]+:|#", target)]
    assert [target for target in local if not (page.parent / target).exists()] == []


@for_pages
def test_every_figure_of_a_page_has_alternative_text(page: Path) -> None:
    figures = re.findall(r"!\[([^\]]*)\]\(", page.read_text(encoding="utf-8"))
    assert [text for text in figures if len(text.strip()) < 10] == []


@for_pages
def test_every_commit_that_a_page_checks_out_is_in_the_history(page: Path) -> None:
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("This is no clone with its whole history.")
    commits = re.findall(r"git checkout ([0-9a-f]+)", page.read_text(encoding="utf-8"))
    assert [each for each in commits if git("merge-base", "--is-ancestor", each, "HEAD").returncode] == []


@for_pages
def test_the_python_blocks_of_a_page_run(page: Path) -> None:
    for language, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            exec(compile(code, str(page), "exec"), {})


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_the_readme_of_a_paper_lists_its_studies(file: Path) -> None:
    assert f"| `{file.stem}` |" in (file.parents[1] / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("entry", read_entries(), ids=lambda entry: entry.claim.name)
def test_the_readme_of_a_paper_has_the_verdicts_of_the_ledger(entry: ClaimEntry) -> None:
    claim, evidence = entry.claim, entry.evidence

    def judged(protocol: Protocol | None) -> str:
        if protocol is None:
            return "not measured"
        return judge_case(claim, evidence, (protocol.cases or claim.cases)[0], protocol.position)

    (folder,) = [ROOT / paper for paper in PAPERS if (ROOT / paper / "claims" / f"{claim.name}.toml").exists()]
    rows = re.findall(
        rf"^\| {claim.number} \| .* \| (.*) \| (.*) \|$", (folder / "README.md").read_text(), re.MULTILINE
    )
    assert rows == [(judged(claim.paper_protocol), judged(claim.fair_protocol))]
