"""Results of a run or a study as flat records: one number with its run, condition, metric, split, and row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.core.errors import PlateauxError, RunError
from plateaux.core.row_names import MEAN_OF_MEMBERS, RowName
from plateaux.core.types import Estimate
from plateaux.evaluation.metric_specs import get_metrics
from plateaux.evaluation.results import MetricResult
from plateaux.evaluation.robustness import robustness
from plateaux.storage.local_store import LocalStore
from plateaux.storage.run import Run
from plateaux.training.cost import Cost, measured_cost

RESULTS = "results.json"
FORMAT = 2
COSTS = ("epochs", "passes", "seconds")
TRAINING = "training"  # split name of training costs
NO_CONDITION: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ResultRow:
    """One number of one run."""

    run: str
    condition: Mapping[str, Any]  # factor -> value, such as {"method": "sam", "rho": 0.05, "width": 16}
    repetition: int
    metric: str
    split: str
    row: RowName
    value: float
    stderr: float | None
    mc_stderr: float | None
    higher_is_better: bool | None
    percent: bool

    def __post_init__(self) -> None:
        """Accept the row's name as a plain string."""
        object.__setattr__(self, "row", RowName.parse(self.row))


def results_from_run(run: Run, condition: Mapping[str, Any] = NO_CONDITION, repetition: int = 0) -> list[ResultRow]:
    """Return all stored results of the current weights of a run, and the training cost."""
    results = _stored_results(run)
    results += robustness(results)
    trees = [to_stored(result) for result in results]
    return list(_result_rows(str(run.store.root), condition, repetition, trees, cost_rows(run)))


def results_from_study(path: str | Path) -> list[ResultRow]:
    """Return all results of a study, from its folder or from its `results.json` alone."""
    results = read_results(path)
    if not results:
        raise RunError(f"{path} has no {RESULTS}: it is not a study folder, or none of its runs is finished.")
    rows: list[ResultRow] = []
    for trial in results["conditions"]:
        entry = results["runs"].get(trial["run"])
        # Entries with another hash are results of an earlier version of the study.
        if entry and results.get("evaluation_hash") in (None, entry.get("evaluation_hash")):
            key = (str(trial["run"]), trial["condition"], int(trial["repetition"]))
            rows += _result_rows(*key, entry["metrics"], entry["costs"])
    return rows


def read_results(path: str | Path) -> dict[str, Any]:
    """Return the stored results of a study; empty if it has not started."""
    file = Path(path)
    folder, name = (file.parent, file.name) if file.is_file() else (file, RESULTS)
    store = LocalStore(folder)
    if not store.has(name):
        return {}
    results = store.get_json(name)
    version = results.get("format") if isinstance(results, dict) else None
    if version != FORMAT:
        raise RunError(f"{folder / name} has format {version!r}; this version of Plateaux reads format {FORMAT}")
    return dict(results)


def to_stored(result: MetricResult) -> dict[str, Any]:
    """Return a metric result as stored in results.json."""
    return {**result.to_dict(), "percent": result.percent}


def cost_rows(
    run: Run, members: int | None = None, components: Components = NO_COMPONENTS
) -> dict[str, dict[str, float]]:
    """Return the training cost of all members, or of the first `members`, by row."""
    try:
        member_ids = range(members or run.recipe.members)
        costs = {RowName.member(number): measured_cost(run, number, components) for number in member_ids}
    except PlateauxError:  # an external method that is not trusted: untrusted runs are only data
        return {}
    mean = Cost(*(sum(getattr(cost, by) for cost in costs.values()) / len(costs) for by in COSTS))
    return {row: asdict(cost) for row, cost in {**costs, MEAN_OF_MEMBERS: mean}.items()}


def _result_rows(
    run: str,
    condition: Mapping[str, Any],
    repetition: int,
    metrics: Iterable[Mapping[str, Any]],
    costs: Mapping[str, Mapping[str, float]],
) -> Iterator[ResultRow]:
    for tree in metrics:
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
                RowName.parse(row),
                number,
                *errors,
                tree["higher_is_better"],
                percent,
            )
    for row, cost in costs.items():
        for by in COSTS:
            where = (run, condition, repetition, by, TRAINING, RowName.parse(row))
            yield ResultRow(*where, cost[by], None, None, False, False)


def _stored_results(run: Run) -> list[MetricResult]:
    """Return the stored results of the current weights, one for each metric and split.

    Of several results, the one with the most members counts, then with default settings, then with the most samples.
    """
    current = _weight_hashes(run)
    best: dict[tuple[str, str], MetricResult] = {}
    for name in run.store.names("metrics"):
        result = _metric_result(run.store.get_json(name))
        if any(current.get(member, hash_) != hash_ for member, hash_ in result.hashes.items()):
            continue
        key = result.metric, result.split
        if key not in best or _priority(result) > _priority(best[key]):
            best[key] = result
    return list(best.values())


def _priority(result: MetricResult) -> tuple[int, bool, int]:
    is_augmented = result.data.get("augmentation", "none") != "none"
    is_default = (
        result.data.get("batchnorm") != "train" and not result.data.get("normalize_logits") and not is_augmented
    )
    return len(result.hashes), is_default, int(result.data.get("samples", 0))


def _weight_hashes(run: Run) -> dict[str, str]:
    """Return the hashes of the existing weights; without weights, no result counts as outdated."""
    existing = [n for n, each in enumerate(run.all_progress()) if each.weights and run.store.has(each.weights)]
    return {RowName.member(number): run.weights_hash(number) for number in existing}


def _metric_result(tree: Mapping[str, Any]) -> MetricResult:
    rows = {RowName.parse(row): _estimate(value) for row, value in tree["rows"].items()}
    facts = (tree["higher_is_better"], tree["weights"], tree["data"], tree["hashes"], tree["group"])
    return MetricResult(
        tree["metric"], tree["split"], rows, *facts, _in_percent(tree["metric"]), tree.get("definition", "")
    )


def _estimate(stored: Mapping[str, Any]) -> Estimate:
    value = float("nan") if stored["value"] is None else stored["value"]
    return Estimate(value, stored["stderr"], stored.get("mc_stderr"))


@lru_cache(maxsize=256)
def _in_percent(metric: str) -> bool:
    """Return whether a metric is shown in percent, by its name."""
    try:
        return get_metrics([metric.removesuffix(" by size")])[metric.removesuffix(" by size")].percent
    except (PlateauxError, KeyError):  # a probe, a derived metric, or an external metric
        return False
