"""Plots of the loss landscape of a run: slices around members, paths between two, and the plane through three.

Every plot has three files in the run folder, `landscape/<name>.png`, `.svg`, and `.json`, written as soon as it is
finished.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any, Literal, TypeVar

from plateaux.config.builders.model import architecture_hash
from plateaux.core.errors import Interrupted, RecipeError, RunError, suggest
from plateaux.core.formatting import pluralize
from plateaux.core.progress import Progress, log_messages
from plateaux.core.row_names import RowName
from plateaux.evaluation.evaluator import Evaluator
from plateaux.loss_landscape import plots
from plateaux.loss_landscape.loss_surface import LossSurface, ProbeOptions
from plateaux.loss_landscape.plot_style import DEFAULT_LIMIT, PLOT_KINDS
from plateaux.loss_landscape.plots import LandscapeFigure
from plateaux.loss_landscape.run_probes import ProbeSession, ProgressMeter
from plateaux.loss_landscape.slices import (
    LossCurve,
    LossGrid,
    evaluate_grid,
    evaluate_line,
    evaluate_path,
    evaluate_plane,
    random_direction,
)
from plateaux.storage.run import RunLike

logger = logging.getLogger(__name__)

T = TypeVar("T")

LINE_POINTS, PATH_POINTS = 51, 21
GRID_POINTS, PLANE_POINTS = 21, 21  # per axis
DIRECTION_METADATA = {"normalization": "filter", "vectors": "fixed"}


def plot_landscape(
    run: RunLike,
    kinds: Sequence[str] = PLOT_KINDS,
    *,
    split: str = "train",
    limit: int = DEFAULT_LIMIT,
    members: Sequence[int] | None = None,
    batchnorm: Literal["eval", "train"] = "eval",
    augment: bool = False,
    normalize_logits: bool = False,
    device: str | None = None,
    progress: Progress = log_messages,
) -> list[LandscapeFigure]:
    """Plot the loss landscape of a run and write the plots to the run folder.

    Args:
        run: A run, its folder, or its URL.
        kinds: "slices" (the loss around every member), "paths" (on the straight line between every two members), and
            "plane" (in the plane through the first three members).
        split: "train", "test", or "validation".
        limit: Number of samples.
        members: Ids of the members. None: all trained members.
        batchnorm: Use running statistics ("eval"), or the statistics of each batch ("train").
        augment: Augment the samples as in training, in the same way for every member.
        normalize_logits: Center the logits of every sample and scale them to norm one before the loss.
        device: "cpu", "cuda", "cuda:1", ... None: the best available device.
        progress: Receives `WorkDone` events, in forward-and-backward passes of one sample.
    """
    evaluator = Evaluator(run, members=members, device=device)
    _check_members(kinds, evaluator)
    options = ProbeOptions(batchnorm, augment, normalize_logits)
    job = PlotJob(ProbeSession(evaluator, split, options, limit=limit))
    store = evaluator.run.store
    figures: list[LandscapeFigure] = []
    try:
        for figure in job.figures(kinds, progress):
            for extension, content in figure.files().items():
                name = f"landscape/{figure.name}.{extension}"
                store.put_json(name, json.loads(content)) if extension == "json" else store.put(name, content)
            logger.info("%s/landscape/%s.png: %s", store.root, figure.name, figure.caption)
            figures.append(figure)
    except KeyboardInterrupt:
        done = pluralize(len(figures), "plot")
        raise Interrupted(f"Interrupted; {done} complete and written to {store.root}/landscape") from None
    return figures


def check_plots(kinds: Sequence[str]) -> None:
    """Raise an error for unknown plots, or if matplotlib is not installed, before any computation."""
    for kind in kinds:
        if kind not in PLOT_KINDS:
            raise RecipeError(f"There is no plot called {kind!r}; {suggest(kind, PLOT_KINDS)}")
    plots.figure_style()


def _check_members(kinds: Sequence[str], evaluator: Evaluator) -> None:
    check_plots(kinds)
    for kind, required in (("paths", 2), ("plane", 3)):
        if kind in kinds and len(evaluator.numbers) < required:
            raise RecipeError(
                f"The plot {kind!r} needs {required} members, but only {len(evaluator.numbers)} "
                "are selected; select more members, or leave this plot out"
            )
    architectures = {
        architecture_hash(evaluator.recipe, member_id, evaluator.components) for member_id in evaluator.numbers
    }
    if len(architectures) > 1 and {"paths", "plane"} & set(kinds):
        raise RunError(
            "Paths and planes need members of one architecture, and the selected members have "
            f"{len(architectures)}; plot slices, or select other members with --members"
        )


@dataclass(slots=True)
class PlotJob:
    """Evaluates loss surfaces and plots them."""

    session: ProbeSession
    meter: ProgressMeter | None = None

    def figures(self, kinds: Sequence[str], progress: Progress) -> Iterator[LandscapeFigure]:
        """Yield the plots one by one. The estimated run time is logged before the first."""
        costs = {member_id: cost for member_id, cost in self._member_costs(kinds).items() if cost}
        self.meter = self.session.start_meter(costs, f"plots ({', '.join(kinds)})", progress)
        if "slices" in kinds:
            yield from self._slices()
        if "paths" in kinds:
            yield self._paths()
        if "plane" in kinds:
            yield self._plane()

    def _slices(self) -> Iterator[LandscapeFigure]:
        member_ids = self.session.evaluator.numbers
        curves = {f"member {member_id}": self._line(member_id) for member_id in member_ids}
        yield plots.plot_slices(curves, self._metadata(directions="one per member, seeded", **DIRECTION_METADATA))
        for member_id in member_ids:
            grid = self._grid(member_id)
            metadata = self._metadata(directions="two, seeded", **DIRECTION_METADATA)
            yield plots.plot_grid(f"surface-{member_id}", f"member {member_id}", grid, metadata)

    def _paths(self) -> LandscapeFigure:
        evaluator = self.session.evaluator
        curves: dict[str, LossCurve] = {}
        for a, b in combinations(evaluator.numbers, 2):
            start, end = evaluator.run.weights(a), evaluator.run.weights(b)
            evaluate = partial(evaluate_path, start=start, end=end, points=PATH_POINTS)
            curves[RowName.pair(a, b)] = self._evaluate(a, self._passes_with_update_bn(PATH_POINTS), evaluate)
        return plots.plot_paths(curves, self._metadata())

    def _plane(self) -> LandscapeFigure:
        evaluator = self.session.evaluator
        three = evaluator.numbers[:3]
        members = {f"member {member_id}": evaluator.run.weights(member_id) for member_id in three}
        evaluate = partial(evaluate_plane, members=members, points=PLANE_POINTS)
        grid = self._evaluate(three[0], self._passes_with_update_bn(PLANE_POINTS**2), evaluate)
        return plots.plot_plane("plane-" + "-".join(map(str, three)), grid, self._metadata())

    def _line(self, member_id: int) -> LossCurve:
        def evaluate(surface: LossSurface) -> LossCurve:
            direction = random_direction(surface.origin, surface.generator("slice", 0))
            return evaluate_line(surface, direction, points=LINE_POINTS)

        return self._evaluate(member_id, self._passes(LINE_POINTS), evaluate)

    def _grid(self, member_id: int) -> LossGrid:
        def evaluate(surface: LossSurface) -> LossGrid:
            x, y = (random_direction(surface.origin, surface.generator("slice", axis)) for axis in (0, 1))
            return evaluate_grid(surface, x, y, points=GRID_POINTS)

        return self._evaluate(member_id, self._passes(GRID_POINTS**2), evaluate)

    def _evaluate(self, member_id: int, passes: float, evaluate: Callable[[LossSurface], T]) -> T:
        assert self.meter is not None
        sample, seconds = self.session.sample, self.session.seconds_per_pass[member_id]
        with (
            self.meter.track(passes, seconds),
            self.session.loss_surface(member_id, sample, self.meter.on_forward) as surface,
        ):
            return evaluate(surface)

    def _passes(self, points: int) -> float:
        return points * len(self.session.sample.ids) / 3

    def _passes_with_update_bn(self, points: int) -> float:
        """Return the number of passes if BatchNorm statistics are recomputed at every point."""
        update_bn = self.session.metadata(self.session.sample)["batchnorm"] == "eval"
        return self._passes(points) * (2 if update_bn else 1)

    def _member_costs(self, kinds: Sequence[str]) -> dict[int, float]:
        """Return the cost per member in passes. A path counts for the member at its start."""
        member_ids = self.session.evaluator.numbers
        costs = dict.fromkeys(member_ids, self._passes(LINE_POINTS + GRID_POINTS**2) if "slices" in kinds else 0.0)
        for a, _ in combinations(member_ids, 2) if "paths" in kinds else []:
            costs[a] += self._passes_with_update_bn(PATH_POINTS)
        costs[member_ids[0]] += self._passes_with_update_bn(PLANE_POINTS**2) if "plane" in kinds else 0.0
        return costs

    def _metadata(self, **more: str) -> dict[str, Any]:
        evaluator = self.session.evaluator
        hashes = {f"member {member_id}": evaluator.hashes[i] for i, member_id in enumerate(evaluator.numbers)}
        return {
            "split": self.session.split.name,
            **self.session.metadata(self.session.sample),
            "hashes": hashes,
            **more,
        }
