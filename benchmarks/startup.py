"""CPU seconds of commands that only answer: the version, help, and the status of a run.

Medians over processes of user and system time, without torch. `control` is what no command can avoid: importing the
libraries that parse arguments. The quick form has three processes instead of five, and limits of its own.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _common import Results, at_most, parse_flags

import plateaux

PLATEAUX = ("-m", "plateaux")
LIMITS = {"version": 0.4, "help": 0.4, "status": 0.6}
PARTS = (*LIMITS, "command_help")


def main() -> None:
    args = parse_flags(__doc__ or "", PARTS)
    results = Results(args.quick, args.json)
    rounds = 3 if args.quick else 5
    with tempfile.TemporaryDirectory() as folder:
        run = trained(Path(folder)) if "status" in args.parts else Path(folder)
        commands = {
            "version": (*PLATEAUX, "--version"),
            "help": (*PLATEAUX, "--help"),
            "command_help": (*PLATEAUX, "evaluate", "--help"),
            "status": (*PLATEAUX, "status", str(run), "--json"),
        }
        for part in args.parts:
            limit = LIMITS.get(part)
            limits = {} if limit is None else {"full": at_most(limit), "quick": at_most(2 * limit)}
            results.add(part, median_cpu_seconds(commands[part], rounds), **limits)
    results.add("control", median_cpu_seconds(("-c", "import typer, pydantic"), rounds))
    results.finish(rounds=rounds)


def trained(folder: Path) -> Path:
    """Train three tiny members and return the run folder."""
    recipe = plateaux.Recipe.from_dict(
        {"members": 3, "data": {"name": "blobs"}, "model": {"name": "mlp"}, "train": {"epochs": 1}}
    )
    plateaux.train(recipe, folder / "run")
    return folder / "run"


def median_cpu_seconds(arguments: tuple[str, ...], rounds: int) -> float:
    """Return the median of user and system time of a Python process, after one that fills the caches."""
    return statistics.median([cpu_seconds(arguments) for _ in range(rounds + 1)][1:])


def cpu_seconds(arguments: tuple[str, ...]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)


if __name__ == "__main__":
    main()
