"""Time and size of a report: a study of 200 runs from its results.json to one page.

    python benchmarks/report.py [--json] [--quick]

Limits: 30 seconds and 15 MB.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from _common import close, flags, seconds

from plateaux.reports.export import to_html
from plateaux.reports.report import report

MEMBERS, EPOCHS = 5, 30
MEMBER_ROWS = [*(f"member {i}" for i in range(MEMBERS)), "mean of members"]
ENSEMBLE = ["ensemble (mean probability)", "ensemble (mean logit)"]
MEASURES = {  # measure -> on, better, rows
    "accuracy": ("test", True, [*MEMBER_ROWS, *ENSEMBLE]),
    "nll": ("test", False, [*MEMBER_ROWS, *ENSEMBLE]),
    "ece": ("test", False, [*MEMBER_ROWS, *ENSEMBLE]),
    "accuracy by size": ("test", True, [f"{n} member{'s' * (n > 1)}" for n in range(1, MEMBERS + 1)]),
    "der": ("test", None, ["members together"]),
    "variance": ("test", None, ["members together"]),
    "worst_l2": ("train", False, MEMBER_ROWS),
    "accuracy under corruption": ("corrupted", True, [f"{ENSEMBLE[0]} · severity {n}" for n in range(1, 6)]),
}


def main() -> None:
    told = flags(__doc__.splitlines()[0])
    runs = 20 if told.quick else 200
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        file.write_text(json.dumps(study(runs)), encoding="utf-8")
        pages: list[str] = []
        took = seconds(lambda: pages.append(to_html(report([file]))))
    figures = {"seconds": took, "megabytes": len(pages[0].encode()) / 1e6}
    if not told.json:
        print(f"{runs} runs: {took:.1f} s, {figures['megabytes']:.2f} MB")
    close(figures, {"seconds": ("at most", 30), "megabytes": ("at most", 15)}, told.quick, runs=runs)


def study(runs: int) -> dict[str, Any]:
    """Return the results of a study with two repetitions of every condition."""
    chance = Random(0)
    conditions = [
        {
            "condition": {"method": f"method {i % 8}", "rho": round(0.01 * (i // 8), 2)},
            "repetition": repetition,
            "run": f"{i}-{repetition}",
        }
        for i in range(runs // 2)
        for repetition in range(2)
    ]
    told = {"question": "How long does a report take?", "baseline": {"rho": 0.0}}
    return {
        "format": 2,
        "study": told,
        "conditions": conditions,
        "runs": {each["run"]: entry(chance) for each in conditions},
    }


def entry(chance: Random) -> dict[str, Any]:
    """Return what a study writes down of one run."""
    measurements = [
        {
            "metric": name, "split": on, "higher_is_better": better, "percent": name.startswith(("accuracy", "ece")),
            "rows": {row: {"value": chance.uniform(0.2, 0.9), "stderr": 0.01} for row in rows},
        }
        for name, (on, better, rows) in MEASURES.items()
    ]  # fmt: skip
    costs = {row: {"epochs": EPOCHS, "passes": 2 * EPOCHS, "seconds": chance.uniform(50, 90)} for row in MEMBER_ROWS}
    lines = [{"epoch": e, "train loss": 2.0 / e, "train accuracy": 1 - 0.8 / e} for e in range(1, EPOCHS + 1)]
    course = {f"member {i}": lines for i in range(MEMBERS)}
    return {"metrics": measurements, "costs": costs, "log": course, "recipe": {}}


if __name__ == "__main__":
    main()
