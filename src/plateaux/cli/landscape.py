"""The command that looks at the landscape around every member of a run: numbers and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

import plateaux
from plateaux.cli.common import AsJson, Device, Members, Trust, parse_numbers, print_result, progress_bar
from plateaux.config.specs import split_names
from plateaux.core.progress import WorkDone
from plateaux.evaluation.results import MetricResult
from plateaux.evaluation.tables import tables, to_markdown
from plateaux.loss_landscape.plots import LandscapeFigure
from plateaux.loss_landscape.render import SAMPLES, check_plots, plot_landscape


def landscape(
    run: Path,
    probes: Annotated[
        str | None,
        typer.Option(help="Names with commas, or all; options: worst_l2(steps=50). All unless --plots is given."),
    ] = None,
    split: Annotated[str, typer.Option(help="train, test or validation.")] = "train",
    limit: Annotated[
        int | None, typer.Option(min=1, help=f"So many samples; each probe's own number, {SAMPLES} for pictures.")
    ] = None,
    members: Members = None,
    batchnorm: Annotated[
        Literal["eval", "train"], typer.Option(help="By running statistics, or by those of each batch.")
    ] = "eval",
    augment: Annotated[
        bool, typer.Option("--augment", help="Vary the samples as the recipe does in training.")
    ] = False,
    normalize_logits: Annotated[
        bool, typer.Option("--normalize-logits", help="Scale every sample's logits to length one.")
    ] = False,
    plots: Annotated[str | None, typer.Option(help="Pictures: slices, paths, plane; with commas.")] = None,
    trust: Trust = None,
    device: Device = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False,
    as_json: AsJson = False,
) -> None:
    """Look at the landscape around every member: how sharp its basin is, and pictures of it.

    In Python: `plateaux.probe_landscape("runs/demo", probes=["worst_l2"])`
    """
    kinds = split_names(plots or "")
    if kinds:
        check_plots(kinds)
    names = split_names(probes) if probes is not None else [] if kinds else ["all"]
    shared: dict[str, Any] = {
        "split": split, "members": parse_numbers(members), "batchnorm": batchnorm, "augment": augment,
        "normalize_logits": normalize_logits, "components": plateaux.Components(trust=tuple(trust or ())),
        "device": device,
    }  # fmt: skip
    found: list[MetricResult] = []
    made: list[LandscapeFigure] = []
    with progress_bar("landscape", "passes") as progress:
        told: dict[str, Any] = {"seen": lambda done, total: progress(WorkDone(done, total))}
        if names:
            found = plateaux.probe_landscape(run, probes=names, limit=limit, **shared, **told)
        if kinds:
            made = plot_landscape(run, kinds, limit=limit or SAMPLES, **shared, **told)
    if markdown:
        typer.echo(to_markdown(found))
        return
    plain = {"metrics": [each.to_dict() for each in found], "figures": [_told(run, each) for each in made]}
    print_result(
        as_json, plain, lambda: [*tables(found, Console().width), *(_told(run, each)["files"][0] for each in made)]
    )


def _told(run: Path, picture: LandscapeFigure) -> dict[str, Any]:
    files = [str(run / "landscape" / f"{picture.name}.{ending}") for ending in ("png", "svg", "json")]
    return {"name": picture.name, "caption": picture.caption, "files": files}
