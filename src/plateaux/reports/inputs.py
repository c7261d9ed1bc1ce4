"""What a report is about, read from run folders and studies: findings, courses of training, and where the rest lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from plateaux.core.errors import RunError, StorageError
from plateaux.reports.figures.training import Course
from plateaux.reports.query import result_label
from plateaux.storage.backends import open_store
from plateaux.storage.run import Run
from plateaux.studies.grid import condition_label
from plateaux.studies.results import RESULTS, ResultRow, read_results, results_from_run, results_from_study


@dataclass(frozen=True, slots=True)
class RunSection:
    """One run of a report."""

    name: str
    condition: Mapping[str, Any]
    repetition: int
    results: Sequence[ResultRow]
    courses: Sequence[Course]
    recipe: Mapping[str, Any]
    run: Run | None = None  # its folder, where that is at hand


@dataclass(frozen=True, slots=True)
class ReportInputs:
    """Runs, and the question they answer."""

    title: str
    sections: Sequence[RunSection]
    question: str = ""
    baseline: Mapping[str, Any] = field(default_factory=dict)
    draw: Sequence[str] = ()  # the only figures to draw; all, if none is named

    @property
    def results(self) -> list[ResultRow]:
        return [each for chapter in self.sections for each in chapter.results]

    def courses(self) -> dict[str, list[Course]]:
        """Return the courses of training by condition."""
        found: dict[str, list[Course]] = {}
        for each in self.sections:
            found.setdefault(each.name, []).extend(each.courses)
        return found


def read(paths: Sequence[str | Path]) -> ReportInputs:
    """Return the book of some run folders and studies: a folder with results.json, or that file alone."""
    if not paths:
        raise RunError("Nothing to report on: name a run folder or a study folder")
    books = [_study(path) if _is_study(path) else _run(path) for path in paths]
    runs = _with_unique_names([each for book in books for each in book.sections if not book.question])
    rest = [each for book in books if book.question for each in (_under(book) if len(books) > 1 else book.sections)]
    first = books[0]
    draw = tuple(dict.fromkeys(name for book in books for name in book.draw))
    title = first.title if len(books) == 1 else f"{first.title} and {len(books) - 1} more"
    return ReportInputs(title, [*runs, *rest], first.question, first.baseline, draw)


def _under(book: ReportInputs) -> list[RunSection]:
    """Return the runs of a study with the study's name in their conditions: others may have the same factors."""
    return [_conditioned(each, {"study": book.title, **each.condition}, each.repetition) for each in book.sections]


def _is_study(path: str | Path) -> bool:
    return Path(path).is_file() or (Path(path) / RESULTS).is_file()


def _run(path: str | Path) -> ReportInputs:
    if not open_store(path).has("run.json"):
        words = "a run folder, which has run.json, nor a study, which has results.json"
        raise RunError(f"{path} is neither {words}: `plateaux train` and `plateaux study` make them")
    run = Run.open(path)
    courses = [_course(run, number) for number in range(run.recipe.members)]
    name = Path(path).resolve().name
    chapter = RunSection(name, {}, 0, results_from_run(run), courses, run.recipe.to_dict(), run)
    return ReportInputs(name, [chapter])


def _study(path: str | Path) -> ReportInputs:
    results = read_results(path)
    found: dict[tuple[str, str, int], list[ResultRow]] = {}
    for each in results_from_study(path):
        found.setdefault((each.run, condition_label(each.condition), each.repetition), []).append(each)
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    chapters = []
    for several in found.values():
        first, entry = several[0], results["runs"][several[0].run]
        courses = list(entry.get("log", {}).values())
        run = _opened(folder / str(entry.get("folder", "")))
        facts = (courses, entry.get("recipe", {}), run)
        chapters.append(RunSection(result_label(first), first.condition, first.repetition, several, *facts))
    told = results.get("study", {})
    draw = told.get("figures", {}).get("draw", ())
    question = str(told.get("question") or "A study")
    title = folder.resolve().name if Path(path).is_dir() or Path(path).name == RESULTS else Path(path).stem
    return ReportInputs(title, chapters, question, told.get("baseline", {}), tuple(map(str, draw)))


def _opened(root: Path) -> Run | None:
    try:
        return Run.open(root)
    except RunError:  # the numbers came without their folders
        return None


def _course(run: Run, number: int) -> Course:
    try:
        return [line for line in run.log(number) if "train loss" in line]
    except (StorageError, ValueError):  # a log that is lost costs a curve, not the report
        return []


def _with_unique_names(chapters: Sequence[RunSection]) -> list[RunSection]:
    """Return runs with what differs in their recipes as their condition; the same but for the seed are repetitions."""
    if len(chapters) < 2:
        return list(chapters)
    flat = [_flat(each.recipe) for each in chapters]
    keys = [key for key in dict.fromkeys(key for each in flat for key in each) if key.partition(".")[0] not in _ASIDE]
    apart = [key for key in keys if len({str(each.get(key)) for each in flat}) > 1]
    short = {key: _short(key, apart) for key in apart}
    made = [{short[key]: each[key] for key in apart if each.get(key) is not None} for each in flat]
    seeds = [each.get("seed") for each in flat]
    found: list[RunSection] = []
    seen: dict[str, list[Any]] = {}
    for chapter, condition, seed in zip(chapters, made, seeds, strict=True):
        earlier = seen.setdefault(condition_label(condition), [])
        if seed in earlier:  # the same recipe twice: only the folder tells them apart
            condition = {"run": chapter.name, **condition}
            earlier = seen.setdefault(condition_label(condition), [])
        found.append(_conditioned(chapter, condition, len(earlier)))
        earlier.append(seed)
    return found


_ASIDE = ("seed", "executor", "run", "probe")


def _conditioned(chapter: RunSection, condition: Mapping[str, Any], repetition: int) -> RunSection:
    findings = [replace(each, condition=condition, repetition=repetition) for each in chapter.results]
    name = condition_label(condition) or chapter.name
    return replace(chapter, name=name, condition=condition, repetition=repetition, results=findings)


def _flat(tree: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _flat(value, f"{at}{name}.") if isinstance(value, Mapping) else {f"{at}{name}": value}
    return found


def _short(key: str, others: Sequence[str]) -> str:
    """Return the last word of a key, or its section where that is `name`, if no other key is called so."""
    *sections, last = key.split(".")
    word = sections[-1] if last == "name" and sections else last
    same = [other for other in others if other.split(".")[-1] == last]
    return word if len(same) == 1 or last == "name" else key
