"""CPU seconds of commands that only answer: the version, help, and the status of a run.

    python benchmarks/startup.py [--json] [--quick] [--part version|help|command_help|status]

Medians over processes of user and system time. Limits: 0.4 s for `--version` and `--help`, 0.6 s for `status` of a
local run. With `--quick` there are three processes instead of five, and the limits are twice as high.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _common import close, listed

import plateaux

PLATEAUX = ("-m", "plateaux")
LIMITS = {"version": 0.4, "help": 0.4, "status": 0.6}
PARTS = (*LIMITS, "command_help")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the closing JSON line")
    parser.add_argument("--quick", action="store_true", help="a small version of the same measurement")
    parser.add_argument("--part", choices=PARTS, help="measure only this command")
    args = parser.parse_args()
    parts = PARTS if args.part is None else (args.part,)
    rounds, slack = (3, 2.0) if args.quick else (5, 1.0)
    with tempfile.TemporaryDirectory() as folder:
        commands = {
            "version": (*PLATEAUX, "--version"),
            "help": (*PLATEAUX, "--help"),
            "command_help": (*PLATEAUX, "evaluate", "--help"),
            "status": (*PLATEAUX, "status", str(trained(Path(folder))) if "status" in parts else ""),
        }
        figures = {part: median_cpu_seconds(commands[part], rounds) for part in parts}
    figures["control"] = median_cpu_seconds(("-c", "import typer, pydantic"), rounds)  # what no command can avoid
    if not args.json:
        listed(figures)
    limits = {part: ("at most", slack * limit) for part, limit in LIMITS.items() if part in figures}
    close(figures, limits, args.quick, rounds=rounds)


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
