# A record, not run at HEAD. A part of the scripts of commit d3fc48cc4d4c: `git checkout d3fc48cc4d4c`, studies/_fair_test.py.
"""Tables of *Does it work?*: pilot, choice of settings, power calculation, and the tests of SharpBalance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import choose_settings
from _method_tables import (
    ACCURACY,
    CORRUPTED,
    CORRUPTED_MEMBERS,
    ECE,
    MEMBER_ACCURACY,
    NLL,
    PASSES,
    Column,
    Condition,
    Numbers,
    repetitions,
    table,
    under_corruption,
)
from power import repetitions_for

from plateaux.studies.claims.claim import read_claims
from plateaux.studies.results import ResultRow, read_results, results_from_study

RULES = ("paper", "released", "released_boost")
CLAIMS = (4, 5, 6, 7)
CLASSES, NOISE = 10, 0.3
FITTED = Column("members, training images %", "accuracy", "train", "mean of members", digits=1)
SEVERITIES = [under_corruption(f"severity {level}", part=f"severity {level}") for level in range(1, 6)]


def pilot(results: Sequence[ResultRow]) -> str:
    """Return what SAM gains over plain gradient descent by radius, and how well the networks fit."""
    conditions = _conditions(results)
    found = {f"SAM, rho = {each['rho']}": each for each in conditions}
    columns = [MEMBER_ACCURACY, ACCURACY, CORRUPTED_MEMBERS, CORRUPTED]
    fits = {label: Numbers(results).mean(each, FITTED) for label, each in found.items()}
    text = {label: "" if fit is None else f"{fit.value:.1f}" for label, fit in fits.items()}
    differences = table(Numbers(results), found, columns, {"rho": 0.0}, extra={FITTED.title: lambda label: text[label]})
    return f"Plain gradient descent fits {text['SAM, rho = 0.0']} % of the training labels.\n\n{differences}"


def choices(results: Sequence[ResultRow]) -> str:
    return choose_settings.table(choose_settings.held_out_accuracy(results))


def power(results: Sequence[ResultRow]) -> str:
    """Return the standard deviation of paired differences on held-out images, and the repetitions it requires."""
    found = choose_settings.held_out_accuracy(results)
    chosen = choose_settings.choose(found)
    numbers = {method: next(n for settings, n in found if settings == chosen[method]) for method in ("SAM", *RULES)}
    deviations = [
        stdev(100 * (ours - sam) for ours, sam in zip(numbers[rule], numbers["SAM"], strict=True)) for rule in RULES
    ]
    pooled = mean(each**2 for each in deviations) ** 0.5
    # A prediction is right for a wrong label with probability 1 / (classes - 1): differences shrink by this factor.
    shrinks = 1 - NOISE - NOISE / (CLASSES - 1)
    needed = repetitions_for(1.0, pooled / shrinks)
    each = ", ".join(f"{rule} {deviation:.2f}" for rule, deviation in zip(RULES, deviations, strict=True))
    return (
        f"Paired differences from SAM on held-out images have the standard deviations {each} points over "
        f"{len(numbers['SAM'])} repetitions, pooled {pooled:.2f}. With {NOISE:.0%} wrong labels, a difference in "
        f"accuracy is {shrinks:.3f} of that for true labels, so this is {pooled / shrinks:.2f} points there. An effect "
        f"of one point, the smallest of the paper, then needs {needed} repetitions at a power of 90 %."
    )


def label(condition: Condition, sam_rho: float) -> str:
    """Return the name of a method of the test."""
    names = {
        "paper": "SharpBalance, paper's rule",
        "released": "SharpBalance, released rule",
        "released_boost": "SharpBalance, released rule of CIFAR-10",
        "random": "SharpBalance, random sets",
        "none": "SAM, then plain gradients",
    }
    method = str(condition["method"])
    rho = condition.get("rho")
    at = "" if rho is None else f", rho = {rho}" + (" (SAM's)" if rho == sam_rho else "")
    return names.get(method, method) + at


def test_tables(results: Sequence[ResultRow], sam_rho: float) -> dict[str, str]:
    """Return the tables of the test."""
    numbers = Numbers(results)
    conditions = {label(each, sam_rho): each for each in _conditions(results)}
    sam, plain = {"method": "SAM"}, {"method": "deep ensemble"}
    wide = [MEMBER_ACCURACY, ACCURACY, CORRUPTED_MEMBERS, CORRUPTED]
    return {
        "means": table(numbers, conditions, [*wide, NLL, ECE, PASSES]),
        "from-sam": table(numbers, conditions, [*wide, NLL], sam),
        "from-plain": table(numbers, conditions, [*wide, NLL], plain),
        "controls": table(numbers, _controls(conditions), wide, conditions["SharpBalance, paper's rule, rho = 0.4"]),
        "severity": table(numbers, conditions, SEVERITIES, sam),
        "repetitions": f"{repetitions(results)} repetitions. Training labels that the deep ensemble fits: "
        f"{numbers.mean(plain, FITTED).value:.1f} %.",  # type: ignore[union-attr]
    }


def _controls(conditions: Mapping[str, Condition]) -> dict[str, Condition]:
    """Return the controls with their best radii, and SAM with the passes of SharpBalance."""
    names = ("SharpBalance, random sets, rho = 0.4", "SAM, then plain gradients, rho = 0.5", "SAM, 34 epochs")
    return {name: conditions[name] for name in names}


def more_members(results: Sequence[ResultRow]) -> str:
    """Return the differences from SAM with the same number of members."""
    numbers, lines, conditions = Numbers(results), list[str](), _conditions(results)
    columns = [MEMBER_ACCURACY, ACCURACY, CORRUPTED_MEMBERS, CORRUPTED]
    for count in sorted({each["members"] for each in conditions}):
        found = {f"{each['method']}, {count} members": each for each in conditions if each["members"] == count}
        made = table(numbers, found, columns, {"members": count, "method": "SAM"}).splitlines()
        lines += made[2 if lines else 0 :]
    return "\n".join(lines)


def registration() -> str:
    """Return the commit that registered the test, from the claims."""
    (commit,) = {claim.registered for claim in read_claims() if claim.number in CLAIMS}
    return (
        f"Commit {commit} registered the test with [claims 4 to 7](claims.md) before it ran: the setting, all "
        "comparisons, and ten repetitions. Nothing was changed later."
    )


def tables(file: Path) -> dict[str, str]:
    """Return all tables of the page from the results files next to that of the test, which may not have run yet."""
    folder = file.parent
    tuning = results_from_study(folder / "sharpbalance_tuning_mlp.json")
    test = {}
    if file.exists():
        sam_rho = float(read_results(file)["study"]["base"]["method"]["rho"])
        test = test_tables(results_from_study(file), sam_rho)
    return {
        "pilot": pilot(results_from_study(folder / "sharpbalance_pilot_mlp.json")),
        "radii": choices(tuning),
        "sets": choices(results_from_study(folder / "sharpbalance_tuning_sets.json")),
        "power": power(tuning),
        "registration": registration(),
        "members": more_members(results_from_study(folder / "more_members.json")),
        **test,
    }


def _conditions(results: Sequence[ResultRow]) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    for each in results:
        if each.condition not in found:
            found.append(each.condition)
    return found
