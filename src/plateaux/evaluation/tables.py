"""Results as tables: for terminals and Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from rich.table import Table as RichTable

from plateaux.core.formatting import format_significant
from plateaux.core.row_names import ALL_MEMBERS, MEAN_PROBABILITY, PART
from plateaux.core.text_table import Table
from plateaux.core.types import Estimate
from plateaux.evaluation.results import MetricResult

CAPTION = "± one standard error: over samples, and over members for their mean"
PROBE_CAPTION = "± one standard error: over samples / over Monte-Carlo samples; of a mean: over members"
MAX_COLUMNS = 4  # metrics side by side: what fits into 80 characters
MAX_PAIRS, MAX_MEMBERS = 6, 8  # rows of pairs and members; above that only their mean is shown
MAX_PARTS = 4  # further values of a probe that are shown; more are left to JSON


def tables(results: Sequence[MetricResult], width: int = 80) -> list[RichTable]:
    """Return the tables for a terminal of `width` characters."""
    return [part.to_rich() for table in result_tables(results) for part in table.split_columns(max_width=width)]


def short_tables(results: Sequence[MetricResult], width: int = 80) -> list[RichTable]:
    """Return the tables without single members: one row for each metric of a split, and what else was evaluated."""
    short = [each for each in results if each.members and "corruption" not in each.data and not _has_parts(each)]
    by_split = [_short_table(list(group)) for _, group in groupby(short, lambda result: result.split)]
    rest = [each for each in results if each not in short]
    return [*(table.to_rich() for table in by_split), *tables(rest, width)]


def _short_table(results: Sequence[MetricResult]) -> Table:
    header = ["", "ensemble", "mean of members", "members"] if len(results[0].members) > 1 else ["", "member"]
    rows = []
    for result in results:
        values = [value.value for value in result.members.values()]
        mean = next((value for name, value in result.rows.items() if name.kind == "mean_of_members"), None)
        cells = [format_value(result, each) for each in (result.ensemble, mean) if each is not None]
        ends = [format_value(result, Estimate(end)) for end in (min(values), max(values))]
        row = [f"{result.metric}{' %' if result.percent else ''}", *cells, " to ".join(ends)]
        rows.append(row[: len(header)])
    return Table.from_text(heading(results[0]), header, rows, CAPTION)


def to_markdown(results: Sequence[MetricResult]) -> str:
    """Return the tables as Markdown."""
    return "\n".join(table.to_markdown() for table in result_tables(results))


def result_tables(results: Sequence[MetricResult]) -> list[Table]:
    """Return the tables that show these results."""
    return list(_result_tables(results))


def _result_tables(results: Sequence[MetricResult]) -> Iterator[Table]:
    probes = [result for result in results if result.group == "sharpness"]
    for _, group in groupby(probes, lambda result: result.split):
        yield _probe_table(list(group))
    if cascades := [result for result in results if result.metric == "cascade"]:
        yield _cascade_table(cascades)
    metrics = [result for result in results if result.group != "sharpness" and result.metric != "cascade"]
    corrupted = [result for result in metrics if "corruption" in result.data]
    clean = [_without_severities(result) for result in metrics if "corruption" not in result.data]
    for _, group in groupby(clean, lambda result: result.split):
        on_split = list(group)
        single = [result for result in on_split if not _has_parts(result)]
        for by_size in (False, True):
            yield from _metric_tables([result for result in single if result.metric.endswith(" by size") is by_size])
        yield from (_table_of_parts(result) for result in on_split if _has_parts(result))
    yield from _corruption_tables([result for result in corrupted if result.metric == "accuracy"])


def _without_severities(result: MetricResult) -> MetricResult:
    """Return a mean over corruptions without its rows by severity. Accuracy has a table of its own for them."""
    if result.metric == "accuracy under corruption" or not result.metric.endswith(" under corruption"):
        return result
    return replace(result, rows={row: value for row, value in result.rows.items() if not row.part})


def _metric_tables(results: Sequence[MetricResult]) -> Iterator[Table]:
    """Yield tables of a few metrics each, those of one group together."""
    if len(results) <= MAX_COLUMNS:
        yield from [_metric_table(results, "")] if results else []
        return
    for group, members in groupby(results, lambda result: result.group):
        in_group = list(members)
        for start in range(0, len(in_group), MAX_COLUMNS):
            yield _metric_table(in_group[start : start + MAX_COLUMNS], group)


def heading(result: MetricResult) -> str:
    """Return one line with the dataset, the split, and the number of samples (and of classes, if they are some)."""
    is_own = result.split in ("test", "train", "validation")
    split = f"{result.split} samples" if is_own else result.split
    if "outside" in result.data:
        outside = result.data["outside"]
        resized = f", resized from {outside['resized']}" if "resized" in outside else ""
        counts = f"{result.data['samples']:,} in, {outside['samples']:,} out of distribution{resized}"
        return f"{result.data['name']}, {split} ({counts})"
    classes = f", {result.data['classes']}" if "classes" in result.data else ""
    return f"{result.data['name']}, {split} ({result.data['samples']:,}{classes})"


def format_value(result: MetricResult, value: Estimate) -> str:
    """Return a value with its standard error, in percent where the metric is shown in percent."""
    scale, digits = (100.0, 2) if result.percent else (1.0, 4)
    text = f"{value.value * scale:.{digits}f}"
    return text if value.stderr is None else f"{text} ± {value.stderr * scale:.{digits}f}"


def _metric_table(results: Sequence[MetricResult], group: str) -> Table:
    """Return one row per member, pair, and ensemble, and one column per metric."""
    header = ["", *(f"{result.metric}{' %' if result.percent else ''}" for result in results)]
    names = list(dict.fromkeys(name for result in results for name in result.rows))
    for kind, limit in (("pair", MAX_PAIRS), ("ordered_pair", MAX_PAIRS), ("member", MAX_MEMBERS)):
        if sum(name.kind == kind for name in names) > limit:
            names = [name for name in names if name.kind != kind]
    rows = [
        [name, *(format_value(result, result.rows[name]) if name in result.rows else "" for result in results)]
        for name in names
    ]
    title = heading(results[0]) + (f": {group}" if group else "")
    return Table.from_text(title, header, [row for row in rows if any(row[1:])], CAPTION)


def _cascade_table(results: Sequence[MetricResult]) -> Table:
    """Return one row per split, and one column per quantity of the cascade."""
    columns = list(dict.fromkeys(PART.join(name.part) for result in results for name in result.rows))
    rows = []
    for result in results:
        values = {PART.join(name.part): format_value(result, value) for name, value in result.rows.items()}
        rows.append([f"{result.split} ({result.data['samples']:,})", *(values.get(column, "") for column in columns)])
    caption = "\n".join(dict.fromkeys(result.definition for result in results))
    return Table.from_text(f"{results[0].data['run data']}: cascade", ["", *columns], rows, caption)


def _table_of_parts(result: MetricResult) -> Table:
    """Return the table of a metric whose rows have parts: rows by the first part of the name, columns by the last.

    Names with three parts (member, class, quantity) are shown for the ensemble, or for the only member.
    """
    cells = {(str(name.base), *name.part): value for name, value in result.rows.items()}
    is_deep = max(len(parts) for parts in cells) > 2
    base = ""
    if is_deep:
        bases = list(dict.fromkeys(parts[0] for parts in cells))
        base = next((row for row in (MEAN_PROBABILITY, ALL_MEMBERS) if row in bases), bases[-1])
        cells = {parts[1:]: value for parts, value in cells.items() if parts[0] == base}
    columns = list(dict.fromkeys(parts[-1] for parts in cells))
    names = list(dict.fromkeys(PART.join(parts[:-1]) for parts in cells))
    if len(columns) > len(names) and len(columns) > MAX_COLUMNS:
        columns, names = names, columns
        cells = {(parts[1], parts[0]): value for parts, value in cells.items()}
    values = {(PART.join(parts[:-1]), parts[-1]): format_value(result, value) for parts, value in cells.items()}
    rows = [[name, *(values.get((name, column), "") for column in columns)] for name in names]
    title = f"{heading(result)}: {result.metric}" + (f", {base}" if is_deep else "") + (" %" if result.percent else "")
    return Table.from_text(title, ["", *columns], rows, result.definition)


def _probe_table(results: Sequence[MetricResult]) -> Table:
    """Return one row per probe and one column per member; further values of a probe if they are few."""
    columns = list(dict.fromkeys(name.base for result in results for name in result.rows))
    if sum(name.kind == "member" for name in columns) > MAX_MEMBERS:
        columns = [name for name in columns if name.kind != "member"]
    rows, hidden = [], 0
    for result in results:
        parts = list(dict.fromkeys(PART.join(name.part) for name in result.rows))
        if len(parts) - 1 > MAX_PARTS and len(results) > 1:
            hidden += len(parts) - 1
            parts = parts[:1]
        for part in parts:
            values = [result.rows.get(column.with_part(part)) for column in columns]
            name = f"{result.metric}{PART}{part}" if part else result.metric
            cells = ["" if value is None else format_both_errors(value) for value in values]
            rows.append([name, f"{result.data['samples']:,}", *cells])
    data = results[0].data
    modes = {
        "BatchNorm in training mode": data["batchnorm"] == "train",
        "normalized logits": data["normalize_logits"],
        "augmented": data["augmentation"] != "none",
    }
    title = f"{data['name']}, {results[0].split} samples: sharpness"
    title = ", ".join([title, *(name for name, is_on in modes.items() if is_on)])
    caption = PROBE_CAPTION + (f". {hidden} further values are in --json" if hidden else "")
    return Table.from_text(title, ["", "samples", *columns], rows, caption)


def format_both_errors(value: Estimate) -> str:
    """Return a value with its standard errors: over samples, and over Monte-Carlo samples.

    >>> format_both_errors(Estimate(1.23456, 0.0421, 0.0212)), format_both_errors(Estimate(512.34, 98.7))
    ('1.235 ± 0.042 / 0.021', '512.3 ± 99')
    >>> format_both_errors(Estimate(1.0, None, 0.1))
    '1.000 ± - / 0.10'
    """
    text = format_significant(value.value, 4)
    if value.stderr is None and value.mc_stderr is None:
        return text
    text += " ± -" if value.stderr is None else f" ± {format_significant(value.stderr, 2)}"
    return text if value.mc_stderr is None else f"{text} / {format_significant(value.mc_stderr, 2)}"


def _corruption_tables(results: Sequence[MetricResult]) -> Iterator[Table]:
    """Yield the table of the ensemble's accuracy by corruption and severity."""
    if not results:
        return
    first = results[0]
    row = MEAN_PROBABILITY if MEAN_PROBABILITY in first.rows else next(iter(first.rows))
    severities = sorted({int(result.data["severity"]) for result in results})
    accuracy = {
        (str(result.data["corruption"]), int(result.data["severity"])): f"{100 * result.rows[row].value:.2f}"
        for result in results
    }
    kinds = dict.fromkeys(kind for kind, _ in accuracy)
    rows = [[kind, *(accuracy.get((kind, severity), "") for severity in severities)] for kind in kinds]
    title = f"{heading(first).split(',')[0]}: accuracy % under corruption, {row}"
    header = ["", *(f"severity {severity}" for severity in severities)]
    sources = ", ".join(sorted({str(result.data["source"]) for result in results}))
    yield Table.from_text(title, header, rows, f"{first.data['samples']:,} samples; {sources}")


def _has_parts(result: MetricResult) -> bool:
    return any(name.part for name in result.rows)
