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
    pluralize,
)
from plateaux.core.row_names import MEAN_OF_MEMBERS, MEAN_PROBABILITY, RowName
from plateaux.core.stats.comparisons import DEFAULT, Inference
from plateaux.reports.query import (
    DIVERSITY,
    ROWS,
    SHARPNESS,
    base_name,
    by_condition,
    default_split,
    find_best,
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
NOT_DISTINGUISHED = "not distinguished from the runner-up"
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


def summary(results: Sequence[ResultRow], inference: Inference = DEFAULT) -> list[SummaryLine]:
    """Return the five lines of the summary."""
    compared = [line(results, inference) for line in (_accuracy, _calibration, _diversity, _sharpness)]
    return [*compared, _cost(results)]


def warning_lines(found: Sequence[Mapping[str, str]]) -> list[SummaryLine]:
    """Return a line with the warnings of all runs; of several runs, the text of the first, and their number."""
    parts = []
    for name in dict.fromkeys(chain(*found)):
        texts = [each[name] for each in found if name in each]
        runs = f" ({len(texts)} of {len(found)} runs)" if len(found) > 1 else ""
        parts.append(f"{texts[0]} [{name}]{runs}.")
    return [SummaryLine("Warnings", " ".join(parts))] if parts else []


def cards(results: Sequence[ResultRow], inference: Inference = DEFAULT) -> list[MemberCard]:
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
            if result.metric == "seconds":
                text = format_duration(result.value)
            else:
                text = inference.format(mean_over_repetitions([result]), result.percent) + " %" * result.percent
            facts.setdefault(result.row, []).append((name, text))
    order = sorted(facts, key=lambda row: row.members)
    return [MemberCard(row.capitalize(), sorted(facts[row], key=lambda pair: CARD_ORDER[pair[0]])) for row in order]


def _accuracy(results: Sequence[ResultRow], inference: Inference) -> SummaryLine:
    split = default_split(results)
    row = headline_row(results, "accuracy", split)
    groups = _finite(results, "accuracy", split, row)
    means = _values(groups)
    if not means:
        return SummaryLine("Accuracy", "Not measured. Run `plateaux evaluate RUN`.", is_known=False)
    members = _values(_finite(results, "accuracy", split, MEAN_OF_MEMBERS))
    best = max(means, key=lambda name: means[name])
    who = "ensemble" if row == MEAN_PROBABILITY else str(row)
    number = inference.format(mean_over_repetitions(groups[best]), True)
    text = f"the accuracy of the {who} on {split} samples is {number} %"
    if len(means) > 1:
        is_best = find_best(groups, higher_is_better=True, inference=inference) is not None
        text += f" for {best}, {'the best condition' if is_best else NOT_DISTINGUISHED}"
    if best in members and row != MEAN_OF_MEMBERS:
        gain = format_percentage_points(means[best] - members[best])
        text += f", {gain} from the mean of its members ({format_number(members[best], True)})"
        top = _best_member(results, split, best)
        if top > means[best]:
            gain = format_percentage_points(means[best] - top)
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


def _calibration(results: Sequence[ResultRow], inference: Inference) -> SummaryLine:
    parts = []
    for metric, name, percent in (
        ("nll", "negative log-likelihood", False),
        ("ece", "calibration error (ECE)", True),
    ):
        split = default_split(results, metric)
        groups = _finite(results, metric, split, headline_row(results, metric, split))
        means = _values(groups)
        if means:
            best = min(means, key=lambda label: means[label])
            text = f"{name} {inference.format(mean_over_repetitions(groups[best]), percent)}{' %' * percent}"
            if len(means) > 1:
                is_best = find_best(groups, higher_is_better=False, inference=inference) is not None
                text += f" ({best}{'' if is_best else f', {NOT_DISTINGUISHED}'})"
            parts.append(text + _others(means, best, percent))
    if not parts:
        return SummaryLine(
            "Calibration", "Not measured. Run `plateaux evaluate RUN --metrics uncertainty`.", is_known=False
        )
    return SummaryLine("Calibration", _sentence("; ".join(parts)))


def _diversity(results: Sequence[ResultRow], inference: Inference) -> SummaryLine:
    parts = []
    split = default_split(results, "disagreement")
    disagreement = _finite(results, "disagreement", split, headline_row(results, "disagreement", split))
    if disagreement:
        shares = format_range(list(_values(disagreement).values()), percent=True)
        parts.append(f"two members disagree on {shares} of the {split} samples")
    if (other := first_measured(results, [name for name in DIVERSITY if name != "disagreement"])) is not None:
        groups = _finite(results, *other, headline_row(results, *other))
        if groups:
            values = format_range(list(_values(groups).values()))
            parts.append(f"diversity ({other[0]} on {other[1]} samples) is {values}{_extremes(groups, inference)}")
    if not parts:
        return SummaryLine(
            "Diversity", "Not measured. Run `plateaux evaluate RUN --metrics diversity`.", is_known=False
        )
    return SummaryLine("Diversity", _sentence("; ".join(parts)))


def _sharpness(results: Sequence[ResultRow], inference: Inference) -> SummaryLine:
    flat = [result for result in results if metric_group(result.metric) == "sharpness" and result.split != TRAINING]
    where = first_measured(flat, SHARPNESS) or next(((result.metric, result.split) for result in flat), None)
    groups = _finite(flat, *where, headline_row(flat, *where, wanted=ROWS)) if where else {}
    if not groups or where is None:
        return SummaryLine("Sharpness", "Not measured. Run `plateaux landscape RUN`.", is_known=False)
    text = f"sharpness ({where[0]} on {where[1]} samples) is {format_range(list(_values(groups).values()))}"
    if len(groups) == 1:
        members = [result.value for result in flat if (result.metric, result.split) == where and is_member(result.row)]
        text += f" on average over {pluralize(len(members), 'member')} ({format_range(members)})" if members else ""
    return SummaryLine("Sharpness", _sentence(text + _extremes(groups, inference, ("flattest", "sharpest"))))


def _cost(results: Sequence[ResultRow]) -> SummaryLine:
    names = ("epochs", "passes", "seconds")
    epochs, passes, seconds = (
        list(_values(_finite(results, name, TRAINING, MEAN_OF_MEMBERS)).values()) for name in names
    )
    if not seconds:
        return SummaryLine("Cost", "The training cost is not known.", is_known=False)
    low, high = format_duration(min(seconds)), format_duration(max(seconds))
    time = low if low == high else f"{low} to {high}"
    total = sum(result.value for result in results if result.metric == "seconds" and is_member(result.row))
    members = sum(1 for result in results if result.metric == "seconds" and is_member(result.row))
    text = (
        f"{format_range(epochs)} epochs, {format_range(passes)} passes over the training samples, and {time} per member"
    )
    return SummaryLine("Cost", _sentence(f"{text}; {format_duration(total)} for all {pluralize(members, 'member')}"))


def _finite(results: Sequence[ResultRow], metric: str, split: str, row: str | None) -> dict[str, list[ResultRow]]:
    """Return the repetitions of one column by condition, without conditions whose mean is not finite."""
    groups = by_condition(results, metric, split, row or "")
    return {name: several for name, several in groups.items() if math.isfinite(mean_over_repetitions(several).value)}


def _values(groups: Mapping[str, Sequence[ResultRow]]) -> dict[str, float]:
    return {name: mean_over_repetitions(several).value for name, several in groups.items()}


def _others(means: Mapping[str, float], best: str, percent: bool) -> str:
    rest = [value for name, value in means.items() if name != best]
    return f", {pluralize(len(rest), 'other')}: {format_range(rest, percent)}" if rest else ""


def _extremes(
    groups: Mapping[str, Sequence[ResultRow]], inference: Inference, words: tuple[str, str] = ("lowest", "highest")
) -> str:
    """Return the conditions that are distinguished as the lowest and as the highest."""
    if len(groups) < 2:
        return ""
    ends = [find_best(groups, higher_is_better=is_high, inference=inference) for is_high in (False, True)]
    named = [f", {word} for {name}" for word, name in zip(words, ends, strict=True) if name is not None]
    return "".join(named) or ", not distinguished"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
