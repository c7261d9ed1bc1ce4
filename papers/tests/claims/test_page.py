"""The page of claims: the table of verdicts under two protocols, and one section for every claim."""

from __future__ import annotations

from pathlib import Path

import pytest
from claims.test_claim import CLAIMS, STATED, around, claim, evidence

from plateaux.errors import RecipeError
from plateaux_papers import ROOT
from plateaux_papers.claims.claim import Case, ClaimEntry, Evidence, MeasuredValue, read_claims, read_entries
from plateaux_papers.claims.page import format_values, page, section

BESIDE = {"metric": "members", "direction": "below", "zero": 2, "effect": 1.0, "paper": "1"}
PROTOCOLS = {"paper_protocol": {"metric": 1}, "fair_protocol": {}, "limits": "One network."}


def row(entry: ClaimEntry) -> str:
    """Return the row of a claim in the table of verdicts."""
    return next(line for line in page([entry]).splitlines() if line.startswith(f"| [{entry.claim.number}]("))


def test_the_page_of_claims_is_current() -> None:
    text = (ROOT / "claims.md").read_text(encoding="utf-8")
    assert text == page(read_entries()), "make it again: plateaux claims --out papers/claims.md"


def test_the_page_shows_every_claim_with_its_criterion() -> None:
    text = page(read_entries())
    for each in CLAIMS.values():
        assert f"\n## {each.number}. {each.statement}\n" in text
        assert each.criterion in text
        assert each.primary.paper in text
        assert each.limits in row(ClaimEntry(each))
        assert each.limits


# The table of verdicts.


def test_each_protocol_shows_the_verdict_of_its_own_metric() -> None:
    case = Case(primary=(around(1.5, 1.0),), also=(around(3.0, 0.5),))
    found = row(ClaimEntry(claim(also=[BESIDE], **PROTOCOLS), evidence(cases={STATED: case})))
    cells = ["[1](#claim-1)", "It leads.", "**contradicted**, 3.00 (2.50 to 3.50)", "**reproduced**, 1.5 (0.5 to 2.5)"]
    assert found == f"| {' | '.join(cells)} | One network. |"


def test_a_protocol_that_was_not_measured_has_no_verdict() -> None:
    assert row(ClaimEntry(claim(limits="x"), evidence(around(1.5, 1.0)))).endswith(
        "| not measured | not measured | x |"
    )
    assert "| **not yet run** | **not yet run** |" in row(ClaimEntry(claim(also=[BESIDE], **PROTOCOLS)))


def test_a_failed_precondition_holds_for_both_protocols() -> None:
    asked = claim(also=[BESIDE], precondition={"metric": "training accuracy", "at_least": 0.99}, **PROTOCOLS)
    case = Case(primary=(around(1.5, 1.0),), also=(around(3.0, 0.5),))
    found = row(ClaimEntry(asked, evidence(cases={STATED: case}, precondition=0.5)))
    assert found.count("**not testable at this scale**") == 2


def test_a_protocol_shows_its_cases_and_the_first_of_several_numbers() -> None:
    asked = claim(cases=["printed", "corrected"], fair_protocol={"cases": ["corrected"]})
    case = Case(primary=(around(1.5, 1.0), around(2.0, 1.0)))
    found = row(ClaimEntry(asked, evidence(cases={"printed": case, "corrected": case})))
    assert "| not measured | corrected: **reproduced**, 1.5 (0.5 to 2.5) and 1 more |" in found


@pytest.mark.parametrize("protocol", [{"metric": 2}, {"metric": -1}, {"cases": ["elsewhere"]}])
def test_a_protocol_names_a_metric_and_cases_of_its_claim(protocol: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="1 secondary metrics"):
        claim(also=[BESIDE], fair_protocol=protocol)


def test_the_page_counts_its_verdicts() -> None:
    other = claim(number=4, about="cost", fair_protocol={})
    entries = [
        ClaimEntry(claim(fair_protocol={}), evidence(around(1.5, 1))),
        ClaimEntry(claim(number=2, fair_protocol={}), evidence(around(0.5, 1))),
        ClaimEntry(claim(number=3)),
        ClaimEntry(other, evidence(around(1.5, 1))),
    ]
    text = page(entries)
    assert "4 claims in 4 cases: 2 reproduced (1 trained ensembles, 1 cost), 1 not yet run, 1 inconclusive." in text
    assert "under a fair protocol: 1 reproduced, 1 inconclusive." in text


# The section of a claim.


def test_a_section_states_criterion_result_and_command() -> None:
    asked = claim(also=[BESIDE], precondition={"metric": "training accuracy", "at_least": 0.99})
    case = Case(primary=(around(1.5, 1.0),), also=(MeasuredValue(value=3.0),))
    found = Evidence(claim="1-lead", command="python lead.py x", seconds=90, commit="abc", precondition=0.995,
                     cases={STATED: case})  # fmt: skip
    text = "\n".join(section(ClaimEntry(asked, found)))
    assert "| lead, claimed > 0 | 1.0 | 1.5 (0.5 to 2.5) **reproduced** |" in text
    assert "| members, claimed < 2 | 1 | 3 (no interval) (inconclusive) |" in text
    assert "at least 0.99; here 0.995." in text
    failed = "\n".join(section(ClaimEntry(asked, found.model_copy(update={"precondition": 0.5}))))
    assert "| members, claimed < 2 | 1 | 3 (no interval) |" in failed  # what cannot be tested is not judged
    assert "**not testable at this scale**" in failed
    bare = "\n".join(section(ClaimEntry(asked, evidence(around(1, 1), precondition=0.995))))
    assert "| members, claimed < 2 | 1 |  |" in bare


def test_a_section_has_a_column_for_every_case() -> None:
    asked = claim(cases=["theirs", "ours"])
    values = {"theirs": Case(primary=(around(-1, 0.5),)), "ours": Case(primary=(around(1, 0.5),))}
    text = "\n".join(section(ClaimEntry(asked, evidence(cases=values))))
    assert "| metric | paper | theirs | ours |" in text
    assert "| -1.00 (-1.50 to -0.50) **contradicted** | 1.00 (0.50 to 1.50) **reproduced** |" in text


@pytest.mark.parametrize(
    ("study", "command"),
    [
        ("scripts/lead.py", "**Reproduce**: `git checkout abc`, then `python lead.py x`; 1 min 30 s."),
        (
            "studies/lead.toml",
            "`plateaux study lead`, then `plateaux claims 1 --study runs/lead`; 1 min 30 s; measured",
        ),
        ("theory", "`python lead.py x`, then `plateaux claims 1 --study theory`; 1 min 30 s; measured at commit abc."),
    ],
)
def test_a_script_runs_at_its_commit_and_a_study_by_its_name(study: str, command: str) -> None:
    found = evidence(around(1, 1), command="python lead.py x", commit="abc", seconds=90)
    assert command in "\n".join(section(ClaimEntry(claim(study=study), found)))


def test_a_section_states_the_required_effect_and_where_the_criterion_was_registered() -> None:
    required = {"metric": "SAM minus plain", "unit": "percentage points", "direction": "above", "paper": "+1"}
    asked = claim(required_effect=required, registered="abc", note="Repetitions were cut.")
    case = Case(primary=(MeasuredValue(value=1, interval=(0.5, 1.5), repetitions=5),), required_effect=around(2, 1))
    text = "\n".join(section(ClaimEntry(asked, evidence(cases={STATED: case}))))
    assert "fixed before running (commit abc): above zero" in text
    assert "**Required effect**: SAM minus plain, claimed > 0; here 2.0 (1.0 to 3.0) percentage points." in text
    assert "**Scale** (5 repetitions): small." in text
    assert "**Note**: Repetitions were cut." in text
    two = asked.model_copy(update={"cases": (STATED, "again")})
    other = case.model_copy(update={"required_effect": around(0, 1)})
    text = "\n".join(section(ClaimEntry(two, evidence(cases={STATED: case, "again": other}))))
    assert "; as stated: 2.0 (1.0 to 3.0) percentage points; again: 0.0 (-1.0 to 1.0) percentage points." in text


def test_half_of_an_interval_has_two_significant_digits() -> None:
    assert format_values([MeasuredValue(value=-0.483067, interval=(-0.738593, -0.22754))]) == "-0.48 (-0.74 to -0.23)"
    assert format_values([MeasuredValue(value=1234.5, interval=(1000.2, 1500.4))]) == "1234 (1000 to 1500)"
    assert (
        format_values([MeasuredValue(value=4.952e-8, interval=(-1.445e-6, 1.544e-6))]) == "5e-08 (-1.4e-06 to 1.5e-06)"
    )
    assert format_values([MeasuredValue(value=3.0, interval=(3.0, 3.0))]) == "3 (no interval)"


def test_a_claim_with_an_unknown_protocol_is_refused(tmp_path: Path) -> None:
    file = ROOT / "lu2024" / "claims" / f"{CLAIMS[1].name}.toml"
    text = file.read_text(encoding="utf-8").replace("fair_protocol = {metric = 3}", "fair_protocol = {metric = 9}")
    copy = tmp_path / file.name
    copy.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError, match="A protocol names metric 9"):
        read_claims([copy.parent])
