"""The command that carries out a study, or says beforehand what it will cost."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from plateaux.cli.common import AsJson, Trust, print_result
from plateaux.cli.progress import live_progress
from plateaux.config.components import Components
from plateaux.core.errors import RecipeError
from plateaux.core.formatting import format_duration
from plateaux.studies.comparison import Comparison
from plateaux.studies.cost_estimate import CostEstimate, RunCost
from plateaux.studies.results import results_from_study
from plateaux.studies.runner import StudyRunner
from plateaux.studies.study import Study


def study(
    file: Annotated[Path, typer.Argument(metavar="STUDY", help="A TOML file: a base recipe, a grid, what to measure.")],
    out: Annotated[Path | None, typer.Option(help="The study folder; runs/<study> by default.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it will cost; run and write nothing.")] = False,
    executor: Annotated[str | None, typer.Option(help="local or mesh.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="So many processes at once.")] = None,
    filter_: Annotated[
        str, typer.Option("--filter", help='Only conditions that match, such as "*rho=0.05*" or "*#0".')
    ] = "*",
    results_only: Annotated[
        bool, typer.Option("--results-only", help="Only the table of what is there so far.")
    ] = False,
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """Run a study: train what is missing of its grid, measure it, and compare.

    In Python: `StudyRunner(Study.load("study.toml"), "runs/study").run()`
    """
    what = Study.load(file)
    root = out or Path("runs") / file.stem
    place = {"name": executor} if executor else {}
    options: dict[str, Any] = {
        "components": Components(trust=tuple(trust or ())),
        "filter_pattern": filter_,
        "executor": {**place, **({"processes": processes} if processes else {})},
    }
    if dry_run:
        conduct = StudyRunner(what, root, **options)
        _some(conduct, filter_)
        conduct.check()
        _told(CostEstimate(conduct).all(), as_json)
        return
    if not results_only:
        with live_progress(Console(stderr=True)) as progress:
            conduct = StudyRunner(what, root, progress=progress, **options)
            _some(conduct, filter_)
            conduct.run()
    found = results_from_study(root)
    tables = Comparison(found, what.baseline).tables() if found else []
    plain = {"study": str(root), "tables": [table.to_dict() for table in tables]}
    print_result(as_json, plain, lambda: [table.to_rich() for table in tables] or ["no run is finished yet"])


def _some(conduct: StudyRunner, only: str) -> None:
    if not conduct.wanted:
        names = "\n  ".join(str(each) for each in conduct.trials[:10])
        raise RecipeError(f"--filter {only}: no condition matches; there are\n  {names}")


def _told(found: list[RunCost], as_json: bool) -> None:
    passes, seconds = sum(each.passes for each in found), sum(each.seconds for each in found)
    plain = {"runs": [asdict(each) for each in found], "passes": passes, "seconds": seconds}

    def shown() -> list[Any]:
        table = Table(pad_edge=False)
        for name in ("run", "", "members", "epochs", "passes", "time"):
            table.add_column(name, justify="left" if name in ("run", "") else "right")
        for each in found:
            state = f"{each.state}, from {each.branches_from[:6]}" if each.branches_from else each.state
            cost = (str(each.members), str(each.epochs), f"{each.passes:.1f}", format_duration(each.seconds))
            table.add_row(" = ".join(each.conditions), state, *cost)
        left = sum(each.state != "done" for each in found)
        words = f"{left} of {len(found)} runs to do: {passes:,.0f} passes over the training samples"
        return [table, f"{words}, about {format_duration(seconds)} in all"]

    print_result(as_json, plain, shown)
