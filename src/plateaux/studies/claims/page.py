"""The page of the ledger: every claim, the paper's figure, ours with its interval, and what becomes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from plateaux.core.formatting import format_duration
from plateaux.studies.claims.claim import BEST_LAST, Claim, ClaimEntry, MeasuredValue, PrimaryMetric, verdict

SOURCES = {
    "Lu et al. 2024": "H. Lu, X. Liu, Y. Zhou, Q. Li, K. Keutzer, M. W. Mahoney, Y. Yan, H. Yang, Y. Yang. Sharpness-diversity tradeoff: improving flat ensembles with SharpBalance. NeurIPS 2024.",  # noqa: E501
    "SED 2024": "Scalable Ensemble Diversification for OOD Generalization and Detection. 2024.",
    "Rethinking Sharpness 2025": "Understanding Deep Learning Requires Rethinking Sharpness. 2025.",
}
HEAD = """# The claims

What three papers claim, how it is tested here, and what came out. Every claim is a file in `claims/`: the criterion and
whether it was fixed before any figure was seen, the primary measure, which way it should go, and how far it went in the
paper. What was measured lies in `claims/evidence/`, numbers only. This page is made of both:

```bash
plateaux claims                        # what stands, in the terminal
plateaux claims 14 15 16 17 --run-studies      # run the study of some, and write its evidence
plateaux claims --out docs/results/claims.md   # make this page
```

The verdict follows by rule from the 95 % interval of the primary measure: **reproduced** when it excludes zero in the
claimed direction, **contradicted** when in the other, **not reproduced** when it includes zero and excludes the paper's
effect, otherwise **inconclusive**; **not testable at this scale** where a precondition fails. A claim that something
does *not always* hold is not contradicted where it holds, and then is not reproduced. Where a claim names another value
than zero to compare with, its criterion says so. What is shown beside the primary measure is judged by the same rule
and decides nothing. That a formula is equal to a simulated mean, or bounds it, is judged as its criterion says. A
verdict holds for the scale that was tested.
"""


def page(entries: Sequence[ClaimEntry]) -> str:
    """Return the whole page as Markdown."""
    parts = [HEAD, _counts(entries), "\n".join(_overview(entries)), *("\n".join(section(each)) for each in entries)]
    known = sorted({each.claim.source for each in entries})
    parts.append("## Sources\n\n" + "\n".join(f"- {name}: {SOURCES.get(name, name)}" for name in known))
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def section(entry: ClaimEntry) -> Iterator[str]:
    """Yield the lines about one claim."""
    claim, evidence = entry.claim, entry.evidence
    yield f"## {claim.number}. {claim.statement}\n"
    yield f"*{claim.source}, {claim.where}.*\n"
    yield from _table(entry)
    yield ""
    yield f"- **Criterion**, fixed {claim.criterion_fixed}: {claim.criterion}"
    if claim.precondition:
        got = f"; here {evidence.precondition:.4g}" if evidence and evidence.precondition is not None else ""
        yield f"- **Precondition**: {claim.precondition.metric}, at least {claim.precondition.at_least:g}{got}."
    yield f"- **Scale**: {claim.scale}."
    yield f"- **Consistent with the paper's own tables**: {claim.consistent_with_own_tables}. {claim.why}"
    yield f"- **Again**: {_again(entry)}"


def figures(found: Sequence[MeasuredValue], unit: str = "") -> str:
    """Return numbers with their intervals in words."""
    return "; ".join(_figure(each) for each in found) + (f" {unit}" if unit else "")


def _counts(entries: Sequence[ClaimEntry]) -> str:
    count = Counter(verdict for each in entries for verdict in each.verdicts.values())
    told = ", ".join(f"{count[name]} {name}" for name in reversed(BEST_LAST) if count[name])
    return f"{len(entries)} claims, {sum(count.values())} cases: {told}.\n"


def _overview(entries: Sequence[ClaimEntry]) -> Iterator[str]:
    yield "| claim | | case | verdict |"
    yield "|---:|---|---|---|"
    for each in entries:
        for at, (case, found) in enumerate(each.verdicts.items()):
            first = (str(each.claim.number), each.claim.statement) if at == 0 else ("", "")
            yield f"| {first[0]} | {first[1]} | {case} | {found} |"


def _table(entry: ClaimEntry) -> Iterator[str]:
    yield "| case | measure | the paper | here (95 % interval) | verdict |"
    yield "|---|---|---|---|---|"
    for case, found in entry.verdicts.items():
        for at, measured in enumerate((entry.claim.primary, *entry.claim.also)):
            ours, beside = _ours(entry, case, at, measured)
            words = f"**{found}**" if at == 0 else beside
            yield f"| {case if at == 0 else ''} | {_measure(measured)} | {measured.paper} | {ours} | {words} |"


def _ours(entry: ClaimEntry, case: str, at: int, measured: PrimaryMetric) -> tuple[str, str]:
    """Return our figures of a measure, and what the rule says of them where they decide nothing."""
    found = entry.evidence.cases.get(case) if entry.evidence else None
    if found is None or (at and not found.also):
        return "", ""
    mine = found.primary if at == 0 else (found.also[at - 1],)
    silent = measured.by_theory or not at or entry.verdicts[case] == "not testable at this scale"
    beside = "" if silent else f"({verdict(mine[0], measured, entry.claim.existential)})"
    return figures(mine, measured.unit), beside


def _measure(measured: PrimaryMetric) -> str:
    signs = {"above": ">", "below": "<"}
    wanted = f", claimed {signs[measured.direction]} {measured.zero:g}" if measured.direction in signs else ""
    return measured.metric + wanted


def _figure(figure: MeasuredValue) -> str:
    where = f"{figure.what}: " if figure.what else ""
    spread = "no interval" if figure.interval is None else f"{figure.interval[0]:.4g} to {figure.interval[1]:.4g}"
    often = f", {figure.repetitions} repetitions" if figure.repetitions else ""
    return f"{where}{figure.value:.4g} ({spread}{often})"


def _again(entry: ClaimEntry) -> str:
    claim, evidence = entry.claim, entry.evidence
    if evidence is None:
        return f"`plateaux claims {claim.number} --run-studies`, which runs {_study(claim)}; not yet run."
    took = format_duration(evidence.seconds) if evidence.seconds is not None else "time not recorded"
    return f"`{evidence.command}`; {took}" + (f"; commit {evidence.commit}." if evidence.commit else ".")


def _study(claim: Claim) -> str:
    return "the theory" if claim.study == "theory" else f"`{claim.study}`"
