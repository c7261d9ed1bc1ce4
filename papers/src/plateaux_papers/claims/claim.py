"""Claims of papers, their evidence, and the rule for verdicts.

A claim is a TOML file that fixes the criterion; its evidence is a JSON file of numbers. The verdict follows by rule
from the interval of the primary metric, zero, and the effect in the paper. Claims that a formula *equals* or *bounds*
something are judged by the criterion in `theory.verdicts`, and their evidence contains that verdict.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from plateaux.commands import write_atomic
from plateaux.errors import RecipeError, suggest
from plateaux_papers import CLAIMS

Verdict = Literal[
    "reproduced", "contradicted", "not reproduced", "inconclusive", "not testable at this scale", "not yet run"
]  # fmt: skip
WEAKEST_FIRST: tuple[Verdict, ...] = (
    "not testable at this scale", "contradicted", "not reproduced", "inconclusive", "not yet run", "reproduced",
)  # fmt: skip


class Section(BaseModel):
    """A table of a claim or its evidence: frozen, and strict about its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Part = TypeVar("Part", bound=Section)


class PrimaryMetric(Section):
    """The number that decides a claim: its expected direction and the effect in the paper."""

    metric: str
    unit: str = ""
    direction: Literal["above", "below", "equal", "within"]  # equal, within: judged in theory.verdicts
    zero: float = 0.0  # the value that means "no effect"
    effect: float | None = None  # in the paper, if it states one
    paper: str  # the numbers of the paper

    @property
    def by_theory(self) -> bool:
        return self.direction in ("equal", "within")


class Precondition(Section):
    """A condition that must hold before the claim can be tested at this scale."""

    metric: str
    at_least: float


class Number(Section):
    """A number of the runs of a study; `where` selects conditions."""

    metric: str
    split: str
    row: str
    where: dict[str, Any] = Field(default_factory=dict)


class Compare(Section):
    """How the results of a study give the numbers of a claim: each case minus its baseline."""

    metric: str
    split: str
    rows: tuple[str, ...] = Field(min_length=1)  # with several rows, the number is the slope over them
    minus_row: str = ""  # a row to subtract from each
    slope_over: Number | None = None  # the number is the log-log slope on this, over all matching conditions
    fitted: float | None = None  # use only conditions whose precondition is at least this, per repetition
    conditions: dict[str, dict[str, Any]]
    baseline: dict[str, Any] | None = None
    same: tuple[str, ...] = ()  # factors that the baseline takes from the case
    minimum: bool = False  # the smallest number of all matching conditions except the baseline, per repetition
    difference_from: dict[str, Any] | None = None  # subtract the same difference at these factors
    times: float = 1.0  # 100 for percentage points
    log10: bool = False  # of every number, so that a difference is a log ratio
    also: tuple[dict[str, Any], ...] = ()  # changed keys for each secondary metric
    precondition: Number | None = None  # the minimum over all conditions and repetitions counts
    required_effect: dict[str, Any] | None = None  # changed keys for the required effect; difference_from is left out

    def changed(self, changes: Mapping[str, Any]) -> Compare:
        """Return the comparison with other values of some keys."""
        return Compare.model_validate({**self.model_dump(), **changes})


class Protocol(Section):
    """The numbers of the evidence that answer a claim under one protocol."""

    metric: Literal["primary"] | int = "primary"  # n: the n-th secondary metric
    cases: tuple[str, ...] = ()  # by default all

    @property
    def position(self) -> int:
        return 0 if self.metric == "primary" else self.metric


class Claim(Section):
    """One claim of a paper, its criterion, and whether the criterion was fixed before the first results."""

    name: str
    number: int = Field(ge=1)
    about: Literal["theory", "cost", "rank correlation", "trained ensembles"] = "trained ensembles"
    source: str
    statement: str
    existential: bool = False  # claims that something can happen; a case without it is no contradiction
    where: str
    study: str  # a study or script in the folder of the paper, or "theory"
    cases: tuple[str, ...] = ("as stated",)
    criterion: str
    criterion_fixed: Literal["before running", "after the first results"] = "before running"
    registered: str = ""  # commit in which criterion, comparison and study were fixed
    note: str = ""  # such as what was changed after a first test
    scale: str
    precondition: Precondition | None = None
    required_effect: PrimaryMetric | None = None  # an effect without which the claim says nothing here
    primary: PrimaryMetric
    also: tuple[PrimaryMetric, ...] = ()  # secondary metrics; the primary metric decides
    compare: Compare | None = None  # needed if the study writes no evidence itself
    consistent_with_own_tables: Literal["yes", "no", "no table"]
    why: str
    paper_protocol: Protocol | None = None  # None: not measured under the protocol of the paper
    fair_protocol: Protocol | None = None
    limits: str = ""  # what limits the result, in one sentence

    @model_validator(mode="after")
    def _check_protocols(self) -> Claim:
        for each in filter(None, (self.paper_protocol, self.fair_protocol)):
            unknown = [case for case in each.cases if case not in self.cases]
            if unknown or not 0 <= each.position <= len(self.also):
                raise ValueError(
                    f"A protocol names metric {each.metric} and cases {list(each.cases)}; this claim has "
                    f"{len(self.also)} secondary metrics and the cases {list(self.cases)}"
                )
        return self


class MeasuredValue(Section):
    """A measured number; it has no interval if there was one repetition."""

    value: float
    interval: tuple[float, float] | None = None
    what: str = ""  # label if a metric has several values; their intervals hold simultaneously
    repetitions: int | None = None  # number of repetitions if the interval is over repetitions

    @model_validator(mode="after")
    def _check_interval(self) -> MeasuredValue:
        if self.interval is not None and not self.interval[0] <= self.value <= self.interval[1]:
            raise ValueError(f"The value {self.value} is outside of its interval {self.interval}")
        return self


class Case(Section):
    """The numbers of one case of a claim: those of the primary metric, and one per secondary metric."""

    primary: tuple[MeasuredValue, ...] = Field(min_length=1)
    also: tuple[MeasuredValue, ...] = ()
    by_theory: Literal["reproduced", "not reproduced", "inconclusive"] | None = None
    required_effect: MeasuredValue | None = None


class Evidence(Section):
    """The numbers measured for a claim, and how to reproduce them."""

    format: Literal[1] = 1
    claim: str
    command: str = ""
    seconds: float | None = None
    commit: str = ""
    precondition: float | None = None
    cases: dict[str, Case]


@dataclass(frozen=True, slots=True)
class ClaimEntry:
    """A claim with its evidence."""

    claim: Claim
    evidence: Evidence | None = None

    @property
    def verdicts(self) -> dict[str, Verdict]:
        return {case: judge_case(self.claim, self.evidence, case) for case in self.claim.cases}

    def to_dict(self) -> dict[str, Any]:
        evidence = self.evidence.model_dump(mode="json") if self.evidence else None
        return {**self.claim.model_dump(mode="json"), "verdicts": self.verdicts, "evidence": evidence}


def values_of(evidence: Evidence | None, case: str, position: int) -> tuple[MeasuredValue, ...]:
    """Return the numbers of the primary metric (position 0) or of a secondary one in a case."""
    measured = evidence.cases.get(case) if evidence else None
    if measured is None:
        return ()
    return measured.also[position - 1 : position] if position else measured.primary


def judge_case(claim: Claim, evidence: Evidence | None, case: str, position: int = 0) -> Verdict:
    """Return the verdict on one case of a claim, by the primary metric (position 0) or by a secondary one."""
    values = values_of(evidence, case, position)
    if evidence is None or not values:
        return "not yet run"
    measured = evidence.cases[case]
    if claim.precondition and (evidence.precondition or 0.0) < claim.precondition.at_least:
        return "not testable at this scale"
    if claim.required_effect and not _has_effect(measured.required_effect, claim.required_effect):
        return "not testable at this scale"
    if not position and measured.by_theory is not None:
        return measured.by_theory
    metric = (claim.primary, *claim.also)[position]
    return weakest_verdict([verdict(value, metric, claim.existential) for value in values])


def _has_effect(measured: MeasuredValue | None, metric: PrimaryMetric) -> bool:
    return measured is not None and verdict(measured, metric) == "reproduced"


def verdict(measured: MeasuredValue, metric: PrimaryMetric, existential: bool = False) -> Verdict:
    """Return the verdict from an interval, zero, and the effect in the paper; no existential claim is contradicted."""
    if measured.interval is None or metric.by_theory:
        return "inconclusive"
    low, high = measured.interval
    sides: tuple[Verdict, Verdict] = ("reproduced", "not reproduced" if existential else "contradicted")
    above, below = sides if metric.direction == "above" else sides[::-1]
    if low > metric.zero:
        return above
    if high < metric.zero:
        return below
    excludes_effect = metric.effect is not None and not low <= metric.effect <= high
    return "not reproduced" if excludes_effect else "inconclusive"


def weakest_verdict(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the weakest of several verdicts."""
    return min(verdicts, key=WEAKEST_FIRST.index)


def read_claims(folders: Sequence[Path] = CLAIMS) -> list[Claim]:
    """Return the claims in some folders, by default of all papers, sorted by number."""
    files = [file for folder in folders for file in sorted(folder.glob("*.toml"))]
    claims = [_validate(Claim, {"name": file.stem, **_read(file, tomllib.loads)}, file) for file in files]
    return sorted(claims, key=lambda claim: claim.number)


def select_claims(claims: Sequence[Claim], names: Sequence[str]) -> list[Claim]:
    """Return the claims with the given numbers or names, or all claims if none is given."""
    known = {key: claim for claim in claims for key in (claim.name, str(claim.number))}
    for name in names:
        if _key(name) not in known:
            raise RecipeError(f"There is no claim {name!r}; {suggest(name, [claim.name for claim in claims])}")
    wanted = {known[_key(name)].number for name in names}
    return [claim for claim in claims if not names or claim.number in wanted]


def read_entries(folders: Sequence[Path] = CLAIMS) -> list[ClaimEntry]:
    """Return the claims in some folders, by default of all papers, with their stored evidence."""
    return [ClaimEntry(claim, read_evidence(claim, evidence_folders(folders))) for claim in read_claims(folders)]


def evidence_folders(folders: Sequence[Path] = CLAIMS) -> list[Path]:
    """Return the folders of the evidence: each lies next to a folder of claims."""
    return [folder.parent / "evidence" for folder in folders]


def read_evidence(claim: Claim, folders: Sequence[Path]) -> Evidence | None:
    """Return the evidence of a claim, or None if no folder has it."""
    file = next((found for folder in folders if (found := folder / f"{claim.name}.json").is_file()), None)
    if file is None:
        return None
    evidence = _validate(Evidence, _read(file, json.loads), file)
    _check_evidence(claim, evidence, file)
    return evidence


def write_evidence(evidence: Evidence, folder: Path) -> Path:
    """Write evidence to a folder and return the file."""
    file = folder / f"{evidence.claim}.json"
    write_atomic(file, json.dumps(evidence.model_dump(mode="json"), indent=1) + "\n")
    return file


def _check_evidence(claim: Claim, evidence: Evidence, file: Path) -> None:
    """Raise an error if evidence does not match its claim."""
    unknown = [name for name in evidence.cases if name not in claim.cases]
    if evidence.claim != claim.name or unknown:
        raise RecipeError(
            f"{file} is evidence for claim {evidence.claim!r}, cases {list(evidence.cases)}; claim {claim.name!r} has "
            f"the cases {list(claim.cases)}"
        )
    if claim.precondition and evidence.precondition is None:
        raise RecipeError(f"{file} has no value of the precondition: {claim.precondition.metric}")
    for name, case in evidence.cases.items():
        if claim.required_effect and case.required_effect is None:
            raise RecipeError(f"{file}, {name}: there is no value of {claim.required_effect.metric}, which is required")
        if (case.by_theory is not None) is not claim.primary.by_theory:
            raise RecipeError(f"{file}, {name}: by_theory is only for claims with direction equal or within")
        if len(case.also) not in (0, len(claim.also)):
            raise RecipeError(f"{file}, {name}: give a value for each of {len(claim.also)} secondary metrics, or none")


def _validate(kind: type[Part], tree: Mapping[str, Any], file: Path) -> Part:
    try:
        return kind.model_validate(tree)
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(str(each) for each in first["loc"])
        raise RecipeError(f"{file}: {where}: {first['msg']}") from None


def _key(name: str) -> str:
    return str(int(name)) if name.isdigit() else name.removesuffix(".toml")


def _read(file: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    try:
        tree = parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise RecipeError(f"Cannot read {file}: {problem}") from None
    if not isinstance(tree, dict):
        raise RecipeError(f"Cannot read {file}: it contains {type(tree).__name__} instead of a table")
    return tree
