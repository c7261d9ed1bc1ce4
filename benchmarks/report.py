"""Time and size of a report: a study of 200 runs from its results.json to one page.

The quick form has 20 runs and limits of its own.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from _common import Results, at_most, parse_flags, seconds

from plateaux.reports.export import to_html
from plateaux.reports.report import report

MEMBERS, EPOCHS = 5, 30
MEMBER_ROWS = [*(f"member {i}" for i in range(MEMBERS)), "mean of members"]
ENSEMBLE = ["ensemble (mean probability)", "ensemble (mean logit)"]
METRICS = {  # metric -> split, higher is better, rows
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
    args = parse_flags(__doc__ or "")
    results = Results(args.quick, args.json)
    runs = 20 if args.quick else 200
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        file.write_text(json.dumps(study(runs)), encoding="utf-8")
        pages: list[str] = []
        took = seconds(lambda: pages.append(to_html(report([file]))))
    results.add("seconds", took, full=at_most(30), quick=at_most(20))
    results.add("megabytes", len(pages[0].encode()) / 1e6, full=at_most(15), quick=at_most(4))
    results.finish(runs=runs)


def study(runs: int) -> dict[str, Any]:
    """Return the results of a study with two repetitions of every condition."""
    rng = Random(0)
    conditions = [
        {
            "condition": {"method": f"method {i % 8}", "rho": round(0.01 * (i // 8), 2)},
            "repetition": repetition,
            "run": f"{i}-{repetition}",
        }
        for i in range(runs // 2)
        for repetition in range(2)
    ]
    settings = {"question": "How long does a report take?", "baseline": {"rho": 0.0}}
    return {
        "format": 2,
        "study": settings,
        "conditions": conditions,
        "runs": {each["run"]: entry(rng) for each in conditions},
    }


def entry(rng: Random) -> dict[str, Any]:
    """Return the entry of one run in the results of a study."""
    metrics = [
        {
            "metric": name, "split": split, "higher_is_better": better, "percent": name.startswith(("accuracy", "ece")),
            "rows": {row: {"value": rng.uniform(0.2, 0.9), "stderr": 0.01} for row in rows},
        }
        for name, (split, better, rows) in METRICS.items()
    ]  # fmt: skip
    costs = {row: {"epochs": EPOCHS, "passes": 2 * EPOCHS, "seconds": rng.uniform(50, 90)} for row in MEMBER_ROWS}
    lines = [{"epoch": e, "train loss": 2.0 / e, "train accuracy": 1 - 0.8 / e} for e in range(1, EPOCHS + 1)]
    log = {f"member {i}": lines for i in range(MEMBERS)}
    return {"metrics": metrics, "costs": costs, "log": log, "recipe": {}}


if __name__ == "__main__":
    main()
