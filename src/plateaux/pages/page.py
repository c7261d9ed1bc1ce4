"""A report, put together: a front page, figures and tables over all runs, then some runs one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from plateaux.build import NOTHING_GIVEN, Given
from plateaux.errors import RecipeError, nearest
from plateaux.findings import Finding
from plateaux.pages import kept, tables
from plateaux.pages.book import Book, Chapter, read
from plateaux.pages.figures import bars, careful, curves, gallery, ground, plane, training, trust
from plateaux.pages.front import CARDS, Answer, Card, cards, front
from plateaux.pages.look import Drawing
from plateaux.pages.picking import DIVERSITY, SHARPNESS, first_of, label_of, swept
from plateaux.pages.tables import Entry, Sheet
from plateaux.pages.words import counted

FAMILIES = (
    "sharpness_diversity", "accuracy_bars", "over_size", "severity", "against", "reliability", "roc", "training",
    "careful", "gallery", "landscape",
)  # fmt: skip
SIZES = ("accuracy", "nll")  # whose curves over the ensemble's size are drawn
DETAILS = 3  # runs shown one by one, unless told otherwise


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
    given: Given = NOTHING_GIVEN,
    figures: bool = True,
) -> Report:
    """Return the report on run folders and studies."""
    return compose(read(paths), details=details, draw=draw, given=given, figures=figures)


def compose(
    book: Book,
    *,
    details: int = DETAILS,
    draw: Sequence[str] = (),
    given: Given = NOTHING_GIVEN,
    figures: bool = True,
) -> Report:
    """Return the report of a book; `draw` names the only families of figures to draw."""
    wanted = tuple(draw or book.draw or FAMILIES)
    for name in wanted:
        if name not in FAMILIES:
            raise RecipeError(f"There is no figure called {name!r}; {nearest(name, FAMILIES)}")
    findings = book.findings
    alone = len(book.chapters) == 1
    over_all = _over_all(book, findings) if figures else iter(())
    sheets = [*tables.summary(findings), *tables.severities(findings), *tables.strangers(findings)]
    sheets += tables.differences(findings, book.baseline)
    fitting = [part for sheet in sheets for part in tables.narrow(sheet)]
    parts = [Part("All runs" if not alone else "This run", _only(over_all, wanted), fitting)]
    for chapter in book.chapters[: details if figures else 0]:
        parts.append(_details(chapter, wanted, alone, given))
    parts = [part for part in parts if part.drawings or part.sheets or part.cards]
    return Report(book.title, book.question, _about(book, details), front(findings), parts, findings)


def _over_all(book: Book, findings: Sequence[Finding]) -> Iterator[Drawing | None]:
    if len(book.chapters) > 1:
        yield plane.sharpness_diversity(findings)
    yield bars.accuracy_bars(findings)
    for measure in SIZES:
        yield curves.over_size(findings, measure=measure)
    yield curves.severity(findings)
    if (factor := swept(findings)) is not None:
        for where in _swept_measures(findings):
            yield curves.against(findings, measure=where[0], on=where[1], factor=factor)
    if len(book.chapters) > 1:
        yield trust.reliability(findings)
    yield training.training(book.courses())


def _swept_measures(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    """Return what is drawn against a factor: how good, how different, how alarmed by their differences, how flat."""
    wanted = (first_of(findings, ("accuracy",), "test"), first_of(findings, DIVERSITY, "test"))
    more = (first_of(findings, ("pds",)), first_of(findings, SHARPNESS))
    return list(dict.fromkeys(each for each in (*wanted, *more) if each is not None))


def _details(chapter: Chapter, wanted: Sequence[str], alone: bool, given: Given) -> Part:
    several = cards(chapter.findings)
    sheets = [_members(several)] if len(several) > CARDS else []
    title = "Members" if alone else f"{chapter.name}, repetition {chapter.repetition}"
    drawings = _only(_of_run(chapter, given), wanted)
    return Part(title, drawings, sheets, several if len(several) <= CARDS else ())


def _of_run(chapter: Chapter, given: Given) -> Iterator[Drawing | None]:
    """Yield the figures of one run that take more than its numbers."""
    run = chapter.run
    if run is None:
        yield trust.reliability(chapter.findings)
        return
    said = kept.said_of(run)
    drawn = trust.reliability(chapter.findings)
    if drawn is None and "test" in said and chapter.findings:
        with kept.if_it_can_be_read():
            drawn = trust.reliability(kept.reliability_of(*said["test"], chapter.findings[0]))
    yield drawn
    strange = list(dict.fromkeys(each.on for each in chapter.findings if each.measure == "ood"))
    yield trust.roc(kept.scores_of(said, strange))
    for met in kept.meetings_of(run):
        with kept.if_it_can_be_read():
            yield careful.careful(met)
    images = kept.images_of(run, "test", given) if "test" in said else None
    if images is not None:
        with kept.if_it_can_be_read():
            yield gallery.gallery(said["test"][0], images, run.about["data"].get("labels", ()))
    pictures = kept.pictures_of(run)
    with kept.if_it_can_be_read():
        for tree in pictures.values():
            yield ground.lines(tree)
        yield ground.surfaces({n: tree for n, tree in pictures.items() if tree["kind"] == "surface"})
        yield ground.surfaces({n: tree for n, tree in pictures.items() if tree["kind"] == "plane"})


def _only(drawings: Iterator[Drawing | None], wanted: Sequence[str]) -> list[Drawing]:
    return [each for each in drawings if each is not None and each.name.startswith(tuple(wanted))]


def _members(several: Sequence[Card]) -> Sheet:
    """Return many members as a table."""
    header = list(dict.fromkeys(name for card in several for name, _ in card.facts))
    rows = [(card.title, [Entry(dict(card.facts).get(name, "")) for name in header]) for card in several]
    return Sheet("Members", ["", *header], rows)


def _about(book: Book, details: int) -> str:
    runs = len(book.chapters)
    labels = {label_of(each) for each in book.findings}
    words = counted(runs, "run")
    if len(labels) not in (0, runs):
        words += f" of {counted(len(labels), 'condition')}"
    words += f", {counted(len(book.findings), 'number')}"
    if runs > details:
        words += f". The first {details} are shown one by one; all are in the tables"
    return f"{words}."
