"""Shared by all commands: options, exit codes, logging, and output as tables or JSON.

Importing this package must not import torch, numpy, pydantic, or rich, so that `--help` and `--json` start fast: the
body of a command imports what it needs, or uses the names in `plateaux`, which are imported at their first use. For the
same reason, modules with commands do not postpone annotations: Typer would evaluate their text twice at every start.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plateaux.core import errors
from plateaux.core.formatting import format_duration, split_names
from plateaux.core.progress import Progress, ProgressEvent, WorkDone, log_messages
from plateaux.distributed.subprocesses import run_torchrun
from plateaux.storage.atomic import explain_os_error

if TYPE_CHECKING:
    from plateaux.config.recipe import Recipe
    from plateaux.core.text_table import PlainConsole
    from plateaux.evaluation.results import MetricResult

CODES: tuple[tuple[type[Exception], int], ...] = (
    (errors.UntrustedCodeError, 6), (errors.Interrupted, 75), (errors.DivergedError, 5), (errors.DataError, 3),
    (errors.RecipeError, 2),
    (errors.RunError, 4), (errors.PlateauxError, 1),
)  # fmt: skip
STORAGE_CODE = 4

Changes = Annotated[list[str] | None, typer.Option("--set", help="Override a value of the recipe: section.key=value.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Trust = Annotated[
    list[str] | None,
    typer.Option(
        help="A module whose functions the recipe may call, a tracker (wandb, mlflow), or the address of a Ray cluster."
    ),
]
Download = Annotated[
    bool, typer.Option("--download", help="Allow downloads: names hf:user/name, and pretrained weights of timm.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; by default the best available.")]
Sha256 = Annotated[
    str | None, typer.Option(help="Refuse a bundle with another digest than this, which export, push, and pull print.")
]
Members = Annotated[str | None, typer.Option(help="Use only these members, such as 0,2.")]


@cache
def error_console() -> PlainConsole:
    """Return the console on standard error. Its library is imported now: JSON does not need it."""
    from plateaux.core.text_table import PlainConsole

    return PlainConsole(stderr=True)


def output_console() -> PlainConsole:
    """Return a console on standard output."""
    from plateaux.core.text_table import PlainConsole

    return PlainConsole()


def handle_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Print a Plateaux error as one message and exit with the code of its kind."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except errors.PlateauxError as problem:
            error_console().print(str(problem), style="red", soft_wrap=True)
            raise typer.Exit(next(code for kind, code in CODES if isinstance(problem, kind))) from None
        except OSError as problem:
            if problem.errno == errno.EPIPE:  # the reader of a pipe has ended; typer exits quietly
                raise
            path = "" if problem.filename is None else problem.filename
            text = explain_os_error("use", path or "the output", problem)
            error_console().print(text, style="red", soft_wrap=True)
            raise typer.Exit(STORAGE_CODE) from None

    return run


def print_result(as_json: bool, plain: Any, shown: Callable[[], list[Any]]) -> None:
    """Print JSON, or tables and lines of text."""
    if as_json:
        typer.echo(json.dumps(plain, indent=2))
        return
    for each in shown():
        output_console().print(each, soft_wrap=isinstance(each, str))


def metric_tables(results: Sequence[MetricResult], *, short_for: object = None) -> list[Any]:
    """Return the tables of metrics, in the width of this terminal; with the run `short_for` without single members."""
    from plateaux.evaluation.tables import short_tables, tables

    width = output_console().width
    if short_for is None:
        return [*tables(results, width)]
    more = f"every member and all metrics: plateaux evaluate {short_for} --metrics all; some: plateaux list metrics"
    return [*short_tables(results, width), more]


class ConsoleHandler(logging.Handler):
    """Prints log records on the console that also shows progress, so that the two do not overwrite each other."""

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        error_console().print(prefix + record.getMessage(), soft_wrap=True)


def configure_logging(verbose: int = 0, *, quiet: bool = False) -> None:
    """Print the messages of the logger `plateaux` on standard error, in the first process only."""
    logger = logging.getLogger("plateaux")
    for handler in [handler for handler in logger.handlers if isinstance(handler, ConsoleHandler)]:
        logger.removeHandler(handler)
    logger.setLevel(logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)
    if os.environ.get("RANK", "0") == "0":
        logger.addHandler(ConsoleHandler())


@contextmanager
def progress_bar(what: str, unit: str = "samples") -> Iterator[Progress]:
    """Show the progress of long-running work, with an estimate of the time left, on a terminal."""
    with error_console().status(what) as status:
        started, last = time.monotonic(), 0.0

        def show(event: ProgressEvent) -> None:
            nonlocal started, last
            if not isinstance(event, WorkDone):
                log_messages(event)
                return
            if event.done <= last:  # the next split
                started = time.monotonic()
            last = event.done
            left = (event.total - event.done) * (time.monotonic() - started) / event.done
            text = f"{what}: {event.done:,.0f} of {event.total:,.0f} {unit}"
            status.update(text + (f", {format_duration(left)} left" if left >= 2 else ""))

        yield show


def parse_numbers(text: str | None) -> list[int] | None:
    """Return the member ids of `--members`; None: all members."""
    if text is None:
        return None
    parts = split_names(text)
    if not all(part.isdigit() for part in parts):
        raise errors.RecipeError(f"--members {text}: give member ids separated by commas, such as 0,2")
    return [int(part) for part in parts]


def trusted_names(trust: Sequence[str] | None, recipe: Recipe, overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the names of `--trust`, and a cluster or built-in trackers if they were given on the command line."""
    from plateaux.core.tracker import BUILT_IN

    own = {override.partition("=")[0].strip() for override in overrides}
    address = [recipe.executor.address] if "executor.address" in own and recipe.executor.address else []
    trackers = [name for name in recipe.run.trackers if name in BUILT_IN] if "run.trackers" in own else []
    return (*(trust or ()), *address, *trackers)


def check_address_option(address: str | None, recipe: Recipe, trust: Sequence[str] | None) -> None:
    """Raise RecipeError if `--address` was given and the executor does not connect to a cluster."""
    from plateaux.config.schema import accepts
    from plateaux.core import registry

    name = recipe.executor.name
    if address and not accepts(registry.executor.get(name, allow=tuple(trust or ())), "address"):
        raise errors.RecipeError(
            f"--address {address} is for a Ray cluster, but the executor is {name!r}: add --executor ray, or leave out "
            "--address"
        )


def torchrun(processes: int) -> int:
    """Run this command again in every process of the mesh."""
    return run_torchrun(processes, sys.argv[1:])
