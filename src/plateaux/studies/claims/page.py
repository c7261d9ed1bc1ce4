"""The page of claims: the numbers of each paper, our numbers with intervals, and the verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from plateaux.core.formatting import format_duration
from plateaux.studies.claims.claim import WEAKEST_FIRST, Claim, ClaimEntry, MeasuredValue, PrimaryMetric, verdict

SOURCES = {
    "Lu et al. 2024": "H. Lu, X. Liu, Y. Zhou, Q. Li, K. Keutzer, M. W. Mahoney, Y. Yan, H. Yang, Y. Yang. Sharpness-diversity tradeoff: improving flat ensembles with SharpBalance. NeurIPS 2024.",  # noqa: E501
    "SED 2024": "Scalable Ensemble Diversification for OOD Generalization and Detection. 2024.",
    "Rethinking Sharpness 2025": "Understanding Deep Learning Requires Rethinking Sharpness. 2025.",
}
HEAD = """# Claims

This page lists the claims of three papers, how they are tested here, and the results. Each claim is a file in `claims/`
with its criterion (and whether it was fixed before the first results), the primary metric, its expected direction, and
the effect in the paper. The measured numbers are in `claims/evidence/`. This page is generated from both:

```bash
plateaux claims                             # verdicts in the terminal
plateaux claims 14 15 16 17 --run-studies   # run the studies of some claims and write their evidence
plateaux claims --out docs/results/claims.md   # generate this page
```

The verdict follows by rule from the 95 % interval of the primary metric:

- **reproduced**: the interval excludes zero in the claimed direction.
- **contradicted**: the interval excludes zero in the other direction. A claim that something does *not always* hold
  cannot be contradicted by a case in which it holds; the verdict is then *not reproduced*.
- **not reproduced**: the interval includes zero and excludes the effect in the paper.
- **inconclusive**: the interval includes both.
- **not testable at this scale**: a precondition fails, or an effect that the claim requires is not reproduced.

If a claim compares with a value other than zero, its criterion says so. Secondary metrics are judged by the same rule
(in parentheses) and do not affect the verdict. Claims that a formula equals or bounds a simulated mean are judged by
their own criterion. A verdict holds for the tested scale.
"""


def page(entries: Sequence[ClaimEntry]) -> str:
    """Return the page as Markdown."""
    parts = [HEAD, _counts(entries), "\n".join(_overview(entries)), *("\n".join(section(each)) for each in entries)]
    known = sorted({each.claim.source for each in entries})
    parts.append("## Sources\n\n" + "\n".join(f"- {name}: {SOURCES.get(name, name)}" for name in known))
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def section(entry: ClaimEntry) -> Iterator[str]:
    """Yield the lines of one claim."""
    claim, evidence = entry.claim, entry.evidence
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
    yield f"- **Scale**: {claim.scale}."
    if claim.note:
        yield f"- **Note**: {claim.note}"
    yield f"- **Consistent with the paper's own tables**: {claim.consistent_with_own_tables}. {claim.why}"
    yield f"- **Reproduce**: {_reproduce(entry)}"


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


def format_values(values: Sequence[MeasuredValue], unit: str = "") -> str:
    """Return numbers with their intervals as text."""
    return "; ".join(_format_value(value) for value in values) + (f" {unit}" if unit else "")


def _counts(entries: Sequence[ClaimEntry]) -> str:
    count = Counter(verdict for entry in entries for verdict in entry.verdicts.values())
    counts = ", ".join(f"{count[name]} {name}" for name in reversed(WEAKEST_FIRST) if count[name])
    return f"{len(entries)} claims, {sum(count.values())} cases: {counts}.\n"


def _overview(entries: Sequence[ClaimEntry]) -> Iterator[str]:
    yield "| number | claim | case | verdict |"
    yield "|---:|---|---|---|"
    for entry in entries:
        for position, (case, judged) in enumerate(entry.verdicts.items()):
            number, statement = (entry.claim.number, entry.claim.statement) if position == 0 else ("", "")
            yield f"| {number} | {statement} | {case} | {judged} |"


def _table(entry: ClaimEntry) -> Iterator[str]:
    yield "| case | metric | paper | here (95 % interval) | verdict |"
    yield "|---|---|---|---|---|"
    for case, judged in entry.verdicts.items():
        for position, metric in enumerate((entry.claim.primary, *entry.claim.also)):
            ours, secondary = _our_values(entry, case, position, metric)
            shown = f"**{judged}**" if position == 0 else secondary
            name = case if position == 0 else ""
            yield f"| {name} | {_metric_text(metric)} | {metric.paper} | {ours} | {shown} |"


def _our_values(entry: ClaimEntry, case: str, position: int, metric: PrimaryMetric) -> tuple[str, str]:
    """Return our numbers for a metric, and the verdict on a secondary metric in parentheses."""
    measured = entry.evidence.cases.get(case) if entry.evidence else None
    if measured is None or (position and not measured.also):
        return "", ""
    values = measured.primary if position == 0 else (measured.also[position - 1],)
    is_judged = position and not metric.by_theory and entry.verdicts[case] != "not testable at this scale"
    secondary = f"({verdict(values[0], metric, entry.claim.existential)})" if is_judged else ""
    return format_values(values, metric.unit), secondary


def _metric_text(metric: PrimaryMetric) -> str:
    signs = {"above": ">", "below": "<"}
    claimed = f", claimed {signs[metric.direction]} {metric.zero:g}" if metric.direction in signs else ""
    return metric.metric + claimed


def _format_value(value: MeasuredValue) -> str:
    label = f"{value.what}: " if value.what else ""
    interval = "no interval" if value.interval is None else f"{value.interval[0]:.4g} to {value.interval[1]:.4g}"
    repetitions = f", {value.repetitions} repetitions" if value.repetitions else ""
    return f"{label}{value.value:.4g} ({interval}{repetitions})"


def _reproduce(entry: ClaimEntry) -> str:
    claim, evidence = entry.claim, entry.evidence
    if evidence is None:
        return f"`plateaux claims {claim.number} --run-studies`, which runs {_study(claim)}; not yet run."
    duration = format_duration(evidence.seconds) if evidence.seconds is not None else "time not recorded"
    return f"`{evidence.command}`; {duration}" + (f"; commit {evidence.commit}." if evidence.commit else ".")


def _study(claim: Claim) -> str:
    return "the simulation" if claim.study == "theory" else f"`{claim.study}`"
