"""The command that looks at the landscape around every member of a run: numbers and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

import plateaux
from plateaux.cli.common import Allow, AsJson, Device, Members, parse_numbers, print_result, progress_bar
from plateaux.config.specs import split_names
from plateaux.evaluation.results import MetricResult
from plateaux.evaluation.tables import tables, to_markdown
from plateaux.loss_landscape.plots import LandscapeFigure
from plateaux.loss_landscape.render import SAMPLES, check_plots, plot_landscape


def landscape(
    run: Path,
    probes: Annotated[
        str | None,
        typer.Option(help="Names with commas, or all; options: worst_l2(steps=50). All unless --draw is given."),
    ] = None,
    on: Annotated[str, typer.Option(help="train, test or validation.")] = "train",
    samples: Annotated[
        int | None, typer.Option(min=1, help=f"So many samples; each probe's own number, {SAMPLES} for pictures.")
    ] = None,
    members: Members = None,
    batchnorm: Annotated[
        Literal["eval", "train"], typer.Option(help="By running statistics, or by those of each batch.")
    ] = "eval",
    augment: Annotated[
        bool, typer.Option("--augment", help="Vary the samples as the recipe does in training.")
    ] = False,
    unit_logits: Annotated[
        bool, typer.Option("--unit-logits", help="Scale every sample's logits to length one.")
    ] = False,
    draw: Annotated[str | None, typer.Option(help="Pictures: slices, paths, plane; with commas.")] = None,
    allow: Allow = None,
    device: Device = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False,
    as_json: AsJson = False,
) -> None:
    """Look at the landscape around every member: how sharp its basin is, and pictures of it.

    In Python: `plateaux.landscape("runs/demo", probes=["worst_l2"])`
    """
    kinds = split_names(draw or "")
    if kinds:
        check_plots(kinds)
    names = split_names(probes) if probes is not None else [] if kinds else ["all"]
    shared: dict[str, Any] = {
        "on": on, "members": parse_numbers(members), "batchnorm": batchnorm, "augment": augment,
        "unit_logits": unit_logits, "given": plateaux.Components(trust=tuple(allow or ())), "device": device,
    }  # fmt: skip
    found: list[MetricResult] = []
    made: list[LandscapeFigure] = []
    with progress_bar("landscape", "passes") as told:
        if names:
            found = plateaux.probe_landscape(run, probes=names, limit=samples, **shared, **told)
        if kinds:
            made = plot_landscape(run, kinds, limit=samples or SAMPLES, **shared, **told)
    if markdown:
        typer.echo(to_markdown(found))
        return
    plain = {"measurements": [each.to_dict() for each in found], "pictures": [_told(run, each) for each in made]}
    print_result(
        as_json, plain, lambda: [*tables(found, Console().width), *(_told(run, each)["files"][0] for each in made)]
    )


def _told(run: Path, picture: LandscapeFigure) -> dict[str, Any]:
    files = [str(run / "landscape" / f"{picture.name}.{ending}") for ending in ("png", "svg", "json")]
    return {"name": picture.name, "caption": picture.caption, "files": files}
