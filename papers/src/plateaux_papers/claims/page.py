"""The page of claims: one table of verdicts, then the criterion and the numbers of every claim."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import floor, log10
from pathlib import Path

from plateaux.commands import format_duration
from plateaux_papers.claims.claim import (
    WEAKEST_FIRST,
    ClaimEntry,
    MeasuredValue,
    PrimaryMetric,
    Protocol,
    judge_case,
    values_of,
)

SOURCES = {
    "Lu et al. 2024": "H. Lu, X. Liu, Y. Zhou, Q. Li, K. Keutzer, M. W. Mahoney, Y. Yan, H. Yang, Y. Yang. Sharpness-diversity tradeoff: improving flat ensembles with SharpBalance. NeurIPS 2024.",  # noqa: E501
    "SED 2024": "Scalable Ensemble Diversification for OOD Generalization and Detection. 2024.",
    "Rethinking Sharpness 2025": "Understanding Deep Learning Requires Rethinking Sharpness. 2025.",
}
HEAD = """# Claims

What three papers claim, and what our studies found, at a much smaller scale. *The paper's protocol* follows the paper
where it differs from a fair comparison, such as one radius for all methods. *A fair protocol* chooses the settings of
each method on held-out data, and compares networks that fit their training data. For the theory, the first column
tests the formulas as printed, the second as corrected. Numbers are effects with 95 % intervals; each is defined below.
"""
RULES = """## Rules

A claim is a TOML file with its criterion; its evidence is a JSON file of measured numbers. The verdict follows from the
interval of the primary metric:

- **reproduced**: the interval excludes zero in the claimed direction.
- **contradicted**: it excludes zero in the other direction. A claim that something does *not always* hold cannot be
  contradicted by a case in which it holds; the verdict is then *not reproduced*.
- **not reproduced**: it includes zero and excludes the effect in the paper.
- **inconclusive**: it includes both.
- **not testable at this scale**: a precondition fails, or an effect that the claim requires is not reproduced.

If a claim compares with a value other than zero, its criterion says so. Secondary metrics are judged by the same rule,
in parentheses. Claims that a formula equals or bounds a simulated mean have a criterion of their own. A verdict holds
for the tested scale, and intervals are not corrected for the number of claims. `plateaux claims --out papers/claims.md`
writes this page.
"""


def page(entries: Sequence[ClaimEntry]) -> str:
    """Return the page as Markdown."""
    parts = [HEAD, "\n".join(_ledger(entries)), _counts(entries), RULES]
    parts += ["\n".join(section(each)) for each in entries]
    known = sorted({each.claim.source for each in entries})
    parts.append("## Sources\n\n" + "\n".join(f"- {name}: {SOURCES.get(name, name)}" for name in known))
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def section(entry: ClaimEntry) -> Iterator[str]:
    """Yield the lines of one claim."""
    claim, evidence = entry.claim, entry.evidence
    yield f'<a id="claim-{claim.number}"></a>\n'
    yield f"## {claim.number}. {claim.statement}\n"
    yield f"*{claim.source}, {claim.where}.*\n"
    yield from _table(entry)
    yield ""
    registered = f" (commit {claim.registered})" if claim.registered else ""
    yield f"- **Criterion**, fixed {claim.criterion_fixed}{registered}: {claim.criterion}"
    if claim.precondition:
        measured = f"; here {evidence.precondition:.4g}" if evidence and evidence.precondition is not None else ""
        yield f"- **Precondition**: {claim.precondition.metric}, at least {claim.precondition.at_least:g}{measured}."
    if claim.required_effect:
        yield f"- **Required effect**: {_metric_text(claim.required_effect)}{_required_effects(entry)}."
    yield f"- **Scale**{_repetitions(entry)}: {claim.scale}."
    if claim.note:
        yield f"- **Note**: {claim.note}"
    yield f"- **Consistent with the paper's own tables**: {claim.consistent_with_own_tables}. {claim.why}"
    yield f"- **Reproduce**: {_reproduce(entry)}"


def format_values(values: Sequence[MeasuredValue], unit: str = "") -> str:
    """Return numbers with their intervals as text; the interval has two significant digits."""
    return "; ".join(_format_value(value) for value in values) + (f" {unit}" if unit else "")


def _ledger(entries: Sequence[ClaimEntry]) -> Iterator[str]:
    """Yield one row for every claim."""
    yield "| | claim | the paper's protocol | a fair protocol | what limits it |"
    yield "|---:|---|---|---|---|"
    for each in entries:
        claim = each.claim
        cells = [_judged(each, claim.paper_protocol), _judged(each, claim.fair_protocol)]
        yield f"| [{claim.number}](#claim-{claim.number}) | {claim.statement} | {' | '.join(cells)} | {claim.limits} |"


def _judged(entry: ClaimEntry, protocol: Protocol | None) -> str:
    """Return the verdicts under a protocol with the first number of each."""
    if protocol is None:
        return "not measured"
    claim, evidence = entry.claim, entry.evidence
    lines = []
    for case in protocol.cases or claim.cases:
        values = values_of(evidence, case, protocol.position)
        more = f" and {len(values) - 1} more" if len(values) > 1 else ""
        name = f"{case}: " if len(claim.cases) > 1 else ""
        unit = (claim.primary, *claim.also)[protocol.position].unit.replace("percentage points", "points")
        number = f", {format_values(values[:1], unit)}{more}" if values else ""
        lines.append(f"{name}**{judge_case(claim, evidence, case, protocol.position)}**{number}")
    return "<br>".join(lines)


def _counts(entries: Sequence[ClaimEntry]) -> str:
    """Return how often each verdict is given, by the primary metric and under a fair protocol."""
    primary = [(found, entry.claim.about) for entry in entries for found in entry.verdicts.values()]
    kinds = Counter(about for found, about in primary if found == "reproduced").most_common()
    about = " (" + ", ".join(f"{number} {kind}" for kind, number in kinds) + ")"
    counts = _tally([found for found, _ in primary]).replace(" reproduced", f" reproduced{about}", 1)
    fair = [
        judge_case(entry.claim, entry.evidence, case, entry.claim.fair_protocol.position)
        for entry in entries
        if entry.claim.about == "trained ensembles" and entry.claim.fair_protocol
        for case in entry.claim.fair_protocol.cases or entry.claim.cases
    ]
    return (
        f"By the primary metric, {len(entries)} claims in {len(primary)} cases: {counts}. The claims about trained "
        f"ensembles, under a fair protocol: {_tally(fair)}.\n"
    )


def _tally(verdicts: Sequence[str]) -> str:
    count = Counter(verdicts)
    return ", ".join(f"{count[name]} {name}" for name in reversed(WEAKEST_FIRST) if count[name]) or "none"


def _table(entry: ClaimEntry) -> Iterator[str]:
    """Yield one row for every metric and one column for every case."""
    claim = entry.claim
    names = claim.cases if len(claim.cases) > 1 else ("here (95 % interval)",)
    yield f"| metric | paper | {' | '.join(names)} |"
    yield "|---|---|" + "---|" * len(names)
    for position, metric in enumerate((claim.primary, *claim.also)):
        cells = [_cell(entry, case, position, metric) for case in claim.cases]
        unit = f", {metric.unit}" if metric.unit else ""
        yield f"| {_metric_text(metric, unit)} | {metric.paper} | {' | '.join(cells)} |"


def _cell(entry: ClaimEntry, case: str, position: int, metric: PrimaryMetric) -> str:
    """Return our numbers for a metric and their verdict: bold if it decides, and in parentheses if not."""
    values = values_of(entry.evidence, case, position)
    found = judge_case(entry.claim, entry.evidence, case, position)
    if not position:
        return f"{format_values(values)} **{found}**".strip()
    is_judged = values and not metric.by_theory and found != "not testable at this scale"
    return f"{format_values(values)} ({found})" if is_judged else format_values(values)


def _required_effects(entry: ClaimEntry) -> str:
    """Return the required effect in every case that was measured; equal ones once."""
    cases = entry.evidence.cases.items() if entry.evidence else ()
    unit = entry.claim.required_effect.unit if entry.claim.required_effect else ""
    by_text: dict[str, list[str]] = {}
    for name, case in cases:
        if case.required_effect:
            by_text.setdefault(format_values([case.required_effect], unit), []).append(name)
    if len(by_text) == 1:
        return f"; here {next(iter(by_text))}"
    return "".join(f"; {', '.join(names)}: {text}" for text, names in by_text.items())


def _repetitions(entry: ClaimEntry) -> str:
    cases = entry.evidence.cases.values() if entry.evidence else ()
    known = sorted({value.repetitions for case in cases for value in case.primary if value.repetitions})
    return f" ({' or '.join(map(str, known))} repetitions)" if known else ""


def _metric_text(metric: PrimaryMetric, unit: str = "") -> str:
    signs = {"above": ">", "below": "<"}
    claimed = f", claimed {signs[metric.direction]} {metric.zero:g}" if metric.direction in signs else ""
    return metric.metric + unit + claimed


def _format_value(value: MeasuredValue) -> str:
    label = f"{value.what}: " if value.what else ""
    low, high = value.interval or (value.value, value.value)
    if low == high:
        return f"{label}{value.value:.4g} (no interval)"
    digits = max(0, 1 - floor(log10((high - low) / 2)))
    style = f".{digits}f" if digits < 6 else ".2g"
    return f"{label}{value.value:{style}} ({low:{style}} to {high:{style}})"


def _reproduce(entry: ClaimEntry) -> str:
    """Return the commands: a study runs at any commit, and a script at the commit that it was written for."""
    claim, evidence = entry.claim, entry.evidence
    name = Path(claim.study).stem
    if evidence is None:
        return f"`plateaux study {name}`; not yet run."
    if claim.study.endswith(".py"):
        return f"`git checkout {evidence.commit}`, then `{evidence.command}`{_duration(evidence.seconds)}."
    if claim.study == "theory":
        words = f"`{evidence.command}`, then `plateaux claims {claim.number} --study theory`"
    else:
        words = f"`plateaux study {name}`, then `plateaux claims {claim.number} --study runs/{name}`"
    return f"{words}{_duration(evidence.seconds)}" + (
        f"; measured at commit {evidence.commit}." if evidence.commit else "."
    )


def _duration(seconds: float | None) -> str:
    return "" if seconds is None else f"; {format_duration(seconds)}"
