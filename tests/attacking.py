"""Helpers of the attack tests: run a command in process, judge how it ended, and count.

In CI an attack runs a seeded sample. `PLATEAUX_LONG=1` runs the full set; `-s` also prints what is found.
"""

from __future__ import annotations

import os
import random
import re
import signal
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from typer.testing import CliRunner

from plateaux.cli.main import app

IS_LONG = bool(os.environ.get("PLATEAUX_LONG"))
EXIT_CODES = {0, 1, 2, 3, 4, 5, 6, 75}  # the table in README.md
HANG_S = 20.0  # of CPU time, so that a busy machine does not count
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200e\u200f\u061c\ud800-\udfff]")
FINDINGS = ("tracebacks", "hangs", "silent differences", "files touched outside", "code executed")
COUNTS: Counter[str] = Counter()

Item = TypeVar("Item")


class HangError(BaseException):
    """A command used more than 20 s. Not an Exception, so that no handler of the command catches it."""


def chosen(cases: Sequence[Item], count: int, seed: int = 0) -> list[Item]:
    """Return all cases in a long test, else a seeded sample of them."""
    if IS_LONG or count >= len(cases):
        return list(cases)
    return random.Random(seed).sample(list(cases), count)


def attack(words: Sequence[str], *, in_terminal: bool = False) -> tuple[int, str, str]:
    """Run a command in this process; return its exit code, output, and problem ("" if there is none).

    A command has a problem if it raises, prints a traceback, returns an undocumented exit code, prints control
    characters (in a terminal, colors are such), fails without a message, or takes longer than 20 s of CPU time.
    """
    COUNTS["inputs"] += 1
    try:
        with time_limit(HANG_S):
            result = CliRunner().invoke(app, list(words))
    except HangError:
        COUNTS["hangs"] += 1
        print(f"{list(words)}: took more than {HANG_S} s")
        return -1, "", f"took more than {HANG_S} s"
    output = result.stdout + result.stderr
    problem = ""
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        problem = "".join(traceback.format_exception(result.exception))[-1500:]
    elif "Traceback (most recent call last)" in output:
        problem = f"printed a traceback: {output[-1500:]}"
    elif result.exit_code not in EXIT_CODES:
        problem = f"exit code {result.exit_code}"
    elif not in_terminal and (control := CONTROL.search(output)):
        problem = f"printed the control character {control[0]!r}"
    elif result.exit_code and not output.strip():
        problem = f"exit code {result.exit_code} without a message"
    COUNTS["tracebacks"] += bool(problem)
    if problem:
        print(f"{list(words)}: {problem}")
    return result.exit_code, output, problem


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `HangError` in the block after `seconds` of CPU time of this process."""

    def stop(*_: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
