"""A report written down: as a page that needs nothing else, as Markdown, as JSON, as CSV, and its figures as files."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from plateaux.core.formatting import escape_markdown, json_safe
from plateaux.core.optional import optional_import
from plateaux.reports.report import Report
from plateaux.reports.style import KINDS, Kind
from plateaux.storage.atomic import write_atomic
from plateaux.studies.grid import condition_label
from plateaux.studies.results import ResultRow

Format = Literal["html", "md", "json", "csv"]
FORMATS: tuple[Format, ...] = ("html", "md", "json", "csv")
FIELDS = ("metric", "split", "row", "value", "stderr", "mc_stderr", "higher_is_better", "percent")


def to_html(made: Report) -> str:
    """Return one page that fetches nothing from anywhere."""
    jinja2, markup = optional_import("jinja2", extra="report"), optional_import("markupsafe", extra="report")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("plateaux.reports"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    # A long name may be broken where words of it end.
    environment.filters["breakable"] = lambda name: markup.escape(name).replace("_", markup.Markup("_<wbr>"))
    # The only text that is not escaped: SVG as matplotlib writes it, which escapes names itself.
    figures = {id(each): markup.Markup(each.inline(name)) for name, each in made.figures()}
    page = environment.get_template("report.html.j2").render(report=made, svg=lambda each: figures[id(each)])
    return str(page)


def to_markdown(made: Report, figures: str | None = None) -> str:
    """Return the report as Markdown; its figures are linked, if they lie in the folder `figures`."""
    return "\n".join(_markdown(made, figures)) + "\n"


def to_json(made: Report) -> str:
    """Return everything as JSON: answers, tables, sentences of figures, and every number."""
    plain = {
        "title": made.title,
        "question": made.question,
        "answers": [asdict(each) for each in made.summary],
        "tables": [table.to_dict() for part in made.parts for table in part.tables],
        "figures": [{"name": name, "title": d.title, "sentence": d.sentence} for name, d in made.figures()],
        "results": [_plain(each) for each in made.results],
    }
    return json.dumps(plain, indent=1, allow_nan=False, default=str) + "\n"


def to_csv(made: Report) -> str:
    """Return one line a number; every factor has a column of its own."""
    factors = list(dict.fromkeys(name for each in made.results for name in each.condition))
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", "condition", "repetition", *(f"factor {name}" for name in factors), *FIELDS])
    for each in made.results:
        values = [each.condition.get(name, "") for name in factors]
        numbers = [getattr(each, name) for name in FIELDS]
        writer.writerow([each.run, condition_label(each.condition), each.repetition, *values, *("" if n is None else n for n in numbers)])  # fmt: skip  # noqa: E501
    return text.getvalue()


def write_figures(made: Report, folder: Path, kinds: Sequence[Kind] = KINDS) -> list[Path]:
    """Write every figure for papers, and return the files."""
    files = []
    for name, each in made.figures():
        for kind in kinds:
            files.append(folder / f"{name}.{kind}")
            write_atomic(files[-1], each.file(kind))
    return files


def _markdown(made: Report, figures: str | None) -> Iterator[str]:
    yield f"# {escape_markdown(made.title)}\n"
    if made.question:
        yield f"*{escape_markdown(made.question)}*\n"
    yield f"{escape_markdown(made.about)}\n"
    for answer in made.summary:
        yield f"- **{answer.question}** {escape_markdown(answer.words)}"
    names = {id(each): name for name, each in made.figures()}
    for part in made.parts:
        yield f"\n## {escape_markdown(part.title)}\n"
        for each in part.figures:
            yield f"### {escape_markdown(each.title)}\n"
            if figures is not None:
                yield f"![{escape_markdown(each.title)}]({figures}/{names[id(each)]}.svg)\n"
            yield f"{escape_markdown(each.sentence)}\n"
        for card in part.cards:
            facts = "; ".join(f"{name} {value}" for name, value in card.facts)
            yield f"- **{escape_markdown(card.title)}**: {escape_markdown(facts)}"
        for sheet in part.tables:
            yield "\n" + sheet.to_markdown("###")


def _plain(each: ResultRow) -> dict[str, Any]:
    facts = {"run": each.run, "condition": dict(each.condition), "repetition": each.repetition}
    return {**facts, **{name: json_safe(getattr(each, name)) for name in FIELDS}}
