"""Summary of a report: five lines on accuracy, calibration, diversity, sharpness, and cost, and a card per member."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

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
    base_name,
    by_condition,
    default_split,
    first_measured,
    headline_row,
    is_member,
    mean_over_repetitions,
    metric_group,
    result_label,
)
from plateaux.studies.result_rows import TRAINING, ResultRow

MAX_CARDS = 12  # more members are shown as a table
CARD_METRICS = ("accuracy", "nll", "ece", "epochs", "passes", "seconds", *SHARPNESS, "fisher_rao")
CARD_ORDER = {name.replace("_", " "): place for place, name in enumerate(CARD_METRICS)}


@dataclass(frozen=True, slots=True)
class SummaryLine:
    """One line of the summary."""

    label: str
    text: str
    is_known: bool = True


@dataclass(frozen=True, slots=True)
class MemberCard:
    """The main numbers of one member."""

    title: str
    facts: Sequence[tuple[str, str]]


def summary(results: Sequence[ResultRow]) -> list[SummaryLine]:
    """Return the five lines of the summary."""
    return [_accuracy(results), _calibration(results), _diversity(results), _sharpness(results), _cost(results)]


def warning_lines(found: Sequence[Mapping[str, str]]) -> list[SummaryLine]:
    """Return a line with the warnings of all runs; of several runs, the text of the first, and their number."""
    parts = []
    for name in dict.fromkeys(chain(*found)):
        texts = [each[name] for each in found if name in each]
        runs = f" ({len(texts)} of {len(found)} runs)" if len(found) > 1 else ""
        parts.append(f"{texts[0]} [{name}]{runs}.")
    return [SummaryLine("Warnings", " ".join(parts))] if parts else []


def cards(results: Sequence[ResultRow]) -> list[MemberCard]:
    """Return a card for each member of one run."""
    split = default_split(results)
    facts: dict[RowName, list[tuple[str, str]]] = {}
    for result in results:
        name = base_name(result.metric).replace("_", " ")
        if (
            name in CARD_ORDER
            and is_member(result.row)
            and (result.split in (split, TRAINING) or metric_group(result.metric) == "sharpness")
        ):
            value = Estimate(result.value, result.stderr)
            if result.metric == "seconds":
                text = format_duration(result.value)
            else:
                text = format_with_stderr(value, result.percent) + (" %" if result.percent else "")
            facts.setdefault(result.row, []).append((name, text))
    order = sorted(facts, key=lambda row: row.members)
    return [MemberCard(row.capitalize(), sorted(facts[row], key=lambda pair: CARD_ORDER[pair[0]])) for row in order]


def _accuracy(results: Sequence[ResultRow]) -> SummaryLine:
    split = default_split(results)
    row = headline_row(results, "accuracy", split)
    means = _means(results, "accuracy", split, row)
    if not means:
        return SummaryLine("Accuracy", "Not measured. Run `plateaux evaluate RUN`.", is_known=False)
    members = _means(results, "accuracy", split, MEAN_OF_MEMBERS)
    best = max(means, key=lambda name: means[name].value)
    who = "ensemble" if row == MEAN_PROBABILITY else str(row)
    text = f"the accuracy of the {who} on {split} samples is {format_with_stderr(means[best], True)} %"
    if len(means) > 1:
        text += f" for {best}, the best condition"
    if best in members and row != MEAN_OF_MEMBERS:
        gain = format_percentage_points(means[best].value - members[best].value)
        text += f", {gain} from the mean of its members ({format_number(members[best].value, True)})"
        top = _best_member(results, split, best)
        if top > means[best].value:
            gain = format_percentage_points(means[best].value - top)
            text += f" and {gain} from the best of them ({format_number(top, True)})"
    return SummaryLine("Accuracy", _sentence(text + _others(means, best, percent=True)))


def _best_member(results: Sequence[ResultRow], split: str, condition: str) -> float:
    """Return the accuracy of the best member of each run, as a mean over runs."""
    best: dict[tuple[str, int], float] = {}
    for each in results:
        if (
            each.metric == "accuracy"
            and each.split == split
            and is_member(each.row)
            and result_label(each) == condition
        ):
            best[each.run, each.repetition] = max(each.value, best.get((each.run, each.repetition), -math.inf))
    return sum(best.values()) / len(best) if best else -math.inf


def _calibration(results: Sequence[ResultRow]) -> SummaryLine:
    parts = []
    for metric, name, percent in (
        ("nll", "negative log-likelihood", False),
        ("ece", "calibration error (ECE)", True),
    ):
        split = default_split(results, metric)
        means = _means(results, metric, split, headline_row(results, metric, split))
        if means:
            best = min(means, key=lambda label: means[label].value)
            unit = " %" if percent else ""
            where = f" ({best})" if len(means) > 1 else ""
            parts.append(
                f"{name} {format_with_stderr(means[best], percent)}{unit}{where}{_others(means, best, percent)}"
            )
    if not parts:
        return SummaryLine(
            "Calibration", "Not measured. Run `plateaux evaluate RUN --metrics uncertainty`.", is_known=False
        )
    return SummaryLine("Calibration", _sentence("; ".join(parts)))


def _diversity(results: Sequence[ResultRow]) -> SummaryLine:
    parts = []
    split = default_split(results, "disagreement")
    disagreement = _means(results, "disagreement", split, headline_row(results, "disagreement", split))
    if disagreement:
        shares = format_range([value.value for value in disagreement.values()], percent=True)
        parts.append(f"two members disagree on {shares} of the {split} samples")
    if (other := first_measured(results, [name for name in DIVERSITY if name != "disagreement"])) is not None:
        means = _means(results, *other, headline_row(results, *other))
        if means:
            values = format_range([value.value for value in means.values()])
            parts.append(f"diversity ({other[0]} on {other[1]} samples) is {values}{_extremes(means)}")
    if not parts:
        return SummaryLine(
            "Diversity", "Not measured. Run `plateaux evaluate RUN --metrics diversity`.", is_known=False
        )
    return SummaryLine("Diversity", _sentence("; ".join(parts)))


def _sharpness(results: Sequence[ResultRow]) -> SummaryLine:
    flat = [result for result in results if metric_group(result.metric) == "sharpness" and result.split != TRAINING]
    where = first_measured(flat, SHARPNESS) or next(((result.metric, result.split) for result in flat), None)
    means = _means(flat, *where, headline_row(flat, *where, wanted=ROWS)) if where else {}
    if not means or where is None:
        return SummaryLine("Sharpness", "Not measured. Run `plateaux landscape RUN`.", is_known=False)
    text = f"sharpness ({where[0]} on {where[1]} samples) is {format_range([v.value for v in means.values()])}"
    if len(means) == 1:
        members = [result.value for result in flat if (result.metric, result.split) == where and is_member(result.row)]
        text += f" on average over {pluralize(len(members), 'member')} ({format_range(members)})" if members else ""
    return SummaryLine("Sharpness", _sentence(text + _extremes(means, low="flattest", high="sharpest")))


def _cost(results: Sequence[ResultRow]) -> SummaryLine:
    costs = {by: _means(results, by, TRAINING, MEAN_OF_MEMBERS) for by in ("epochs", "passes", "seconds")}
    if not costs["seconds"]:
        return SummaryLine("Cost", "The training cost is not known.", is_known=False)
    epochs, passes, seconds = ([value.value for value in means.values()] for means in costs.values())
    low, high = format_duration(min(seconds)), format_duration(max(seconds))
    time = low if low == high else f"{low} to {high}"
    total = sum(result.value for result in results if result.metric == "seconds" and is_member(result.row))
    members = sum(1 for result in results if result.metric == "seconds" and is_member(result.row))
    text = (
        f"{format_range(epochs)} epochs, {format_range(passes)} passes over the training samples, and {time} per member"
    )
    return SummaryLine("Cost", _sentence(f"{text}; {format_duration(total)} for all {pluralize(members, 'member')}"))


def _means(results: Sequence[ResultRow], metric: str, split: str, row: str | None) -> dict[str, Estimate]:
    means = {
        name: mean_over_repetitions(repetitions)
        for name, repetitions in by_condition(results, metric, split, row or "").items()
    }
    return {name: value for name, value in means.items() if math.isfinite(value.value)}


def _others(means: dict[str, Estimate], best: str, percent: bool) -> str:
    rest = [value.value for name, value in means.items() if name != best]
    return f", {pluralize(len(rest), 'other')}: {format_range(rest, percent)}" if rest else ""


def _extremes(means: dict[str, Estimate], low: str = "lowest", high: str = "highest") -> str:
    if len(means) < 2:
        return ""
    smallest, largest = (pick(means, key=lambda name: means[name].value) for pick in (min, max))
    return f", {low} for {smallest}, {high} for {largest}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
