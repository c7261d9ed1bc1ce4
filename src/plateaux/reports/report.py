"""A report, put together: a front page, figures and tables over all runs, then some runs one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.core.errors import RecipeError, suggest
from plateaux.core.formatting import pluralize
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
from plateaux.reports.inputs import Book, Chapter, read
from plateaux.reports.query import DIVERSITY, SHARPNESS, first_of, label_of, swept
from plateaux.reports.style import Drawing
from plateaux.reports.summary import CARDS, Answer, Card, cards, front
from plateaux.reports.tables import Entry, Sheet
from plateaux.storage.run import Run
from plateaux.studies.results import Finding

FAMILIES = (
    "sharpness_diversity", "accuracy_bars", "over_size", "severity", "against", "reliability", "roc", "training",
    "careful", "gallery", "landscape",
)  # fmt: skip
SIZES = ("accuracy", "nll")  # whose curves over the ensemble's size are drawn
DETAILS = 3  # runs shown one by one, unless told otherwise
Plan = tuple[str, Callable[[], Drawing | None]]
"""A figure to draw: its family, and how."""


@dataclass(frozen=True, slots=True)
class Part:
    """A section of a report."""

    title: str
    drawings: Sequence[Drawing] = ()
    sheets: Sequence[Sheet] = ()
    cards: Sequence[Card] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """All that a page shows, before it is a page."""

    title: str
    question: str
    about: str
    answers: Sequence[Answer]
    parts: Sequence[Part]
    findings: Sequence[Finding] = field(repr=False)

    def drawings(self) -> Iterator[tuple[str, Drawing]]:
        """Yield every figure under a name of its own."""
        seen: dict[str, int] = {}
        for part in self.parts:
            for each in part.drawings:
                seen[each.name] = seen.get(each.name, 0) + 1
                yield each.name if seen[each.name] == 1 else f"{each.name}_{seen[each.name]}", each


def report(
    paths: Sequence[str | Path],
    *,
    details: int = DETAILS,
    draw: Sequence[str] = (),
    given: Components = NO_COMPONENTS,
    figures: bool = True,
) -> Report:
    """Return the report on run folders and studies."""
    return compose(read(paths), details=details, draw=draw, given=given, figures=figures)


def compose(
    book: Book,
    *,
    details: int = DETAILS,
    draw: Sequence[str] = (),
    given: Components = NO_COMPONENTS,
    figures: bool = True,
) -> Report:
    """Return the report of a book; `draw` names the only families of figures to draw."""
    wanted = tuple(draw or book.draw or FAMILIES)
    for name in wanted:
        if name not in FAMILIES:
            raise RecipeError(f"There is no figure called {name!r}; {suggest(name, FAMILIES)}")
    findings = book.findings
    alone = len(book.chapters) == 1
    over_all = _drawn(_over_all(book, findings), wanted if figures else ())
    sheets = [*tables.summary(findings), *tables.severities(findings), *tables.strangers(findings)]
    sheets += tables.differences(findings, book.baseline)
    fitting = [part for sheet in sheets for part in tables.narrow(sheet)]
    parts = [Part("All runs" if not alone else "This run", over_all, fitting)]
    shown = details if figures else 0
    for chapter in book.chapters[:shown]:
        parts.append(_details(chapter, wanted, alone, given))
    parts = [part for part in parts if part.drawings or part.sheets or part.cards]
    return Report(book.title, book.question, _about(book, shown), front(findings), parts, findings)


def _over_all(book: Book, findings: Sequence[Finding]) -> Iterator[Plan]:
    several = len(book.chapters) > 1
    if several:
        yield "sharpness_diversity", lambda: sharpness_diversity.sharpness_diversity(findings)
    yield "accuracy_bars", lambda: accuracy.accuracy_bars(findings)
    for measure in SIZES:
        yield "over_size", partial(curves.over_size, findings, measure=measure)
    yield "severity", lambda: curves.severity(findings)
    if (factor := swept(findings)) is not None:
        for measure, on in _swept_measures(findings):
            yield "against", partial(curves.against, findings, measure=measure, on=on, factor=factor)
    if several:
        yield "reliability", lambda: uncertainty.reliability(findings)
    yield "training", lambda: training.training(book.courses())


def _swept_measures(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    """Return what is drawn against a factor: how good, how different, how alarmed by their differences, how flat."""
    wanted = (first_of(findings, ("accuracy",), "test"), first_of(findings, DIVERSITY, "test"))
    more = (first_of(findings, ("pds",)), first_of(findings, SHARPNESS))
    return list(dict.fromkeys(each for each in (*wanted, *more) if each is not None))


def _details(chapter: Chapter, wanted: Sequence[str], alone: bool, given: Components) -> Part:
    several = cards(chapter.findings)
    sheets = [_members(several)] if len(several) > CARDS else []
    title = "Members" if alone else f"{chapter.name}, repetition {chapter.repetition}"
    drawings = _drawn(_of_run(chapter, given), wanted)
    return Part(title, drawings, sheets, several if len(several) <= CARDS else ())


def _of_run(chapter: Chapter, given: Components) -> Iterator[Plan]:
    """Yield the figures of one run, of which most take more than its numbers."""
    run = chapter.run
    if run is None:
        yield "reliability", lambda: uncertainty.reliability(chapter.findings)
        return
    said = artifacts.said_of(run)
    yield "reliability", lambda: uncertainty.reliability(chapter.findings) or _reliability(chapter, said)
    strange = list(dict.fromkeys(each.on for each in chapter.findings if each.measure == "ood"))
    yield "roc", lambda: uncertainty.roc(artifacts.scores_of(said, strange))
    for met in artifacts.meetings_of(run):
        yield "careful", partial(partition.careful, met)
    yield "gallery", lambda: _gallery(run, said, given)
    pictures = artifacts.pictures_of(run)
    for tree in pictures.values():
        yield "landscape", partial(landscape.lines, tree)
    for kind in ("surface", "plane"):
        alike = {name: tree for name, tree in pictures.items() if tree.get("kind") == kind}
        yield "landscape", partial(landscape.surfaces, alike)


def _reliability(chapter: Chapter, said: Mapping[str, artifacts.Heard]) -> Drawing | None:
    """Draw from what members said, where nobody asked for the bins."""
    if "test" not in said or not chapter.findings:
        return None
    return uncertainty.reliability(artifacts.reliability_of(*said["test"], chapter.findings[0]))


def _gallery(run: Run, said: Mapping[str, artifacts.Heard], given: Components) -> Drawing | None:
    images = artifacts.images_of(run, given) if "test" in said else None
    return gallery.gallery(said["test"][0], images, run.metadata["data"].get("labels", ())) if images else None


def _drawn(plans: Iterable[Plan], wanted: Sequence[str]) -> list[Drawing]:
    """Return the figures that are wanted and have something to show; one that cannot be read costs no report."""
    found: list[Drawing | None] = []
    for family, draw in plans:
        if family in wanted:
            with artifacts.if_it_can_be_read():
                found.append(draw())
    return [each for each in found if each is not None]


def _members(several: Sequence[Card]) -> Sheet:
    """Return many members as a table."""
    header = list(dict.fromkeys(name for card in several for name, _ in card.facts))
    rows = [(card.title, [Entry(dict(card.facts).get(name, "")) for name in header]) for card in several]
    return Sheet("Members", ["", *header], rows)


def _about(book: Book, shown: int) -> str:
    runs = len(book.chapters)
    labels = {label_of(each) for each in book.findings}
    words = pluralize(runs, "run")
    if len(labels) not in (0, runs):
        words += f" of {pluralize(len(labels), 'condition')}"
    words += f", {pluralize(len(book.findings), 'number')}"
    if runs > shown > 0:
        first = "The first is shown by itself" if shown == 1 else f"The first {shown} are shown one by one"
        words += f". {first}; all are in the tables"
    return f"{words}."
