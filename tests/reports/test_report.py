"""A report is one safe page; Markdown, JSON, and CSV contain the same results; two hundred runs are supported."""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from random import Random
from typing import Any

import pytest
import synthetic_results as synthetic

from plateaux.core.errors import RecipeError
from plateaux.core.formatting import format_range, format_with_error
from plateaux.core.row_names import MEAN_PROBABILITY
from plateaux.core.stats.comparisons import Inference
from plateaux.core.stats.intervals import t_interval
from plateaux.core.text_table import Cell, Table
from plateaux.reports import report_tables, summary
from plateaux.reports.export import to_csv, to_html, to_json, to_latex, to_markdown
from plateaux.reports.query import mean_over_repetitions
from plateaux.reports.report import Report
from plateaux.reports.report import report as compose
from plateaux.reports.report_inputs import ReportInputs, RunSection
from plateaux.studies.output_config import TableConfig
from plateaux.studies.result_rows import ResultRow

HOSTILE = "<script>alert(1)</script>"


def make_inputs(conditions: list[dict[str, Any]], members: int = 3, repetitions: int = 1, **more: Any) -> ReportInputs:
    sections = []
    for i, condition in enumerate(conditions):
        for repetition in range(repetitions):
            where = {"run": f"runs/{i}-{repetition}", "condition": condition, "repetition": repetition}
            name = ", ".join(f"{k}={v}" for k, v in condition.items()) or "one"
            found = synthetic.one_run(members, **where)
            sections.append(RunSection(name, condition, repetition, found, [synthetic.training_log()] * members, {}))
    return ReportInputs("A title", sections, **more)


@pytest.fixture(scope="module")
def hostile() -> tuple[Report, str]:
    """Return a report in which every name that a user can choose is hostile."""
    conditions = [{HOSTILE: HOSTILE, "rho": 0.1}, {HOSTILE: "a|b`[x](y)", "rho": 0.2}, {HOSTILE: HOSTILE, "rho": 0.3}]
    found = replace(make_inputs(conditions, question=HOSTILE), title=HOSTILE)
    report = compose(found, max_runs=1)
    return report, to_html(report)


class Reader(HTMLParser):
    """Records the tags of a page and what they load, and checks that they are closed in order."""

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


def parse_page(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    return reader


def test_a_run_name_with_html_is_escaped(hostile: tuple[Report, str]) -> None:
    page = hostile[1]
    assert "<script" not in page.lower()
    assert "&lt;script&gt;" in page
    assert "script" not in parse_page(page).tags
    assert not re.search(r"\son\w+=", re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL))


def test_a_page_loads_no_external_resources_and_its_anchors_exist(hostile: tuple[Report, str]) -> None:
    page = hostile[1]
    found = parse_page(page)
    assert [each for each in found.loads if not each.startswith(("#", "data:image/png;base64,"))] == []
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", page)
    assert not re.search(r"@import|url\((?!#)", page)
    assert len(found.ids) == len(set(found.ids))
    assert {each[1:] for each in found.loads if each.startswith("#")} <= set(found.ids)
    assert "default-src 'none'" in page
    assert page.count("<figure>") == page.count('role="img" aria-label="') == len(list(hostile[0].figures()))


def test_a_page_supports_dark_mode_print_and_narrow_screens(hostile: tuple[Report, str]) -> None:
    wanted = ("prefers-color-scheme: dark", "@media print", "width=device-width", "overflow-x: auto", "currentColor")
    assert [words for words in wanted if words not in hostile[1]] == []
    assert "#222222;" not in hostile[1].partition("</style>")[2]  # a fixed dark color would be unreadable in dark mode


def test_markdown_keeps_hostile_names_in_their_cells(hostile: tuple[Report, str]) -> None:
    text = to_markdown(hostile[0], "figures")
    assert "<script" not in text
    assert "![" in text
    assert "](figures/accuracy_bars.svg)" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    widths = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
    assert all(width > 2 for width in widths)
    assert "](y)" not in text.replace("\\](y)", "")
    assert "![" not in to_markdown(hostile[0])


def test_csv_and_json_contain_every_result(hostile: tuple[Report, str]) -> None:
    report = hostile[0]
    rows = list(csv.DictReader(StringIO(to_csv(report))))
    assert len(rows) == len(report.results)
    assert [float(row["value"]) for row in rows] == [each.value for each in report.results]
    assert rows[0][f"factor {HOSTILE}"] == HOSTILE
    plain = json.loads(to_json(report))
    assert len(plain["results"]) == len(rows)
    assert {each["name"] for each in plain["figures"]} >= {"accuracy_bars", "sharpness_diversity", "training"}
    broken = replace(report, results=synthetic.one_run(broken=True))
    assert json.loads(to_json(broken))["results"][0]["value"] is None


def test_two_hundred_runs_are_reported_on_a_page_of_limited_size() -> None:
    conditions = [{"method": f"{synthetic.LONG} {i % 10}", "rho": round(0.01 * (i // 10), 2)} for i in range(100)]
    whole = make_inputs(conditions, members=3, repetitions=2, baseline={"rho": 0.0})
    page = to_html(compose(whole))
    assert len(page.encode()) < 15_000_000
    assert "200 runs of 100 conditions" in page
    parse_page(page)


def test_one_run_of_fifty_members_has_a_table_instead_of_cards() -> None:
    report = compose(make_inputs([{}], members=50), only_figures=["training"])
    assert [part.title for part in report.parts] == ["This run", "Members"]
    assert not report.parts[1].cards
    assert len(report.parts[1].tables[0].rows) == 50
    few = compose(make_inputs([{}]), only_figures=["training"])
    assert [card.title for card in few.parts[1].cards] == ["Member 0", "Member 1", "Member 2"]
    assert [name for name, _ in few.parts[1].cards[0].facts][:3] == ["accuracy", "nll", "ece"]
    assert [drawing.name for _, drawing in few.figures()] == ["training"]


def test_only_the_requested_figures_are_drawn() -> None:
    lines = make_inputs([{}], figures=("accuracy_bars",))
    assert [name for name, _ in compose(lines).figures()] == ["accuracy_bars"]
    assert [name for name, _ in compose(lines, only_figures=["severity"]).figures()] == ["severity"]
    assert not list(compose(lines, figures=False).figures())
    with pytest.raises(RecipeError, match=r"no figure 'bars'.*accuracy_bars"):
        compose(lines, only_figures=["bars"])
    assert [name for name, _ in compose(make_inputs([{}, {"a": 1}]), only_figures=["reliability"]).figures()] == [
        "reliability", "reliability_2", "reliability_3",
    ]  # fmt: skip


# The summary.


def summary_lines(found: list[ResultRow]) -> dict[str, summary.SummaryLine]:
    return {each.label: each for each in summary.summary(found)}


@pytest.mark.parametrize(
    ("shown", "words"),
    [(0, ""), (1, " The first run has details below;"), (2, " The first 2 runs have details below;"), (3, "")],
)
def test_the_description_states_which_runs_have_details(shown: int, words: str) -> None:
    report = compose(
        make_inputs([{"rho": 0.1}, {"rho": 0.2}, {"rho": 0.3}], repetitions=1),
        max_runs=shown,
        only_figures=["training"],
    )
    first, _, last = report.about.partition(" ± is half of a 95 % interval: ")
    assert first.partition(".")[2] == (f"{words} the tables contain all runs." if words else "")
    assert last.startswith("over repetitions")
    assert len([part for part in report.parts if part.title != "All runs"]) == shown


def test_the_summary_of_one_run_has_five_lines() -> None:
    found = [
        synthetic.result_row("accuracy", "mean of members", 0.9, percent=True),
        synthetic.result_row("accuracy", MEAN_PROBABILITY, 0.925, percent=True),
        synthetic.result_row("nll", MEAN_PROBABILITY, 0.25, higher_is_better=False),
        synthetic.result_row("disagreement", "mean of pairs", 0.08, percent=True),
        synthetic.result_row("worst_l2", "mean of members", 0.5, split="train"),
        synthetic.result_row("worst_l2", "member 0", 0.4, split="train"),
        synthetic.result_row("worst_l2", "member 1", 0.6, split="train"),
        *(synthetic.result_row(by, row, 60.0, split="training", stderr=None) for by in ("epochs", "passes", "seconds")
          for row in ("member 0", "member 1", "mean of members")),
    ]  # fmt: skip
    lines = summary_lines(found)
    assert all(answer.is_known for answer in lines.values())
    assert lines["Accuracy"].text == (
        "The accuracy of the ensemble on test samples is 92.5 ± 2.0 %, "
        "+2.5 points from the mean of its members (90.0 %)."
    )
    assert lines["Calibration"].text == "Negative log-likelihood 0.250 ± 0.020."
    assert lines["Diversity"].text == "Two members disagree on 8.0 % of the test samples."
    assert lines["Sharpness"].text == (
        "Sharpness (worst_l2 on train samples) is 0.5 on average over 2 members (0.4 to 0.6)."
    )
    assert lines["Cost"].text.startswith("60 epochs, 60 passes over the training samples, and 1 min")
    assert lines["Cost"].text.endswith("for all 2 members.")


def test_missing_metrics_name_the_command_that_measures_them() -> None:
    lines = summary_lines([])
    assert not any(answer.is_known for answer in lines.values())
    assert "plateaux landscape RUN" in lines["Sharpness"].text
    assert not any(
        answer.is_known for q, answer in summary_lines(synthetic.one_run(broken=True)).items() if q != "Cost"
    )


def two_conditions(repetitions: int, noise: float) -> list[ResultRow]:
    found = []
    for name, accuracy, nll, der in (("a", 0.8, 0.3, 1.0), ("b", 0.9, 0.2, 0.5)):
        for repetition in range(repetitions):
            where = {"run": name, "condition": {"method": name}, "repetition": repetition}
            shift = noise * (repetition if name == "a" else -repetition) + 0.01 * repetition
            found.append(synthetic.result_row("accuracy", MEAN_PROBABILITY, accuracy + shift, percent=True, **where))
            found.append(synthetic.result_row("nll", MEAN_PROBABILITY, nll + shift, **where))
            found.append(synthetic.result_row("der", "members together", der + shift, **where))
    return found


def test_the_summary_names_the_best_condition_if_it_differs_from_the_runner_up() -> None:
    lines = summary_lines(two_conditions(3, 0.001))
    assert lines["Accuracy"].text.startswith(
        "The accuracy of the ensemble on test samples is 90.9 ± 2.2 % for method=b, the best condition"
    )
    assert "(method=b), 1 other: 0.311" in lines["Calibration"].text
    apart = "Diversity (der on test samples) is 0.509 to 1.01, lowest for method=b, highest for method=a."
    assert lines["Diversity"].text == apart


@pytest.mark.parametrize("found", [two_conditions(1, 0.0), two_conditions(2, 1.0)], ids=["one run each", "noise"])
def test_the_summary_names_no_best_condition_if_it_may_be_chance(found: list[ResultRow]) -> None:
    lines = summary_lines(found)
    assert ", not distinguished from the runner-up" in lines["Accuracy"].text
    assert ", not distinguished from the runner-up), 1 other" in lines["Calibration"].text
    assert lines["Diversity"].text.endswith(", not distinguished.")
    report = compose(ReportInputs("t", [RunSection("n", r.condition, r.repetition, [r], [], {}) for r in found]))
    words = "".join(figure.caption for _, figure in report.figures()) + "".join(line.text for line in report.summary)
    assert "the best" not in words
    assert "best: " not in words
    assert not any(cell.is_best for part in report.parts for table in part.tables for row in table.rows for cell in row)


@pytest.mark.parametrize(
    ("value", "percent", "text"),
    [
        ((0.96333, 0.00771), True, "96.33 ± 0.77"),
        ((0.5, None), True, "50.00"),
        ((math.nan, 0.1), False, "NaN"),
        ((2.5e7, 1e5), False, "2.5e+07 ± 1e+05"),
        ((1e-6, 1e-7), False, "1e-06 ± 1e-07"),
        ((12345.6, None), False, "12,346"),
        ((0.2, math.nan), False, "0.2"),
    ],
)
def test_values_have_as_many_digits_as_their_error_justifies(
    value: tuple[float, float | None], percent: bool, text: str
) -> None:
    assert format_with_error(*value, percent) == text
    assert format_range([math.nan]) == "NaN"


# Tables.


def test_the_best_value_of_a_column_is_marked_if_it_differs_from_the_runner_up() -> None:
    found = [
        synthetic.result_row(
            "nll", MEAN_PROBABILITY, value, higher_is_better=False, condition={"a": name}, repetition=repetition
        )
        for name, values in (("x", (1.0, 3.0)), ("y", (1.0, 1.5)))
        for repetition, value in enumerate(values)
    ]
    (table,) = report_tables.metric_tables(found)
    assert table.header == ["", "nll"]
    assert table.rows == [[Cell("a=x"), Cell("2 ± 13")], [Cell("a=y"), Cell("1.2 ± 3.2")]]  # may be chance
    (errors,) = report_tables.metric_tables(found, Inference(standard_errors=True))
    assert errors.text_rows() == [["a=x", "2.0 ± 1.0"], ["a=y", "1.25 ± 0.25"]]
    paired = [each if each.value == 1.0 else replace(each, value=each.value + 1.5) for each in found]
    paired = [replace(each, value=each.value - 0.5) if each.condition == {"a": "y"} else each for each in paired]
    paired = [replace(each, value=4.0) if each.value == 2.5 else each for each in paired]
    assert [row[1].is_best for row in report_tables.metric_tables(paired)[0].rows] == [False, True]
    with_nan = [replace(each, value=math.nan) if each.value == 1.5 else each for each in found]
    assert report_tables.metric_tables(with_nan)[0].text_rows() == [["a=x", "2 ± 13"], ["a=y", "1 (1 of 2)"]]
    same = [replace(each, value=1.0) for each in found]
    assert not any(cell.is_best for row in report_tables.metric_tables(same)[0].rows for cell in row)


def test_each_group_of_metrics_has_a_table() -> None:
    found = synthetic.one_run()
    assert [table.title for table in report_tables.metric_tables(found)] == [
        "Performance", "Uncertainty", "Diversity", "Sharpness", "Training cost",
    ]  # fmt: skip
    own = report_tables.metric_tables(
        [*found, synthetic.result_row("mine:own", "member 0", 1.0), synthetic.result_row("odd", "a row", 1.0)]
    )
    assert [table.title for table in own][-1] == "Other metrics"
    assert "ood" not in to_markdown(Report("", "", "", (), (), ()))


def test_corruption_tables_have_a_row_per_kind_for_one_run_and_per_condition_for_several() -> None:
    (one,) = report_tables.corruption_tables(synthetic.one_run())
    assert (one.header, [row[0] for row in one.text_rows()]) == (["", "severity 1", "severity 5"], ["fog", "snow"])
    (several,) = report_tables.corruption_tables(synthetic.study(synthetic.grid(3)))
    assert several.header == ["", "severity 1", "severity 5", "cACC"]
    assert not any(row[3].is_best for row in several.rows)
    assert report_tables.corruption_tables([synthetic.result_row("nll", "member 0", 1.0)]) == []
    assert (
        report_tables.corruption_tables(
            [synthetic.result_row("nll", "member 0", 1.0, condition={"a": i}) for i in (1, 2)]
        )
        == []
    )


def test_ood_tables_mark_the_best_score_over_repetitions() -> None:
    area, rate = report_tables.ood_tables(synthetic.one_run())
    assert area.rows[0][0].text == "mnist (far)"
    assert not any(cell.is_best for table in (area, rate) for cell in table.rows[0])
    found = [
        synthetic.result_row("ood", f"members together · {score} · auroc", value + 0.01 * repetition,
                             split="far", percent=True, repetition=repetition)
        for score, value in (("entropy", 0.8), ("max_probability", 0.7)) for repetition in range(3)
    ]  # fmt: skip
    (table,) = report_tables.ood_tables(found)
    assert [name for name, cell in zip(table.header, table.rows[0], strict=True) if cell.is_best] == ["entropy"]
    assert report_tables.ood_tables(synthetic.study(synthetic.grid(2), 1))[0].rows[0][0].text.endswith(": mnist (far)")


def test_tables_of_differences_from_the_baseline_are_split_if_wide() -> None:
    found = synthetic.study(synthetic.grid(4, "SAM"))
    split_tables = report_tables.differences(found, {"rho": 0.0})
    assert split_tables[0].title == "Difference from rho=0.0"
    assert report_tables.differences(found, {}) == []
    parts = split_tables[0].split_columns(max_columns=2, number_titles=True)
    assert len(parts) == -(-(len(split_tables[0].header) - 1) // 2)
    assert parts[0].title.endswith(f"(1 of {len(parts)})")
    assert [cell for part in parts for cell in part.rows[0][1:]] == list(split_tables[0].rows[0][1:])
    assert (
        Table.from_text("t", ["", "a"], [["r", "1"]]).split_columns(max_columns=2, number_titles=True)[0].title == "t"
    )


@pytest.mark.parametrize(
    ("standard_errors", "words"), [(False, "half of a 95 % interval"), (True, "one standard error")]
)
def test_the_first_line_states_the_one_meaning_of_plus_minus(standard_errors: bool, words: str) -> None:
    conditions = [{"rho": 0.1}, {"rho": 0.2}]
    values = {rho: [0.8 + rho + x for x in (0.0, 0.03, 0.01)] for rho in (0.1, 0.2)}
    rows = [
        synthetic.result_row("accuracy", MEAN_PROBABILITY, values[c["rho"]][r], condition=c, repetition=r, stderr=None)
        for c in conditions for r in range(3)
    ]  # fmt: skip
    sections = [RunSection("n", row.condition, row.repetition, [row], [], {}) for row in rows]
    column = {"title": "accuracy", "metric": "accuracy"}
    table = TableConfig.model_validate({"title": "Table 1", "columns": [column]})
    found = ReportInputs("t", sections, baseline=conditions[0], tables=[table])
    report = compose(found, figures=False, standard_errors=standard_errors)
    assert f"± is {words}: over repetitions" in to_markdown(report).split("\n\n")[1]
    interval = t_interval(values[0.2])
    error = interval.stderr if standard_errors else interval.half
    cells = [
        cell.text for part in report.parts for t in part.tables for row in t.rows for cell in row if "±" in cell.text
    ]
    assert len(cells) == 4  # two in the declared table, two in that of performance; the difference is exact
    assert {format_with_error(interval.value, error)} < set(cells)
    assert {cell.partition("± ")[2] for cell in cells} == {f"{error:.2g}"}
    assert report.summary[0].text.count(f"± {100 * error:.1f}" if not standard_errors else "± 0.88") == 1


def test_an_interval_of_one_run_is_over_its_samples_or_its_members() -> None:
    over_samples = mean_over_repetitions([synthetic.result_row("nll", MEAN_PROBABILITY, 1.0)])
    assert over_samples.half == pytest.approx(0.0196, abs=1e-5)
    over_members = mean_over_repetitions([synthetic.result_row("nll", "mean of members", 1.0, members=3)])
    assert over_members.half == pytest.approx(0.01 * 4.302653, abs=1e-6)
    assert math.isnan(mean_over_repetitions([synthetic.result_row("nll", "member 0", 1.0, stderr=None)]).half)


def test_differences_that_may_be_chance_are_not_bold_and_holm_leaves_fewer() -> None:
    random = Random(3)
    conditions = [{"rho": float(i)} for i in range(9)]
    found = [
        synthetic.result_row("accuracy", MEAN_PROBABILITY, (c["rho"] > 0) * 0.3 + random.gauss(0, 0.1),
                             condition=c, repetition=r)
        for c in conditions for r in range(4)
    ]  # fmt: skip
    counts = []
    for correction in ("none", "holm"):
        (table,) = report_tables.differences(found, conditions[0], Inference(correction=correction))
        counts.append(sum(row[1].is_best for row in table.rows))
        assert ("corrected by Holm" in table.caption) is (correction == "holm")
    assert 0 <= counts[1] < counts[0] < 8
    with pytest.raises(RecipeError, match=r"no correction 'bonferoni'; .*holm"):
        compose(make_inputs([{}]), correction="bonferoni")  # type: ignore[arg-type]


def test_latex_has_a_booktabs_float_per_table_and_escapes_names(hostile: tuple[Report, str]) -> None:
    report = hostile[0]
    text = to_latex(report)
    tables = [table for part in report.parts for table in part.tables]
    for word in ("\\begin{table}", "\\toprule", "\\midrule", "\\bottomrule", "\\end{tabular}"):
        assert text.count(word) == len(tables)
    rows = [line for line in text.splitlines() if line.endswith(r" \\")]
    assert len(rows) == sum(1 + len(table.rows) for table in tables)
    assert "|" not in text
    for line in rows:
        assert not re.search(r"(?<!\\)[%#_]|(?<!\\)&(?! )", line)
        assert line[0] != "["


def test_figures_have_the_given_size_font_and_labels() -> None:
    options = {"width": 3.3, "height": 2.5, "font": "DejaVu Serif", "font_size": 7.0,
               "labels": {"accuracy on test samples, %": "Accuracy (%)", "method=SAM 0, rho=0.0": "plain"}}  # fmt: skip
    found = make_inputs(synthetic.grid(2))
    report = compose(found, only_figures=["accuracy_bars"], figure_options=options)
    ((_, drawn),) = report.figures()
    assert drawn.figure.get_size_inches().tolist() == [3.3, 2.5]
    (axes,) = drawn.figure.axes
    assert axes.get_xlabel() == "Accuracy (%)"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["plain", "method=SAM 1, rho=0.0"]
    drawn.figure.draw_without_rendering()
    fonts = {(*text.get_fontfamily(), text.get_fontsize()) for text in (axes.xaxis.label, *axes.get_xticklabels())}
    assert fonts == {("DejaVu Serif", 7.0)}
    assert b"DejaVu Serif" in drawn.file("svg")
    for wrong, words in (({"labels": {"acuracy on test samples, %": "x"}}, "did you mean 'accuracy on test"),
                         ({"font": "No such font"}, "no font 'No such font'"), ({"width": 0}, "width = 0"),
                         ({"with": 1}, "did you mean 'width'")):  # fmt: skip
        with pytest.raises(RecipeError, match=re.escape(words)):
            compose(found, only_figures=["accuracy_bars"], figure_options=wrong)
