"""Show the progress of training: one live line per member, or plain lines if the output is not a terminal."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from plateaux.core.formatting import format_duration
from plateaux.core.progress import MemberUpdate, Message, Progress, ProgressEvent

WIDE = 130  # characters that a line with a bar, the speed, and both accuracies takes


@contextmanager
def live_progress(console: Console) -> Iterator[Progress]:
    """Yield a progress callback that shows messages and the members on a console."""
    if not console.is_terminal:
        yield lambda event: _print_event(console, event)
        return
    latest: dict[int, MemberUpdate] = {}
    with Live(console=console, refresh_per_second=4, transient=False) as live:

        def show(event: ProgressEvent) -> None:
            if isinstance(event, Message):
                _print(live.console, event.text)
            elif isinstance(event, MemberUpdate):
                known = latest.get(event.member)
                latest[event.member] = event if known is None else known.merge(event)
                live.update(member_table(latest, width=console.width))

        yield show


def member_table(latest: Mapping[int, MemberUpdate], lost: Collection[int] = (), *, width: int = WIDE) -> Table:
    """Return one line per member: position, loss, accuracy, images per second, time left; on a cluster also the node.

    `lost` are members whose job has stopped writing its record. A narrow line has no bar, no speed, and one accuracy.
    """
    is_wide = width >= WIDE
    table = Table.grid(padding=(0, 2))
    for number in sorted(latest):
        update = latest[number]
        epochs, epoch, steps, metrics = update.epochs or 0, update.epoch or 0, update.steps or 1, update.metrics
        total = epochs * steps
        is_finished = update.completed_epoch == epochs
        # After an epoch, the values of the whole epoch are newer than those of a step within it.
        prefixes = ("train ", "") if update.step is None else ("", "train ")
        loss, accuracy = (_first(metrics, [prefix + name for prefix in prefixes]) for name in ("loss", "accuracy"))
        validation = metrics.get("validation accuracy")
        bar = ProgressBar(total=total, completed=min(epoch * steps + (update.step or 0), total), width=24)
        trained = f"train {100 * accuracy:.1f} %" if accuracy else ""
        validated = f"validation {100 * validation:.1f} %" if validation is not None else ""
        table.add_row(
            f"member {number}",
            *([bar] if is_wide else []),
            f"epoch {min(epoch + (not is_finished), epochs)}/{epochs}",
            f"loss {loss:.4f}" if loss is not None else "",
            *([trained, validated, _format_speed(update)] if is_wide else [validated or trained]),
            "done" if is_finished else _format_time_left(update),
            *([f"on {update.node}", _format_retries(update, is_lost=number in lost)] if update.node else ()),
        )
    for column in table.columns:
        column.no_wrap = True
    return table


def _first(metrics: Mapping[str, float], names: Sequence[str]) -> float | None:
    return next((metrics[name] for name in names if name in metrics), None)


def _format_speed(update: MemberUpdate) -> str:
    if update.scored:
        return f"scoring {100 * update.scored:.0f} %"
    return f"{update.samples_per_second:,.0f} images/s" if update.samples_per_second else ""


def _format_time_left(update: MemberUpdate) -> str:
    return "" if update.seconds_left is None else f"{format_duration(update.seconds_left)} left"


def _format_retries(update: MemberUpdate, *, is_lost: bool) -> str:
    count = update.retries or 0
    retries = f"{count} retr{'y' if count == 1 else 'ies'}" if count else ""
    return " ".join(filter(None, [retries, "lost" if is_lost else ""]))


def _print(console: Console, text: str) -> None:
    """Print a line, unless `--quiet` has raised the level of the logger."""
    if logging.getLogger("plateaux").level <= logging.INFO:
        console.print(text, soft_wrap=True)


def _print_event(console: Console, event: ProgressEvent) -> None:
    """Print a message, or one line for a completed epoch."""
    if isinstance(event, Message):
        _print(console, event.text)
    elif isinstance(event, MemberUpdate) and event.completed_epoch is not None:
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in event.metrics.items())
        text = f"member {event.member}: epoch {event.completed_epoch}/{event.epochs}, {metrics}"
        _print(console, text)
