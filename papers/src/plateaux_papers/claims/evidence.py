"""Evidence for claims from the folder of a finished study.

A study has results that a claim compares; the theory has `theory.json`.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plateaux.errors import RecipeError, RunError
from plateaux.studies import results_from_study
from plateaux_papers import ROOT
from plateaux_papers.claims.claim import Case, Claim, Evidence, MeasuredValue
from plateaux_papers.claims.contrasts import build_evidence, rounded

FORMULAS = {"printed": "as printed", "corrected": "as corrected"}
REGIMES = {"converging": "SAM converges", "diverging": "SAM diverges"}
EQUAL, BOUND = "simulation / formula - 1", "simulation / upper bound"


def evidence_from_study(claims: Sequence[Claim], folder: Path) -> list[Evidence]:
    """Return the evidence for claims from the results in a folder."""
    scripts = {claim.number: claim.study for claim in claims if claim.study.endswith(".py")}
    if scripts:
        raise RecipeError(
            f"The script of a claim runs at the commit that it names, and writes the evidence itself: {scripts}. "
            "Leave out --study for these claims."
        )
    facts = {"command": " and ".join(dict.fromkeys(command(claim.study) for claim in claims)), "commit": commit()}
    return [_evidence(claim, folder).model_copy(update=facts) for claim in claims]


def command(study: str) -> str:
    """Return the command whose folder has the results of a study."""
    return "plateaux theory --matrices 400" if study == "theory" else f"plateaux study {Path(study).stem}"


def commit() -> str:
    """Return the commit of the clone that this package is in, or an empty string."""
    words = ["git", "-C", str(ROOT), "rev-parse", "--show-toplevel", "--short=12", "HEAD"]
    try:
        top, revision = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return ""
    return revision if Path(top).resolve() == ROOT.parent.resolve() else ""  # not of an enclosing repository


def _evidence(claim: Claim, folder: Path) -> Evidence:
    if claim.study != "theory":
        if claim.compare is None:
            raise RecipeError(f"Claim {claim.number} has no section [compare], so results say nothing about it")
        return build_evidence(claim, claim.compare, results_from_study(folder))
    try:
        record = json.loads((folder / "theory.json").read_text(encoding="utf-8"))
        return theory_evidence(claim, {each["claim"]: each for each in record["claims"]}[claim.number])
    except OSError as problem:
        raise RunError(f"{problem}. Give the folder that `plateaux theory --out` wrote.") from None
    except (LookupError, TypeError, ValueError) as problem:
        raise RunError(f"{folder / 'theory.json'} is not a record of the theory ({problem!r}); delete it") from None


def theory_evidence(claim: Claim, answer: Mapping[str, Any]) -> Evidence:
    """Return the evidence of the simulation for a claim, with one case per formula and regime."""
    cases = {
        f"{name_of_formula}, {regime}": _case(claim, answer[formula][name])
        for formula, name_of_formula in FORMULAS.items()
        for name, regime in REGIMES.items()
        if name in answer[formula]
    }
    return Evidence(claim=claim.name, cases=cases)


def _case(claim: Claim, answer: Mapping[str, Any]) -> Case:
    if "bounds" in answer:
        rows = [_measured_value(row["more diversity"], f"bound {row['bound']:.2f}") for row in answer["bounds"]]
        return Case(primary=tuple(rows))
    first, *others = [
        _measured_value(answer[key], _failure_note(key, answer)) for key in (EQUAL, BOUND) if key in answer
    ]
    return Case(primary=(first,), also=tuple(others[: len(claim.also)]), by_theory=answer["verdict"])


def _failure_note(key: str, answer: Mapping[str, Any]) -> str:
    """Return in how many settings the formula fails, which decides the verdict of the theory."""
    if key == EQUAL:
        outside = answer["settings whose interval excludes the formula"]
        return f"{outside} of {answer['settings']} settings exclude the formula, mean"
    beyond = sum(answer.get(f"settings {side} bound", 0) for side in ("above the upper", "below the lower"))
    return f"{beyond} of {answer['settings']} settings beyond a bound, mean"


def _measured_value(number: Mapping[str, Any], what: str = "") -> MeasuredValue:
    low, high = number["interval"]
    return rounded(number["mean"], (low, high), what)
