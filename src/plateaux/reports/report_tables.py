"""Tables of a report: metrics by condition, accuracy under corruption, OOD detection, and one run alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from plateaux.core.formatting import format_range, pluralize
from plateaux.core.row_names import ALL_MEMBERS, MEAN_OF_MEMBERS, MEAN_PROBABILITY, PART, RowName, row_name
from plateaux.core.stats.comparisons import DEFAULT, Inference
from plateaux.core.text_table import Cell, Table
from plateaux.ensembles.ood_scores import OOD_SCORES
from plateaux.evaluation.splits import is_corrupted_split
from plateaux.reports.query import (
    ROWS,
    Column,
    base_name,
    find_best,
    is_member,
    mean_over_repetitions,
    metric_group,
    result_label,
)
from plateaux.studies.comparison import MAIN, SUMMED, Comparison
from plateaux.studies.result_rows import TRAINING, ResultRow

TITLES = {
    "performance": "Performance", "uncertainty": "Uncertainty", "diversity": "Diversity", "sharpness": "Sharpness",
    "cost": "Training cost", "other": "Other metrics",
}  # fmt: skip
OWN_TABLE = ("ood", "reliability", "per_class", "brier_parts", "spectrum")  # shown in their own tables or figures
MAX_COLUMNS = 7  # of a table, without the row names


def metric_tables(results: Sequence[ResultRow], inference: Inference = DEFAULT) -> list[Table]:
    """Return one table per group of metrics: one metric per row for one condition, else one metric per column."""
    names = dict.fromkeys(result_label(result) for result in results)
    columns = _columns(results)
    several = len(names) > 1
    return list(_several_conditions(columns, list(names), inference) if several else _one_condition(columns, inference))


def corruption_tables(results: Sequence[ResultRow], inference: Inference = DEFAULT) -> list[Table]:
    """Return accuracy under corruption: by corruption and severity for one condition, by severity for several."""
    names = list(dict.fromkeys(result_label(result) for result in results))
    if len(names) == 1:
        return list(_by_corruption(results, inference))
    by_part: dict[str, dict[str, list[ResultRow]]] = {}
    for result in results:
        row, part = result.row.base, PART.join(result.row.part)
        is_ensemble = result.metric == "accuracy under corruption" and row == MEAN_PROBABILITY
        if is_ensemble and (part == SUMMED or part.startswith("severity ")):
            by_part.setdefault(part, {}).setdefault(result_label(result), []).append(result)
    if not by_part:
        return []
    columns = sorted(by_part, key=lambda part: (part == SUMMED, part))
    cells = [_column_cells(by_part[part], names, inference) for part in columns]
    rows = [
        [Cell(name), *(column[i] for column in cells)] for i, name in enumerate(names) if any(c[i].text for c in cells)
    ]
    caption = "Accuracy of the ensemble, mean over corruptions; cACC is also the mean over severities. "
    caption += _bold_note("condition of each column", inference)
    return [Table("Accuracy under corruption, %", ["", *columns], rows, caption)]


def ood_tables(results: Sequence[ResultRow], inference: Inference = DEFAULT) -> list[Table]:
    """Return AUROC and FPR at 95 % TPR of every OOD score, with the best score of each row in bold."""
    scores: dict[tuple[str, str], dict[str, list[ResultRow]]] = {}
    for result in results:
        row, rest = result.row.base, result.row.part
        if result.metric == "ood" and len(rest) == 2 and row in (ALL_MEMBERS, RowName.member(0)):
            by_score = scores.setdefault((result_label(result), result.split), {})
            by_score.setdefault(f"{row}{rest[1]}{rest[0]}", []).append(result)
    has_several = len({label for label, _ in scores}) > 1
    tables = []
    for metric, title, higher_is_better in (("auroc", "AUROC", True), ("fpr95", "FPR at 95 % TPR", False)):
        rows = []
        for (label, split), by_score in scores.items():
            row = ALL_MEMBERS if any(key.startswith(ALL_MEMBERS) for key in by_score) else RowName.member(0)
            repetitions = [by_score.get(f"{row}{metric}{name}", ()) for name in OOD_SCORES]
            name = f"{label}: {split}" if has_several else split
            rows.append([Cell(name), *_cells(repetitions, higher_is_better, True, inference)])
        if any(cell.text for row in rows for cell in row[1:]):
            header = ["", *(name.replace("_", " ") for name in OOD_SCORES)]
            text = f"{title} of the ensemble, {'higher' if higher_is_better else 'lower'} is better. "
            text += _bold_note("score of each row", inference)
            tables.append(Table(f"Out-of-distribution detection: {title}, %", header, rows, text))
    return tables


def differences(
    results: Sequence[ResultRow], baseline: Mapping[str, object], inference: Inference = DEFAULT
) -> list[Table]:
    """Return tables of the differences from a baseline, paired by repetition."""
    if not baseline:
        return []
    return [
        replace(table, title=table.title[:1].upper() + table.title[1:])
        for table in Comparison(results, baseline, inference).tables()[1:]
    ]


def _columns(results: Sequence[ResultRow]) -> dict[Column, dict[str, list[ResultRow]]]:
    """Return the results by column and condition, without those that have their own table."""
    columns: dict[Column, dict[str, list[ResultRow]]] = {}
    for result in results:
        is_corrupted = is_corrupted_split(result.split)
        if base_name(result.metric) not in OWN_TABLE and not result.metric.endswith(" by size") and not is_corrupted:
            column = columns.setdefault((result.metric, result.split, result.row), {})
            column.setdefault(result_label(result), []).append(result)
    return columns


def _by_group(columns: Mapping[Column, object]) -> dict[str, list[tuple[str, str, list[RowName]]]]:
    """Return metrics with their rows, by group."""
    rows: dict[tuple[str, str], list[RowName]] = {}
    for metric, split, row in columns:
        rows.setdefault((metric, split), []).append(row)
    groups: dict[str, list[tuple[str, str, list[RowName]]]] = {name: [] for name in TITLES}
    for (metric, split), names in rows.items():
        groups[metric_group(metric, split)].append((metric, split, names))
    return {name: group for name, group in groups.items() if group}


def _main_row(rows: Sequence[RowName], group: str) -> RowName | None:
    wanted = ROWS if group in ("sharpness", "cost") else MAIN
    return next((row for row in (*wanted, *(row_name(name, SUMMED) for name in wanted)) if row in rows), None)


def _one_condition(
    columns: Mapping[Column, Mapping[str, Sequence[ResultRow]]], inference: Inference
) -> Iterator[Table]:
    """Yield one table per group: one row per metric with the ensemble, the mean of members, and their range."""
    for group, metrics in _by_group(columns).items():
        rows: list[list[Cell]] = []
        for metric, split, rows_of_metric in metrics:
            main = _main_row(rows_of_metric, group)
            if main is None:
                continue
            members = [
                one
                for row in rows_of_metric
                if is_member(row)
                for one in next(iter(columns[metric, split, row].values()))
            ]
            first = next(iter(columns[metric, split, main].values()))
            mean = next(iter(columns.get((metric, split, MEAN_OF_MEMBERS), {}).values()), None)
            percent = first[0].percent
            cells = [
                Cell("" if main == MEAN_OF_MEMBERS else inference.format(mean_over_repetitions(first), percent)),
                Cell(inference.format(mean_over_repetitions(mean), percent) if mean else ""),
                Cell(format_range([one.value for one in members], percent) if members else ""),
            ]
            rows.append([Cell(_metric_label(metric, split, percent)), *cells])
        if rows:
            header = ["", "ensemble", "mean of members", "members"]
            yield Table(TITLES[group], header, rows)


def _several_conditions(
    columns: Mapping[Column, Mapping[str, Sequence[ResultRow]]], names: Sequence[str], inference: Inference
) -> Iterator[Table]:
    """Yield one table per group: one row per condition, one column per metric, with the best in bold."""
    for group, metrics in _by_group(columns).items():
        header, cells = [""], []
        for metric, split, rows_of_metric in metrics:
            main = _main_row(rows_of_metric, group)
            if main is not None:
                column = columns[metric, split, main]
                header.append(_metric_label(metric, split, next(iter(column.values()))[0].percent))
                cells.append(_column_cells(column, names, inference))
        rows = [[Cell(name), *(column[i] for column in cells)] for i, name in enumerate(names)]
        rows = [row for row in rows if any(cell.text for cell in row[1:])]
        if rows:
            note = _bold_note("condition of each column", inference)
            yield Table(TITLES[group], header, rows, f"{pluralize(len(rows), 'condition')}. {note}")


def _column_cells(column: Mapping[str, Sequence[ResultRow]], names: Sequence[str], inference: Inference) -> list[Cell]:
    """Return the cells of a column, one per condition."""
    first = next(iter(column.values()))[0]
    return _cells([column.get(name, ()) for name in names], first.higher_is_better, first.percent, inference)


def _cells(
    groups: Sequence[Sequence[ResultRow]], higher_is_better: bool | None, percent: bool, inference: Inference
) -> list[Cell]:
    """Return the mean of each group of repetitions; the best is marked if it is distinguished from the runner-up."""
    best = None
    if higher_is_better is not None:
        best = find_best(dict(enumerate(groups)), higher_is_better=higher_is_better, inference=inference)
    cells = []
    for position, several in enumerate(groups):
        text, note = (
            inference.format(mean_over_repetitions(several), percent) if several else "",
            _missing_note(several),
        )
        cells.append(Cell(text + note, position == best and not note))
    return cells


def _bold_note(what: str, inference: Inference) -> str:
    return f"Bold: the best {what}, if it differs from the runner-up: {inference.criterion}."


def _missing_note(repetitions: Sequence[ResultRow]) -> str:
    """Return how many repetitions are finite if some are not, since a mean over the rest may be biased."""
    finite = sum(math.isfinite(result.value) for result in repetitions)
    return f" ({finite} of {len(repetitions)})" if 0 < finite < len(repetitions) else ""


def _by_corruption(results: Sequence[ResultRow], inference: Inference) -> Iterator[Table]:
    repetitions: dict[tuple[str, int], list[ResultRow]] = {}
    rows = {result.row for result in results if result.metric == "accuracy" and result.split != TRAINING}
    main = next((row for row in MAIN if row in rows), None)
    for result in results:
        match = re.fullmatch(r"(.+) ([1-5])", result.split)
        if match and result.metric == "accuracy" and result.row == main:
            repetitions.setdefault((match[1], int(match[2])), []).append(result)
    severities = sorted({severity for _, severity in repetitions})
    means = {key: mean_over_repetitions(several) for key, several in repetitions.items()}
    lines = []
    for kind in dict.fromkeys(kind for kind, _ in means):
        values = [means.get((kind, severity)) for severity in severities]
        lines.append([kind.replace("_", " "), *(f"{100 * value.value:.1f}" if value else "" for value in values)])
    if lines:
        errors = [100 * error for mean in means.values() if math.isfinite(error := inference.error(mean))]
        caption = f"Accuracy of the {main} by corruption and severity; ± of one value is {format_range(errors)} points."
        header = ["", *(f"severity {severity}" for severity in severities)]
        yield Table.from_text("Accuracy under corruption, %", header, lines, caption)


def _metric_label(metric: str, split: str, percent: bool) -> str:
    where = "" if split in ("test", TRAINING) else f", {split}"
    return f"{metric}{where}{' %' if percent else ''}"
