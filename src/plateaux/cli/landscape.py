"""The command `plateaux landscape`: probes and plots of the loss landscape around every member of a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import plateaux
from plateaux.cli.common import (
    AsJson,
    Device,
    Members,
    Trust,
    metric_tables,
    parse_numbers,
    print_result,
    progress_bar,
)
from plateaux.core.formatting import split_names
from plateaux.loss_landscape.plot_style import DEFAULT_LIMIT

if TYPE_CHECKING:
    from plateaux.evaluation.results import MetricResult
    from plateaux.loss_landscape.plots import LandscapeFigure


def landscape(
    run: Path,
    probes: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated names, or all; with options: worst_l2(steps=50). Default: all, or none with --plots."
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="train, test, or validation.")] = "train",
    limit: Annotated[
        int | None,
        typer.Option(min=1, help=f"Number of samples. Default: set by each probe; {DEFAULT_LIMIT} for plots."),
    ] = None,
    members: Members = None,
    batchnorm: Annotated[
        Literal["eval", "train"], typer.Option(help="Use running statistics, or the statistics of each batch.")
    ] = "eval",
    augment: Annotated[
        bool, typer.Option("--augment", help="Augment the samples as the recipe does in training.")
    ] = False,
    normalize_logits: Annotated[
        bool, typer.Option("--normalize-logits", help="Scale the logits of every sample to norm one.")
    ] = False,
    plots: Annotated[str | None, typer.Option(help="Comma-separated plots: slices, paths, plane.")] = None,
    trust: Trust = None,
    device: Device = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure and plot the loss landscape around every member of a run.

    In Python: `plateaux.probe_landscape("runs/demo", probes=["worst_l2"])`
    """
    from plateaux.evaluation.tables import to_markdown
    from plateaux.loss_landscape.render import check_plots, plot_landscape

    kinds = split_names(plots or "")
    if kinds:
        check_plots(kinds)
    names = split_names(probes) if probes is not None else [] if kinds else ["all"]
    shared: dict[str, Any] = {
        "split": split,
        "members": parse_numbers(members),
        "batchnorm": batchnorm,
        "augment": augment,
        "normalize_logits": normalize_logits,
        "device": device,
    }
    opened = plateaux.open_run(run, trust=trust or ())
    results: list[MetricResult] = []
    figures: list[LandscapeFigure] = []
    with progress_bar("landscape", "passes") as progress:
        if names:
            results = plateaux.probe_landscape(opened, probes=names, limit=limit, progress=progress, **shared)
        if kinds:
            figures = plot_landscape(opened, kinds, limit=limit or DEFAULT_LIMIT, progress=progress, **shared)
    if markdown:
        typer.echo(to_markdown(results))
        return
    described = [_describe_figure(run, figure) for figure in figures]
    print_result(
        as_json,
        {"metrics": [result.to_dict() for result in results], "figures": described},
        lambda: [*metric_tables(results), *(figure["files"][0] for figure in described)],
    )


def _describe_figure(run: Path, figure: "LandscapeFigure") -> dict[str, Any]:
    files = [str(run / "landscape" / f"{figure.name}.{extension}") for extension in ("png", "svg", "json")]
    return {"name": figure.name, "caption": figure.caption, "files": files}
