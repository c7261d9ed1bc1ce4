"""The command `plateaux study`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plateaux.cli.common import AsJson, Download, Trust, check_address_option, error_console, print_result
from plateaux.core.errors import RecipeError

if TYPE_CHECKING:
    from plateaux.studies.runner import StudyRunner


def study(
    file: Annotated[
        str,
        typer.Argument(metavar="STUDY", help="A TOML file, or the name of a study or of a paper's table or figure."),
    ],
    out: Annotated[Path | None, typer.Option(help="The study folder; by default runs/<study>.")] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the passes over the training samples of every run; run and write nothing."
        ),
    ] = False,
    executor: Annotated[str | None, typer.Option(help="local, mesh or ray.")] = None,
    address: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster; by default a local one is started.")
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Number of parallel processes.")] = None,
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
    from plateaux.studies.declared_tables import declared_tables
    from plateaux.studies.result_rows import results_from_study
    from plateaux.studies.runner import StudyRunner
    from plateaux.studies.study import Study

    loaded = Study.load(file)
    root = out or Path("runs") / loaded.name
    section: dict[str, Any] = {"name": executor} if executor else {}
    section |= {"processes": processes} if processes else {}
    section |= {"address": address} if address else {}
    components = Components(trust=(*(trust or ()), *([address] if address else ())), download=download)
    options: dict[str, Any] = {"components": components, "filter_pattern": filter_, "executor": section}
    if dry_run:
        runner = StudyRunner(loaded, root, **options)
        _check_options(runner, filter_, address)
        runner.check(data=False)
        _print_passes(runner, as_json)
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
    plain = {"study": str(root), "tables": [table.to_dict() for table in tables]}
    print_result(as_json, plain, lambda: [*(table.to_rich() for table in tables)] or ["no run has finished"])


def _check_options(runner: "StudyRunner", pattern: str, address: str | None) -> None:
    for spec in runner.runs:
        check_address_option(address, runner.training_recipe(spec), runner.components.trust)
    if not runner.wanted:
        names = "\n  ".join(str(trial) for trial in runner.trials[:10])
        raise RecipeError(f"--filter {pattern}: no condition matches. The conditions are\n  {names}")


def _print_passes(runner: "StudyRunner", as_json: bool) -> None:
    rows = [(spec.folder, [str(trial) for trial in todo], runner.cost(spec)) for spec, todo in runner.missing()]
    total = sum(passes for *_, passes in rows)
    plain = {
        "runs": [{"run": run, "conditions": names, "passes": passes} for run, names, passes in rows],
        "passes": total,
    }
    lines = [f"{' = '.join(names)}: {passes:.1f} passes" for _, names, passes in rows]
    print_result(
        as_json, plain, lambda: [*lines, f"{len(rows)} runs are pending: {total:,.0f} passes over the training samples"]
    )
