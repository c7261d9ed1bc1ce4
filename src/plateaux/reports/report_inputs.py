"""Inputs of a report, read from run folders and studies: results, training logs, and run folders."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.recipe import flatten, short_key
from plateaux.core.errors import PlateauxError, RunError, StorageError
from plateaux.evaluation.run_warnings import run_warnings
from plateaux.reports.figures.training import TrainingLog
from plateaux.reports.query import result_label
from plateaux.storage.json_shapes import read_shape
from plateaux.storage.remote_store import open_store
from plateaux.storage.run import Run, RunLike
from plateaux.studies.grid import condition_label
from plateaux.studies.output_config import FigureConfig, TableConfig
from plateaux.studies.result_rows import (
    RESULTS,
    ResultRow,
    StudyResults,
    read_results,
    results_from_run,
    results_from_study,
)

RUN_FOLDER = re.compile(r"runs/[\w-]{1,100}")  # an untrusted results file must not name another folder
IGNORED_SECTIONS = ("seed", "executor", "run", "probe")  # recipe keys that are not part of a condition


@dataclass(frozen=True, slots=True)
class RunSection:
    """One run of a report."""

    name: str
    condition: Mapping[str, Any]
    repetition: int
    results: Sequence[ResultRow]
    logs: Sequence[TrainingLog]
    recipe: Mapping[str, Any]
    run: Run | None = None  # None if the run folder is missing
    warnings: Mapping[str, str] = field(default_factory=dict)  # by name


@dataclass(frozen=True, slots=True)
class ReportInputs:
    """The runs of a report and the question of the study."""

    title: str
    sections: Sequence[RunSection]
    question: str = ""
    baseline: Mapping[str, Any] = field(default_factory=dict)
    figures: Sequence[str] = ()  # families of figures to draw; empty: all
    tables: Sequence[TableConfig] = ()  # of the study
    declared: Sequence[FigureConfig] = ()  # figures of the study

    @property
    def results(self) -> list[ResultRow]:
        return [result for section in self.sections for result in section.results]

    def training_logs(self) -> dict[str, list[TrainingLog]]:
        """Return the training logs of all members by condition."""
        logs: dict[str, list[TrainingLog]] = {}
        for section in self.sections:
            logs.setdefault(section.name, []).extend(section.logs)
        return logs


def read_inputs(paths: Sequence[RunLike], components: Components = NO_COMPONENTS) -> ReportInputs:
    """Read runs and studies; a study is a folder with results.json, or that file alone."""
    if not paths:
        raise RunError("Nothing to report on. Give a run folder or a study folder.")
    sources = [_read_source(path, components) for path in paths]
    runs = _with_unique_names([section for each in sources for section in each.sections if not each.question])
    has_several = len(sources) > 1
    studies = [_with_study_name(each) if has_several else each.sections for each in sources if each.question]
    rest = [section for sections in studies for section in sections]
    first = sources[0]
    figures = tuple(dict.fromkeys(name for each in sources for name in each.figures))
    title = first.title if len(sources) == 1 else f"{first.title} and {len(sources) - 1} more"
    own = (first.tables, first.declared) if len(sources) == 1 else ((), ())
    return ReportInputs(title, [*runs, *rest], first.question, first.baseline, figures, *own)


def _with_study_name(inputs: ReportInputs) -> list[RunSection]:
    """Return the runs of a study with the name of the study in their conditions; studies may share factors."""
    return [
        _with_condition(section, {"study": inputs.title, **section.condition}, section.repetition)
        for section in inputs.sections
    ]


def _read_source(path: RunLike, components: Components) -> ReportInputs:
    if isinstance(path, Run):
        return _read_run(path)
    if Path(path).is_file() or (Path(path) / RESULTS).is_file():
        return _read_study(path, components)
    if not open_store(path).has("run.json"):
        raise RunError(
            f"{path} is neither a run folder (with run.json) nor a study (with results.json). Create one with "
            "`plateaux train` or `plateaux study`."
        )
    return _read_run(Run.open(path, components))


def _read_run(run: Run) -> ReportInputs:
    logs = [_read_log(run, number) for number in range(run.recipe.members)]
    name = Path(str(run)).resolve().name
    results = [replace(each, run=name) for each in results_from_run(run)]  # without the folders of this machine
    section = RunSection(name, {}, 0, results, logs, run.recipe.to_dict(), run, run_warnings(run))
    return ReportInputs(name, [section])


def _read_study(path: str | Path, components: Components) -> ReportInputs:
    results = results_from_study(path)
    stored = read_shape(StudyResults, read_results(path), path)
    by_run: dict[tuple[str, str, int], list[ResultRow]] = {}
    for result in results:
        by_run.setdefault((result.run, condition_label(result.condition), result.repetition), []).append(result)
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    sections = []
    for rows in by_run.values():
        first, entry = rows[0], stored.runs[rows[0].run]
        run = _open_run(folder / entry.folder, components) if RUN_FOLDER.fullmatch(entry.folder) else None
        rest = (list(entry.log.values()), entry.recipe, run, entry.warnings)
        sections.append(RunSection(result_label(first), first.condition, first.repetition, rows, *rest))
    question = stored.study.question or "A study"
    title = folder.resolve().name if Path(path).is_dir() or Path(path).name == RESULTS else Path(path).stem
    figures = stored.study.figures
    declared = (figures.only, stored.study.tables, figures.draw)
    return ReportInputs(title, sections, question, stored.study.baseline, *declared)


def _open_run(root: Path, components: Components) -> Run | None:
    try:
        return Run.open(root, components)
    except (PlateauxError, OSError):  # the results were copied without their run folders, or those are damaged
        return None


def _read_log(run: Run, number: int) -> TrainingLog:
    try:
        return [line for line in run.log(number) if "train loss" in line]
    except (StorageError, ValueError):  # a damaged log costs a curve, not the report
        return []


def _with_unique_names(sections: Sequence[RunSection]) -> list[RunSection]:
    """Return runs with the differing keys of their recipes as conditions; different seeds are repetitions."""
    if len(sections) < 2:
        return list(sections)
    flat = [flatten(section.recipe) for section in sections]
    known = dict.fromkeys(key for each in flat for key in each)
    keys = [key for key in known if key.partition(".")[0] not in IGNORED_SECTIONS]
    varying = [key for key in keys if len({str(each.get(key)) for each in flat}) > 1]
    short = {key: _short_key(key, varying) for key in varying}
    conditions = [
        {short[key]: _without_folder(each[key]) for key in varying if each.get(key) is not None} for each in flat
    ]
    seeds = [each.get("seed") for each in flat]
    unique: list[RunSection] = []
    seeds_by_label: dict[str, list[Any]] = {}
    for section, condition, seed in zip(sections, conditions, seeds, strict=True):
        earlier = seeds_by_label.setdefault(condition_label(condition), [])
        if seed in earlier:  # the same recipe twice: add the name of the folder
            condition = {"run": section.name, **condition}
            earlier = seeds_by_label.setdefault(condition_label(condition), [])
        unique.append(_with_condition(section, condition, len(earlier)))
        earlier.append(seed)
    return unique


def _without_folder(value: Any) -> Any:
    """Return the last part of an absolute path, which would tell the folders of this machine, else the value."""
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _with_condition(section: RunSection, condition: Mapping[str, Any], repetition: int) -> RunSection:
    results = [replace(each, condition=condition, repetition=repetition) for each in section.results]
    name = condition_label(condition) or section.name
    return replace(section, name=name, condition=condition, repetition=repetition, results=results)


def _short_key(key: str, others: Sequence[str]) -> str:
    """Return the short name of a recipe key if no other key has it, otherwise the full key."""
    last = key.split(".")[-1]
    is_unique = sum(other.split(".")[-1] == last for other in others) == 1
    return short_key(key) if is_unique or last == "name" else key
