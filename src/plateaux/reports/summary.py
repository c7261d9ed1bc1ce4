"""The front page: five lines that answer how good, how sure, how different, how flat, at what cost; a card a member."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from plateaux.core.formatting import (
    format_duration,
    format_number,
    format_percentage_points,
    format_range,
    format_with_stderr,
    pluralize,
)
from plateaux.core.row_names import MEAN_OF_MEMBERS, MEAN_PROBABILITY, RowName
from plateaux.core.types import Estimate
from plateaux.reports.query import (
    DIVERSITY,
    ROWS,
    SHARPNESS,
    bare,
    by_condition,
    default_split,
    first_measured,
    headline_row,
    is_member,
    metric_question,
    over,
)
from plateaux.studies.results import TRAINING, ResultRow

CARDS = 12  # members at most that have a card each


@dataclass(frozen=True, slots=True)
class SummaryLine:
    """One of the five questions, and what is known of it."""

    question: str
    words: str
    known: bool = True


@dataclass(frozen=True, slots=True)
class MemberCard:
    """What is to be said of one member."""

    title: str
    facts: Sequence[tuple[str, str]]


def summary(findings: Sequence[ResultRow]) -> list[SummaryLine]:
    """Return the five answers."""
    return [_good(findings), _sure(findings), _different(findings), _flat(findings), _cost(findings)]


def cards(findings: Sequence[ResultRow]) -> list[MemberCard]:
    """Return a card for every member of one run."""
    on = default_split(findings)
    facts: dict[RowName, list[tuple[str, str]]] = {}
    for each in findings:
        name = bare(each.metric).replace("_", " ")
        if (
            name in PLACES
            and is_member(each.row)
            and (each.split in (on, TRAINING) or metric_question(each.metric) == "sharpness")
        ):
            value = Estimate(each.value, each.stderr)
            if each.metric == "seconds":
                text = format_duration(each.value)
            else:
                text = format_with_stderr(value, each.percent) + (" %" if each.percent else "")
            facts.setdefault(each.row, []).append((name, text))
    order = sorted(facts, key=lambda row: row.members)
    return [MemberCard(row.capitalize(), sorted(facts[row], key=lambda pair: PLACES[pair[0]])) for row in order]


WORTH_A_LINE = ("accuracy", "nll", "ece", "epochs", "passes", "seconds", *SHARPNESS, "fisher_rao")


PLACES = {name.replace("_", " "): place for place, name in enumerate(WORTH_A_LINE)}


def _good(findings: Sequence[ResultRow]) -> SummaryLine:
    on = default_split(findings)
    row = headline_row(findings, "accuracy", on)
    found = _means(findings, "accuracy", on, row)
    if not found:
        return SummaryLine("How good?", "Accuracy was not measured: plateaux evaluate RUN.", known=False)
    means = _means(findings, "accuracy", on, MEAN_OF_MEMBERS)
    best = max(found, key=lambda name: found[name].value)
    who = "ensemble" if row == MEAN_PROBABILITY else str(row)
    words = (
        f"{_sides(best, found)}the {who} answers {format_with_stderr(found[best], True)} % of the {on} samples rightly"
    )
    if best in means and row != MEAN_OF_MEMBERS:
        gain = found[best].value - means[best].value
        words += (
            f", {format_percentage_points(gain)} from the mean of its members "
            f"({format_number(means[best].value, True)})"
        )
    return SummaryLine("How good?", _sentence(words + _others(found, best, percent=True)))


def _sure(findings: Sequence[ResultRow]) -> SummaryLine:
    parts = []
    for measure, words, percent in (
        ("nll", "negative log-likelihood", False),
        ("ece", "calibration error (ECE)", True),
    ):
        on = default_split(findings, measure)
        found = _means(findings, measure, on, headline_row(findings, measure, on))
        if found:
            best = min(found, key=lambda name: found[name].value)
            unit = " %" if percent else ""
            where = f" ({best})" if len(found) > 1 else ""
            parts.append(
                f"{words} {format_with_stderr(found[best], percent)}{unit}{where}{_others(found, best, percent)}"
            )
    if not parts:
        return SummaryLine("How sure?", "Not measured: plateaux evaluate RUN --metrics uncertainty.", known=False)
    return SummaryLine("How sure?", _sentence("; ".join(parts)))


def _different(findings: Sequence[ResultRow]) -> SummaryLine:
    parts = []
    on = default_split(findings, "disagreement")
    apart = _means(findings, "disagreement", on, headline_row(findings, "disagreement", on))
    if apart:
        shares = format_range([value.value for value in apart.values()], percent=True)
        parts.append(f"two members answer {shares} of the {on} samples differently")
    if (other := first_measured(findings, [name for name in DIVERSITY if name != "disagreement"])) is not None:
        found = _means(findings, *other, headline_row(findings, *other))
        if found:
            range_of = format_range([value.value for value in found.values()])
            parts.append(f"diversity ({other[0]} on {other[1]} samples) is {range_of}{_extremes(found)}")
    if not parts:
        return SummaryLine("How different?", "Not measured: plateaux evaluate RUN --metrics diversity.", known=False)
    return SummaryLine("How different?", _sentence("; ".join(parts)))


def _flat(findings: Sequence[ResultRow]) -> SummaryLine:
    flat = [each for each in findings if metric_question(each.metric) == "sharpness" and each.split != TRAINING]
    where = first_measured(flat, SHARPNESS) or next(((each.metric, each.split) for each in flat), None)
    found = _means(flat, *where, headline_row(flat, *where, wanted=ROWS)) if where else {}
    if not found or where is None:
        return SummaryLine("How flat?", "Not measured: plateaux landscape RUN.", known=False)
    words = f"sharpness ({where[0]} on {where[1]} samples) is {format_range([v.value for v in found.values()])}"
    if len(found) == 1:
        members = [each.value for each in flat if (each.metric, each.split) == where and is_member(each.row)]
        words += f" on average over {pluralize(len(members), 'member')} ({format_range(members)})" if members else ""
    return SummaryLine("How flat?", _sentence(words + _extremes(found, low="flattest", high="sharpest")))


def _cost(findings: Sequence[ResultRow]) -> SummaryLine:
    costs = {by: _means(findings, by, TRAINING, MEAN_OF_MEMBERS) for by in ("epochs", "passes", "seconds")}
    if not costs["seconds"]:
        return SummaryLine("At what cost?", "The cost of training is not known.", known=False)
    epochs, passes, seconds = ([value.value for value in found.values()] for found in costs.values())
    low, high = format_duration(min(seconds)), format_duration(max(seconds))
    time = low if low == high else f"{low} to {high}"
    total = sum(each.value for each in findings if each.metric == "seconds" and is_member(each.row))
    members = sum(1 for each in findings if each.metric == "seconds" and is_member(each.row))
    words = (
        f"{format_range(epochs)} epochs, {format_range(passes)} passes over the training samples and {time} a member"
    )
    return SummaryLine(
        "At what cost?", _sentence(f"{words}; {format_duration(total)} for all {pluralize(members, 'member')}")
    )


def _means(findings: Sequence[ResultRow], measure: str, on: str, row: str | None) -> dict[str, Estimate]:
    found = {name: over(several) for name, several in by_condition(findings, measure, on, row or "").items()}
    return {name: value for name, value in found.items() if math.isfinite(value.value)}


def _sides(best: str, found: dict[str, Estimate]) -> str:
    return f"best is {best}: " if len(found) > 1 else ""


def _others(found: dict[str, Estimate], best: str, percent: bool) -> str:
    rest = [value.value for name, value in found.items() if name != best]
    return f", {pluralize(len(rest), 'other')} {format_range(rest, percent)}" if rest else ""


def _extremes(found: dict[str, Estimate], low: str = "least", high: str = "most") -> str:
    if len(found) < 2:
        return ""
    least, most = (pick(found, key=lambda name: found[name].value) for pick in (min, max))
    return f", {low} for {least}, {high} for {most}"


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."
