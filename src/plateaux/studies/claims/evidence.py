"""Studies of claims, started from the ledger, and what they leave behind as evidence.

A study leaves `evidence/<claim>.json` in its folder, or numbers that the claim says how to compare; the theory leaves
`theory.json`, which is read here. Command, time and commit are filled in where the study did not write them: a study
that was resumed knows better.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plateaux.core.errors import RecipeError, RunError
from plateaux.studies.claims.claim import Case, Claim, Evidence, MeasuredValue, read_evidence, write_evidence
from plateaux.studies.claims.contrasts import ResultLike, build_evidence, rounded

MATRICES = 400
FORMULAS = {"printed": "as printed", "corrected": "as corrected"}
REGIMES = {"converging": "SAM converges", "diverging": "SAM diverges"}
EQUAL, BOUND = "simulation / formula - 1", "simulation / upper bound"
Call = Callable[[Sequence[str]], int]
Read = Callable[[Path], Sequence[ResultLike]]
"""Returns all numbers of the study in a folder."""


def gather(
    claims: Sequence[Claim],
    out: Path,
    evidence: Path,
    root: Path,
    call: Call = subprocess.call,
    read: Read | None = None,
) -> list[Path]:
    """Run every study of these claims once, and return the files of evidence it led to; `root` holds the studies."""
    written = []
    for study in dict.fromkeys(claim.study for claim in claims):
        folder = out / Path(study).stem
        words, began, fresh = study_command(study, folder, root), time.monotonic(), not folder.exists()
        code = call([sys.executable, *words])
        if code:
            raise RunError(f"{shown(words, root)} ended with exit code {code}; what it wrote is in {folder}")
        took = round(time.monotonic() - began, 1) if fresh else None  # of a study that went on nobody knows it here
        told = {"command": shown(study_command(study, _told(folder, root), root), root), "seconds": took}
        told |= {"commit": commit(root)}
        for found in collect([claim for claim in claims if claim.study == study], folder, read):
            known = {name: value for name, value in told.items() if not getattr(found, name)}
            written.append(write_evidence(found.model_copy(update=known), evidence))
    return written


def _told(folder: Path, root: Path) -> Path:
    """Return a study's folder as it is told to others: where it lay on this machine is nobody's business."""
    inside = folder.resolve().is_relative_to(root.resolve())
    return folder.resolve().relative_to(root.resolve()) if inside else Path("runs") / folder.name


def study_command(study: str, folder: Path, root: Path) -> list[str]:
    """Return what Python is to be given to run a study."""
    if study == "theory":
        return ["-m", "plateaux", "theory", "--out", str(folder), "--matrices", str(MATRICES)]
    file = root / study
    if not file.is_file():
        raise RecipeError(f"There is no {file}: studies do not come with the package; call from a clone of the project")
    return (
        [str(file), str(folder)]
        if file.suffix == ".py"
        else ["-m", "plateaux", "study", str(file), "--out", str(folder)]
    )


def shown(words: Sequence[str], root: Path) -> str:
    """Return a command as a person types it at the root of the project."""
    typed = words[1:] if words[0] == "-m" else ["python", *words]
    return shlex.join(word.removeprefix(f"{root}/") for word in typed)


def collect(claims: Sequence[Claim], folder: Path, read: Read | None = None) -> list[Evidence]:
    """Return the evidence that a finished study left in its folder, as files or as numbers to compare."""
    if claims[0].study == "theory":
        record = json.loads((folder / "theory.json").read_text(encoding="utf-8"))
        by_number = {each["claim"]: each for each in record["claims"]}
        return [theory_evidence(claim, by_number[claim.number]) for claim in claims]
    found = []
    for claim in claims:
        left = read_evidence(claim, folder / "evidence")
        if left is None and read is not None and claim.compare is not None:
            left = build_evidence(claim, claim.compare, read(folder))
        if left is None:
            raise RunError(f"The study left no {folder / 'evidence' / claim.name}.json: there is nothing to judge by")
        found.append(left)
    return found


def theory_evidence(claim: Claim, answer: Mapping[str, Any]) -> Evidence:
    """Return what the simulation says of a claim, as evidence: a case for each formula and regime."""
    cases = {
        f"{words}, {regime}": _case(claim, answer[formula][name])
        for formula, words in FORMULAS.items()
        for name, regime in REGIMES.items()
        if name in answer[formula]
    }
    return Evidence(claim=claim.name, cases=cases)


def commit(root: Path) -> str:
    """Return the commit of a clone, or nothing."""
    asked = ["git", "-C", str(root), "rev-parse", "--show-toplevel", "--short=12", "HEAD"]
    try:
        top, found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
        return found if Path(top).resolve() == root.resolve() else ""  # else of whatever the package lies within
    except (OSError, subprocess.CalledProcessError):
        return ""


def _case(claim: Claim, found: Mapping[str, Any]) -> Case:
    if "bounds" in found:
        rows = [_figure(row["more diversity"], f"bound {row['bound']:.2f}") for row in found["bounds"]]
        return Case(primary=tuple(rows))
    first, *others = [_figure(found[key], _outside(key, found)) for key in (EQUAL, BOUND) if key in found]
    return Case(primary=(first,), also=tuple(others[: len(claim.also)]), by_theory=found["verdict"])


def _outside(key: str, found: Mapping[str, Any]) -> str:
    """Say in how many settings the formula fails, which is what the theory's criterion asks."""
    if key == EQUAL:
        outside = found["settings whose interval excludes the formula"]
        return f"{outside} of {found['settings']} settings exclude the formula, mean"
    beyond = sum(found.get(f"settings {side} bound", 0) for side in ("above the upper", "below the lower"))
    return f"{beyond} of {found['settings']} settings beyond a bound, mean"


def _figure(number: Mapping[str, Any], what: str = "") -> MeasuredValue:
    low, high = number["interval"]
    return rounded(number["mean"], (low, high), what)
