"""The ledger: what papers claim, what was measured, and what becomes of each claim, by rule.

A claim is a TOML file that fixes the criterion; evidence is a JSON file of numbers beside it. The rule compares the
interval of the primary measure with zero and with the paper's effect; nobody types a verdict. Claims that a formula
*equals* or *bounds* something are judged by the theory's own criterion, and their evidence carries what it said.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError, model_validator

from plateaux.config.schema import ConfigSection
from plateaux.core.errors import RecipeError, suggest
from plateaux.storage.atomic import write_atomic

Verdict = Literal[
    "reproduced", "contradicted", "not reproduced", "inconclusive", "not testable at this scale", "not yet run"
]  # fmt: skip
BEST_LAST: tuple[Verdict, ...] = (
    "not testable at this scale", "contradicted", "not reproduced", "inconclusive", "not yet run", "reproduced",
)  # fmt: skip
Part = TypeVar("Part", bound=ConfigSection)


class PrimaryMetric(ConfigSection):
    """What a claim is judged by: a number, which way it should go, and how far it went in the paper."""

    metric: str
    unit: str = ""
    direction: Literal["above", "below", "equal", "within"]  # equal, within: judged by the theory's own criterion
    zero: float = 0.0  # the value that means "no effect"
    effect: float | None = None  # the paper's, where it tells one
    paper: str  # the paper's figures, in its own numbers

    @property
    def by_theory(self) -> bool:
        return self.direction in ("equal", "within")


class Precondition(ConfigSection):
    """What must hold at the tested scale before the claim means anything."""

    metric: str
    at_least: float


class Number(ConfigSection):
    """A number of a study's runs; `where` it is looked for."""

    metric: str
    split: str
    row: str
    where: dict[str, Any] = Field(default_factory=dict)


class Compare(ConfigSection):
    """How a study's numbers make the figures of a claim: of each case, less those of the condition `against` it."""

    metric: str
    split: str
    rows: tuple[str, ...] = Field(min_length=1)  # of several, in order, the slope over them is the number
    minus_row: str = ""  # a row to take away from each
    slope_over: Number | None = None  # the number is the slope of log on log of this, over all conditions as told
    fitted: float | None = None  # over those only, in each repetition, whose number of the precondition is as high
    conditions: dict[str, dict[str, Any]]
    baseline: dict[str, Any] | None = None
    same: tuple[str, ...] = ()  # factors in which both conditions agree
    minimum: bool = False  # of all conditions as told but the one against them, the smallest number in each repetition
    difference_from: dict[str, Any] | None = None  # the same difference where these factors are so is taken away
    times: float = 1.0  # 100 for percentage points
    log10: bool = False  # of every number, so that a difference is a ratio
    also: tuple[dict[str, Any], ...] = ()  # what is different for each further measure
    precondition: Number | None = None  # the lowest of all conditions and repetitions counts


class Claim(ConfigSection):
    """One claim of a paper, how it is tested, and whether that was fixed before any figure was seen."""

    name: str
    number: int = Field(ge=1)
    source: str
    statement: str
    existential: bool = False  # a claim that something can happen: where it does not, that contradicts nothing
    where: str
    study: str  # a study file, or "theory"
    cases: tuple[str, ...] = ("as stated",)
    criterion: str
    criterion_fixed: Literal["before running", "after the first figures"] = "before running"
    scale: str
    precondition: Precondition | None = None
    primary: PrimaryMetric
    also: tuple[PrimaryMetric, ...] = ()  # shown and judged too, but the verdict is the primary's
    compare: Compare | None = None  # how a study's numbers become figures, where the study does not do it itself
    consistent_with_own_tables: Literal["yes", "no", "no table"]
    why: str


class MeasuredValue(ConfigSection):
    """A measured number; its interval is missing where nothing was repeated."""

    value: float
    interval: tuple[float, float] | None = None
    what: str = ""  # tells several figures of one measure apart; their intervals hold at once
    repetitions: int | None = None  # that the interval is over, where it is over repetitions

    @model_validator(mode="after")
    def _inside(self) -> MeasuredValue:
        if self.interval is not None and not self.interval[0] <= self.value <= self.interval[1]:
            raise ValueError(f"{self.value} is not within its interval {self.interval}")
        return self


class Case(ConfigSection):
    """The figures of one case of a claim: those of the primary measure, and one for each further measure."""

    primary: tuple[MeasuredValue, ...] = Field(min_length=1)
    also: tuple[MeasuredValue, ...] = ()
    by_theory: Literal["reproduced", "not reproduced", "inconclusive"] | None = None


class Evidence(ConfigSection):
    """What was measured for a claim: numbers, and how to get them again."""

    format: Literal[1] = 1
    claim: str
    command: str = ""
    seconds: float | None = None
    commit: str = ""
    precondition: float | None = None
    cases: dict[str, Case]


@dataclass(frozen=True, slots=True)
class ClaimEntry:
    """A claim with what was measured."""

    claim: Claim
    evidence: Evidence | None = None

    @property
    def verdicts(self) -> dict[str, Verdict]:
        return {case: judge_case(self.claim, self.evidence, case) for case in self.claim.cases}

    def to_dict(self) -> dict[str, Any]:
        found = self.evidence.model_dump(mode="json") if self.evidence else None
        return {**self.claim.model_dump(mode="json"), "verdicts": self.verdicts, "evidence": found}


def judge_case(claim: Claim, evidence: Evidence | None, case: str) -> Verdict:
    """Return what becomes of one case of a claim."""
    found = evidence.cases.get(case) if evidence else None
    if evidence is None or found is None:
        return "not yet run"
    if claim.precondition and (evidence.precondition or 0.0) < claim.precondition.at_least:
        return "not testable at this scale"
    if found.by_theory is not None:
        return found.by_theory
    return weakest_verdict([verdict(each, claim.primary, claim.existential) for each in found.primary])


def verdict(figure: MeasuredValue, measured: PrimaryMetric, somewhere: bool = False) -> Verdict:
    """Compare an interval with zero, then with the paper's effect; what may be `somewhere` is not contradicted here."""
    if figure.interval is None or measured.by_theory:
        return "inconclusive"
    low, high = figure.interval
    sides: tuple[Verdict, Verdict] = ("reproduced", "not reproduced" if somewhere else "contradicted")
    above, below = sides if measured.direction == "above" else sides[::-1]
    if low > measured.zero:
        return above
    if high < measured.zero:
        return below
    missed = measured.effect is not None and not low <= measured.effect <= high
    return "not reproduced" if missed else "inconclusive"


def weakest_verdict(verdicts: Sequence[Verdict]) -> Verdict:
    """Return what may be said of several figures together: the least of what may be said of each."""
    return min(verdicts, key=BEST_LAST.index)


def claims_dir() -> Path:
    """Return the folder of the claims that come along: inside the package, or at the root of the project."""
    here = Path(__file__).resolve().parents[2]
    return next((each for each in (here / "claims", here.parents[1] / "claims") if each.is_dir()), here / "claims")


def read_claims(folder: Path | None = None) -> list[Claim]:
    """Return all claims of a folder by number."""
    files = sorted((folder or claims_dir()).glob("*.toml"))
    claims = [_checked(Claim, {"name": file.stem, **_plain(file, tomllib.loads)}, file) for file in files]
    return sorted(claims, key=lambda claim: claim.number)


def select_claims(claims: Sequence[Claim], names: Sequence[str]) -> list[Claim]:
    """Return the claims asked for, by number or name; all of them where nothing is asked for."""
    known = {key: claim for claim in claims for key in (claim.name, str(claim.number))}
    for name in names:
        if _key(name) not in known:
            raise RecipeError(f"There is no claim {name!r}; {suggest(name, [claim.name for claim in claims])}")
    wanted = {known[_key(name)].number for name in names}
    return [claim for claim in claims if not names or claim.number in wanted]


def read_entries(folder: Path | None = None, evidence: Path | None = None) -> list[ClaimEntry]:
    """Return all claims with what was measured for them."""
    root = folder or claims_dir()
    return [ClaimEntry(claim, read_evidence(claim, evidence or root / "evidence")) for claim in read_claims(root)]


def read_evidence(claim: Claim, folder: Path) -> Evidence | None:
    """Return what was measured for a claim, or None."""
    file = folder / f"{claim.name}.json"
    if not file.is_file():
        return None
    found = _checked(Evidence, _plain(file, json.loads), file)
    _fits(claim, found, file)
    return found


def write_evidence(evidence: Evidence, folder: Path) -> Path:
    """Write what was measured, and return the file."""
    file = folder / f"{evidence.claim}.json"
    write_atomic(file, json.dumps(evidence.model_dump(mode="json"), indent=1) + "\n")
    return file


def _fits(claim: Claim, evidence: Evidence, file: Path) -> None:
    """Refuse evidence that is about something else than the claim."""
    strange = [name for name in evidence.cases if name not in claim.cases]
    if evidence.claim != claim.name or strange:
        told = f"claim {evidence.claim!r}, cases {list(evidence.cases)}"
        raise RecipeError(f"{file} is of {told}; claim {claim.name!r} has the cases {list(claim.cases)}")
    if claim.precondition and evidence.precondition is None:
        raise RecipeError(f"{file} lacks the number of the precondition: {claim.precondition.metric}")
    for name, case in evidence.cases.items():
        if (case.by_theory is not None) is not claim.primary.by_theory:
            raise RecipeError(f"{file}, {name}: by_theory belongs to claims that something is equal or within, only")
        if len(case.also) not in (0, len(claim.also)):
            raise RecipeError(f"{file}, {name}: give a figure for each of {len(claim.also)} further measures, or none")


def _checked(kind: type[Part], plain: Mapping[str, Any], file: Path) -> Part:
    try:
        return kind.model_validate(plain)
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(str(each) for each in first["loc"])
        raise RecipeError(f"{file}: {where}: {first['msg']}") from None


def _key(name: str) -> str:
    return str(int(name)) if name.isdigit() else name.removesuffix(".toml")


def _plain(file: Path, read: Callable[[str], Any]) -> dict[str, Any]:
    try:
        return dict(read(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as problem:
        raise RecipeError(f"{file} cannot be read: {problem}") from None
