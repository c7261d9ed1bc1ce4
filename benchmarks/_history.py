"""Run benchmarks, append their ratios to benchmarks/history.jsonl, and compare them with earlier ones.

python benchmarks/_history.py [--quick] [--file FILE] [NAME ...]

A ratio is a figure whose name contains " / ". It depends less on the machine than seconds do, so that values of
different days can be compared. Only entries of the same form (quick or full) and the same number of cores are compared.
An entry contains no host name and no path. The JSON lines go to standard output, the comparison to standard error.
A benchmark without figures, because its data are absent, is skipped with its reason. One that fails does not end the
others; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import plateaux
from plateaux.core.process_info import num_cores

HERE = Path(__file__).resolve().parent
TOLERANCE = 0.03  # differences up to this are noise, as for the controls
Entry = dict[str, Any]


def names() -> list[str]:
    return sorted(path.stem for path in HERE.glob("*.py") if not path.name.startswith("_"))


def build_entry(name: str, line: Entry) -> Entry:
    """Return the entry of the history for the final line of a benchmark."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "version": plateaux.__version__,
        "torch": torch.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "cores": num_cores(),
        "benchmark": name,
        "quick": line["quick"],
        "ok": line["ok"],
        "ratios": {figure: value for figure, value in line["figures"].items() if " / " in figure},
    }


def read(file: Path) -> list[Entry]:
    """Return the entries of a history, oldest first."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def compare(entry: Entry, history: Iterable[Entry]) -> list[str]:
    """Return a line for each ratio that is outside the range of earlier ones, extended by 3 %."""
    keys = ("benchmark", "quick", "cores")
    similar = [each for each in history if all(each[key] == entry[key] for key in keys)]
    lines = []
    for name, value in entry["ratios"].items():
        earlier = [each["ratios"][name] for each in similar if name in each["ratios"]]
        if earlier and not (1 - TOLERANCE) * min(earlier) <= value <= (1 + TOLERANCE) * max(earlier):
            spread = f"median {statistics.median(earlier):.3f}, {min(earlier):.3f} to {max(earlier):.3f}"
            lines.append(f"{name}: {value:.3f}; earlier {spread} ({len(earlier)} entries)")
    return lines


def append(file: Path, entry: Entry) -> None:
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(entry) + "\n")


def run(name: str, *, quick: bool) -> Entry | None:
    """Run a benchmark and return its final line, or None if it fails; its messages go to standard error."""
    call = [sys.executable, str(HERE / f"{name}.py"), "--json", *(["--quick"] if quick else [])]
    done = subprocess.run(call, check=False, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if done.returncode == 0 and lines else None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"benchmarks to run (default: all): {', '.join(names())}"
    )
    parser.add_argument("--quick", action="store_true", help="the quick forms")
    parser.add_argument("--file", type=Path, default=HERE / "history.jsonl", help="the history")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.names) - set(names())):
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(names())}")
    failed = []
    for name in args.names or names():
        print(f"== {name}", file=sys.stderr, flush=True)
        line = run(name, quick=args.quick)
        if line is None:
            failed.append(name)
            continue
        print(json.dumps(line), flush=True)
        if not line["figures"]:
            print(f"   skipped: {'; '.join(line['cannot_tell'])}", file=sys.stderr)
            continue
        entry = build_entry(name, line)
        for text in compare(entry, read(args.file)):
            print(f"   {text}", file=sys.stderr)
        append(args.file, entry)
    if failed:
        print(f"== failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
