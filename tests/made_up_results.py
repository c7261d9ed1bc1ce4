"""Findings made up for tests: of any number of runs, members and conditions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import numpy as np

from plateaux.core.row_names import ALL_MEMBERS, MEAN_OF_PAIRS, MEAN_PROBABILITY, row_name
from plateaux.reports.figures.gallery import SplitPredictions
from plateaux.reports.figures.partition import SamSets
from plateaux.studies.results import ResultRow

LONG = "a very long name of sixty characters, as people like to write"[:60]
ROWS = {"accuracy": True, "nll": False, "ece": True}  # measure -> whether in percent


def finding(
    measure: str,
    row: str,
    number: float,
    *,
    on: str = "test",
    error: float | None = 0.01,
    draws: float | None = None,
    better: bool | None = True,
    **more: Any,
) -> ResultRow:
    facts: dict[str, Any] = {"run": "runs/one", "condition": {}, "repetition": 0, "percent": False, **more}
    named: dict[str, Any] = {"split": on, "stderr": error, "mc_stderr": draws, "higher_is_better": better}
    return ResultRow(metric=measure, row=row, value=number, **named, **facts)


def one_run(members: int = 3, *, broken: bool = False, sizes: bool = True, **where: Any) -> list[ResultRow]:
    """Return what a whole run might have been found to be."""
    chance = Random(str(sorted(where.items(), key=str)))

    def value() -> float:
        return math.nan if broken else chance.uniform(0.4, 0.9)

    found = []
    for measure, percent in ROWS.items():
        better = measure == "accuracy"
        rows = [*(f"member {i}" for i in range(members)), "mean of members", MEAN_PROBABILITY]
        found += [finding(measure, row, value(), better=better, percent=percent, **where) for row in rows]
        if sizes:
            names = [f"{n} member{'s' * (n > 1)}" for n in range(1, members + 1)]
            found += [finding(f"{measure} by size", row, value(), percent=percent, **where) for row in names]
    for measure in ("der", "pds"):
        found.append(finding(measure, ALL_MEMBERS, value(), better=None, **where))
    found.append(finding("disagreement", MEAN_OF_PAIRS, value(), better=None, percent=True, **where))
    for row in (*(f"member {i}" for i in range(members)), "mean of members"):
        found.append(finding("worst_l2(m=128)", row, value(), on="train", better=False, **where))
        for by in ("epochs", "passes", "seconds"):
            found.append(finding(by, row, 10.0, on="training", error=None, better=False, **where))
    for part in ("cACC", "severity 1", "severity 5", "fog"):
        row = row_name(MEAN_PROBABILITY, part)
        found.append(finding("accuracy under corruption", row, value(), on="corrupted", percent=True, **where))
    for kind in ("fog", "snow"):
        for level in (1, 5):
            found.append(finding("accuracy", MEAN_PROBABILITY, value(), on=f"{kind} {level}", percent=True, **where))
    for score in ("max_probability", "entropy"):
        for what in ("auroc", "fpr95"):
            found.append(
                finding("ood", row_name(ALL_MEMBERS, score, what), value(), on="mnist (far)", percent=True, **where)
            )
    for row in (*(f"member {i}" for i in range(members)), MEAN_PROBABILITY):
        for at in (3, 9, 14):
            for what, number in (("share", 1 / 3), ("confidence", at / 15), ("accuracy", value())):
                name = row_name(row, f"bin {at}", what)
                found.append(finding("reliability", name, number, better=None, percent=True, **where))
    return found


def study(
    conditions: Sequence[Mapping[str, Any]], repetitions: int = 2, members: int = 3, **more: Any
) -> list[ResultRow]:
    """Return the findings of a study."""
    found = []
    for condition in conditions:
        for repetition in range(repetitions):
            name = f"runs/{abs(hash(str(condition))) % 9999}-{repetition}"
            found += one_run(members, run=name, condition=condition, repetition=repetition, **more)
    return found


def grid(count: int, name: str = "SAM") -> list[dict[str, Any]]:
    """Return so many conditions: two families along rho."""
    return [{"method": f"{name} {i % 2}", "rho": round(0.01 * (i // 2), 3)} for i in range(count)]


def course(epochs: int = 4, *, broken: bool = False) -> list[dict[str, Any]]:
    return [
        {"epoch": e, "train loss": None if broken else 2.0 * 0.1**e, "train accuracy": 1 - 0.5**e}
        for e in range(1, epochs + 1)
    ]


def said(members: int = 3, samples: int = 20, classes: int = 4) -> SplitPredictions:
    chance = np.random.default_rng(0)
    table = chance.dirichlet(np.ones(classes), (members, samples)).astype(np.float32)
    return SplitPredictions("test", range(members), np.arange(samples), chance.integers(0, classes, samples), table)


def met(members: int = 3) -> SamSets:
    overlap = np.full((members, members), 0.4) + 0.6 * np.eye(members)
    return SamSets(5, [10 * (i + 1) for i in range(members + 1)], [0.4] * members, overlap.tolist())


def lines(names: Sequence[str], *, broken: bool = False, kind: str = "slices") -> dict[str, Any]:
    at = [-1.0, 0.0, 1.0]
    losses = [None, None, None] if broken else [1.0, 0.5, 1.5]
    return {"kind": kind, "lines": {name: {"at": at, "losses": losses} for name in names}}


def surface(*, broken: bool = False, kind: str = "surface") -> dict[str, Any]:
    losses: list[list[float | None]] = [[1.0, 2.0, 1.0], [2.0, 0.1, None], [1.0, 2.0, 9.0]]
    losses = [[None] * 3] * 3 if broken else losses
    mark = {"x": 0.0, "y": 0.0, "loss": 0.1}
    return {"kind": kind, "surface": {"x": [-1, 0, 1], "y": [-1, 0, 1], "losses": losses, "marks": {"member 0": mark}}}
