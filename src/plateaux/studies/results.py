"""Findings: every number of a run or of a study as one flat record, with all that tells it apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.core.errors import PlateauxError, RunError
from plateaux.core.types import Estimate
from plateaux.evaluation.metric_specs import get_metrics
from plateaux.evaluation.results import MetricResult
from plateaux.evaluation.robustness import robustness
from plateaux.evaluation.row_names import MEMBERS_MEAN
from plateaux.storage.local_store import LocalStore
from plateaux.storage.run import Run
from plateaux.training.cost import Cost, measured_cost

RESULTS = "results.json"
FORMAT = 2
COSTS = ("epochs", "passes", "seconds")
TRAINING = "training"  # what costs are measured on
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ResultRow:
    """One number of one run, with all that tells it apart."""

    run: str
    condition: Mapping[str, Any]  # factor -> value, such as {"method": "sam", "rho": 0.05, "width": 16}
    repetition: int
    metric: str
    split: str
    row: str
    value: float
    stderr: float | None
    mc_stderr: float | None
    higher_is_better: bool | None
    percent: bool


def results_from_run(run: Run, condition: Mapping[str, Any] = NOTHING, repetition: int = 0) -> list[ResultRow]:
    """Return everything that was measured of a run's members as they are now, and what they cost."""
    found = _stored_results(run)
    found += robustness(found)
    trees = [to_stored(each) for each in found]
    return list(_result_rows(str(run.store.root), condition, repetition, trees, cost_rows(run)))


def results_from_study(path: str | Path) -> list[ResultRow]:
    """Return everything that was measured in a study: from its folder, or from its `results.json` alone."""
    results = read_results(path)
    if not results:
        raise RunError(f"{path} holds no {RESULTS}: it is no study folder, or none of its runs is finished yet")
    found: list[ResultRow] = []
    for each in results["conditions"]:
        entry = results["runs"].get(each["run"])
        if entry and results.get("evaluation_hash") in (
            None,
            entry.get("evaluation_hash"),
        ):  # else it answers what was asked before
            where = (str(each["run"]), each["condition"], int(each["repetition"]))
            found += _result_rows(*where, entry["metrics"], entry["costs"])
    return found


def read_results(path: str | Path) -> dict[str, Any]:
    """Return what a study has written down so far; nothing, if it has not begun."""
    file = Path(path)
    folder, name = (file.parent, file.name) if file.is_file() else (file, RESULTS)
    store = LocalStore(folder)
    if not store.has(name):
        return {}
    found = store.get_json(name)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        given = found.get("format") if isinstance(found, dict) else None
        raise RunError(f"{folder / name} has format {given!r}; this version of Plateaux reads format {FORMAT}")
    return found


def to_stored(found: MetricResult) -> dict[str, Any]:
    """Return a measurement as a study keeps it."""
    return {**found.to_dict(), "percent": found.percent}


def cost_rows(run: Run, members: int | None = None, given: Components = NO_COMPONENTS) -> dict[str, dict[str, float]]:
    """Return what the members of a run, or the first so many, have cost, by row."""
    try:
        each = {
            f"member {number}": measured_cost(run, number, given) for number in range(members or run.recipe.members)
        }
    except PlateauxError:  # a method from outside that nobody allowed: a run from a stranger is data
        return {}
    mean = Cost(*(sum(getattr(cost, by) for cost in each.values()) / len(each) for by in COSTS))
    return {row: asdict(cost) for row, cost in {**each, MEMBERS_MEAN: mean}.items()}


def _result_rows(
    run: str,
    condition: Mapping[str, Any],
    repetition: int,
    measurements: Iterable[Mapping[str, Any]],
    costs: Mapping[str, Mapping[str, float]],
) -> Iterator[ResultRow]:
    for tree in measurements:
        name = str(tree["metric"])
        percent = bool(tree["percent"]) if "percent" in tree else _in_percent(name)
        for row, value in tree["rows"].items():
            number = float("nan") if value["value"] is None else float(value["value"])
            errors = (value["stderr"], value.get("mc_stderr"))
            yield ResultRow(
                run,
                condition,
                repetition,
                name,
                str(tree["split"]),
                row,
                number,
                *errors,
                tree["higher_is_better"],
                percent,
            )
    for row, cost in costs.items():
        for by in COSTS:
            yield ResultRow(run, condition, repetition, by, TRAINING, row, cost[by], None, None, False, False)


def _stored_results(run: Run) -> list[MetricResult]:
    """Return the measurements in a run folder that are about its members' weights, one for each question.

    Where several answer, that of most members counts, then one under the usual conditions, then of most samples.
    """
    now = _hashes(run)
    best: dict[tuple[str, str], MetricResult] = {}
    for name in run.store.names("metrics"):
        found = _measurement(run.store.get_json(name))
        if any(now.get(member, hash_) != hash_ for member, hash_ in found.hashes.items()):
            continue
        key = found.metric, found.split
        if key not in best or _weight(found) > _weight(best[key]):
            best[key] = found
    return list(best.values())


def _weight(found: MetricResult) -> tuple[int, bool, int]:
    varied = found.data.get("augmentation", "none") != "none"
    usual = found.data.get("batchnorm") != "train" and not found.data.get("normalize_logits") and not varied
    return len(found.hashes), usual, int(found.data.get("samples", 0))


def _hashes(run: Run) -> dict[str, str]:
    """Return the hashes of the weights that are there; where they were dropped, nothing is known to be out of date."""
    there = [n for n, each in enumerate(run.all_progress()) if each.weights and run.store.has(each.weights)]
    return {f"member {number}": run.weights_hash(number) for number in there}


def _measurement(tree: Mapping[str, Any]) -> MetricResult:
    nan = float("nan")
    rows = {
        row: Estimate(nan if each["value"] is None else each["value"], each["stderr"], each.get("mc_stderr"))
        for row, each in tree["rows"].items()
    }
    facts = (tree["higher_is_better"], tree["weights"], tree["data"], tree["hashes"], tree["group"])
    return MetricResult(
        tree["metric"], tree["split"], rows, *facts, _in_percent(tree["metric"]), tree.get("definition", "")
    )


@lru_cache(maxsize=256)
def _in_percent(measure: str) -> bool:
    """Say whether a measure is shown in percent, by its name."""
    try:
        return get_metrics([measure.removesuffix(" by size")])[measure.removesuffix(" by size")].percent
    except (PlateauxError, KeyError):  # a probe, a sum of others, or a measure from outside
        return False
