"""Work under way, for a person: one live line a member, or plain lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from plateaux.core.callbacks import Tell
from plateaux.core.formatting import format_duration


@contextmanager
def live_progress(console: Console) -> Iterator[Tell]:
    """Show news of the members while the work goes on."""
    if not console.is_terminal:
        yield lambda news: _plain(console, news)
        return
    latest: dict[int, dict[str, Any]] = {}
    with Live(console=console, refresh_per_second=4, transient=False) as live:

        def tell(news: Mapping[str, Any]) -> None:
            if "say" in news:
                live.console.print(news["say"], highlight=False)
                return
            latest.setdefault(news["member"], {}).update({"scored": None, **news})
            live.update(lines(latest))

        yield tell


def lines(latest: Mapping[int, Mapping[str, Any]]) -> Table:
    """Return one line a member: how far, loss, accuracy, images a second, time left; on a cluster node and retries."""
    table = Table.grid(padding=(0, 2))
    for number in sorted(latest):
        news = latest[number]
        steps = news.get("steps", 1)
        total = news["epochs"] * steps
        done = max(
            news.get("done", 0) * steps, news.get("epoch", 0) * steps + news.get("step", 0) if "step" in news else 0
        )
        finished = news.get("done") == news["epochs"]
        done = total if finished else min(done, total)
        loss = news.get("loss") or news.get("train loss")
        right = news.get("accuracy") or news.get("train accuracy")
        judged = news.get("validation accuracy")
        scored = news.get("scored")
        table.add_row(
            f"member {number}",
            ProgressBar(total=total, completed=done, width=24),
            f"epoch {min(news.get('epoch', 0) + (not finished), news['epochs'])}/{news['epochs']}",
            f"loss {loss:.4f}" if loss is not None else "",
            f"train {100 * right:.1f} %" if right else "",
            f"validation {100 * judged:.1f} %" if judged is not None else "",
            f"scoring {100 * scored:.0f} %" if scored else f"{news['rate']:,.0f} images/s" if news.get("rate") else "",
            "done" if finished else f"{format_duration(news['left'])} left" if news.get("left") is not None else "",
            *([f"on {news['node']}", _tried(news)] if "node" in news else ()),
        )
    return table


def _tried(news: Mapping[str, Any]) -> str:
    """Say how often a job was begun again, and whether it still talks."""
    count = news.get("retries", news.get("attempt", 0))
    again = f"{count} retr{'y' if count == 1 else 'ies'}" if count else ""
    return " ".join(filter(None, [again, "lost" if news.get("outcome") == "lost" else ""]))


def _plain(console: Console, news: Mapping[str, Any]) -> None:
    if "say" in news:
        console.print(news["say"], highlight=False)
    elif "done" in news:
        numbers = ", ".join(f"{n} {v:.4f}" for n, v in news.items() if isinstance(v, float))
        console.print(f"member {news['member']}: epoch {news['done']}/{news['epochs']}, {numbers}", highlight=False)
