"""A report in a real browser: no sideways scrolling, nothing fetched, light and dark, on paper."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import synthetic_results as synthetic

from plateaux.reports.export import to_html
from plateaux.reports.report import report as compose
from plateaux.reports.report_inputs import ReportInputs, RunSection

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if BROWSER is None:
    pytest.skip("no Chromium is installed (Debian: apt-get install chromium)", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser: pip install playwright")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a report with names as long as they come."""
    chapters = []
    for i in range(3):
        condition = {synthetic.LONG: "x" * 60, "rho": 0.1 * i}
        found = synthetic.one_run(4, run=f"runs/{i}", condition=condition)
        chapters.append(RunSection(f"{synthetic.LONG}={'x' * 60}", condition, 0, found, [synthetic.training_log()], {}))
    report = compose(
        ReportInputs("y" * 60, chapters, "Is it flat?"),
        max_runs=1,
        only_figures=["accuracy_bars", "severity", "training"],
    )
    file = tmp_path_factory.mktemp("browser") / "report.html"
    file.write_text(to_html(report), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as play:
        opened = play.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_fits_its_window_and_fetches_nothing(browser: Any, page: Path, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    opened = context.new_page()
    messages: list[str] = []
    opened.on("console", lambda message: messages.append(message.text))
    opened.on(
        "request", lambda request: None if request.url.startswith(("file:", "data:")) else messages.append(request.url)
    )
    opened.goto(page.as_uri())
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
    boxes = "[...document.querySelectorAll('figure, .card, .scroll, dl')]"
    assert opened.evaluate(f"{boxes}.every(box => box.getBoundingClientRect().right <= innerWidth + 1)")
    styles = (("body", "backgroundColor"), ("figure text", "fill"))
    background, text_color = (
        opened.evaluate(f"getComputedStyle(document.querySelector('{selector}')).{style}") for selector, style in styles
    )
    assert (brightness(text_color) < brightness(background)) is (scheme == "light")
    assert abs(brightness(text_color) - brightness(background)) > 400
    assert messages == []
    context.close()


def test_a_page_is_printed_on_white_in_light_and_dark_mode(browser: Any, page: Path) -> None:
    context = browser.new_context(color_scheme="dark", offline=True)
    opened = context.new_page()
    opened.goto(page.as_uri())
    assert opened.pdf(format="A4").startswith(b"%PDF")
    opened.emulate_media(media="print")
    assert brightness(opened.evaluate("getComputedStyle(document.body).backgroundColor")) == 3 * 255
    context.close()


def brightness(color: str) -> int:
    return sum(int(part) for part in color.removeprefix("rgb(").removesuffix(")").split(","))
