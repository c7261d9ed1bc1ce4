"""Run the studies of claims and collect their evidence.

A study writes `evidence/<claim>.json` in its folder, or results that the claim compares; the theory writes
`theory.json`. Command, time, and commit are added if the study did not write them.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plateaux.core.errors import RecipeError, RunError
from plateaux.distributed.subprocesses import read_output, run_python
from plateaux.storage.local_store import LocalStore
from plateaux.studies.claims.claim import Case, Claim, Evidence, MeasuredValue, read_evidence, write_evidence
from plateaux.studies.claims.contrasts import ResultLike, build_evidence, rounded

MATRICES = 400
FORMULAS = {"printed": "as printed", "corrected": "as corrected"}
REGIMES = {"converging": "SAM converges", "diverging": "SAM diverges"}
EQUAL, BOUND = "simulation / formula - 1", "simulation / upper bound"
Call = Callable[[Sequence[str]], int]
"""Runs Python with some arguments and returns the exit code."""
Read = Callable[[Path], Sequence[ResultLike]]
"""Reads all results of the study in a folder."""


def gather(
    claims: Sequence[Claim],
    out: Path,
    evidence: Path,
    root: Path,
    call: Call = run_python,
    read: Read | None = None,
) -> list[Path]:
    """Run each study of the claims once and return the written evidence files; `root` contains the studies."""
    written = []
    for study in dict.fromkeys(claim.study for claim in claims):
        folder = out / Path(study).stem
        command, started, is_new = study_command(study, folder, root), time.monotonic(), not folder.exists()
        code = call(command)
        if code:
            raise RunError(
                f"`{format_command(command, root)}` failed with exit code {code}. Its output is in {folder}."
            )
        seconds = (
            round(time.monotonic() - started, 1) if is_new else None
        )  # the total time of a resumed study is unknown
        public = format_command(study_command(study, _public_path(folder, root), root), root)
        facts = {"command": public, "seconds": seconds, "commit": commit(root)}
        for collected in collect([claim for claim in claims if claim.study == study], folder, read):
            missing = {name: value for name, value in facts.items() if not getattr(collected, name)}
            written.append(write_evidence(collected.model_copy(update=missing), evidence))
    return written


def _public_path(folder: Path, root: Path) -> Path:
    """Return the folder of a study without paths of this machine."""
    is_inside = folder.resolve().is_relative_to(root.resolve())
    return folder.resolve().relative_to(root.resolve()) if is_inside else Path("runs") / folder.name


def study_command(study: str, folder: Path, root: Path) -> list[str]:
    """Return the Python arguments that run a study."""
    if study == "theory":
        return ["-m", "plateaux", "theory", "--out", str(folder), "--matrices", str(MATRICES)]
    file = root / study
    if not file.is_file():
        raise RecipeError(
            f"There is no {file}. Studies are not part of the package; run this in a clone of the repository."
        )
    return (
        [str(file), str(folder)]
        if file.suffix == ".py"
        else ["-m", "plateaux", "study", str(file), "--out", str(folder)]
    )


def format_command(command: Sequence[str], root: Path) -> str:
    """Return a command as typed at the root of the repository."""
    typed = command[1:] if command[0] == "-m" else ["python", *command]
    return shlex.join(word.removeprefix(f"{root}/") for word in typed)


def collect(claims: Sequence[Claim], folder: Path, read: Read | None = None) -> list[Evidence]:
    """Return the evidence of a finished study, from evidence files or from its results."""
    if claims[0].study == "theory":
        record = LocalStore(folder).get_json("theory.json", has_digest=False)
        try:
            by_number = {each["claim"]: each for each in record["claims"]}
            return [theory_evidence(claim, by_number[claim.number]) for claim in claims]
        except (LookupError, TypeError, ValueError) as problem:
            raise RunError(f"{folder / 'theory.json'} is not a record of the theory ({problem!r}); delete it") from None
    collected = []
    for claim in claims:
        evidence = read_evidence(claim, folder / "evidence")
        if evidence is None and read is not None and claim.compare is not None:
            evidence = build_evidence(claim, claim.compare, read(folder))
        if evidence is None:
            raise RunError(f"The study wrote no evidence: {folder / 'evidence' / claim.name}.json is missing.")
        collected.append(evidence)
    return collected


def theory_evidence(claim: Claim, answer: Mapping[str, Any]) -> Evidence:
    """Return the evidence of the simulation for a claim, with one case per formula and regime."""
    cases = {
        f"{name_of_formula}, {regime}": _case(claim, answer[formula][name])
        for formula, name_of_formula in FORMULAS.items()
        for name, regime in REGIMES.items()
        if name in answer[formula]
    }
    return Evidence(claim=claim.name, cases=cases)


def commit(root: Path) -> str:
    """Return the commit of a clone, or an empty string."""
    command = ["git", "-C", str(root), "rev-parse", "--show-toplevel", "--short=12", "HEAD"]
    output = read_output(command)
    if output is None:
        return ""
    top, revision = output.splitlines()
    return revision if Path(top).resolve() == root.resolve() else ""  # not of an enclosing repository


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
