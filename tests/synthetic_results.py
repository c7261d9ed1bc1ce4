"""Synthetic results for tests of reports: any number of runs, members, and conditions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import numpy as np

from plateaux.core.row_names import ALL_MEMBERS, MEAN_OF_PAIRS, MEAN_PROBABILITY, row_name
from plateaux.reports.figures.gallery import SplitPredictions
from plateaux.reports.figures.partition import SamSets
from plateaux.studies.result_rows import ResultRow

LONG = "a very long name of sixty characters, as people like to write"[:60]
ROWS = {"accuracy": True, "nll": False, "ece": True}  # metric -> whether in percent


def result_row(
    metric: str,
    row: str,
    value: float,
    *,
    split: str = "test",
    stderr: float | None = 0.01,
    mc_stderr: float | None = None,
    higher_is_better: bool | None = True,
    **more: Any,
) -> ResultRow:
    fields: dict[str, Any] = {"run": "runs/one", "condition": {}, "repetition": 0, "percent": False, **more}
    fields |= {"split": split, "stderr": stderr, "mc_stderr": mc_stderr, "higher_is_better": higher_is_better}
    return ResultRow(metric=metric, row=row, value=value, **fields)


def one_run(members: int = 3, *, broken: bool = False, sizes: bool = True, **where: Any) -> list[ResultRow]:
    """Return results of every kind for one run."""
    rng = Random(str(sorted(where.items(), key=str)))

    def value() -> float:
        return math.nan if broken else rng.uniform(0.4, 0.9)

    results = []
    for metric, percent in ROWS.items():
        higher_is_better = metric == "accuracy"
        rows = [*(f"member {i}" for i in range(members)), "mean of members", MEAN_PROBABILITY]
        results += [
            result_row(metric, row, value(), higher_is_better=higher_is_better, percent=percent, **where)
            for row in rows
        ]
        if sizes:
            names = [f"{n} member{'s' * (n > 1)}" for n in range(1, members + 1)]
            results += [result_row(f"{metric} by size", row, value(), percent=percent, **where) for row in names]
    for metric in ("der", "pds"):
        results.append(result_row(metric, ALL_MEMBERS, value(), higher_is_better=None, **where))
    results.append(result_row("disagreement", MEAN_OF_PAIRS, value(), higher_is_better=None, percent=True, **where))
    for row in (*(f"member {i}" for i in range(members)), "mean of members"):
        results.append(result_row("worst_l2(m=128)", row, value(), split="train", higher_is_better=False, **where))
        for by in ("epochs", "passes", "seconds"):
            results.append(result_row(by, row, 10.0, split="training", stderr=None, higher_is_better=False, **where))
    for part in ("cACC", "severity 1", "severity 5", "fog"):
        row = row_name(MEAN_PROBABILITY, part)
        results.append(result_row("accuracy under corruption", row, value(), split="corrupted", percent=True, **where))
    for kind in ("fog", "snow"):
        for level in (1, 5):
            results.append(
                result_row("accuracy", MEAN_PROBABILITY, value(), split=f"{kind} {level}", percent=True, **where)
            )
    for score in ("max_probability", "entropy"):
        for part in ("auroc", "fpr95"):
            results.append(
                result_row(
                    "ood", row_name(ALL_MEMBERS, score, part), value(), split="mnist (far)", percent=True, **where
                )
            )
    for row in (*(f"member {i}" for i in range(members)), MEAN_PROBABILITY):
        for bin_index in (3, 9, 14):
            for part, number in (("share", 1 / 3), ("confidence", bin_index / 15), ("accuracy", value())):
                name = row_name(row, f"bin {bin_index}", part)
                results.append(result_row("reliability", name, number, higher_is_better=None, percent=True, **where))
    return results


def study(
    conditions: Sequence[Mapping[str, Any]], repetitions: int = 2, members: int = 3, **more: Any
) -> list[ResultRow]:
    """Return the results of a study."""
    results = []
    for condition in conditions:
        for repetition in range(repetitions):
            name = f"runs/{abs(hash(str(condition))) % 9999}-{repetition}"
            results += one_run(members, run=name, condition=condition, repetition=repetition, **more)
    return results


def grid(count: int, name: str = "SAM") -> list[dict[str, Any]]:
    """Return `count` conditions: two methods with increasing rho."""
    return [{"method": f"{name} {i % 2}", "rho": round(0.01 * (i // 2), 3)} for i in range(count)]


def training_log(epochs: int = 4, *, broken: bool = False) -> list[dict[str, Any]]:
    return [
        {"epoch": e, "train loss": None if broken else 2.0 * 0.1**e, "train accuracy": 1 - 0.5**e}
        for e in range(1, epochs + 1)
    ]


def predictions(members: int = 3, samples: int = 20, classes: int = 4) -> SplitPredictions:
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.ones(classes), (members, samples)).astype(np.float32)
    return SplitPredictions(
        "test", range(members), np.arange(samples), rng.integers(0, classes, samples), probabilities
    )


def sam_sets(members: int = 3) -> SamSets:
    overlap = np.full((members, members), 0.4) + 0.6 * np.eye(members)
    return SamSets(5, [10 * (i + 1) for i in range(members + 1)], [0.4] * members, overlap.tolist())


def lines(names: Sequence[str], *, broken: bool = False, kind: str = "slices") -> dict[str, Any]:
    bin_index = [-1.0, 0.0, 1.0]
    losses = [None, None, None] if broken else [1.0, 0.5, 1.5]
    return {"kind": kind, "lines": {name: {"at": bin_index, "losses": losses} for name in names}}


def surface(*, broken: bool = False, kind: str = "surface") -> dict[str, Any]:
    losses: list[list[float | None]] = [[1.0, 2.0, 1.0], [2.0, 0.1, None], [1.0, 2.0, 9.0]]
    losses = [[None] * 3] * 3 if broken else losses
    mark = {"x": 0.0, "y": 0.0, "loss": 0.1}
    return {"kind": kind, "surface": {"x": [-1, 0, 1], "y": [-1, 0, 1], "losses": losses, "marks": {"member 0": mark}}}
