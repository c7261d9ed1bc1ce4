"""Results of a run or a study as flat records: one number with its run, condition, metric, split, and row."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from plateaux.config.code import changed_code
from plateaux.config.specs import user_code
from plateaux.core.errors import PlateauxError, RunError
from plateaux.core.ranges import Finite, StoredInt
from plateaux.core.row_names import MEAN_OF_MEMBERS, RowName
from plateaux.core.types import Estimate
from plateaux.evaluation.metric_specs import get_metrics
from plateaux.evaluation.results import MetricResult
from plateaux.evaluation.robustness import robustness
from plateaux.storage.json_shapes import read_shape
from plateaux.storage.local_store import LocalStore
from plateaux.storage.run import Run
from plateaux.studies.grid import condition_label
from plateaux.studies.output_config import FiguresConfig, TableConfig
from plateaux.studies.packed_results import FORMAT, UNPACKED_FORMAT, unpack
from plateaux.training.cost import Cost, measured_cost

RESULTS = "results.json"
COSTS = ("epochs", "passes", "seconds")
TRAINING = "training"  # split name of training costs
ADVICE = "restore it, or delete it and run the study again"
DELETE = "delete it and evaluate again"
NO_CONDITION: Mapping[str, Any] = MappingProxyType({})
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredValue:
    """One number of a stored metric; NaN and infinity are stored as null."""

    value: Finite | None
    stderr: Finite | None
    mc_stderr: Finite | None = None

    @property
    def number(self) -> float:
        return math.nan if self.value is None else float(self.value)


@dataclass(frozen=True, slots=True)
class StoredMetric:
    """A metric in `metrics/*.json` of a run, or in the results of a study."""

    metric: str
    split: str
    rows: dict[str, StoredValue]
    higher_is_better: bool | None
    weights: dict[str, str] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)
    group: str = "performance"
    percent: bool | None = None
    definition: str = ""
    code: str = ""


@dataclass(frozen=True, slots=True)
class _SampleInfo:
    """What is read from the description of a metric's samples."""

    samples: StoredInt = 0
    corruption: str = ""
    severity: StoredInt = 0


@dataclass(frozen=True, slots=True)
class CostRow:
    """The training cost of a member, or the mean over members."""

    epochs: Finite
    passes: Finite
    seconds: Finite


@dataclass(frozen=True, slots=True)
class StoredRun:
    """One run in the results of a study."""

    metrics: tuple[StoredMetric, ...]
    costs: dict[str, CostRow]
    evaluation_hash: str | None = None
    code: dict[str, str] = field(default_factory=dict)  # that trained it: hashes, by section of the recipe
    warnings: dict[str, str] = field(default_factory=dict)  # by name
    folder: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)
    log: dict[str, tuple[dict[str, Any], ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredTrial:
    """One condition of a study and the run that measures it."""

    run: str
    condition: dict[str, Any]
    repetition: StoredInt
    code: dict[str, str] = field(default_factory=dict)  # of the last start of the study


@dataclass(frozen=True, slots=True)
class StoredStudy:
    """What a report shows of the study itself."""

    question: str = ""
    baseline: dict[str, Any] = field(default_factory=dict)
    tables: tuple[TableConfig, ...] = ()
    figures: FiguresConfig = field(default_factory=FiguresConfig)


@dataclass(frozen=True, slots=True)
class StudyResults:
    """The content of results.json."""

    conditions: tuple[StoredTrial, ...]
    runs: dict[str, StoredRun]
    evaluation_hash: str | None = None
    study: StoredStudy = field(default_factory=StoredStudy)


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
    members: int = 0  # of a mean of members: how many

    def __post_init__(self) -> None:
        """Accept the row's name as a plain string."""
        object.__setattr__(self, "row", RowName.parse(self.row))


def results_from_run(run: Run, condition: Mapping[str, Any] = NO_CONDITION, repetition: int = 0) -> list[ResultRow]:
    """Return all stored results of the current weights of a run, and the training cost."""
    results = _stored_results(run)
    results += robustness(results)
    stored = [read_shape(StoredMetric, to_stored(result), run.store.root) for result in results]
    costs = {row: CostRow(**cost) for row, cost in cost_rows(run).items()}
    return list(_result_rows(str(run.store.root), condition, repetition, stored, costs))


def results_from_study(path: str | Path) -> list[ResultRow]:
    """Return all results of a study, from its folder or from its `results.json` alone."""
    results = read_results(path)
    if not results:
        raise RunError(f"{path} has no {RESULTS}: it is not a study folder, or none of its runs is finished.")
    stored = read_shape(StudyResults, results, path, ADVICE)
    rows: list[ResultRow] = []
    for trial in stored.conditions:
        entry = stored.runs.get(trial.run)
        if entry is None:
            continue
        if stored.evaluation_hash not in (None, entry.evaluation_hash) or changed_code(entry.code, trial.code):
            label = f"{condition_label(trial.condition)} #{trial.repetition}".strip()
            logger.warning("%s is left out: it is of an earlier version of the study or of its code", label)
            continue
        rows += _result_rows(trial.run, trial.condition, trial.repetition, entry.metrics, entry.costs)
    return rows


def read_results(path: str | Path) -> dict[str, Any]:
    """Return the stored results of a study; empty if it has not started."""
    file = Path(path)
    folder, name = (file.parent, file.name) if file.is_file() else (file, RESULTS)
    store = LocalStore(folder)
    if not store.has(name):
        return {}
    results = store.get_json(name, has_digest=False)
    version = results.get("format") if isinstance(results, dict) else None
    if version not in (UNPACKED_FORMAT, FORMAT):
        known = f"{UNPACKED_FORMAT} and {FORMAT}"
        raise RunError(f"{folder / name} has format {version!r}; this version of Plateaux reads formats {known}")
    if version == FORMAT:
        results = unpack(results, folder / name, ADVICE)
    read_shape(StudyResults, results, folder / name, ADVICE)
    return dict(results)


def to_stored(result: MetricResult) -> dict[str, Any]:
    """Return a metric result as stored in results.json."""
    return {**result.to_dict(), "percent": result.percent}


def to_metric_result(tree: Any, file: object) -> MetricResult:
    """Return a metric as stored in a run, or in results.json, as a result."""
    stored = read_shape(StoredMetric, tree, file, DELETE)
    read_shape(_SampleInfo, stored.data, file, DELETE)
    values = stored.rows.items()
    rows = {RowName.parse(row): Estimate(value.number, value.stderr, value.mc_stderr) for row, value in values}
    facts = (stored.higher_is_better, stored.weights, stored.data, stored.hashes, stored.group)
    percent = _in_percent(stored.metric) if stored.percent is None else stored.percent
    return MetricResult(stored.metric, stored.split, rows, *facts, percent, stored.definition, stored.code)


def cost_rows(run: Run, members: int | None = None) -> dict[str, dict[str, float]]:
    """Return the training cost of all members, or of the first `members`, by row."""
    try:
        member_ids = range(members or run.recipe.members)
        costs = {RowName.member(number): measured_cost(run, number) for number in member_ids}
    except PlateauxError:  # an external method that is not trusted: untrusted runs are only data
        return {}
    mean = Cost(*(sum(getattr(cost, by) for cost in costs.values()) / len(costs) for by in COSTS))
    return {row: asdict(cost) for row, cost in {**costs, MEAN_OF_MEMBERS: mean}.items()}


def _result_rows(
    run: str,
    condition: Mapping[str, Any],
    repetition: int,
    metrics: Iterable[StoredMetric],
    costs: Mapping[str, CostRow],
) -> Iterator[ResultRow]:
    for stored in metrics:
        percent = _in_percent(stored.metric) if stored.percent is None else stored.percent
        where = (run, condition, repetition, stored.metric, stored.split)
        names = [RowName.parse(row) for row in stored.rows]
        members = sum(name.kind == "member" and not name.part for name in names)
        for name, value in zip(names, stored.rows.values(), strict=True):
            estimate = (value.number, value.stderr, value.mc_stderr)
            count = members if name.base == MEAN_OF_MEMBERS else 0
            yield ResultRow(*where, name, *estimate, stored.higher_is_better, percent, count)
    for row, cost in costs.items():
        for by in COSTS:
            where = (run, condition, repetition, by, TRAINING)
            yield ResultRow(*where, RowName.parse(row), getattr(cost, by), None, None, False, False)


def _stored_results(run: Run) -> list[MetricResult]:
    """Return the stored results of the current weights, one for each metric and split.

    Of several results, the one with the most members counts, then with default settings, then with the most samples.
    """
    current = _weight_hashes(run)
    best: dict[tuple[str, str], MetricResult] = {}
    for name in run.store.names("metrics"):
        result = to_metric_result(run.store.get_json(name), run.store.root / name)
        if any(current.get(member, hash_) != hash_ for member, hash_ in result.hashes.items()):
            continue
        if result.code and result.code != (user_code(result.metric, run.components.trust) or result.code):
            logger.warning("%s on %s is left out: its code has changed; evaluate again", result.metric, result.split)
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


@lru_cache(maxsize=256)
def _in_percent(metric: str) -> bool:
    """Return whether a metric is shown in percent, by its name."""
    try:
        return get_metrics([metric.removesuffix(" by size")])[metric.removesuffix(" by size")].percent
    except (PlateauxError, KeyError):  # a probe, a derived metric, or an external metric
        return False
