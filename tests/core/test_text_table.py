"""Tables of text: Markdown, terminal, plain data, and columns that are split over several tables."""

from __future__ import annotations

import pytest
from rich.console import Console

from plateaux.core.text_table import Cell, Table

WIDE = Table.from_text("runs", ["", "loss", "accuracy", "time"], [["a", "1", "2", "3"], ["b", "4", "", ""]], "note")


def test_markdown_marks_the_best_and_escapes_cells() -> None:
    table = Table("t", ["", "x|y"], [[Cell("<a>"), Cell("1", is_best=True)]], "caption")
    assert table.to_markdown() == "**t**\n\n|  | x\\|y |\n|---|---:|\n| &lt;a> | **1** |\n\ncaption\n"
    assert table.to_markdown("##").startswith("## t\n\n|")
    assert "\n|---|---|\n" in table.to_markdown(text_columns=["x|y"])


def test_plain_data_lists_the_best_cells() -> None:
    table = Table("t", ["", "x"], [[Cell("a"), Cell("1")], [Cell("b"), Cell("2", is_best=True)]])
    assert table.to_dict() == {
        "title": "t", "header": ["", "x"], "rows": [["a", "1"], ["b", "2"]], "best": [[1, 1]], "caption": "",
    }  # fmt: skip


def test_a_terminal_shows_every_cell() -> None:
    console = Console(width=60, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(WIDE.to_rich())
    text = console.export_text()
    assert all(word in text for word in ("runs", "loss", "accuracy", "note", "4"))


@pytest.mark.parametrize("limit", [{"max_columns": 1}, {"max_width": 12}])
def test_wide_tables_are_split_and_every_part_has_the_row_names(limit: dict[str, int]) -> None:
    parts = WIDE.split_columns(**limit, number_titles=True)  # type: ignore[arg-type]
    assert [part.title for part in parts] == ["runs (1 of 3)", "runs (2 of 3)", "runs (3 of 3)"]
    assert [part.text_rows() for part in parts] == [[["a", "1"], ["b", "4"]], [["a", "2"]], [["a", "3"]]]
    assert [part.caption for part in parts] == ["", "", "note"]


def test_a_table_that_fits_is_not_split() -> None:
    assert WIDE.split_columns(max_width=80)[0].title == "runs"
    assert len(WIDE.split_columns(max_columns=3, number_titles=True)) == 1


def test_latex_marks_the_best_cell_and_escapes_every_special_character() -> None:
    table = Table("50 % & more", ["", "loss_1"], [[Cell("[a] ± b"), Cell("0.1", is_best=True)]], "ends.")
    assert table.to_latex().splitlines() == [
        r"\begin{table}", r"\centering", r"\caption{50 \% \& more. ends.}", r"\begin{tabular}{lr}", r"\toprule",
        r" & loss\_1 \\", r"\midrule", r"{[}a{]} $\pm$ b & \textbf{0.1} \\", r"\bottomrule", r"\end{tabular}",
        r"\end{table}",
    ]  # fmt: skip
