"""Draw docs/images/terminal.svg: the README's quickstart, really run, as a terminal shows it.

python docs/make_terminal_picture.py

The commands are the command line's own, with its console replaced by one that records, and with the live progress shown
twice instead of four times a second: about halfway, and at the end.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from plateaux.cli import common
from plateaux.cli.progress import lines

cli: Any = import_module("plateaux.cli.main")  # as an attribute of the package it is the function of that name

PICTURE = Path(__file__).parent / "images" / "terminal.svg"
COMMANDS = ("train quickstart", "status runs/quickstart")
# rich's own frame, without the web font it would fetch: any monospaced font will do.
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
    for module in (cli, common):
        module.Console = lambda **_: console
    cli.live_progress = _live_progress
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
def _live_progress(console: Console) -> Iterator[Any]:
    latest: dict[int, dict[str, Any]] = {}
    halfway = False

    def tell(news: Mapping[str, Any]) -> None:
        nonlocal halfway
        latest.setdefault(news["member"], {}).update(news)
        here = all("rate" in each and each["epoch"] >= each["epochs"] // 2 for each in latest.values())
        if here and len(latest) == 3 and not halfway:
            halfway = True
            console.print(lines(latest))
            console.print("[dim]... a few seconds later[/dim]")

    yield tell
    console.print(lines(latest))


if __name__ == "__main__":
    main()
