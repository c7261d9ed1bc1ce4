"""Pictures of a run's landscapes: slices around members, paths between them, the plane through three.

Every picture is three files in the run folder, landscape/<name>.png, .svg and .json, written when it is finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any, Literal

from plateaux.config.builders.model import architecture_hash
from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.core.callbacks import Say, Seen, nothing
from plateaux.core.errors import Interrupted, RecipeError, RunError, suggest
from plateaux.core.row_names import RowName
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.options import EvalOptions
from plateaux.loss_landscape import plots
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.plots import LandscapeFigure
from plateaux.loss_landscape.run_probes import ProbeSession, ProgressMeter
from plateaux.loss_landscape.session import ProbeSettings
from plateaux.loss_landscape.slices import Line, Surface, direction, line, path, plane, surface
from plateaux.storage.run import Run, RunLike

KINDS = ("slices", "paths", "plane")
LINE, SURFACE, PATH, PLANE = 51, 21, 21, 21  # points of each, to a side
SAMPLES = 512


def plot_landscape(
    root: RunLike,
    kinds: Sequence[str] = KINDS,
    *,
    split: str = "train",
    limit: int = SAMPLES,
    members: Sequence[int] | None = None,
    batchnorm: Literal["eval", "train"] = "eval",
    augment: bool = False,
    normalize_logits: bool = False,
    components: Components = NO_COMPONENTS,
    device: str | None = None,
    seen: Seen = nothing,
    say: Say = nothing,
) -> list[LandscapeFigure]:
    """Draw landscapes: `slices` around members, `paths` between each two, the `plane` through the first three."""
    panel = Evaluator(
        Run.open(root), components=components, options=EvalOptions(members=members, device=device, cache_logits="off")
    )
    _check(kinds, panel)
    gallery = PlotJob(ProbeSession(panel, split, ProbeSettings(batchnorm, augment, normalize_logits), most=limit))
    made: list[LandscapeFigure] = []
    try:
        for picture in gallery.all(kinds, seen):
            for ending, content in picture.files().items():
                panel.run.store.put(f"landscape/{picture.name}.{ending}", content)
            say(f"{panel.run.store.root}/landscape/{picture.name}.png: {picture.caption}")
            made.append(picture)
    except KeyboardInterrupt:
        raise Interrupted(f"Stopped; {len(made)} pictures are drawn and written to {root}/landscape") from None
    return made


def check_plots(kinds: Sequence[str]) -> None:
    """Refuse pictures that there are not, or all where matplotlib is missing: before an hour of work."""
    for kind in kinds:
        if kind not in KINDS:
            raise RecipeError(f"There is no picture called {kind!r}; {suggest(kind, KINDS)}")
    plots.check_matplotlib()


def _check(kinds: Sequence[str], panel: Evaluator) -> None:
    check_plots(kinds)
    for kind, least in (("paths", 2), ("plane", 3)):
        if kind in kinds and len(panel.numbers) < least:
            raise RecipeError(
                f"A picture of {kind} takes {least} members, and there is {len(panel.numbers)}; leave it out"
            )
    alike = {architecture_hash(panel.recipe, number, panel.components) for number in panel.numbers}
    if len(alike) > 1 and {"paths", "plane"} & set(kinds):
        raise RunError(
            "Between members of different architectures there is no straight path; draw slices, or choose --members"
        )


@dataclass(slots=True)
class PlotJob:
    """Looks around, and draws what it sees."""

    scene: ProbeSession
    meter: ProgressMeter | None = None

    def all(self, kinds: Sequence[str], seen: Seen) -> Iterator[LandscapeFigure]:
        """Yield the pictures one by one; how long it will take is said before the first."""
        costs = {number: cost for number, cost in self._costs(kinds).items() if cost}
        self.meter = self.scene.meter(costs, f"pictures of {' and '.join(kinds)}", seen)
        if "slices" in kinds:
            yield from self._slices()
        if "paths" in kinds:
            yield self._paths()
        if "plane" in kinds:
            yield self._plane()

    def _slices(self) -> Iterator[LandscapeFigure]:
        numbers = self.scene.evaluator.numbers
        found: dict[str, Line] = {}
        for number in numbers:
            found[f"member {number}"] = self._line(number)
        yield plots.slices(found, self._about(directions="one each, seeded", scale="filter", vectors="still"))
        for number in numbers:
            seen = self._surface(number)
            about = self._about(directions="two, seeded", scale="filter", vectors="still")
            yield plots.surface(f"surface-{number}", f"member {number}", seen, about)

    def _paths(self) -> LandscapeFigure:
        panel = self.scene.evaluator
        found: dict[str, Line] = {}
        for a, b in combinations(panel.numbers, 2):
            ends = panel.run.weights(a), panel.run.weights(b)
            found[RowName.pair(a, b)] = self._look(
                a, self._anew(PATH), partial(path, start=ends[0], end=ends[1], points=PATH)
            )
        return plots.paths(found, self._about())

    def _plane(self) -> LandscapeFigure:
        panel = self.scene.evaluator
        three = panel.numbers[:3]
        members = {f"member {number}": panel.run.weights(number) for number in three}
        found: Surface = self._look(three[0], self._anew(PLANE**2), partial(plane, members=members, points=PLANE))
        return plots.plane("plane-" + "-".join(map(str, three)), found, self._about())

    def _line(self, number: int) -> Line:
        def look(ground: LossSurface) -> Line:
            return line(ground, direction(ground.origin, ground.generator("slice", 0)), points=LINE)

        found: Line = self._look(number, self._passes(LINE), look)
        return found

    def _surface(self, number: int) -> Surface:
        def look(ground: LossSurface) -> Surface:
            x, y = (direction(ground.origin, ground.generator("slice", axis)) for axis in (0, 1))
            return surface(ground, x, y, points=SURFACE)

        found: Surface = self._look(number, self._passes(SURFACE**2), look)
        return found

    def _look(self, number: int, passes: float, look: Callable[[LossSurface], Any]) -> Any:
        assert self.meter is not None
        sample, pace = self.scene.sample, self.scene.throughputs[number]
        with self.meter.track(passes, pace), self.scene.loss_surface(number, sample, self.meter.on_forward) as ground:
            return look(ground)

    def _passes(self, points: int) -> float:
        return points * len(self.scene.sample.ids) / 3

    def _anew(self, points: int) -> float:
        """Return the passes where BatchNorm's statistics are taken anew at every point."""
        twice = self.scene.metadata(self.scene.sample)["batchnorm"] == "eval"
        return self._passes(points) * (2 if twice else 1)

    def _costs(self, kinds: Sequence[str]) -> dict[int, float]:
        """Return what each member costs, in passes; a path costs the member it starts from."""
        numbers = self.scene.evaluator.numbers
        costs = dict.fromkeys(numbers, self._passes(LINE + SURFACE**2) if "slices" in kinds else 0.0)
        for a, _ in combinations(numbers, 2) if "paths" in kinds else []:
            costs[a] += self._anew(PATH)
        costs[numbers[0]] += self._anew(PLANE**2) if "plane" in kinds else 0.0
        return costs

    def _about(self, **more: str) -> dict[str, Any]:
        panel = self.scene.evaluator
        hashes = {f"member {number}": panel.hashes[i] for i, number in enumerate(panel.numbers)}
        return {"split": self.scene.split.name, **self.scene.metadata(self.scene.sample), "hashes": hashes, **more}
