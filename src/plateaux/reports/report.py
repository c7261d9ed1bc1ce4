"""A report: summary, figures and tables of all runs, then details of the first runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import Any

from plateaux.core.errors import RecipeError, check_names, suggest
from plateaux.core.formatting import pluralize
from plateaux.core.stats.comparisons import CORRECTIONS, Correction, Inference
from plateaux.core.text_table import Table
from plateaux.reports import artifacts, report_tables
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
from plateaux.reports.query import DIVERSITY, SHARPNESS, first_measured, result_label, swept_factor
from plateaux.reports.report_inputs import ReportInputs, RunSection, read_inputs
from plateaux.reports.style import MAX_RUNS, ReportFigure, restyle
from plateaux.reports.summary import MAX_CARDS, MemberCard, SummaryLine, cards, summary, warning_lines
from plateaux.storage.run import Run, RunLike
from plateaux.studies.declared_tables import declared_tables, select
from plateaux.studies.result_rows import ResultRow

FAMILIES = (
    "sharpness_diversity", "accuracy_bars", "over_size", "severity", "against", "reliability", "roc", "training",
    "sam_sets", "gallery", "landscape",
)  # fmt: skip
SAMPLE_IMAGES = "gallery"  # the family that shows samples, which may be private: only on request
SIZE_METRICS = ("accuracy", "nll")  # drawn against the ensemble size
DECLARABLE: Mapping[str, Callable[..., ReportFigure | None]] = {  # families that a study may draw with options
    "sharpness_diversity": sharpness_diversity.sharpness_diversity,
    "accuracy_bars": accuracy.accuracy_bars,
    "over_size": curves.over_size,
    "severity": curves.severity,
    "against": curves.against,
}
OVER = "over repetitions, or for a single run over its samples (of a mean of members, over members)"
NO_OPTIONS: Mapping[str, Any] = {}
Plan = tuple[str, Callable[[], ReportFigure | None]]
"""The family of a figure, and the function that draws it."""


@dataclass(frozen=True, slots=True)
class ReportPart:
    """A section of a report."""

    title: str
    figures: Sequence[ReportFigure] = ()
    tables: Sequence[Table] = ()
    cards: Sequence[MemberCard] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """The contents of a report, independent of the output format."""

    title: str
    question: str
    about: str
    summary: Sequence[SummaryLine]
    parts: Sequence[ReportPart]
    results: Sequence[ResultRow] = field(repr=False)

    def figures(self) -> Iterator[tuple[str, ReportFigure]]:
        """Yield all figures with unique names."""
        counts: dict[str, int] = {}
        for part in self.parts:
            for figure in part.figures:
                count = counts[figure.name] = counts.get(figure.name, 0) + 1
                yield figure.name if count == 1 else f"{figure.name}_{count}", figure


def report(
    sources: Sequence[RunLike] | ReportInputs,
    *,
    max_runs: int = MAX_RUNS,
    only_figures: Sequence[str] = (),
    figures: bool = True,
    sample_images: bool = False,
    standard_errors: bool = False,
    correction: Correction = "none",
    figure_options: Mapping[str, Any] = NO_OPTIONS,
) -> Report:
    """Return the report of runs and studies.

    Args:
        sources: `Run` objects, their folders, and folders or files of studies, or what was read from them.
        max_runs: How many runs are shown individually.
        only_figures: Families of figures to draw. Empty: all, or those of the study.
        figures: Whether to draw figures.
        sample_images: Whether to show samples of the data set; also if `only_figures` names their figure.
        standard_errors: Whether ± and error bars are standard errors instead of halves of 95 % intervals.
        correction: "holm" corrects the comparisons of each metric for their number.
        figure_options: `width` and `height` in inches, `font` by name, `font_size` in points, and `labels`, new texts
            by the texts that they replace.
    """
    inputs = sources if isinstance(sources, ReportInputs) else read_inputs(sources)
    check_names("figure_options", figure_options, set(signature(restyle).parameters) - {"figures"})
    families = tuple(only_figures or inputs.figures or FAMILIES)
    for name in families:
        if name not in FAMILIES:
            raise RecipeError(f"There is no figure {name!r}; {suggest(name, FAMILIES)}")
    if correction not in CORRECTIONS:
        raise RecipeError(f"There is no correction {correction!r}; {suggest(correction, CORRECTIONS)}")
    if not sample_images and SAMPLE_IMAGES not in only_figures:
        families = tuple(name for name in families if name != SAMPLE_IMAGES)
    inference = Inference(standard_errors, correction)
    results = inputs.results
    is_single = len(inputs.sections) == 1
    drawn = _declared_figures(inputs, results, inference) if figures and inputs.declared else []
    drawn += _draw(_plan_all_runs(inputs, results, inference), families if figures else ())
    found_tables = declared_tables(inputs.tables, results, inference)
    found_tables += [
        *report_tables.metric_tables(results, inference),
        *report_tables.corruption_tables(results, inference),
        *report_tables.ood_tables(results, inference),
        *report_tables.differences(results, inputs.baseline, inference),
    ]
    narrow = [
        part
        for table in found_tables
        for part in table.split_columns(max_columns=report_tables.MAX_COLUMNS, number_titles=True)
    ]
    parts = [ReportPart("All runs" if not is_single else "This run", drawn, narrow)]
    detailed = max_runs if figures else 0
    for section in inputs.sections[:detailed]:
        parts.append(_details(section, families, is_single, inference))
    parts = [part for part in parts if part.figures or part.tables or part.cards]
    if figure_options:
        restyle([drawing.figure for part in parts for drawing in part.figures], **figure_options)
    about = f"{_describe(inputs, detailed)} ± is {inference.meaning}: {OVER}."
    lines = [*summary(results, inference), *warning_lines([section.warnings for section in inputs.sections])]
    return Report(inputs.title, inputs.question, about, lines, parts, results)


def _declared_figures(inputs: ReportInputs, results: Sequence[ResultRow], inference: Inference) -> list[ReportFigure]:
    """Return the figures that the study declares, under the titles that it gives them."""
    figures = []
    for config in inputs.declared:
        if config.family not in DECLARABLE:
            raise RecipeError(f"[figures] family = {config.family!r}; {suggest(config.family, DECLARABLE)}")
        draw = DECLARABLE[config.family]
        known = set(signature(draw).parameters) - {"results", "inference"}
        if unknown := sorted(set(config.options) - known):
            name = unknown[0]
            raise RecipeError(f"The figure {config.family!r} has no option {name!r}; {suggest(name, known)}")
        figure = draw(select(results, config.where), inference=inference, **config.options)
        if figure is not None:
            figures.append(replace(figure, title=config.title))
    return figures


def _plan_all_runs(inputs: ReportInputs, results: Sequence[ResultRow], inference: Inference) -> Iterator[Plan]:
    has_several = len(inputs.sections) > 1
    if has_several:
        yield "sharpness_diversity", lambda: sharpness_diversity.sharpness_diversity(results, inference=inference)
    yield "accuracy_bars", lambda: accuracy.accuracy_bars(results, inference=inference)
    for metric in SIZE_METRICS:
        yield "over_size", partial(curves.over_size, results, metric=metric, inference=inference)
    yield "severity", lambda: curves.severity(results, inference=inference)
    if (factor := swept_factor(results)) is not None:
        for metric, split in _swept_measures(results):
            options: dict[str, Any] = {"metric": metric, "split": split, "factor": factor}
            yield "against", partial(curves.against, results, inference=inference, **options)
    if has_several:
        yield "reliability", lambda: uncertainty.reliability(results)
    yield "training", lambda: training.training(inputs.training_logs())


def _swept_measures(results: Sequence[ResultRow]) -> list[tuple[str, str]]:
    """Return the metrics drawn against a factor: accuracy, diversity on test and OOD samples, and sharpness."""
    on_test = (first_measured(results, ("accuracy",), "test"), first_measured(results, DIVERSITY, "test"))
    others = (first_measured(results, ("pds",)), first_measured(results, SHARPNESS))
    return list(dict.fromkeys(metric for metric in (*on_test, *others) if metric is not None))


def _details(section: RunSection, families: Sequence[str], is_single: bool, inference: Inference) -> ReportPart:
    members = cards(section.results, inference)
    has_many = len(members) > MAX_CARDS
    title = "Members" if is_single else f"{section.name}, repetition {section.repetition}"
    figures = _draw(_plan_run(section), families)
    return ReportPart(title, figures, [_member_table(members)] if has_many else [], () if has_many else members)


def _plan_run(section: RunSection) -> Iterator[Plan]:
    """Yield the figures of one run; most of them need its run folder."""
    run = section.run
    if run is None:
        yield "reliability", lambda: uncertainty.reliability(section.results)
        return
    predictions = artifacts.load_predictions(run)
    yield (
        "reliability",
        lambda: uncertainty.reliability(section.results) or _reliability_from_predictions(section, predictions),
    )
    ood_splits = list(dict.fromkeys(result.split for result in section.results if result.metric == "ood"))
    yield "roc", lambda: uncertainty.roc(artifacts.load_ood_scores(predictions, ood_splits))
    for sets in artifacts.load_partitions(run):
        yield "sam_sets", partial(partition.sam_sets, sets)
    yield "gallery", lambda: _gallery(run, predictions)
    plots = artifacts.load_landscape_data(run)
    for tree in plots.values():
        yield "landscape", partial(landscape.lines, tree)
    for kind in ("surface", "plane"):
        same_kind = {name: tree for name, tree in plots.items() if tree.get("kind") == kind}
        yield "landscape", partial(landscape.surfaces, same_kind)


def _reliability_from_predictions(
    section: RunSection, predictions: Mapping[str, artifacts.LoadedPredictions]
) -> ReportFigure | None:
    """Draw the reliability diagram from cached predictions if its bins were not measured."""
    if "test" not in predictions or not section.results:
        return None
    return uncertainty.reliability(artifacts.reliability_rows(*predictions["test"], section.results[0]))


def _gallery(run: Run, predictions: Mapping[str, artifacts.LoadedPredictions]) -> ReportFigure | None:
    images = artifacts.load_images(run) if "test" in predictions else None
    return gallery.gallery(predictions["test"][0], images, run.info.data.labels) if images else None


def _draw(plans: Iterable[Plan], families: Sequence[str]) -> list[ReportFigure]:
    """Return the figures of some families; those without data or with unreadable data are skipped."""
    figures: list[ReportFigure | None] = []
    for family, draw in plans:
        if family in families:
            with artifacts.ignore_unreadable():
                figures.append(draw())
    return [figure for figure in figures if figure is not None]


def _member_table(members: Sequence[MemberCard]) -> Table:
    """Return the members as a table instead of cards."""
    header = list(dict.fromkeys(name for card in members for name, _ in card.facts))
    rows = [[card.title, *(dict(card.facts).get(name, "") for name in header)] for card in members]
    return Table.from_text("Members", ["", *header], rows)


def _describe(inputs: ReportInputs, detailed: int) -> str:
    runs = len(inputs.sections)
    labels = {result_label(result) for result in inputs.results}
    text = pluralize(runs, "run")
    if len(labels) not in (0, runs):
        text += f" of {pluralize(len(labels), 'condition')}"
    text += f", {pluralize(len(inputs.results), 'number')}"
    if runs > detailed > 0:
        first = "The first run has" if detailed == 1 else f"The first {detailed} runs have"
        text += f". {first} details below; the tables contain all runs"
    return f"{text}."
