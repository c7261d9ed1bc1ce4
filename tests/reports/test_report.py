"""A report is one safe page; the same numbers are Markdown, JSON and CSV; two hundred runs are no burden."""

from __future__ import annotations

import csv
import json
import math
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from typing import Any

import made_up_results as made
import pytest

from plateaux.core.errors import RecipeError
from plateaux.core.formatting import format_range, format_with_stderr
from plateaux.core.row_names import MEAN_PROBABILITY
from plateaux.core.text_table import Cell, Table
from plateaux.core.types import Estimate
from plateaux.reports import summary, tables
from plateaux.reports.export import to_csv, to_html, to_json, to_markdown
from plateaux.reports.inputs import ReportInputs, RunSection
from plateaux.reports.report import Report, compose
from plateaux.studies.results import ResultRow

EVIL = "<script>alert(1)</script>"


def book(conditions: list[dict[str, Any]], members: int = 3, repetitions: int = 1, **more: Any) -> ReportInputs:
    chapters = []
    for i, condition in enumerate(conditions):
        for repetition in range(repetitions):
            where = {"run": f"runs/{i}-{repetition}", "condition": condition, "repetition": repetition}
            name = ", ".join(f"{k}={v}" for k, v in condition.items()) or "one"
            found = made.one_run(members, **where)
            chapters.append(RunSection(name, condition, repetition, found, [made.course()] * members, {}))
    return ReportInputs("A title", chapters, **more)


@pytest.fixture(scope="module")
def evil() -> tuple[Report, str]:
    """Return a report in which everything a user can name is hostile."""
    conditions = [{EVIL: EVIL, "rho": 0.1}, {EVIL: "a|b`[x](y)", "rho": 0.2}, {EVIL: EVIL, "rho": 0.3}]
    found = replace(book(conditions, question=EVIL), title=EVIL)
    report = compose(found, max_runs=1)
    return report, to_html(report)


class Reader(HTMLParser):
    """Notes the tags of a page, what they would load, and whether they are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action", "data")]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    return reader


def test_a_run_named_like_a_script_is_only_text(evil: tuple[Report, str]) -> None:
    page = evil[1]
    assert "<script" not in page.lower()
    assert "&lt;script&gt;" in page
    assert "script" not in read(page).tags
    assert not re.search(r"\son\w+=", re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL))


def test_a_page_loads_nothing_and_its_anchors_lead_somewhere(evil: tuple[Report, str]) -> None:
    page = evil[1]
    found = read(page)
    assert [each for each in found.loads if not each.startswith(("#", "data:image/png;base64,"))] == []
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", page)
    assert not re.search(r"@import|url\((?!#)", page)
    assert len(found.ids) == len(set(found.ids))
    assert {each[1:] for each in found.loads if each.startswith("#")} <= set(found.ids)
    assert "default-src 'none'" in page
    assert page.count("<figure>") == page.count('role="img" aria-label="') == len(list(evil[0].figures()))


def test_a_page_is_for_light_and_dark_and_print_and_phones(evil: tuple[Report, str]) -> None:
    wanted = ("prefers-color-scheme: dark", "@media print", "width=device-width", "overflow-x: auto", "currentColor")
    assert [words for words in wanted if words not in evil[1]] == []
    assert "#222222;" not in evil[1].partition("</style>")[2]  # ink of its own would vanish in the dark


def test_markdown_keeps_hostile_names_in_their_cells(evil: tuple[Report, str]) -> None:
    text = to_markdown(evil[0], "figures")
    assert "<script" not in text
    assert "![" in text
    assert "](figures/accuracy_bars.svg)" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    widths = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
    assert all(width > 2 for width in widths)
    assert "](y)" not in text.replace("\\](y)", "")
    assert "![" not in to_markdown(evil[0])


def test_csv_and_json_carry_every_number(evil: tuple[Report, str]) -> None:
    report = evil[0]
    rows = list(csv.DictReader(StringIO(to_csv(report))))
    assert len(rows) == len(report.results)
    assert [float(row["value"]) for row in rows] == [each.value for each in report.results]
    assert rows[0][f"factor {EVIL}"] == EVIL
    plain = json.loads(to_json(report))
    assert len(plain["results"]) == len(rows)
    assert {each["name"] for each in plain["figures"]} >= {"accuracy_bars", "sharpness_diversity", "training"}
    broken = replace(report, results=made.one_run(broken=True))
    assert json.loads(to_json(broken))["results"][0]["value"] is None


def test_two_hundred_runs_are_reported_in_time_and_size() -> None:
    conditions = [{"method": f"{made.LONG} {i % 10}", "rho": round(0.01 * (i // 10), 2)} for i in range(100)]
    whole = book(conditions, members=3, repetitions=2, baseline={"rho": 0.0})
    begun = time.process_time()
    page = to_html(compose(whole))
    assert time.process_time() - begun < 30
    assert len(page.encode()) < 15_000_000
    assert "200 runs of 100 conditions" in page
    read(page)


def test_one_run_of_fifty_members_has_a_table_instead_of_cards() -> None:
    report = compose(book([{}], members=50), only_figures=["training"])
    assert [part.title for part in report.parts] == ["This run", "Members"]
    assert not report.parts[1].cards
    assert len(report.parts[1].tables[0].rows) == 50
    few = compose(book([{}]), only_figures=["training"])
    assert [card.title for card in few.parts[1].cards] == ["Member 0", "Member 1", "Member 2"]
    assert [name for name, _ in few.parts[1].cards[0].facts][:3] == ["accuracy", "nll", "ece"]
    assert [drawing.name for _, drawing in few.figures()] == ["training"]


def test_only_the_figures_that_are_asked_for_are_drawn() -> None:
    told = book([{}], draw=("accuracy_bars",))
    assert [name for name, _ in compose(told).figures()] == ["accuracy_bars"]
    assert [name for name, _ in compose(told, only_figures=["severity"]).figures()] == ["severity"]
    assert not list(compose(told, figures=False).figures())
    with pytest.raises(RecipeError, match=r"no figure called 'bars'.*accuracy_bars"):
        compose(told, only_figures=["bars"])
    assert [name for name, _ in compose(book([{}, {"a": 1}]), only_figures=["reliability"]).figures()] == [
        "reliability", "reliability_2", "reliability_3",
    ]  # fmt: skip


# The front page.


def words(found: list[ResultRow]) -> dict[str, summary.SummaryLine]:
    return {each.question: each for each in summary.summary(found)}


@pytest.mark.parametrize(
    ("shown", "words"),
    [(0, ""), (1, " The first is shown by itself;"), (2, " The first 2 are shown one by one;"), (3, "")],
)
def test_the_head_says_which_runs_are_shown_one_by_one(shown: int, words: str) -> None:
    report = compose(
        book([{"rho": 0.1}, {"rho": 0.2}, {"rho": 0.3}], repetitions=1), max_runs=shown, only_figures=["training"]
    )
    assert report.about.partition(".")[2] == (f"{words} all are in the tables." if words else "")
    assert len([part for part in report.parts if part.title != "All runs"]) == shown


def test_five_lines_answer_five_questions_about_one_run() -> None:
    found = [
        made.finding("accuracy", "mean of members", 0.9, percent=True),
        made.finding("accuracy", MEAN_PROBABILITY, 0.925, percent=True),
        made.finding("nll", MEAN_PROBABILITY, 0.25, better=False),
        made.finding("disagreement", "mean of pairs", 0.08, percent=True),
        made.finding("worst_l2", "mean of members", 0.5, on="train"),
        made.finding("worst_l2", "member 0", 0.4, on="train"),
        made.finding("worst_l2", "member 1", 0.6, on="train"),
        *(made.finding(by, row, 60.0, on="training", error=None) for by in ("epochs", "passes", "seconds")
          for row in ("member 0", "member 1", "mean of members")),
    ]  # fmt: skip
    told = words(found)
    assert all(answer.known for answer in told.values())
    assert told["How good?"].words == (
        "The ensemble answers 92.5 ± 1.0 % of the test samples rightly, "
        "+2.5 points from the mean of its members (90.0 %)."
    )
    assert told["How sure?"].words == "Negative log-likelihood 0.250 ± 0.010."
    assert told["How different?"].words == "Two members answer 8.0 % of the test samples differently."
    assert told["How flat?"].words == (
        "Sharpness (worst_l2 on train samples) is 0.5 on average over 2 members (0.4 to 0.6)."
    )
    assert told["At what cost?"].words.startswith("60 epochs, 60 passes over the training samples and 1 min")
    assert told["At what cost?"].words.endswith("for all 2 members.")


def test_what_was_not_measured_says_how_to() -> None:
    told = words([])
    assert not any(answer.known for answer in told.values())
    assert "plateaux landscape RUN" in told["How flat?"].words
    assert not any(answer.known for q, answer in words(made.one_run(broken=True)).items() if q != "At what cost?")


def test_of_several_conditions_the_best_is_named() -> None:
    found = []
    for name, accuracy, nll, der in (("a", 0.8, 0.3, 1.0), ("b", 0.9, 0.2, 0.5)):
        where = {"run": name, "condition": {"method": name}}
        found.append(made.finding("accuracy", MEAN_PROBABILITY, accuracy, percent=True, **where))
        found.append(made.finding("nll", MEAN_PROBABILITY, nll, **where))
        found.append(made.finding("der", "members together", der, **where))
    told = words(found)
    assert told["How good?"].words.startswith("Best is method=b: the ensemble answers 90.0 ± 1.0 %")
    assert "(method=b), 1 other 0.3" in told["How sure?"].words
    apart = "Diversity (der on test samples) is 0.5 to 1, least for method=b, most for method=a."
    assert told["How different?"].words == apart


@pytest.mark.parametrize(
    ("value", "percent", "text"),
    [
        (Estimate(0.96333, 0.00771), True, "96.33 ± 0.77"),
        (Estimate(0.5, None), True, "50.00"),
        (Estimate(math.nan, 0.1), False, "NaN"),
        (Estimate(2.5e7, 1e5), False, "2.5e+07 ± 1e+05"),
        (Estimate(1e-6, 1e-7), False, "1e-06 ± 1e-07"),
        (Estimate(12345.6), False, "12,346"),
        (Estimate(0.2, math.nan), False, "0.2"),
    ],
)
def test_a_number_is_shown_to_as_many_places_as_its_error_is_worth(value: Estimate, percent: bool, text: str) -> None:
    assert format_with_stderr(value, percent) == text
    assert format_range([math.nan]) == "NaN"


# Tables.


def test_the_best_of_a_column_is_marked_and_means_have_their_error() -> None:
    found = [
        made.finding("nll", MEAN_PROBABILITY, value, better=False, condition={"a": name}, repetition=repetition)
        for name, values in (("x", (1.0, 3.0)), ("y", (1.0, 1.5)))
        for repetition, value in enumerate(values)
    ]
    (sheet,) = tables.metric_tables(found)
    assert sheet.header == ["", "nll"]
    assert sheet.rows == [[Cell("a=x"), Cell("2.0 ± 1.0")], [Cell("a=y"), Cell("1.25 ± 0.25", is_best=True)]]
    lacking = [replace(each, value=math.nan) if each.value == 1.5 else each for each in found]
    assert tables.metric_tables(lacking)[0].text_rows() == [["a=x", "2.0 ± 1.0"], ["a=y", "1 (1 of 2)"]]
    same = [replace(each, value=1.0) for each in found]
    assert not any(cell.is_best for row in tables.metric_tables(same)[0].rows for cell in row)


def test_tables_are_by_question_and_leave_large_measures_to_their_own() -> None:
    found = made.one_run()
    assert [sheet.title for sheet in tables.metric_tables(found)] == [
        "How good", "How sure", "How different", "How flat", "At what cost",
    ]  # fmt: skip
    own = tables.metric_tables([*found, made.finding("mine:own", "member 0", 1.0), made.finding("odd", "a row", 1.0)])
    assert [sheet.title for sheet in own][-1] == "Other measures"
    assert "ood" not in to_markdown(Report("", "", "", (), (), ()))


def test_severities_by_kind_for_one_and_by_condition_for_several() -> None:
    (one,) = tables.corruption_tables(made.one_run())
    assert (one.header, [row[0] for row in one.text_rows()]) == (["", "severity 1", "severity 5"], ["fog", "snow"])
    (several,) = tables.corruption_tables(made.study(made.grid(3)))
    assert several.header == ["", "severity 1", "severity 5", "cACC"]
    assert sum(row[3].is_best for row in several.rows) == 1
    assert tables.corruption_tables([made.finding("nll", "member 0", 1.0)]) == []
    assert tables.corruption_tables([made.finding("nll", "member 0", 1.0, condition={"a": i}) for i in (1, 2)]) == []


def test_strangers_are_told_apart_with_the_best_score_marked() -> None:
    area, rate = tables.ood_tables(made.one_run())
    assert area.rows[0][0].text == "mnist (far)"
    assert sum(cell.is_best for cell in area.rows[0]) == sum(cell.is_best for cell in rate.rows[0]) == 1
    assert tables.ood_tables(made.study(made.grid(2), 1))[0].rows[0][0].text.endswith(": mnist (far)")


def test_differences_from_the_baseline_keep_their_names_and_wide_tables_are_cut() -> None:
    found = made.study(made.grid(4, "SAM"))
    sheets = tables.differences(found, {"rho": 0.0})
    assert sheets[0].title == "Difference from rho=0.0"
    assert tables.differences(found, {}) == []
    parts = sheets[0].split_columns(max_columns=2, number_titles=True)
    assert len(parts) == -(-(len(sheets[0].header) - 1) // 2)
    assert parts[0].title.endswith(f"(1 of {len(parts)})")
    assert [cell for part in parts for cell in part.rows[0][1:]] == list(sheets[0].rows[0][1:])
    assert (
        Table.from_text("t", ["", "a"], [["r", "1"]]).split_columns(max_columns=2, number_titles=True)[0].title == "t"
    )
