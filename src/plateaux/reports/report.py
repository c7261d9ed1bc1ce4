"""A report, put together: a front page, figures and tables over all runs, then some runs one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.core.errors import RecipeError, suggest
from plateaux.core.formatting import pluralize
from plateaux.core.text_table import Table
from plateaux.reports import artifacts, tables
from plateaux.reports.figures import (
    accuracy,
    curves,
    gallery,
    landscape,
    partition,
    sharpness_diversity,
    training,
    uncertainty,
)
from plateaux.reports.inputs import ReportInputs, RunSection, read
from plateaux.reports.query import DIVERSITY, SHARPNESS, first_measured, result_label, swept_factor
from plateaux.reports.style import ReportFigure
from plateaux.reports.summary import CARDS, MemberCard, SummaryLine, cards, summary
from plateaux.storage.run import Run
from plateaux.studies.results import ResultRow

FAMILIES = (
    "sharpness_diversity", "accuracy_bars", "over_size", "severity", "against", "reliability", "roc", "training",
    "sam_sets", "gallery", "landscape",
)  # fmt: skip
SIZES = ("accuracy", "nll")  # whose curves over the ensemble's size are drawn
DETAILS = 3  # runs shown one by one, unless told otherwise
Plan = tuple[str, Callable[[], ReportFigure | None]]
"""A figure to draw: its family, and how."""


@dataclass(frozen=True, slots=True)
class ReportPart:
    """A section of a report."""

    title: str
    figures: Sequence[ReportFigure] = ()
    tables: Sequence[Table] = ()
    cards: Sequence[MemberCard] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """All that a page shows, before it is a page."""

    title: str
    question: str
    about: str
    summary: Sequence[SummaryLine]
    parts: Sequence[ReportPart]
    results: Sequence[ResultRow] = field(repr=False)

    def figures(self) -> Iterator[tuple[str, ReportFigure]]:
        """Yield every figure under a name of its own."""
        seen: dict[str, int] = {}
        for part in self.parts:
            for each in part.figures:
                seen[each.name] = seen.get(each.name, 0) + 1
                yield each.name if seen[each.name] == 1 else f"{each.name}_{seen[each.name]}", each


def report(
    paths: Sequence[str | Path],
    *,
    max_runs: int = DETAILS,
    only_figures: Sequence[str] = (),
    components: Components = NO_COMPONENTS,
    figures: bool = True,
) -> Report:
    """Return the report on run folders and studies."""
    return compose(read(paths), max_runs=max_runs, only_figures=only_figures, components=components, figures=figures)


def compose(
    book: ReportInputs,
    *,
    max_runs: int = DETAILS,
    only_figures: Sequence[str] = (),
    components: Components = NO_COMPONENTS,
    figures: bool = True,
) -> Report:
    """Return the report of a book; `draw` names the only families of figures to draw."""
    wanted = tuple(only_figures or book.draw or FAMILIES)
    for name in wanted:
        if name not in FAMILIES:
            raise RecipeError(f"There is no figure called {name!r}; {suggest(name, FAMILIES)}")
    findings = book.results
    alone = len(book.sections) == 1
    over_all = _drawn(_over_all(book, findings), wanted if figures else ())
    sheets = [*tables.metric_tables(findings), *tables.corruption_tables(findings), *tables.ood_tables(findings)]
    sheets += tables.differences(findings, book.baseline)
    fitting = [part for sheet in sheets for part in sheet.split_columns(max_columns=tables.COLUMNS, number_titles=True)]
    parts = [ReportPart("All runs" if not alone else "This run", over_all, fitting)]
    shown = max_runs if figures else 0
    for chapter in book.sections[:shown]:
        parts.append(_details(chapter, wanted, alone, components))
    parts = [part for part in parts if part.figures or part.tables or part.cards]
    return Report(book.title, book.question, _about(book, shown), summary(findings), parts, findings)


def _over_all(book: ReportInputs, findings: Sequence[ResultRow]) -> Iterator[Plan]:
    several = len(book.sections) > 1
    if several:
        yield "sharpness_diversity", lambda: sharpness_diversity.sharpness_diversity(findings)
    yield "accuracy_bars", lambda: accuracy.accuracy_bars(findings)
    for measure in SIZES:
        yield "over_size", partial(curves.over_size, findings, measure=measure)
    yield "severity", lambda: curves.severity(findings)
    if (factor := swept_factor(findings)) is not None:
        for measure, on in _swept_measures(findings):
            yield "against", partial(curves.against, findings, measure=measure, on=on, factor=factor)
    if several:
        yield "reliability", lambda: uncertainty.reliability(findings)
    yield "training", lambda: training.training(book.courses())


def _swept_measures(findings: Sequence[ResultRow]) -> list[tuple[str, str]]:
    """Return what is drawn against a factor: how good, how different, how alarmed by their differences, how flat."""
    wanted = (first_measured(findings, ("accuracy",), "test"), first_measured(findings, DIVERSITY, "test"))
    more = (first_measured(findings, ("pds",)), first_measured(findings, SHARPNESS))
    return list(dict.fromkeys(each for each in (*wanted, *more) if each is not None))


def _details(chapter: RunSection, wanted: Sequence[str], alone: bool, components: Components) -> ReportPart:
    several = cards(chapter.results)
    sheets = [_members(several)] if len(several) > CARDS else []
    title = "Members" if alone else f"{chapter.name}, repetition {chapter.repetition}"
    drawings = _drawn(_of_run(chapter, components), wanted)
    return ReportPart(title, drawings, sheets, several if len(several) <= CARDS else ())


def _of_run(chapter: RunSection, components: Components) -> Iterator[Plan]:
    """Yield the figures of one run, of which most take more than its numbers."""
    run = chapter.run
    if run is None:
        yield "reliability", lambda: uncertainty.reliability(chapter.results)
        return
    said = artifacts.load_predictions(run)
    yield "reliability", lambda: uncertainty.reliability(chapter.results) or _reliability(chapter, said)
    strange = list(dict.fromkeys(each.split for each in chapter.results if each.metric == "ood"))
    yield "roc", lambda: uncertainty.roc(artifacts.load_ood_scores(said, strange))
    for met in artifacts.load_partitions(run):
        yield "sam_sets", partial(partition.sam_sets, met)
    yield "gallery", lambda: _gallery(run, said, components)
    pictures = artifacts.load_landscape_data(run)
    for tree in pictures.values():
        yield "landscape", partial(landscape.lines, tree)
    for kind in ("surface", "plane"):
        alike = {name: tree for name, tree in pictures.items() if tree.get("kind") == kind}
        yield "landscape", partial(landscape.surfaces, alike)


def _reliability(chapter: RunSection, said: Mapping[str, artifacts.LoadedPredictions]) -> ReportFigure | None:
    """Draw from what members said, where nobody asked for the bins."""
    if "test" not in said or not chapter.results:
        return None
    return uncertainty.reliability(artifacts.reliability_rows(*said["test"], chapter.results[0]))


def _gallery(run: Run, said: Mapping[str, artifacts.LoadedPredictions], components: Components) -> ReportFigure | None:
    images = artifacts.load_images(run, components) if "test" in said else None
    return gallery.gallery(said["test"][0], images, run.info.data.labels) if images else None


def _drawn(plans: Iterable[Plan], wanted: Sequence[str]) -> list[ReportFigure]:
    """Return the figures that are wanted and have something to show; one that cannot be read costs no report."""
    found: list[ReportFigure | None] = []
    for family, draw in plans:
        if family in wanted:
            with artifacts.ignore_unreadable():
                found.append(draw())
    return [each for each in found if each is not None]


def _members(several: Sequence[MemberCard]) -> Table:
    """Return many members as a table."""
    header = list(dict.fromkeys(name for card in several for name, _ in card.facts))
    rows = [[card.title, *(dict(card.facts).get(name, "") for name in header)] for card in several]
    return Table.from_text("Members", ["", *header], rows)


def _about(book: ReportInputs, shown: int) -> str:
    runs = len(book.sections)
    labels = {result_label(each) for each in book.results}
    words = pluralize(runs, "run")
    if len(labels) not in (0, runs):
        words += f" of {pluralize(len(labels), 'condition')}"
    words += f", {pluralize(len(book.results), 'number')}"
    if runs > shown > 0:
        first = "The first is shown by itself" if shown == 1 else f"The first {shown} are shown one by one"
        words += f". {first}; all are in the tables"
    return f"{words}."
