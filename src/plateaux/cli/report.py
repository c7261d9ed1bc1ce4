"""The command `plateaux report`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from plateaux.cli.common import AsJson, Trust, print_result
from plateaux.core.errors import RecipeError, suggest
from plateaux.core.formatting import format_size, split_names
from plateaux.reports.style import FORMATS, MAX_RUNS
from plateaux.storage.atomic import write_atomic

if TYPE_CHECKING:
    from plateaux.reports.report import Report


def report(
    paths: Annotated[
        list[Path], typer.Argument(metavar="RUN|STUDY ...", help="Run folders, study folders, or results.json files.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("report.html"),
    format: Annotated[
        str | None, typer.Option(help="html, md, tex, json or csv; by default from the file name.")
    ] = None,
    figures_dir: Annotated[
        Path | None, typer.Option(help="A folder to write the figures to as SVG, PNG and PDF.")
    ] = None,
    only_figures: Annotated[
        str | None, typer.Option(help="Include only these figures, such as accuracy_bars,training.")
    ] = None,
    max_runs: Annotated[int, typer.Option(min=0, help="Number of runs that are shown individually.")] = MAX_RUNS,
    sample_images: Annotated[
        bool, typer.Option("--sample-images", help="Show samples of the data set, with predictions of the members.")
    ] = False,
    standard_errors: Annotated[
        bool, typer.Option("--standard-errors", help="± is a standard error instead of half of a 95 % interval.")
    ] = False,
    correction: Annotated[
        Literal["none", "holm"], typer.Option(help="Correct the comparisons of each metric for their number.")
    ] = "none",
    figure_width: Annotated[float | None, typer.Option(help="Width of figures, in inches.")] = None,
    figure_height: Annotated[float | None, typer.Option(help="Height of figures, in inches.")] = None,
    font: Annotated[str | None, typer.Option(help="The font of figures, such as 'DejaVu Serif'.")] = None,
    font_size: Annotated[float | None, typer.Option(help="The size of text in figures, in points.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="OLD=NEW", help="Replace a text of the figures; can be repeated.")
    ] = None,
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """Write a report on runs and studies: an HTML page that works offline, Markdown, LaTeX tables, JSON, or CSV.

    In Python: `plateaux.reports.export.to_html(plateaux.reports.report.report(["runs/demo"]))`
    """  # fmt: skip
    from plateaux.config.components import Components
    from plateaux.reports.export import write_figures
    from plateaux.reports.report import report as compose
    from plateaux.reports.report_inputs import read_inputs

    kind = format or out.suffix.removeprefix(".")
    if kind not in FORMATS:
        raise RecipeError(f"There is no report format {kind!r}; {suggest(kind, FORMATS)}")
    options: dict[str, Any] = {"max_runs": max_runs, "only_figures": split_names(only_figures or "")}
    options |= {"sample_images": sample_images, "standard_errors": standard_errors, "correction": correction}
    pairs = [each.rpartition("=") for each in label or ()]
    if wrong := [new for _, sign, new in pairs if not sign]:
        raise RecipeError(f"--label {wrong[0]}: give OLD=NEW, such as 'accuracy on test samples, %=Accuracy (%)'")
    style: dict[str, Any] = {"width": figure_width, "height": figure_height, "font": font, "font_size": font_size}
    style["labels"] = {old: new for old, _, new in pairs} or None
    options["figure_options"] = {name: value for name, value in style.items() if value is not None}
    has_figures = kind not in ("csv", "tex") or figures_dir is not None
    built = compose(read_inputs(paths, Components(trust=tuple(trust or ()))), figures=has_figures, **options)
    write_atomic(out, _text(built, kind, out, figures_dir))
    files = write_figures(built, figures_dir) if figures_dir is not None else []
    plain = {
        "file": str(out), "bytes": out.stat().st_size, "figures": [str(file) for file in files],
        "summary": {line.label: line.text for line in built.summary},
    }  # fmt: skip
    lines = [f"{line.label:15} {line.text}" for line in built.summary]
    last = f"{out}: {format_size(out.stat().st_size)}" + (f"; {len(files)} files in {figures_dir}" if files else "")
    print_result(as_json, plain, lambda: [*lines, last])


def _text(report: "Report", kind: str, out: Path, figures: Path | None) -> str:
    from plateaux.reports.export import to_csv, to_html, to_json, to_latex, to_markdown

    if kind == "md":
        where = None if figures is None else os.path.relpath(figures, out.parent).replace(os.sep, "/")
        return to_markdown(report, where)
    return {"html": to_html, "tex": to_latex, "json": to_json, "csv": to_csv}[kind](report)
