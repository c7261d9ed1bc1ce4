"""Evidence from the numbers of a study: paired differences, slopes, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from reference import paper_tables as papers
from test_ledger import CLAIMS, STATED, claim

from plateaux import evidence as studies
from plateaux.contrasts import evidence_of, repeated
from plateaux.errors import RunError
from plateaux.ledger import Compare, Entry, Evidence, Figure

SAM, OURS = {"method": "SAM", "rho": 0.1}, {"method": "ours", "rho": 0.1}
COMPARE = Compare(
    measure="accuracy", on="test", rows=("ensemble",), of={STATED: {"method": "ours"}}, against={"method": "SAM"},
    same=("rho",), times=100,
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    condition: Mapping[str, Any]
    repetition: int
    number: float
    row: str = "ensemble"
    measure: str = "accuracy"
    on: str = "test"


def compared(found: list[Finding], compare: Compare = COMPARE) -> Figure:
    return evidence_of(claim(), compare, found).cases[STATED].primary[0]


PAIRED = [
    Finding(SAM, 0, 0.50), Finding(OURS, 0, 0.52), Finding(SAM, 1, 0.70), Finding(OURS, 1, 0.71),
    Finding({"method": "SAM", "rho": 0.2}, 0, 0.9), Finding(OURS, 0, 9.0, on="train"),
    Finding(OURS, 0, 9.0, measure="nll"), Finding(OURS, 0, 9.0, row="member 0"), Finding(OURS, 2, 0.9),
]  # fmt: skip


def test_differences_are_paired_by_repetition_at_the_same_radius() -> None:
    found = compared(PAIRED)
    half = 12.706205 * 0.5  # scipy.stats.t.ppf(0.975, 1) times the standard error of 2 and 1
    assert found.value == pytest.approx(1.5)
    assert found.interval == (pytest.approx(1.5 - half, abs=1e-4), pytest.approx(1.5 + half, abs=1e-4))


def test_one_repetition_has_no_interval() -> None:
    assert compared(PAIRED[:2]) == Figure(value=2.0)


def test_the_papers_own_table_gives_the_papers_own_slope() -> None:
    rows = tuple(f"severity {level}" for level in range(1, 6))
    tables = {"SAM": papers.SEVERITIES["CIFAR10-C"][1], "ours": papers.SEVERITIES["CIFAR10-C"][2]}
    found = [
        Finding({"method": name, "rho": 0.2}, repetition, number / 100, row)
        for name, numbers in tables.items()
        for repetition in range(2)
        for row, number in zip(rows, numbers, strict=True)
    ]
    slope = compared(found, COMPARE.model_copy(update={"rows": rows}))
    assert slope.value == pytest.approx(CLAIMS[7].primary.effect)
    assert slope.interval == (pytest.approx(0.405), pytest.approx(0.405))  # both repetitions are the same


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (PAIRED[:1], "0 conditions"),
        ([*PAIRED, Finding({"method": "ours", "rho": 0.2}, 0, 0.5)], "2 conditions"),
        ([PAIRED[0], PAIRED[3]], "No repetition has 'ensemble'"),
        ([PAIRED[0], PAIRED[7]], "No repetition has 'ensemble'"),
    ],
)
def test_numbers_that_cannot_be_compared_are_refused(found: list[Finding], message: str) -> None:
    with pytest.raises(RunError, match=message):
        compared(found)


def test_a_study_that_left_numbers_and_no_files_is_compared(tmp_path: Path) -> None:
    asked = claim(compare=COMPARE.model_dump())
    found = studies.collect([asked], tmp_path, lambda folder: PAIRED if folder == tmp_path else [])
    assert Entry(asked, found[0]).verdicts == {STATED: "inconclusive"}
    assert isinstance(found[0], Evidence)
    with pytest.raises(RunError, match="nothing to judge by"):
        studies.collect([claim()], tmp_path, lambda _: PAIRED)


def test_what_was_repeated_has_a_t_interval() -> None:
    found = repeated([1.0, 2.0, 3.0], "lead")
    half = 4.302653 / 3**0.5  # scipy.stats.t.ppf(0.975, 2) times the standard error
    assert (found.value, found.what) == (2.0, "lead")
    assert found.interval == (pytest.approx(2 - half, abs=1e-5), pytest.approx(2 + half, abs=1e-5))


def test_claims_that_compare_do_so_for_each_of_their_cases() -> None:
    comparing = {number: each.compare for number, each in CLAIMS.items() if each.compare}
    assert list(comparing) == [5, 7]
    for number, compare in comparing.items():
        assert tuple(compare.of) == CLAIMS[number].cases
        assert CLAIMS[number].primary.unit.startswith("percentage points")
        assert compare.times == 100
