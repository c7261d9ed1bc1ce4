"""The ledger: verdicts by rule, claims that say what the papers' own tables say, evidence that fits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import paper_tables as papers

from plateaux.errors import RecipeError, StorageError
from plateaux_papers import CLAIMS as CLAIMS_FOLDERS
from plateaux_papers.claims.claim import (
    WEAKEST_FIRST,
    Case,
    Claim,
    ClaimEntry,
    Evidence,
    MeasuredValue,
    PrimaryMetric,
    evidence_folders,
    judge_case,
    read_claims,
    read_entries,
    read_evidence,
    select_claims,
    verdict,
    weakest_verdict,
    write_evidence,
)

CLAIMS = {claim.number: claim for claim in read_claims()}
STATED = "as stated"


def claim(**changes: Any) -> Claim:
    primary = {"metric": "lead", "direction": "above", "effect": 1.0, "paper": "1.0"}
    plain = {
        "name": "1-lead", "number": 1, "source": "a paper", "statement": "It leads.", "where": "Table 1",
        "study": "studies/lead.py", "criterion": "above zero", "scale": "small", "primary": primary,
        "consistent_with_own_tables": "yes", "why": "It says so.",
    }  # fmt: skip
    return Claim.model_validate({**plain, **changes})


def evidence(*figures: MeasuredValue, **changes: Any) -> Evidence:
    plain = {"claim": "1-lead", "command": "plateaux study lead.toml", "cases": {STATED: {"primary": figures}}}
    return Evidence.model_validate({**plain, **changes})


def around(value: float, spread: float) -> MeasuredValue:
    return MeasuredValue(value=value, interval=(value - spread, value + spread))


# The rule.


@pytest.mark.parametrize(
    ("value", "spread", "expected"),
    [  # the paper's effect is 1
        (0.9, 0.5, "reproduced"),
        (0.2, 0.1, "reproduced"),  # smaller than the paper's, and there
        (3.0, 0.5, "reproduced"),
        (-0.9, 0.5, "contradicted"),
        (0.2, 0.3, "not reproduced"),
        (-0.1, 0.3, "not reproduced"),
        (0.9, 1.0, "inconclusive"),
        (0.5, 0.5, "inconclusive"),  # zero and the effect are the very ends
        (0.0, 5.0, "inconclusive"),
    ],
)
def test_the_interval_decides(value: float, spread: float, expected: str) -> None:
    rises = PrimaryMetric(metric="lead", direction="above", effect=1.0, paper="")
    falls = PrimaryMetric(metric="lead", direction="below", effect=-1.0, paper="")
    assert verdict(around(value, spread), rises) == expected
    assert verdict(around(-value, spread), falls) == expected


def test_existential_claims_are_not_contradicted() -> None:
    can = claim(existential=True)
    assert judge_case(can, evidence(around(-0.9, 0.5)), STATED) == "not reproduced"
    assert judge_case(can, evidence(around(0.9, 0.5)), STATED) == "reproduced"
    assert judge_case(claim(), evidence(around(-0.9, 0.5)), STATED) == "contradicted"


def test_another_value_than_zero_can_mean_no_effect() -> None:
    cheap = PrimaryMetric(metric="cost", direction="below", zero=1.5, effect=0.99, paper="")
    assert verdict(around(0.3, 0.1), cheap) == "reproduced"
    assert verdict(around(2.0, 0.1), cheap) == "contradicted"
    assert verdict(around(1.5, 0.1), cheap) == "not reproduced"
    assert verdict(around(1.2, 0.4), cheap) == "inconclusive"


def test_without_an_interval_the_verdict_is_inconclusive() -> None:
    assert verdict(MeasuredValue(value=100.0), claim().primary) == "inconclusive"


def test_without_an_effect_in_the_paper_a_claim_is_inconclusive() -> None:
    metric = PrimaryMetric(metric="lead", direction="above", paper="no number")
    assert verdict(around(0.0, 0.001), metric) == "inconclusive"


def test_several_values_give_the_weakest_verdict() -> None:
    both = [around(1, 0.5), around(-1, 0.5)]
    assert judge_case(claim(), evidence(*both), STATED) == "contradicted"
    assert judge_case(claim(), evidence(around(1, 0.5), around(0.9, 1)), STATED) == "inconclusive"
    assert judge_case(claim(), evidence(around(1, 0.5), around(2, 0.5)), STATED) == "reproduced"
    assert weakest_verdict(["reproduced", "not reproduced", "inconclusive"]) == "not reproduced"
    assert len(set(WEAKEST_FIRST)) == 6


def test_a_failed_precondition_makes_a_claim_untestable_whatever_was_measured() -> None:
    fitted = claim(precondition={"metric": "training accuracy", "at_least": 0.99})
    assert judge_case(fitted, evidence(around(1, 0.5), precondition=0.67), STATED) == "not testable at this scale"
    assert judge_case(fitted, evidence(around(1, 0.5), precondition=0.99), STATED) == "reproduced"


def test_without_the_required_effect_a_claim_is_untestable() -> None:
    needs_sam = claim(required_effect={"metric": "SAM minus plain", "direction": "above", "paper": "+1"})
    for required, judged in (
        (around(1, 0.5), "reproduced"),
        (around(1, 1.5), "not testable at this scale"),  # includes zero
        (around(-1, 0.5), "not testable at this scale"),
        (None, "not testable at this scale"),
    ):
        found = evidence(cases={STATED: Case(primary=(around(2, 0.5),), required_effect=required)})
        assert judge_case(needs_sam, found, STATED) == judged


def test_a_claim_without_evidence_is_not_yet_run() -> None:
    two = claim(cases=["one rule", "another"])
    some = evidence(cases={"another": Case(primary=(around(1, 0.5),))})
    assert ClaimEntry(two, some).verdicts == {"one rule": "not yet run", "another": "reproduced"}
    assert ClaimEntry(two).verdicts == {"one rule": "not yet run", "another": "not yet run"}


def test_equality_is_judged_by_the_theory_and_never_by_the_interval() -> None:
    equal = claim(primary={"metric": "ratio", "direction": "equal", "paper": "equal"})
    found = evidence(cases={STATED: Case(primary=(around(1, 0.5),), by_theory="not reproduced")})
    assert judge_case(equal, found, STATED) == "not reproduced"
    assert judge_case(equal, evidence(around(1, 0.5)), STATED) == "inconclusive"


# The built-in claims.


def test_seventeen_claims_are_built_in_as_files_named_by_number() -> None:
    assert list(CLAIMS) == list(range(1, 18))
    for number, each in CLAIMS.items():
        assert each.name.startswith(f"{number:02d}-")
        assert sum((folder / f"{each.name}.toml").is_file() for folder in CLAIMS_FOLDERS) == 1
    texts = [each.statement for each in CLAIMS.values()]
    assert len(set(texts)) == 17


def test_evidence_belongs_to_a_claim() -> None:
    names = {each.name for each in CLAIMS.values()}
    assert {file.stem for folder in evidence_folders() for file in folder.glob("*.json")} <= names


def test_claims_by_theory_are_those_of_the_simulation() -> None:
    assert [number for number, each in CLAIMS.items() if each.study == "theory"] == [14, 15, 16, 17]
    assert [number for number, each in CLAIMS.items() if each.primary.by_theory] == [14, 15, 16]


def test_claims_about_sharpness_require_fitted_members() -> None:
    asking = [number for number, each in CLAIMS.items() if each.precondition]
    assert asking == [1, 2, 3, 4, 5, 6, 7, 11, 12]
    assert {CLAIMS[number].precondition.at_least for number in asking} == {0.99}  # type: ignore[union-attr]


def slope(values: tuple[float, ...]) -> float:
    return float(np.polyfit(range(1, len(values) + 1), values, 1)[0])


def lead(name: str, over: int = 1) -> tuple[float, ...]:
    rows = papers.SEVERITIES[name]
    return tuple(round(a - b, 2) for a, b in zip(rows[2], rows[over], strict=True))


def effects(number: int) -> list[float | None]:
    each = CLAIMS[number]
    return [each.primary.effect, *(more.effect for more in each.also)]


def test_effects_are_those_of_the_papers_tables() -> None:
    plain, sam, balanced = papers.FIGURE_7["CIFAR10-C"]
    controls = np.array(papers.RESNET_CIFAR10)
    fisher, accuracy = controls[:, 4], 100 * controls[:, 0]
    detected = np.array(papers.SED_PDS) - np.max(list(papers.BMA.values()), 0)
    unique = np.subtract(papers.UNIQUE["SED"], papers.UNIQUE["deep ensemble"])
    extra, total = papers.MINUTES
    expected = {
        1: [min(papers.WIDTHS.values())],
        2: [papers.WIDTHS[8] - papers.WIDTHS[16]],
        3: [papers.SPARSITIES[0.8] - papers.SPARSITIES[0.0]],
        4: [sam[1] - plain[1], sam[0] - plain[0]],
        5: [balanced[2] - sam[2]],
        6: [1.30 - (papers.FIGURE_7["CIFAR100-C"][2][2] - papers.FIGURE_7["CIFAR100-C"][1][2])],
        7: [slope(lead("CIFAR10-C"))],
        8: [100 * extra / (total - extra)],
        9: [detected.mean(), unique.mean()],
        11: [math.log10(fisher[1:].min() / fisher[0]), accuracy[1:].min() - accuracy[0]],
        12: [math.log10(controls[1, column] / controls[0, column]) for column in (4, 6)],
    }
    assert effects(12)[2] == pytest.approx(controls[1, 5] - controls[0, 5], rel=1e-3)
    for number, numbers in expected.items():
        for ours, theirs in zip(effects(number), numbers, strict=False):
            assert ours == pytest.approx(theirs, abs=0.006 if number == 9 else 6e-4 if number > 10 else 5.1e-3), number


def test_members_and_gain_add_up_and_sam_trades_one_for_the_other_everywhere() -> None:
    for rows in papers.FIGURE_7.values():
        for members, gain, ensemble in rows:
            assert members + gain == pytest.approx(ensemble)
        assert rows[1][0] > rows[0][0]
        assert rows[1][1] < rows[0][1]
    assert CLAIMS[4].consistent_with_own_tables == "yes"


def test_severities_and_figure_agree_but_on_one_set() -> None:
    off = {
        name: papers.FIGURE_7[name][2][2] - np.mean(rows[2]).item() for name, rows in papers.SEVERITIES.items()
    }  # fmt: skip
    assert abs(off["CIFAR10-C"]) < 0.011
    assert abs(off["CIFAR100-C"]) < 0.011
    assert off["TinyImageNet-C"] == pytest.approx(-0.154)
    assert "32.13" in CLAIMS[5].why


def test_the_lead_does_not_grow_with_severity_in_every_table() -> None:
    assert slope(lead("CIFAR10-C")) == pytest.approx(0.405)
    assert slope(lead("CIFAR100-C")) == pytest.approx(0.133)
    assert slope(lead("TinyImageNet-C")) == pytest.approx(-0.08)
    assert lead("TinyImageNet-C") == (1.28, 1.49, 1.51, 1.29, 0.98)
    assert lead("TinyImageNet-C", over=0)[::4] == (2.86, 1.83)
    assert CLAIMS[7].consistent_with_own_tables == "no"


def test_the_baseline_is_neither_flattest_nor_worst_in_every_table() -> None:
    assert len(papers.CONTROLS) == len(papers.RESNET_CIFAR10) == len(papers.RESNET_CIFAR100)
    table = np.array(papers.RESNET_CIFAR100)
    assert papers.CONTROLS[table[:, 5].argmin()] == "baseline + SAM"
    assert papers.CONTROLS[table[:, 0].argmin()] == papers.CONTROLS[table[:, 2].argmin()] == "decay"
    assert papers.CONTROLS[np.array(papers.RESNET_CIFAR10)[:, 2].argmin()] == "decay"
    assert min(papers.VGG_CIFAR100_ACCURACY) < papers.VGG_CIFAR100_ACCURACY[0]
    assert min(papers.VIT_CIFAR10_ACCURACY) < papers.VIT_CIFAR10_ACCURACY[0]
    assert CLAIMS[11].consistent_with_own_tables == "no"


def test_sam_raises_eight_of_nine_figures_of_sharpness() -> None:
    table = np.array(papers.RESNET_CIFAR10)[:, 4:]
    assert (table[1::2] > table[::2]).sum() == 8
    assert CLAIMS[12].consistent_with_own_tables == "yes"


# Files.


def test_claims_are_selected_by_number_or_name() -> None:
    known = list(CLAIMS.values())
    assert [each.number for each in select_claims(known, ["7", "05", CLAIMS[2].name, "7"])] == [2, 5, 7]
    assert select_claims(known, [f"{CLAIMS[3].name}.toml"]) == [CLAIMS[3]]
    assert select_claims(known, []) == known
    with pytest.raises(RecipeError, match="did you mean '16-theorem-2'"):
        select_claims(known, ["16-theorem"])
    with pytest.raises(RecipeError, match="no claim '18'"):
        select_claims(known, ["18"])


def test_evidence_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = evidence(around(1.25, 0.5), seconds=12.5, commit="abc")
    file = write_evidence(found, tmp_path / "new")
    assert file.name == "1-lead.json"
    assert read_evidence(claim(), [tmp_path / "new"]) == found
    assert read_evidence(claim(), [tmp_path]) is None
    assert ClaimEntry(claim(), found).to_dict()["evidence"]["cases"][STATED]["primary"][0]["value"] == 1.25


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"Cannot write .*1-lead\.json: .*; choose another output path"):
        write_evidence(evidence(around(1, 0.5)), tmp_path / "file")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"claim": "2-other"}, "is evidence for claim '2-other'"),
        ({"cases": {"another": {"primary": [{"value": 1}]}}}, "has the cases"),
        ({"precondition": None}, "has no value of the precondition"),
        ({"cases": {STATED: {"primary": [{"value": 1}], "by_theory": "reproduced"}}}, "by_theory is only"),
        ({"cases": {STATED: {"primary": [{"value": 1}], "also": [{"value": 1}]}}}, "a value for each of 2"),
        ({"cases": {STATED: {"primary": []}}}, "cases.as stated.primary"),
        ({"cases": {STATED: {"primary": [{"value": 1, "interval": [2, 3]}]}}}, "outside of its interval"),
        ({"cases": {STATED: {"primary": [{"value": math.nan}]}}}, "finite number"),
        ({"verdict": "reproduced"}, "verdict: Extra"),
        ({"format": 2}, "format"),
    ],
)
def test_evidence_that_does_not_fit_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    measured = {"metric": "x", "direction": "above", "paper": ""}
    asked = claim(precondition={"metric": "training accuracy", "at_least": 0.99}, also=[measured, measured])
    good = evidence(around(1, 0.5), precondition=1.0).model_dump(mode="json")
    file = tmp_path / "1-lead.json"
    file.write_text(json.dumps(good), encoding="utf-8")
    assert read_evidence(asked, [tmp_path]) is not None
    file.write_text(json.dumps({**good, **changes}), encoding="utf-8")
    with pytest.raises(RecipeError, match=message):
        read_evidence(asked, [tmp_path])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("number = ", "Cannot read .*1-lead.toml"),
        ("number = 0", "1-lead.toml.*number"),
        ("", "1-lead.toml.*Field"),
    ],
)
def test_a_broken_claim_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "1-lead.toml").write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError, match=message):
        read_claims([tmp_path])


def test_broken_evidence_is_named(tmp_path: Path) -> None:
    (tmp_path / "1-lead.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(RecipeError, match=r"Cannot read .*1-lead\.json"):
        read_evidence(claim(), [tmp_path])


def test_entries_are_claims_with_their_evidence(tmp_path: Path) -> None:
    assert [each.claim.number for each in read_entries()] == list(CLAIMS)
    assert all(each.evidence for each in read_entries())
    assert read_entries([tmp_path]) == []
