"""Evidence from the numbers of a study: paired differences, slopes, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from claims.test_claim import CLAIMS, STATED, claim
from reference import paper_tables as papers

from plateaux.errors import RunError
from plateaux_papers.claims.claim import ClaimEntry, Compare, Evidence, MeasuredValue
from plateaux_papers.claims.contrasts import build_evidence, mean_with_interval

SAM, OURS = {"method": "SAM", "rho": 0.1}, {"method": "ours", "rho": 0.1}
COMPARE = Compare(
    metric="accuracy", split="test", rows=("ensemble",), conditions={STATED: {"method": "ours"}},
    baseline={"method": "SAM"},
    same=("rho",), times=100,
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    condition: Mapping[str, Any]
    repetition: int
    value: float
    row: str = "ensemble"
    metric: str = "accuracy"
    split: str = "test"


def compare_results(results: list[Result], compare: Compare = COMPARE) -> MeasuredValue:
    return build_evidence(claim(), compare, results).cases[STATED].primary[0]


PAIRED = [
    Result(SAM, 0, 0.50), Result(OURS, 0, 0.52), Result(SAM, 1, 0.70), Result(OURS, 1, 0.71),
    Result({"method": "SAM", "rho": 0.2}, 0, 0.9), Result(OURS, 0, 9.0, split="train"),
    Result(OURS, 0, 9.0, metric="nll"), Result(OURS, 0, 9.0, row="member 0"), Result(OURS, 2, 0.9),
]  # fmt: skip


def test_differences_are_paired_by_repetition_at_the_same_radius() -> None:
    results = compare_results(PAIRED)
    half = 12.706205 * 0.5  # scipy.stats.t.ppf(0.975, 1) times the standard error of 2 and 1
    assert results.value == pytest.approx(1.5)
    assert results.interval == (pytest.approx(1.5 - half, abs=1e-4), pytest.approx(1.5 + half, abs=1e-4))


def test_a_required_effect_is_another_comparison_of_the_same_study() -> None:
    plain = [Result({"method": "plain", "rho": 0.0}, repetition, value) for repetition, value in ((0, 0.4), (1, 0.5))]
    required = {"conditions": {STATED: SAM}, "baseline": {"method": "plain"}, "same": ()}
    results = [*PAIRED, *plain]
    found = build_evidence(claim(), COMPARE.model_copy(update={"required_effect": required}), results)
    (case,) = found.cases.values()
    assert case.required_effect is not None
    assert case.required_effect.value == pytest.approx(15)  # of 10 and 20 points
    assert case.primary[0].value == pytest.approx(1.5)


def test_cases_without_results_are_not_yet_run() -> None:
    asked = claim(cases=[STATED, "another rule"])
    conditions = {STATED: {"method": "ours"}, "another rule": {"method": "theirs"}}
    found = build_evidence(asked, COMPARE.model_copy(update={"conditions": conditions}), PAIRED)
    assert ClaimEntry(asked, found).verdicts == {STATED: "inconclusive", "another rule": "not yet run"}


def test_one_repetition_has_no_interval() -> None:
    assert compare_results(PAIRED[:2]) == MeasuredValue(value=2.0, repetitions=1)


def test_the_papers_own_table_gives_the_papers_own_slope() -> None:
    rows = tuple(f"severity {level}" for level in range(1, 6))
    tables = {"SAM": papers.SEVERITIES["CIFAR10-C"][1], "ours": papers.SEVERITIES["CIFAR10-C"][2]}
    results = [
        Result({"method": name, "rho": 0.2}, repetition, number / 100, row)
        for name, numbers in tables.items()
        for repetition in range(2)
        for row, number in zip(rows, numbers, strict=True)
    ]
    slope = compare_results(results, COMPARE.model_copy(update={"rows": rows}))
    assert slope.value == pytest.approx(CLAIMS[7].primary.effect)
    assert slope.interval == (pytest.approx(0.405), pytest.approx(0.405))  # both repetitions are the same


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (PAIRED[:1], "No condition of the study"),
        ([*PAIRED, Result({"method": "ours", "rho": 0.2}, 0, 0.5)], "2 conditions"),
        ([PAIRED[0], PAIRED[3]], "No repetition has 'accuracy'"),
        ([PAIRED[0], PAIRED[7]], "no row 'ensemble'"),
    ],
)
def test_numbers_that_cannot_be_compared_are_refused(results: list[Result], message: str) -> None:
    with pytest.raises(RunError, match=message):
        compare_results(results)


def test_repetitions_have_a_t_interval() -> None:
    results = mean_with_interval([1.0, 2.0, 3.0], "lead")
    half = 4.302653 / 3**0.5  # scipy.stats.t.ppf(0.975, 2) times the standard error
    assert (results.value, results.what) == (2.0, "lead")
    assert results.interval == (pytest.approx(2 - half, abs=1e-5), pytest.approx(2 + half, abs=1e-5))


def curve(
    width: int,
    beta: float,
    radii: tuple[float, ...] = (0.0, 0.1, 0.2),
    *,
    fitted: tuple[float, ...] = (1.0, 1.0, 0.99),
    probe: str = "worst_l2(m=128; samples=512)",
) -> list[Result]:
    """Return a study in which diversity is sharpness to the power of beta, and a little more in each repetition."""
    results = []
    for repetition, more in enumerate((0.0, 0.02)):
        for sharpness, rho, right in zip((1.0, 2.0, 5.0), radii, fitted, strict=False):
            at = {"method": "SAM", "width": width, "network": f"width {width}", "rho": rho}
            results.append(Result(at, repetition, sharpness, "mean of members", probe, "train"))
            results.append(Result(at, repetition, right, "mean of members", "accuracy", "train"))
            for measure, row in (
                ("der", "members together"),
                ("variance", "members together"),
                ("kl", "mean of pairs"),
            ):
                results.append(Result(at, repetition, 0.1 * sharpness ** (beta + more), row, measure, "test"))
    return results


def said(number: int, results: list[Result]) -> Evidence:
    compare = CLAIMS[number].compare
    assert compare is not None
    return build_evidence(CLAIMS[number], compare, results)


def test_a_power_law_has_its_power_as_slope() -> None:
    results = said(1, [*curve(16, 0.3), *curve(8, 0.5)])
    case = results.cases[STATED]
    assert [each.value for each in (*case.primary, *case.also)] == pytest.approx([0.31] * 4)
    assert [each.repetitions for each in case.primary] == [2]
    assert results.precondition == 1.0


def test_a_slope_can_be_limited_to_fitted_conditions() -> None:
    results = curve(16, 0.3)
    sharp = {"method": "SAM", "width": 16, "network": "width 16", "rho": 0.4}
    for repetition in (0, 1):  # a point that is not fitted, and off the line
        results.append(Result(sharp, repetition, 10.0, "mean of members", "worst_l2(m=128; samples=512)", "train"))
        results.append(Result(sharp, repetition, 0.5, "mean of members", "accuracy", "train"))
        for measure, row in (("der", "members together"), ("variance", "members together"), ("kl", "mean of pairs")):
            results.append(Result(sharp, repetition, 9.0, row, measure, "test"))
    case = said(1, results).cases[STATED]
    assert case.also[-1].value == pytest.approx(0.31)
    assert min(each.value for each in (*case.primary, *case.also[:-1])) > 1
    with pytest.raises(RunError, match="a repetition has 2"):
        said(1, curve(16, 0.3, fitted=(1.0, 1.0, 0.9)))


def test_nan_is_refused_and_not_left_out() -> None:
    results = curve(16, 0.3)
    results[0] = replace(results[0], value=float("nan"))
    with pytest.raises(RunError, match=r"'rho': 0.0.*, repetition 0, is NaN or infinite"):
        said(1, results)


def test_slopes_of_two_widths_are_compared_in_each_repetition() -> None:
    probe, radii = "worst_l2(m=125; samples=500)", (0.0, 0.05, 0.1)
    wide = curve(16, 0.3, radii, fitted=(0.5, 1.0, 1.0), probe=probe)
    results = said(2, [*wide, *curve(8, 0.5, radii, probe=probe)])
    (case,) = results.cases.values()
    assert [case.primary[0].value, case.also[0].value] == pytest.approx([0.2, 0.2])
    assert ClaimEntry(CLAIMS[2], results).verdicts == {
        STATED: "not testable at this scale"
    }  # half of the samples are fitted


def test_a_comparison_can_be_limited_to_some_levels_of_a_factor() -> None:
    probe = "worst_l2(m=125; samples=500)"
    near = [*curve(16, 0.3, (0.0, 0.05, 0.1), probe=probe), *curve(8, 0.5, (0.0, 0.05, 0.1), probe=probe)]
    far = curve(8, 0.5, (0.2,), probe=probe)
    off = [replace(each, value=3 * each.value) if each.metric == "der" else each for each in far]
    case = said(2, [*near, *off, *curve(16, 0.3, (0.2,), probe=probe)]).cases[STATED]
    assert case.also[0].value == pytest.approx(0.2), "the radius of 0.2 is left out"
    assert abs(case.primary[0].value - 0.2) > 0.01


def test_a_slope_needs_three_points_above_zero() -> None:
    with pytest.raises(RunError, match="a repetition has 2"):
        said(1, curve(16, 0.3, (0.0, 0.1)))
    zero = [replace(each, value=0.0) if each.metric == "der" else each for each in curve(16, 0.3)]
    with pytest.raises(RunError, match="positive numbers"):
        said(1, zero)


def test_the_lead_with_fewer_members_is_subtracted() -> None:
    leads = {(3, 0): 0.01, (5, 0): 0.04, (3, 1): 0.02, (5, 1): 0.03}
    results = []
    for (members, repetition), lead in leads.items():
        sam = 0.5 + members / 100
        for method, number in (("deep ensemble", 0.48), ("SAM", sam), ("SharpBalance", sam + lead)):
            at = {"method": method, "members": members}
            row = "ensemble (mean probability) · cACC"
            results.append(Result(at, repetition, number, row, "accuracy under corruption", "corrupted"))
            results.append(Result(at, repetition, 1.0, "mean of members", "accuracy", "train"))
    case = said(6, results).cases[STATED]
    assert case.primary[0].value == pytest.approx(2.0)  # three points and one
    assert case.required_effect is not None
    assert case.required_effect.value == pytest.approx(7.0)  # of five members


def test_the_flattest_of_the_others_is_found_in_each_repetition() -> None:
    controls = {("baseline", 0.0): (1.0, 1.0), ("baseline", 0.05): (100.0, 10.0), ("weight decay", 0.0): (10.0, 1000.0)}
    results = []
    for (control, rho), norms in controls.items():
        at = {"control": control, "rho": rho}
        for repetition, norm in enumerate(norms):
            results.append(Result(at, repetition, norm, "mean of members", "fisher_rao", "train"))
            results.append(Result(at, repetition, 0.5 + rho, "mean of members", "accuracy", "test"))
            results.append(Result(at, repetition, 0.995, "mean of members", "accuracy", "train"))
    case = said(11, results).cases[STATED]
    assert case.primary[0] == MeasuredValue(value=1.0, interval=(1.0, 1.0), repetitions=2)
    assert case.also[0].value == 0.0


def test_the_gain_is_the_ensemble_minus_its_members() -> None:
    results = []
    for method, (members, _, ensemble) in zip(("deep ensemble", "SAM"), papers.FIGURE_7["CIFAR10-C"], strict=False):
        at = {"method": method}
        results.append(Result(at, 0, 1.0, "mean of members", "accuracy", "train"))
        for row, number in (("mean of members", members), ("ensemble (mean probability)", ensemble)):
            results.append(Result(at, 0, number / 100, f"{row} · cACC", "accuracy under corruption", "corrupted"))
    case = said(4, results).cases[STATED]
    wanted = [CLAIMS[4].primary.effect, CLAIMS[4].also[0].effect]
    assert [case.primary[0].value, case.also[0].value] == pytest.approx(wanted)
    assert case.required_effect is not None
    assert case.required_effect.value == pytest.approx(76.32 - 75.83)  # of the ensembles


def test_a_ratio_is_compared_by_its_logarithm() -> None:
    columns = {"fisher_rao": 4, "relative_flatness": 6, "sam_sharpness(form=paper)": 5}
    results = []
    for rho, row in zip((0.0, 0.05), papers.RESNET_CIFAR10, strict=False):
        at = {"control": "baseline", "rho": rho}
        results.append(Result(at, 0, 0.995, "mean of members", "accuracy", "train"))
        results += [Result(at, 0, row[c], "mean of members", name, "train") for name, c in columns.items()]
    case = said(12, results).cases[STATED]
    wanted = [CLAIMS[12].primary.effect, *(each.effect for each in CLAIMS[12].also)]
    assert [each.value for each in (*case.primary, *case.also)] == pytest.approx(wanted, abs=6e-4)
    assert case.also[1].value == pytest.approx(wanted[2], rel=1e-3)
    signed = [
        replace(each, value=-each.value) if each.metric == "sam_sharpness(form=paper)" else each for each in results
    ]
    assert said(12, signed).cases[STATED].also[1].value == pytest.approx(-wanted[2], rel=1e-3)  # a difference
    with pytest.raises(RunError, match=r"'relative_flatness' in .* no logarithm"):
        said(12, [replace(each, value=-1e-6) if each.metric == "relative_flatness" else each for each in results])


def test_claims_that_compare_do_so_for_each_of_their_cases_and_measures() -> None:
    comparing = {number: each.compare for number, each in CLAIMS.items() if each.compare}
    assert list(comparing) == [1, 2, 3, 4, 5, 6, 7, 11, 12]
    for number, compare in comparing.items():
        asked = CLAIMS[number]
        assert tuple(compare.conditions) == asked.cases
        assert len(compare.also) == len(asked.also)
        assert (compare.precondition is None) is (asked.precondition is None)
        assert (compare.required_effect is None) is (asked.required_effect is None)
        assert compare.times == (100 if asked.primary.unit.startswith("percentage points") else 1)
