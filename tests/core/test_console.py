"""Names and texts of files cannot style the output or control the terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.table import Table as RichTable
from rich.text import Text

from plateaux.core.formatting import escape_csv, escape_markdown, printable
from plateaux.core.progress import MemberUpdate, Message
from plateaux.core.text_table import PlainConsole, Table

HOSTILE = "[red]x[/] [link=http://e]y[/link] \x1b[2J\x1b]0;t\x07 \x9b31m \u202e \udcff :smile: \r\x08"
SHOWN = "[red]x[/] [link=http://e]y[/link] ␛[2J␛]0;t␇ �31m � � :smile: ␍␈"


def shown(*things: Any) -> str:
    console = PlainConsole(file=io.StringIO(), force_terminal=True, width=200)
    for each in things:
        console.print(each)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def rich_table() -> RichTable:
    table = RichTable(HOSTILE, title=HOSTILE, caption=HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE))
    return table


@pytest.mark.parametrize(
    "thing", [HOSTILE, Text(HOSTILE), rich_table(), Table.from_text(HOSTILE, [HOSTILE], [[HOSTILE]], HOSTILE).to_rich()]
)
def test_markup_and_control_characters_are_shown_and_have_no_effect(thing: Any) -> None:
    output = shown(thing)
    assert not set(output) & set("\x07\x08\r\x9b\u202e\udcff")
    assert "\x1b[2J" not in output
    assert "\x1b]0" not in output
    assert "[red]x[/] [link=http://e]y[/link] ␛[2J␛]0;t" in output


def test_a_table_with_control_characters_stays_aligned() -> None:
    lines = shown(Table.from_text("", ["name", "loss"], [[HOSTILE, "1"], ["b", "2"]]).to_rich()).splitlines()
    widths = {len(Text.from_ansi(line).plain) for line in lines if line}
    assert len(widths) == 1


def test_progress_of_training_cannot_control_the_terminal() -> None:
    from plateaux.cli.progress import live_progress

    console = PlainConsole(file=io.StringIO(), width=300)
    with live_progress(console) as progress:
        progress(Message(HOSTILE))
        progress(MemberUpdate(0, epochs=1, epoch=1, metrics={HOSTILE: 0.5}))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count(SHOWN) == 2


def test_printable_keeps_lines_tabs_and_other_scripts() -> None:
    assert printable("ü 中 ع א 😀\n\tx") == "ü 中 ع א 😀\n\tx"
    assert printable(HOSTILE) == SHOWN


def test_an_escaped_link_is_not_a_link_in_markdown() -> None:
    assert escape_markdown("\\[x\\](javascript:alert(1))") == "\\\\\\[x\\\\\\](javascript:alert(1))"
    assert escape_markdown("a\n\n# b\x1b") == "a # b␛"


@pytest.mark.parametrize("text", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", " =1", "\n=1"])
def test_formulas_are_escaped_in_csv(text: str) -> None:
    assert escape_csv(text) == f"'{text}"


@pytest.mark.parametrize("value", ["-0.5", "+1e-3", "1", "a=b", "", -0.5, 7, None, True])
def test_numbers_and_other_text_are_unchanged_in_csv(value: Any) -> None:
    assert escape_csv(value) == value
