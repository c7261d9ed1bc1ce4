"""Export of a report: a self-contained HTML page, Markdown, LaTeX, JSON, CSV, and figure files."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

from plateaux.core.formatting import escape_csv, escape_markdown, json_safe, printable
from plateaux.core.imports import optional_import
from plateaux.core.row_names import RowName
from plateaux.reports.report import Report
from plateaux.reports.style import KINDS, Kind
from plateaux.storage.atomic import write_atomic
from plateaux.studies.grid import condition_label
from plateaux.studies.result_rows import ResultRow

FIELDS = ("metric", "split", "row", "value", "stderr", "mc_stderr", "higher_is_better", "percent")


def to_html(report: Report) -> str:
    """Return one self-contained HTML page that loads nothing from the network."""
    jinja2, markup = optional_import("jinja2", extra="report"), optional_import("markupsafe", extra="report")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("plateaux.reports"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined, finalize=_visible,
    )  # fmt: skip
    # Allow line breaks after underscores of long names.
    environment.filters["breakable"] = lambda name: markup.escape(printable(name)).replace("_", markup.Markup("_<wbr>"))
    # SVG is the only text that Jinja does not escape: matplotlib escapes names itself.
    figures = {id(figure): markup.Markup(figure.inline_svg(name)) for name, figure in report.figures()}
    page = environment.get_template("report.html.j2").render(report=report, svg=lambda figure: figures[id(figure)])
    return str(page)


def to_markdown(report: Report, figures: str | None = None) -> str:
    """Return the report as Markdown; figures are linked if `figures`, the folder of their files, is given."""
    return "\n".join(_markdown(report, figures)) + "\n"


def to_latex(report: Report) -> str:
    """Return the tables as LaTeX."""
    first = rf"% Needs \usepackage{{booktabs}}. {report.about}"
    return "\n".join([first, *(table.to_latex() for part in report.parts for table in part.tables)])


def to_json(report: Report) -> str:
    """Return the summary, tables, captions of figures, and all numbers as JSON."""
    tree = {
        "title": report.title,
        "question": report.question,
        "about": report.about,
        "summary": [asdict(line) for line in report.summary],
        "tables": [table.to_dict() for part in report.parts for table in part.tables],
        "figures": [
            {"name": name, "title": figure.title, "caption": figure.caption} for name, figure in report.figures()
        ],
        "results": [_result_dict(result) for result in report.results],
    }
    return json.dumps(tree, indent=1, allow_nan=False, default=str) + "\n"


def to_csv(report: Report) -> str:
    """Return one line per number; each factor has its own column."""
    factors = list(dict.fromkeys(name for result in report.results for name in result.condition))
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    header = ["run", "condition", "repetition", *(f"factor {name}" for name in factors), *FIELDS]
    writer.writerow([escape_csv(cell) for cell in header])
    for result in report.results:
        values = [result.condition.get(name, "") for name in factors]
        numbers = ["" if (value := getattr(result, name)) is None else value for name in FIELDS]
        label = condition_label(result.condition)
        writer.writerow([escape_csv(cell) for cell in (result.run, label, result.repetition, *values, *numbers)])
    return text.getvalue()


def write_figures(report: Report, folder: Path, kinds: Sequence[Kind] = KINDS) -> list[Path]:
    """Write every figure as SVG, PNG, and PDF, and return the files."""
    files = []
    for name, figure in report.figures():
        for kind in kinds:
            files.append(folder / f"{name}.{kind}")
            write_atomic(files[-1], figure.file(kind))
    return files


def _markdown(report: Report, figures: str | None) -> Iterator[str]:
    yield f"# {escape_markdown(report.title)}\n"
    if report.question:
        yield f"*{escape_markdown(report.question)}*\n"
    yield f"{escape_markdown(report.about)}\n"
    for line in report.summary:
        yield f"- **{line.label}**: {escape_markdown(line.text) if line.is_known else line.text}"
    names = {id(figure): name for name, figure in report.figures()}
    for part in report.parts:
        yield f"\n## {escape_markdown(part.title)}\n"
        for figure in part.figures:
            yield f"### {escape_markdown(figure.title)}\n"
            if figures is not None:
                yield f"![{escape_markdown(figure.alt_text)}]({figures}/{names[id(figure)]}.svg)\n"
            yield f"{escape_markdown(figure.caption)}\n"
        for card in part.cards:
            facts = "; ".join(f"{name} {value}" for name, value in card.facts)
            yield f"- **{escape_markdown(card.title)}**: {escape_markdown(facts)}"
        for table in part.tables:
            yield "\n" + table.to_markdown("###").rstrip("\n")


def _visible(value: Any) -> Any:
    """Return text without control characters and lone surrogates; leave SVG, which is Markup, unchanged."""
    return printable(value) if type(value) is str or isinstance(value, RowName) else value


def _result_dict(result: ResultRow) -> dict[str, Any]:
    facts = {"run": result.run, "condition": dict(result.condition), "repetition": result.repetition}
    return {**facts, **{name: json_safe(getattr(result, name)) for name in FIELDS}}
