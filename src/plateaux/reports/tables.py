"""Tables of a report: conditions by measures with the best in bold, severities, strangers, and one run by itself."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from plateaux.core.formatting import format_range, format_with_stderr, pluralize
from plateaux.core.row_names import ALL_MEMBERS, MEAN_OF_MEMBERS, MEAN_PROBABILITY, PART, RowName, row_name
from plateaux.core.text_table import Cell, Table
from plateaux.core.types import Estimate
from plateaux.ensembles.ood_scores import OOD_SCORES
from plateaux.reports.query import ROWS, Column, bare, is_member, metric_question, over, result_label
from plateaux.studies.comparison import MAIN, SUMMED, Comparison
from plateaux.studies.results import TRAINING, ResultRow

QUESTIONS = {
    "performance": "How good", "uncertainty": "How sure", "diversity": "How different", "sharpness": "How flat",
    "cost": "At what cost", "other": "Other measures",
}  # fmt: skip
APART = ("ood", "reliability", "per_class", "brier_parts", "spectrum")  # that have tables or figures of their own
COLUMNS = 7  # of a table, besides the names of its rows
ERRORS = "± one standard error: over repetitions, or of a single run over its samples (of means, over members)."


def metric_tables(findings: Sequence[ResultRow]) -> list[Table]:
    """Return what was measured: of one condition its measures one below the other, of several side by side."""
    names = dict.fromkeys(result_label(each) for each in findings)
    found = _columns(findings)
    return list(_one(found) if len(names) == 1 else _control_by_measure(found, list(names)))


def corruption_tables(findings: Sequence[ResultRow]) -> list[Table]:
    """Return accuracies under corruption: of one condition by kind and severity, of several by severity."""
    names = list(dict.fromkeys(result_label(each) for each in findings))
    if len(names) == 1:
        return list(_kinds(findings))
    by: dict[str, dict[str, list[ResultRow]]] = {}
    for each in findings:
        row, part = each.row.base, PART.join(each.row.part)
        mine = each.metric == "accuracy under corruption" and row == MEAN_PROBABILITY
        if mine and (part == SUMMED or part.startswith("severity ")):
            by.setdefault(part, {}).setdefault(result_label(each), []).append(each)
    if not by:
        return []
    columns = sorted(by, key=lambda part: (part == SUMMED, part))
    cells = [_entries(by[part], names) for part in columns]
    rows = [
        [Cell(name), *(column[i] for column in cells)] for i, name in enumerate(names) if any(c[i].text for c in cells)
    ]
    sentence = "Accuracy of the ensemble, mean over corruptions; cACC is the mean over severities too. Best in bold."
    return [Table("Accuracy under corruption, %", ["", *columns], rows, sentence)]


def ood_tables(findings: Sequence[ResultRow]) -> list[Table]:
    """Return how well each score tells strange samples from own ones, the best score of a row in bold."""
    found: dict[tuple[str, str], dict[str, list[ResultRow]]] = {}
    for each in findings:
        row, rest = each.row.base, each.row.part
        if each.metric == "ood" and len(rest) == 2 and row in (ALL_MEMBERS, RowName.member(0)):
            found.setdefault((result_label(each), each.split), {}).setdefault(f"{row}{rest[1]}{rest[0]}", []).append(
                each
            )
    several = len({label for label, _ in found}) > 1
    sheets = []
    for what, title, better in (("auroc", "AUROC", True), ("fpr95", "FPR at 95 % TPR", False)):
        rows = []
        for (label, on), cells in found.items():
            row = ALL_MEMBERS if any(key.startswith(ALL_MEMBERS) for key in cells) else RowName.member(0)
            values = [
                over(cells[f"{row}{what}{name}"]) if f"{row}{what}{name}" in cells else None for name in OOD_SCORES
            ]
            rows.append([Cell(f"{label}: {on}" if several else on), *_marked(values, better, percent=True)])
        if any(cell.text for row in rows for cell in row[1:]):
            header = ["", *(name.replace("_", " ") for name in OOD_SCORES)]
            words = f"{title} of the members together, {'higher' if better else 'lower'} is better; "
            words += "the best score of each row in bold."
            sheets.append(Table(f"Strange samples: {title}, %", header, rows, words))
    return sheets


def differences(findings: Sequence[ResultRow], baseline: Mapping[str, object]) -> list[Table]:
    """Return the differences from a baseline, paired by repetition."""
    if not baseline:
        return []
    return [
        replace(table, title=table.title[:1].upper() + table.title[1:])
        for table in Comparison(findings, baseline).tables()[1:]
    ]


def _columns(findings: Sequence[ResultRow]) -> dict[Column, dict[str, list[ResultRow]]]:
    """Return the findings by column and condition, without what has a table of its own."""
    found: dict[Column, dict[str, list[ResultRow]]] = {}
    for each in findings:
        aside = bare(each.metric) in APART or each.metric.endswith(" by size") or re.search(r" [1-5]$", each.split)
        if not aside:
            column = found.setdefault((each.metric, each.split, each.row), {})
            column.setdefault(result_label(each), []).append(each)
    return found


def _by_measure(found: Mapping[Column, object]) -> dict[str, list[tuple[str, str, list[RowName]]]]:
    """Return measures with their rows, by the question they answer."""
    rows: dict[tuple[str, str], list[RowName]] = {}
    for measure, on, row in found:
        rows.setdefault((measure, on), []).append(row)
    groups: dict[str, list[tuple[str, str, list[RowName]]]] = {name: [] for name in QUESTIONS}
    for (measure, on), there in rows.items():
        groups[metric_question(measure, on)].append((measure, on, there))
    return {name: group for name, group in groups.items() if group}


def _main(rows: Sequence[RowName], question: str) -> RowName | None:
    wanted = ROWS if question in ("sharpness", "cost") else MAIN
    return next((row for row in (*wanted, *(row_name(name, SUMMED) for name in wanted)) if row in rows), None)


def _one(found: Mapping[Column, Mapping[str, Sequence[ResultRow]]]) -> Iterator[Table]:
    """Yield one table a question: measures below each other; members' mean and range beside the ensemble."""
    for question, group in _by_measure(found).items():
        rows: list[list[Cell]] = []
        for measure, on, there in group:
            main = _main(there, question)
            if main is None:
                continue
            members = [one for row in there if is_member(row) for one in next(iter(found[measure, on, row].values()))]
            first = next(iter(found[measure, on, main].values()))
            mean = next(iter(found.get((measure, on, MEAN_OF_MEMBERS), {}).values()), None)
            percent = first[0].percent
            cells = [
                Cell("" if main == MEAN_OF_MEMBERS else format_with_stderr(over(first), percent)),
                Cell(format_with_stderr(over(mean), percent) if mean else ""),
                Cell(format_range([one.value for one in members], percent) if members else ""),
            ]
            rows.append([Cell(_name(measure, on, percent)), *cells])
        if rows:
            header = ["", "all together", "mean of members", "members"]
            yield Table(QUESTIONS[question], header, rows, ERRORS)


def _control_by_measure(
    found: Mapping[Column, Mapping[str, Sequence[ResultRow]]], names: Sequence[str]
) -> Iterator[Table]:  # fmt: skip
    """Yield one table a question: conditions below each other, measures side by side, the best in bold."""
    for question, group in _by_measure(found).items():
        header, columns = [""], []
        for measure, on, there in group:
            main = _main(there, question)
            if main is not None:
                column = found[measure, on, main]
                header.append(_name(measure, on, next(iter(column.values()))[0].percent))
                columns.append(_entries(column, names))
        rows = [[Cell(name), *(column[i] for column in columns)] for i, name in enumerate(names)]
        rows = [row for row in rows if any(cell.text for cell in row[1:])]
        if rows:
            words = f"{pluralize(len(rows), 'condition')}; the best of each column in bold, where one end is better."
            yield Table(QUESTIONS[question], header, rows, f"{words} {ERRORS}")


def _entries(column: Mapping[str, Sequence[ResultRow]], names: Sequence[str]) -> list[Cell]:
    """Return a column of a table, by conditions."""
    values = [over(column[name]) if name in column else None for name in names]
    first = next(iter(column.values()))[0]
    entries = zip(names, _marked(values, first.higher_is_better, first.percent), strict=True)
    lacks = {name: _lacking(column.get(name, ())) for name in names}
    return [Cell(entry.text + lacks[name], entry.is_best and not lacks[name]) for name, entry in entries]


def _lacking(several: Sequence[ResultRow]) -> str:
    """Say how many repetitions made a number, where some have none: those left need not be like the others."""
    fine = sum(math.isfinite(each.value) for each in several)
    return f" ({fine} of {len(several)})" if 0 < fine < len(several) else ""


def _marked(values: Sequence[Estimate | None], better: bool | None, percent: bool) -> list[Cell]:
    numbers = [math.nan if value is None else value.value for value in values]
    fine = [each for each in numbers if math.isfinite(each)]
    pick = None if better is None else max if better else min
    best = pick(fine) if pick is not None and len(set(fine)) > 1 else None
    return [
        Cell("" if value is None else format_with_stderr(value, percent), best is not None and each == best)
        for each, value in zip(numbers, values, strict=True)
    ]


def _kinds(findings: Sequence[ResultRow]) -> Iterator[Table]:
    by: dict[tuple[str, int], list[ResultRow]] = {}
    rows = {each.row for each in findings if each.metric == "accuracy" and each.split != TRAINING}
    main = next((row for row in MAIN if row in rows), None)
    for each in findings:
        place = re.fullmatch(r"(.+) ([1-5])", each.split)
        if place and each.metric == "accuracy" and each.row == main:
            by.setdefault((place[1], int(place[2])), []).append(each)
    levels = sorted({level for _, level in by})
    cells = {where: over(several) for where, several in by.items()}
    lines = []
    for kind in dict.fromkeys(kind for kind, _ in by):
        there = [cells.get((kind, level)) for level in levels]
        lines.append([Cell(kind.replace("_", " ")), *(Cell(f"{100 * v.value:.1f}" if v else "") for v in there)])
    if lines:
        words = f"Accuracy of the {main} by kind and severity; a single error is about {_error(cells.values())} points."
        yield Table("Accuracy under corruption, %", ["", *(f"severity {level}" for level in levels)], lines, words)


def _error(cells: Iterable[Estimate]) -> str:
    errors = [100 * value.stderr for value in cells if value.stderr is not None and math.isfinite(value.stderr)]
    return format_range(errors)


def _name(measure: str, on: str, percent: bool) -> str:
    where = "" if on in ("test", TRAINING) else f", {on}"
    return f"{measure}{where}{' %' if percent else ''}"
