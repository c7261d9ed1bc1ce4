"""Measured numbers as tables: for people, for Markdown, for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.table import Table as RichTable

from plateaux.core.formatting import format_significant
from plateaux.core.text_table import Table
from plateaux.core.types import Estimate
from plateaux.evaluation.results import MetricResult
from plateaux.evaluation.row_names import MEAN_PROBABILITY, PART, TOGETHER

CAPTION = "± one standard error: over samples, and over members for their mean"
APART = "± one standard error: over samples / over random draws; of a mean: over members"
TITLES = {"performance": "performance", "uncertainty": "uncertainty", "diversity": "diversity"}
COLUMNS = 4  # measures side by side: what 80 characters hold
PAIRS, MEMBERS = 6, 8  # rows of these before only their mean is shown
BESIDE = 4  # numbers beside a probe's answer before they are left to JSON


def tables(found: Sequence[MetricResult], width: int = 80) -> list[RichTable]:
    """Return the tables for a terminal of `width` characters."""
    return [part.to_rich() for table in text_tables(found) for part in table.split_columns(max_width=width)]


def to_markdown(found: Sequence[MetricResult]) -> str:
    """Return the tables as Markdown."""
    return "\n".join(table.to_markdown() for table in text_tables(found))


def text_tables(found: Sequence[MetricResult]) -> list[Table]:
    """Return the tables that show these measurements."""
    return list(_text_tables(found))


def _text_tables(found: Sequence[MetricResult]) -> Iterator[Table]:
    flat = [each for each in found if each.group == "sharpness"]
    for _, group in groupby(flat, lambda each: each.split):
        yield _landscape(list(group))
    found = [each for each in found if each.group != "sharpness"]
    corrupted = [each for each in found if "corruption" in each.data]
    for _, group in groupby((each for each in found if each not in corrupted), lambda each: each.split):
        several = list(group)
        plain = [each for each in several if not _has_parts(each)]
        for curves in (False, True):  # whose rows are sizes
            yield from _columns([each for each in plain if each.metric.endswith(" by size") is curves])
        for each in several:
            if _has_parts(each):
                yield _in_parts(each)
    if corrupted:
        yield from _under_corruption([each for each in corrupted if each.metric == "accuracy"])


def _columns(plain: Sequence[MetricResult]) -> Iterator[Table]:
    """Yield tables of a few measures each, those of one question together."""
    if len(plain) <= COLUMNS:
        yield from [_side_by_side(plain, "")] if plain else []
        return
    for asks, few in groupby(plain, lambda each: each.group):
        alike = list(few)
        for start in range(0, len(alike), COLUMNS):
            yield _side_by_side(alike[start : start + COLUMNS], asks)


def heading(first: MetricResult) -> str:
    """Return one line that says what was measured on what."""
    what = f"{first.split} samples" if first.split in ("test", "train", "validation") else first.split
    return f"{first.data['name']}, {what} ({first.data['samples']:,})"


def show(measurement: MetricResult, value: Estimate) -> str:
    """Return a number with its standard error."""
    times, digits = (100.0, 2) if measurement.percent else (1.0, 4)
    text = f"{value.value * times:.{digits}f}"
    return text if value.stderr is None else f"{text} ± {value.stderr * times:.{digits}f}"


def _side_by_side(few: Sequence[MetricResult], asks: str) -> Table:
    """Return one row a member, pair and ensemble, one column a measure."""
    header = ["", *(f"{each.metric}{' %' if each.percent else ''}" for each in few)]
    names = list(dict.fromkeys(name for each in few for name in each.rows))
    for crowd, most in ((_is_pair, PAIRS), (_is_ordered, PAIRS), (_is_member, MEMBERS)):
        if sum(map(crowd, names)) > most:
            names = [name for name in names if not crowd(name)]
    rows = [[name, *(show(each, each.rows[name]) if name in each.rows else "" for each in few)] for name in names]
    title = heading(few[0]) + (f": {TITLES[asks]}" if asks else "")
    return Table.from_text(title, header, [row for row in rows if any(row[1:])], CAPTION)


def _in_parts(found: MetricResult) -> Table:
    """Return a measurement whose numbers have two or more names: rows by the first, columns by the last.

    Of numbers with three names (a row, a class, what of it) those of the ensemble are shown, or of the only member.
    """
    cells = {tuple(name.split(PART)): value for name, value in found.rows.items()}
    deep = max(len(parts) for parts in cells) > 2
    if deep:
        first = list(dict.fromkeys(parts[0] for parts in cells))
        mine = next((row for row in (MEAN_PROBABILITY, TOGETHER) if row in first), first[-1])
        cells = {parts[1:]: value for parts, value in cells.items() if parts[0] == mine}
    columns = list(dict.fromkeys(parts[-1] for parts in cells))
    names = list(dict.fromkeys(PART.join(parts[:-1]) for parts in cells))
    if len(columns) > len(names) and len(columns) > COLUMNS:
        columns, names = names, columns
        cells = {(parts[1], parts[0]): value for parts, value in cells.items()}
    named = {(PART.join(parts[:-1]), parts[-1]): value for parts, value in cells.items()}
    rows = [[row, *(show(found, named[row, c]) if (row, c) in named else "" for c in columns)] for row in names]
    title = f"{heading(found)}: {found.metric}" + (f", {mine}" if deep else "") + (" %" if found.percent else "")
    return Table.from_text(title, ["", *columns], rows, found.definition)


def _landscape(found: Sequence[MetricResult]) -> Table:
    """Return one row a probe, one column a member; numbers beside an answer where they are few, or of one probe."""
    columns = list(dict.fromkeys(name.partition(PART)[0] for each in found for name in each.rows))
    if sum(map(_is_member, columns)) > MEMBERS:
        columns = [name for name in columns if not _is_member(name)]
    rows, left = [], 0
    for each in found:
        parts = list(dict.fromkeys(name.partition(PART)[2] for name in each.rows))
        if len(parts) - 1 > BESIDE and len(found) > 1:
            left += len(parts) - 1
            parts = parts[:1]
        for part in parts:
            cells = [each.rows.get(f"{column}{PART}{part}" if part else column) for column in columns]
            name = f"{each.metric}{PART}{part}" if part else each.metric
            rows.append([name, f"{each.data['samples']:,}", *("" if c is None else both_errors(c) for c in cells)])
    first = found[0]
    modes = {
        "BatchNorm in training mode": first.data["batchnorm"] == "train",
        "normalized logits": first.data["normalize_logits"],
    }
    modes["augmented"] = first.data["augmentation"] != "none"
    title = ", ".join(
        [f"{first.data['name']}, {first.split} samples: sharpness", *(name for name, on in modes.items() if on)]
    )
    caption = APART + (f". {left} numbers beside these are in --json" if left else "")
    return Table.from_text(title, ["", "samples", *columns], rows, caption)


def both_errors(value: Estimate) -> str:
    """Return a number with its standard errors: over samples, and over what was drawn at random.

    >>> both_errors(Estimate(1.23456, 0.0421, 0.0212)), both_errors(Estimate(512.34, 98.7))
    ('1.235 ± 0.042 / 0.021', '512.3 ± 99')
    >>> both_errors(Estimate(1.0, None, 0.1))
    '1.000 ± - / 0.10'
    """
    text = format_significant(value.value, 4)
    if value.stderr is None and value.mc_stderr is None:
        return text
    text += " ± -" if value.stderr is None else f" ± {format_significant(value.stderr, 2)}"
    return text if value.mc_stderr is None else f"{text} / {format_significant(value.mc_stderr, 2)}"


def _under_corruption(found: Sequence[MetricResult]) -> Iterator[Table]:
    """Return the ensemble's accuracy by kind and severity."""
    if not found:
        return
    row = MEAN_PROBABILITY if MEAN_PROBABILITY in found[0].rows else next(iter(found[0].rows))
    levels = sorted({int(each.data["severity"]) for each in found})
    by = {(str(each.data["corruption"]), int(each.data["severity"])): each for each in found}
    rows = []
    for kind in dict.fromkeys(kind for kind, _ in by):
        cells = [f"{100 * by[kind, s].rows[row].value:.2f}" if (kind, s) in by else "" for s in levels]
        rows.append([kind, *cells])
    title = f"{heading(found[0]).split(',')[0]}: accuracy % under corruption, {row}"
    sources = ", ".join(sorted({str(each.data["source"]) for each in found}))
    yield Table.from_text(
        title, ["", *(f"severity {s}" for s in levels)], rows, f"{found[0].data['samples']:,} samples; {sources}"
    )


def _is_pair(name: str) -> bool:
    return name.startswith("members ") and name != TOGETHER


def _is_ordered(name: str) -> bool:
    return name.startswith("member ") and " to " in name


def _is_member(name: str) -> bool:
    return name.startswith("member ") and " to " not in name


def _has_parts(found: MetricResult) -> bool:
    return any(PART in name for name in found.rows)
