"""Hostile strings in names reach reports, terminals, Markdown, CSV, and file names, and have no effect there."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import synthetic_results as synthetic
from attacking import CONTROL, COUNTS, IS_LONG, attack
from PIL import Image

from plateaux.reports.export import to_csv, to_html, to_json, to_markdown, write_figures
from plateaux.reports.report import report as compose
from plateaux.reports.report_inputs import ReportInputs, RunSection
from plateaux.studies.packed_results import encode_results

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
RUN_ME = "document.documentElement.dataset.attacked=1"
STRINGS = {
    "html": f'"><script>{RUN_ME}</script><img src=x onerror="{RUN_ME}"><svg onload="{RUN_ME}">',
    "attribute": f"' onmouseover={RUN_ME} \" onfocus={RUN_ME} autofocus x=\"",
    "template": "{{ 7 * 7 }}{% raw %}${7*7}$\\frac{1}$",
    "ansi": "\x1b[2J\x1b[31m\x1b]0;title\x07\x9b31m\r\x08",
    "markup": "[red]x[/] [link=http://e]y[/link] [/nope] :smile: [bold",
    "lines": "a\nb\r\nc\u2028d\x0be",
    "right to left": "abc\u202edef\u2066\u200f\u061c",
    "formula =": "=cmd|' /C calc'!A0",
    "formula +": "+1+1",
    "formula -": "-1+1",
    "formula @": "@SUM(1)",
    "formula tab": "\t=1+1",
    "markdown": f"[x](javascript:{RUN_ME}) \\[y\\](javascript:z) | a | `b` **c** <b> &lt;",
    "nul": "a\x00b\ud800\ufffe",
    "path": "../../x/..\\y",
    "long": "x" * 10_000,
    "long words": "word " * 2_000,
    "wide": "\U0001f600\u200d" * 500,
}  # fmt: skip
INSIDE = ("#", "data:image/png;base64,")
CHOSEN = list(STRINGS) if IS_LONG else ["html", "ansi", "formula =", "nul"]


class Page(HTMLParser):
    """The tags and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attributes


def hostile_report(text: str) -> ReportInputs:
    """Return the inputs of a report in which everything that a file can name is the given text."""
    sections = []
    for number in range(2):
        condition = {text: text, "rho": 0.1 * number}
        results = synthetic.one_run(2, run=text, condition=condition)
        results += [synthetic.result_row(text, f"{text}{i}", 0.5, split=text, condition=condition) for i in range(2)]
        sections.append(RunSection(text, condition, number, results, [synthetic.training_log()], {text: text}))
    return ReportInputs(text, sections, text, {text: text})


def check_page(page: str) -> None:
    parsed = Page(page)
    assert not parsed.tags & {"script", "img", "iframe", "object", "embed", "form", "base", "link", "foreignobject"}
    assert [name for name, _ in parsed.attributes if name.startswith("on")] == []
    assert [value for name, value in parsed.attributes if "href" in name and not (value or "").startswith(INSIDE)] == []
    assert not CONTROL.search(page)


def check_csv(text: str) -> None:
    for row in csv.reader(io.StringIO(text)):
        for cell in row:
            assert not cell.lstrip().startswith(("=", "+", "-", "@")) or is_number(cell), cell[:50]


def is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", text) is not None


def without_colors(text: str) -> str:
    """Return the output of a terminal without the sequences that rich writes for colors, styles, and progress.

    Progress that lasts long enough is drawn again: one line up, erase the line. No hostile string has these.
    """
    return re.sub("\x1b\\[[0-9;]*m|\x1b\\[\\?25[hl]|\x1b\\[1A|\x1b\\[2K", "", text)


@pytest.mark.parametrize("kind", CHOSEN)
def test_a_report_shows_hostile_names_as_text(kind: str, tmp_path: Path) -> None:
    COUNTS["inputs"] += 4
    figures = ["accuracy_bars", "training", "sharpness_diversity"] if IS_LONG else ["accuracy_bars"]
    report = compose(hostile_report(STRINGS[kind]), only_figures=figures)
    page, markdown = to_html(report), to_markdown(report, "figures")
    check_page(page)
    check_csv(to_csv(report))
    json.loads(to_json(report))
    for text in (page, markdown, to_csv(report), to_json(report)):
        text.encode()  # no lone surrogates
    assert not CONTROL.search(markdown)
    assert not re.search(r"<(?!/?wbr)[a-z/!]", markdown)
    assert not re.search(r"(?<!\\)(\\\\)*\]\(javascript", markdown)
    for file in write_figures(report, tmp_path, ("svg",)):
        assert "<script" not in file.read_text("utf-8")
        assert file.parent == tmp_path


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (Debian: apt-get install chromium)")
@pytest.mark.parametrize("policy", ["with", "without"])
def test_a_report_executes_nothing_in_a_browser(policy: str, tmp_path: Path) -> None:
    """Also without the content security policy of the page, which would block a script that was not escaped."""
    COUNTS["inputs"] += 1
    inputs = [hostile_report(STRINGS[kind]) for kind in ("html", "attribute", "template", "markdown")]
    pages = [to_html(compose(each, only_figures=["accuracy_bars"])) for each in inputs]
    page = "\n".join(pages)
    if policy == "without":
        page = re.sub("<meta http-equiv=[^>]*>", "", page)
    assert not run_in_browser(page, tmp_path)
    if policy == "without":  # the test itself works: a script is executed and seen
        assert run_in_browser(page + f"<script>{RUN_ME}</script>", tmp_path)


def run_in_browser(page: str, folder: Path) -> bool:
    """Open a page in Chromium without a network; return whether it executed a script of ours."""
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--proxy-server=127.0.0.1:1",
        "--virtual-time-budget=3000",
    ]
    command = [str(BROWSER), *options, f"--user-data-dir={folder / 'profile'}", "--dump-dom", file.as_uri()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "</html>" in ended.stdout, ended.stderr[-1000:]
    return "data-attacked" in ended.stdout


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run folder whose name and classes are hostile, and results of a study with hostile conditions."""
    root = tmp_path_factory.mktemp("strings")
    classes = [text.replace("/", "").replace("\0", "").replace("\ud800", "")[:60] for text in STRINGS.values()]
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        for name in dict.fromkeys(classes):
            folder = root / "data" / split / name
            folder.mkdir(parents=True)
            Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(folder / "a.png")
    recipe = {"data": {"name": "image_folder", "root": str(root / "data"), "path": ".", "size": 8, "batch_size": 8}}
    lines = [f"{key} = {json.dumps(value)}" for key, value in recipe["data"].items()]
    text = "\n".join(["members = 2", "[data]", *lines, "[model]", 'name = "mlp"', "[train]", "epochs = 1"])
    (root / "recipe.toml").write_text(text, encoding="utf-8")
    return root


def test_commands_show_hostile_names_as_text(hostile_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")  # tables instead of JSON
    monkeypatch.chdir(hostile_run)
    run = f"runs/{STRINGS['ansi']}{STRINGS['markup']}".replace("/[", "[").replace("http://e", "e").replace("[/", "[")
    commands = [
        ["train", "recipe.toml", "--out", run], ["status", run], ["plan", run],
        ["evaluate", run, "--metrics", "all"], ["evaluate", run, "--markdown"],
        ["calibrate", run, "--split", "test", "--fraction", "0.5"],
        ["predict", run, "--split", "test", "--out", "p.csv"],
        ["report", run, "--out", "r.html"], ["report", run, "--out", "r.md"], ["report", run, "--out", "r.csv"],
        ["status", STRINGS["ansi"]], ["train", STRINGS["ansi"] + STRINGS["markup"]], ["list", STRINGS["ansi"]],
        ["train", "recipe.toml", "--set", f"model.name='{STRINGS['markup']}'"],
        ["evaluate", run, "--split", STRINGS["ansi"]], ["evaluate", run, "--metrics", STRINGS["markup"]],
        ["report", run, "--out", f"{STRINGS['markup'].replace('/', '')}.md"],
    ]  # fmt: skip
    for words in commands:
        _, output, problem = attack(words, in_terminal=True)
        assert problem == ""
        shown = without_colors(output)
        assert "\x1b" not in shown, words
        assert not CONTROL.search(shown.replace("\r", "")), words
    check_csv(Path("p.csv").read_text("utf-8"))
    check_csv(Path("r.csv").read_text("utf-8"))
    check_page(Path("r.html").read_text("utf-8"))
    assert sorted(path.name for path in Path("runs").iterdir()) == [Path(run).name]


@pytest.mark.parametrize("kind", CHOSEN)
def test_results_of_a_study_with_hostile_names_are_reported_as_text(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All names come from a results.json that somebody else wrote."""
    monkeypatch.chdir(tmp_path)
    text = STRINGS[kind]
    value = {"value": 0.5, "stderr": 0.1}
    metric = {"metric": text, "split": text, "rows": {text: value, "member 0": value}, "higher_is_better": True}
    entry = {"evaluation_hash": "h", "metrics": [metric, {**metric, "metric": "accuracy"}], "costs": {}, "folder": text}
    entry |= {"log": {text: [{"epoch": 1, "train loss": 0.5, text: text}]}, "recipe": {text: text}}
    tree = {
        "study": {"question": text, "baseline": {text: text}}, "evaluation_hash": "h",
        "conditions": [{"run": text, "condition": {text: text}, "repetition": 0}], "runs": {text: entry},
    }  # fmt: skip
    Path("results.json").write_bytes(encode_results(tree))
    for file in ("r.html", "r.md", "r.csv", "r.json"):
        code, output, problem = attack(["report", "results.json", "--out", file])
        assert (code, problem) == (0, ""), output
        assert not CONTROL.search(output)
    check_page(Path("r.html").read_text("utf-8"))
    check_csv(Path("r.csv").read_text("utf-8"))
