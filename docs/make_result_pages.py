"""Write tables and pictures of the pages in docs/results from the files in studies/results, or `--check` them.

Reports of studies are generated as a whole. Other pages have hand-written text, and tables between two marks:

    <!-- begin NAME: python docs/make_result_pages.py -->
    <!-- end NAME -->
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from _generated import ROOT, write_or_check
from _interval_picture import Row, interval_picture

sys.path.insert(0, str(ROOT / "studies"))

import _fair_test
import _joint_results
import _which_method
import four_resnets
import joint_cifar100
import landscape_cifar10
import lora_mrpc
import sharpbalance_cifar10
from _results import read_numbers

from plateaux.reports.export import to_markdown
from plateaux.reports.report import report
from plateaux.studies.results import results_from_study

PAGES, RESULTS = ROOT / "docs" / "results", ROOT / "studies" / "results"
Tables = dict[str, str]


def joint(file: Path) -> Tables:
    return {"tables": _joint_results.markdown(_joint_results.Found(read_numbers(file, joint_cifar100.STUDY)))}


def landscape(file: Path) -> Tables:
    numbers = read_numbers(file, landscape_cifar10.STUDY)
    return {"accuracy": landscape_cifar10.fitted(numbers) + ".", "probes": landscape_cifar10.table(numbers)}


def lora(file: Path) -> Tables:
    return {"table": "\n".join(lora_mrpc.table(results_from_study(file)))}


def four(file: Path) -> Tables:
    return four_resnets.tables(four_resnets.read(file))


def sharpbalance(file: Path) -> Tables:
    return {"tables": sharpbalance_cifar10.Study(file.parent, quick=False).tables()}


REPORTS = {"flat-and-diverse": "flat_and_diverse.json", "six-controls": "six_controls.json"}
TABLES: dict[str, tuple[str, Callable[[Path], Tables]]] = {
    "does-it-work": ("sharpbalance_test.json", _fair_test.tables),
    "four-resnets": ("four_resnets.json", four),
    "joint-cifar100": ("joint_cifar100.json", joint),
    "landscape-cifar10": ("landscape_cifar10.json", landscape),
    "lora-mrpc": ("lora_mrpc.json", lora),
    "sharpbalance-cifar10": ("sharpbalance_cifar10/results.json", sharpbalance),
    "which-method": ("which_method.json", _which_method.tables),
}


def which_method_picture(file: Path) -> str:
    rows = [Row(label, accuracy, f"{cost:.0f}") for label, accuracy, cost in _which_method.robustness_and_cost(file)]
    axis = "accuracy of the ensemble under corruption, %"
    return interval_picture(rows, axis=axis, note="passes to train", description="Methods by accuracy under corruption")


def with_tables(text: str, tables: Tables) -> str:
    """Return a page with new text between its marks; every table must have a place."""
    for name, table in tables.items():
        begin, end = f"<!-- begin {name}: python docs/make_result_pages.py -->", f"<!-- end {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"A page lacks its marks: add the lines\n{begin}\n{end}")
        before, _, rest = text.partition(begin)
        after = rest.partition(end)[2]
        text = f"{before}{begin}\n\n{table}\n\n{end}{after}"
    return text


def pages() -> dict[Path, str]:
    """Return all pages of results, by file."""
    made = {
        PAGES / f"{page}.md": to_markdown(report([RESULTS / file], max_runs=0), f"../images/{page}")
        for page, file in REPORTS.items()
    }
    for page, (file, tables) in TABLES.items():
        path = PAGES / f"{page}.md"
        made[path] = with_tables(path.read_text(encoding="utf-8"), tables(RESULTS / file))
    made[PAGES.parent / "images" / "which-method.svg"] = which_method_picture(RESULTS / "which_method.json")
    return made


if __name__ == "__main__":
    sys.exit(write_or_check(pages()))
