"""The command `plateaux theory`."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plateaux.commands import AsJson, format_duration, optional_import, print_result, progress_bar, write_atomic

if TYPE_CHECKING:
    from rich.table import Table


def theory(
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write figures and theory.json to.")],
    matrices: Annotated[int, typer.Option(min=2, help="Number of random data matrices.")] = 50,
    inits: Annotated[int, typer.Option(min=2, help="Initializations per matrix.")] = 50,
    grid_points: Annotated[int, typer.Option(min=2, help="Points along a curve.")] = 9,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Reproduce Figures 1b, 2, 9, 10 and 11 of Lu et al. 2024, with the formulas as printed and as corrected.

    In Python: `plateaux_papers.theory.theorem1(plateaux_papers.theory.Setting(k=3, eta=0.01, rho=0.1))`
    """
    from plateaux_papers.theory.experiment import run_experiment
    from plateaux_papers.theory.figures import draw_figures
    from plateaux_papers.theory.record import deviations, record

    optional_import("matplotlib", extra="report")  # before minutes of simulation
    started = time.monotonic()
    with progress_bar("simulating", unit="matrices") as progress:
        experiment = run_experiment(matrices=matrices, starts=inits, density=grid_points, seed=seed, progress=progress)
        recorded = record(experiment)
        contents = {"theory.json": json.dumps(recorded, indent=1).encode(), **draw_figures(experiment)}
        for name, content in contents.items():
            write_atomic(out / name, content)
        files = [out / name for name in contents]
    seconds = time.monotonic() - started
    plain = {"files": [str(file) for file in files], "seconds": round(seconds, 1), **recorded}
    last = f"{len(files)} files in {out}, after {format_duration(seconds)}"
    print_result(as_json, plain, lambda: [_differences(deviations(experiment)), _verdicts(recorded["claims"]), last])


def _differences(rows: list[list[str]]) -> "Table":
    """Show where the formulas differ from the simulation, and so from each other."""
    from rich.table import Table

    header = ["figure", "settings", "diverging"]
    columns = ["diversity printed", "diversity corrected", "bound printed", "bound corrected"]
    table = Table(*header, *columns, title="formula above simulation, the furthest of each figure", padding=(0, 0))
    for row in rows:
        table.add_row(*row)
    return table


def _verdicts(claims: list[dict[str, Any]]) -> "Table":
    from rich.table import Table

    table = Table("claim", "what it says", "as printed", "as corrected", title="claims")
    for each in claims:
        verdicts = [each[formula]["verdict"] for formula in ("printed", "corrected")]
        table.add_row(str(each["claim"]), each["statement"], *verdicts)
    return table
