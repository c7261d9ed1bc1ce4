"""What every command shares: options, exit codes, messages, and tables for people or JSON for programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Annotated, Any

import typer
from rich.console import Console

from plateaux.config.specs import split_names
from plateaux.core import errors
from plateaux.core.formatting import format_duration
from plateaux.core.runtime import num_cores

CODES: tuple[tuple[type[Exception], int], ...] = (
    (errors.UntrustedCodeError, 6), (errors.Interrupted, 75), (errors.DivergedError, 5), (errors.DataError, 3),
    (errors.RecipeError, 2),
    (errors.RunError, 4), (errors.PlateauxError, 1),
)  # fmt: skip

Changes = Annotated[list[str] | None, typer.Option("--set", help="Change one value of the recipe: section.key=value.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, as when the output is piped.")]
Trust = Annotated[list[str] | None, typer.Option(help="A module whose functions this recipe may call.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; the best there is by default.")]
Members = Annotated[str | None, typer.Option(help="Only these members, such as 0,2.")]


def handle_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn what Plateaux raises on purpose into one message and an exit code that means something."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except errors.PlateauxError as problem:
            Console(stderr=True).print(str(problem), style="red", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(next(code for kind, code in CODES if isinstance(problem, kind))) from None

    return run


def print_result(as_json: bool, plain: Any, shown: Callable[[], list[Any]]) -> None:
    """Print tables for a person, JSON for a program."""
    console = Console()
    if as_json or not console.is_terminal:
        typer.echo(json.dumps(plain, indent=2))
        return
    for each in shown():
        console.print(each, highlight=False)


@contextmanager
def progress_bar(what: str, unit: str = "samples") -> Iterator[dict[str, Any]]:
    """Lend `seen` and `say`: progress with an estimate on a terminal, lines that stay on standard error."""
    console = Console(stderr=True)
    with console.status(what) as status:
        begun = [time.monotonic(), 0]

        def seen(done: int, total: int) -> None:
            if done <= begun[1]:  # another set of samples
                begun[0] = time.monotonic()
            begun[1] = done
            left = (total - done) * (time.monotonic() - begun[0]) / done
            status.update(
                f"{what}: {done:,} of {total:,} {unit}" + (f", {format_duration(left)} left" if left >= 2 else "")
            )

        yield {"seen": seen, "say": lambda words: console.print(words, highlight=False, markup=False, soft_wrap=True)}


def parse_numbers(text: str | None) -> list[int] | None:
    """Return the members that `--members` names; None: all of them."""
    if text is None:
        return None
    parts = split_names(text)
    if not all(part.isdigit() for part in parts):
        raise errors.RecipeError(f"--members {text}: give numbers with commas, such as 0,2")
    return [int(part) for part in parts]


def torchrun(processes: int) -> int:
    """Start this very command again, once for every process of the mesh."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    threads = str(max(1, num_cores() // processes))
    env = {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONSAFEPATH": "1"}
    return subprocess.call([*start, "-m", "plateaux", *sys.argv[1:]], env=env)
