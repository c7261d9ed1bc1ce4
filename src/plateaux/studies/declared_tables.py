"""The tables that a study declares: measured numbers next to those of the paper."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from plateaux.core.errors import RecipeError, suggest
from plateaux.core.row_names import RowName
from plateaux.core.stats.comparisons import DEFAULT, Inference
from plateaux.core.stats.intervals import t_interval
from plateaux.core.text_table import Table
from plateaux.studies.comparison import main_row
from plateaux.studies.output_config import MEMBERS, ColumnConfig, TableConfig
from plateaux.studies.result_rows import COSTS, ResultRow

EMPTY = "Empty cells: not measured."


def declared_tables(
    configs: Sequence[TableConfig], results: Sequence[ResultRow], inference: Inference = DEFAULT
) -> list[Table]:
    """Return the declared tables of a study, also while some of its numbers are missing."""
    return [_table(config, results, inference) for config in configs]


def check_columns(tables: Sequence[TableConfig], measured: Collection[str]) -> None:
    """Raise RecipeError if a table has a column of a metric that the study does not measure."""
    known = [*measured, "ood", *COSTS]
    for table in tables:
        for column in table.columns:
            name = column.metric
            for suffix in (" under corruption", " by size", " of the soup"):
                name = name.removesuffix(suffix)
            if name not in known:
                raise RecipeError(
                    f"[[tables]] {table.title!r} has a column of {column.metric!r}, which this study does not measure; "
                    f"{suggest(name, known)}"
                )


def select(results: Sequence[ResultRow], where: Mapping[str, Any]) -> list[ResultRow]:
    """Return the results of some conditions, without the factors that have a single value there."""
    fixed = {name for name, value in where.items() if not isinstance(value, list | tuple)}
    rest: dict[int, dict[str, Any]] = {}
    selected = []
    for each in results:
        if _matches(each.condition, where):
            key = id(each.condition)
            if key not in rest:
                rest[key] = {name: value for name, value in each.condition.items() if name not in fixed}
            selected.append(replace(each, condition=rest[key]))
    return selected


def row_label(condition: Mapping[str, Any]) -> str:
    """Return the label of a row of a declared table.

    >>> row_label({"method": "SAM", "rho": 0.1})
    'SAM, rho=0.1'
    """
    return ", ".join(value if isinstance(value, str) else f"{name}={value}" for name, value in condition.items())


def _matches(condition: Mapping[str, Any], where: Mapping[str, Any]) -> bool:
    """Return whether a condition has the given values; a list allows several values of a factor."""
    return all(
        condition.get(name) in value if isinstance(value, list | tuple) else condition.get(name) == value
        for name, value in where.items()
    )


def _table(config: TableConfig, results: Sequence[ResultRow], inference: Inference) -> Table:
    rows: dict[str, list[ResultRow]] = {}
    for result in select(results, config.where):
        rows.setdefault(row_label(result.condition), []).append(result)
    labels = [*rows, *(label for label in config.paper if label not in rows)]
    header, has_paper = [""], []
    for i, column in enumerate(config.columns):
        has_paper.append(any(_published(config, label, i) is not None for label in labels))
        header += [column.title, f"{column.title}, paper"] if has_paper[-1] else [column.title]
    cells = []
    for label in labels:
        line = [label]
        for i, column in enumerate(config.columns):
            line.append(_measured(column, rows.get(label, ()), inference))
            if has_paper[i]:
                published = _published(config, label, i)
                line.append("" if published is None else f"{published:g}")
        cells.append(line)
    of_members = [RowName.parse(column.row).base == MEMBERS for column in config.columns]
    over = "members" if all(of_members) else f"repetitions{', of a mean over members over those' * any(of_members)}"
    return Table.from_text(config.title, header, cells, f"± is {inference.meaning} over {over}. {EMPTY}")


def _published(config: TableConfig, label: str, column: int) -> float | None:
    values = config.paper.get(label, ())
    return values[column] if column < len(values) else None


def _measured(column: ColumnConfig, results: Sequence[ResultRow], inference: Inference) -> str:
    found = [each for each in results if each.metric == column.metric and each.split == column.split]
    wanted = RowName.parse(column.row)
    if wanted.base == MEMBERS:
        chosen = [each for each in found if each.row.kind == "member" and each.row.part == wanted.part]
    else:
        row = wanted if column.row else main_row([each.row for each in found])
        chosen = [each for each in found if each.row == row]
    return inference.format(t_interval([each.value for each in chosen]), chosen[0].percent) if chosen else ""
