"""The command `plateaux study`."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plateaux.cli.common import AsJson, Download, Trust, check_address_option, error_console, print_result
from plateaux.core.errors import RecipeError
from plateaux.core.formatting import format_duration, format_size

if TYPE_CHECKING:
    from plateaux.studies.cost_estimate import RunCost
    from plateaux.studies.runner import StudyRunner


def study(
    file: Annotated[
        str,
        typer.Argument(metavar="STUDY", help="A TOML file, or the name of a study or of a paper's table or figure."),
    ],
    out: Annotated[Path | None, typer.Option(help="The study folder; by default runs/<study>.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the estimated cost; run and write nothing.")
    ] = False,
    executor: Annotated[str | None, typer.Option(help="local, mesh or ray.")] = None,
    address: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster; by default a local one is started.")
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Number of parallel processes.")] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Try the whole study at a tiny size, on generated files; no result.")
    ] = False,
    images_per_second: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="For --dry-run: plain training images/s of a device with the network of the first run; the speed of "
            "other networks follows from their operations. By default measured here.",
        ),
    ] = None,
    filter_: Annotated[
        str, typer.Option("--filter", help='Run only conditions that match, such as "*rho=0.05*" or "*#0".')
    ] = "*",
    results_only: Annotated[
        bool, typer.Option("--results-only", help="Train nothing; print the results so far.")
    ] = False,
    trust: Trust = None,
    download: Download = False,
    as_json: AsJson = False,
) -> None:
    """Run a study: train the missing runs of its grid, evaluate them, and compare.

    The studies of papers have names: `plateaux study lu2024_figure7`.

    In Python: `StudyRunner(Study.load("study.toml"), "runs/study").run()`
    """
    from plateaux.cli.progress import live_progress
    from plateaux.config.components import Components
    from plateaux.studies.comparison import Comparison
    from plateaux.studies.cost_estimate import CostEstimate
    from plateaux.studies.results import results_from_study
    from plateaux.studies.runner import StudyRunner
    from plateaux.studies.study import Study
    from plateaux.studies.tables import declared_tables

    if smoke and dry_run:
        raise RecipeError(
            "--smoke runs the study at a tiny size, and --dry-run estimates the full one: give one of them"
        )
    if images_per_second is not None and not dry_run:
        raise RecipeError("--images-per-second is for the estimate of --dry-run: add --dry-run, or leave it out to run")
    loaded = Study.load(file)
    root = out or Path("runs") / (f"{loaded.name}-smoke" if smoke else loaded.name)
    section: dict[str, Any] = {"name": executor} if executor else {}
    section |= {"processes": processes} if processes else {}
    section |= {"address": address} if address else {}
    components = Components(trust=(*(trust or ()), *([address] if address else ())), download=download)
    options: dict[str, Any] = {"components": components, "filter_pattern": filter_, "executor": section}
    if smoke:
        from plateaux.studies.smoke import smoke_study

        loaded = smoke_study(loaded, root / "generated", components)
    if dry_run:
        runner = StudyRunner(loaded, root, **options)
        _check_options(runner, filter_, address)
        runner.check(data=False)
        estimate = CostEstimate(runner, images_per_second=images_per_second)
        _print_costs(estimate.all(), as_json, sorted(estimate.missing_data))
        return
    if not results_only:
        with live_progress(error_console()) as progress:
            runner = StudyRunner(loaded, root, progress=progress, **options)
            _check_options(runner, filter_, address)
            runner.run()
    results = results_from_study(root)
    tables = (
        [*declared_tables(loaded.tables, results), *Comparison(results, loaded.baseline).tables()] if results else []
    )
    plain = {"study": str(root), "is_smoke_test": smoke, "tables": [table.to_dict() for table in tables]}
    note = (
        [f"A smoke test on generated files: the numbers mean nothing. Figures: plateaux report {root}"] if smoke else []
    )
    print_result(as_json, plain, lambda: [*(table.to_rich() for table in tables), *note] or ["no run has finished"])


def _check_options(runner: "StudyRunner", pattern: str, address: str | None) -> None:
    for spec in runner.runs:
        check_address_option(address, runner.training_recipe(spec), runner.components.trust)
    if not runner.wanted:
        names = "\n  ".join(str(trial) for trial in runner.trials[:10])
        raise RecipeError(f"--filter {pattern}: no condition matches. The conditions are\n  {names}")


def _print_costs(runs: list["RunCost"], as_json: bool, missing: list[str]) -> None:
    passes, seconds = sum(run.passes for run in runs), sum(run.seconds for run in runs)
    hours = sum(run.device_seconds for run in runs) / 3600
    size = sum(run.bytes for run in runs)
    totals = {"passes": passes, "seconds": seconds, "device_hours": hours, "bytes": size}
    plain = {"runs": [asdict(run) for run in runs], **totals, "data_of_published_size": missing}

    def lines() -> list[Any]:
        from rich.table import Table

        table = Table(pad_edge=False)
        for name in ("run", "", "members", "epochs", "passes", "time"):
            table.add_column(name, justify="left" if name in ("run", "") else "right")
        for run in runs:
            state = f"{run.state}, from {run.branches_from[:6]}" if run.branches_from else run.state
            cost = (str(run.members), str(run.epochs), f"{run.passes:.1f}", format_duration(run.seconds))
            table.add_row(" = ".join(run.conditions), state, *cost)
        pending = sum(run.state != "done" for run in runs)
        text = f"{pending} of {len(runs)} runs are pending: {passes:,.0f} passes over the training samples"
        lines = [table, f"{text}, about {format_duration(seconds)} in total"]
        lines.append(f"{hours:,.1f} device hours; weights that are kept: {format_size(size)}")
        if missing:
            lines.append(f"not on this machine, so taken at the published size: {', '.join(missing)}")
        return lines

    print_result(as_json, plain, lines)
