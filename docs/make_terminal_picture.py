"""Draw docs/images/terminal.svg: run the quickstart of the README and record the terminal.

python docs/make_terminal_picture.py

The commands of the command line run with a console that records. The live progress is printed twice instead of four
times per second: about halfway, and at the end.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from plateaux.cli import common, progress
from plateaux.cli.progress import member_table
from plateaux.core.progress import MemberUpdate, Progress, ProgressEvent

cli: Any = import_module("plateaux.cli.main")  # `plateaux.cli.main` as an attribute is the function of that name

PICTURE = Path(__file__).parent / "images" / "terminal.svg"
COMMANDS = ("train quickstart", "status runs/quickstart")
# The frame of rich, without its web font: nothing is fetched.
FRAME = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; \
font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def main() -> None:
    """Run the quickstart in an empty folder and write the picture."""
    console = Console(record=True, force_terminal=True, width=104, height=40, file=io.StringIO(), legacy_windows=False)
    common.is_terminal = lambda: True
    common.output_console = lambda: console
    cli.error_console = common.error_console = lambda: console
    progress.live_progress = _live_progress
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for command in COMMANDS:
            console.print(Text.assemble(("$ ", "green"), ("plateaux " + command, "bold")))
            cli.app(command.split(), standalone_mode=False)
            console.print()
        os.chdir("/")
    picture = console.export_svg(title="plateaux", code_format=FRAME, unique_id="t")
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(
        "\n".join(line.strip() for line in picture.splitlines() if line.strip()) + "\n", encoding="utf-8"
    )


@contextmanager
def _live_progress(console: Console) -> Iterator[Progress]:
    latest: dict[int, MemberUpdate] = {}
    is_shown = False

    def show(event: ProgressEvent) -> None:
        nonlocal is_shown
        if not isinstance(event, MemberUpdate):
            return
        known = latest.get(event.member)
        latest[event.member] = event if known is None else known.merge(event)
        is_halfway = all(
            each.samples_per_second and (each.epoch or 0) >= (each.epochs or 0) // 2 for each in latest.values()
        )
        if is_halfway and len(latest) == 3 and not is_shown:
            is_shown = True
            console.print(member_table(latest))
            console.print("[dim]... a few seconds later[/dim]")

    yield show
    console.print(member_table(latest))


if __name__ == "__main__":
    main()
