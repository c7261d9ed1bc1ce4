"""Plots of the loss landscape: contents, captions, reproducible files, and errors."""

from __future__ import annotations

import builtins
import json
import re
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from cases import recipe

from plateaux.config.builders.model import architecture_hash
from plateaux.core.errors import Interrupted, RecipeError, RunError
from plateaux.core.formatting import format_significant
from plateaux.loss_landscape import plots, render
from plateaux.loss_landscape.plots import LandscapeFigure
from plateaux.loss_landscape.slices import LossCurve, LossGrid, Mark
from plateaux.storage.open_run import open_run
from plateaux.training.train import train

TRUST = ("cases",)
METADATA = {"samples": 1000, "split": "train", "name": "hills"}
NAN = float("nan")


def bowl_curve(depth: float, *, statistics: Any = "own") -> LossCurve:
    at = (-1.0, -0.5, 0.0, 0.5, 1.0)
    return LossCurve(at, tuple(depth + t * t for t in at), (0.1,) * 5, (0.2, 0.5, 0.9, 0.5, 0.2), statistics)


def barrier_curve(height: float) -> LossCurve:
    return LossCurve((0.0, 0.5, 1.0), (1.0, 2.0 + height, 3.0), (0.1,) * 3, (0.9, 0.3, 0.7), "recomputed")


def make_grid(*rows: tuple[float, ...], **marks: Mark) -> LossGrid:
    return LossGrid((-1.0, 0.0, 1.0), (-1.0, 0.0, 1.0), rows, ((0.5,) * 3,) * 3, "none", marks)


ROWS = (1.0, 0.5, 1.0), (0.5, 0.2, 0.5), (1.0, 0.1, 1.0)
WIDE_ROWS = (90.0, 0.5, 90.0), (0.5, 0.2, NAN), (9.0, 0.1, 9.0)
ORIGIN = {"member": Mark(0.0, 0.0, 0.2, 0.5)}
THREE = {
    "member 0": Mark(-0.9, -0.5, 0.3, 0.9),
    "member 1": Mark(0.9, -0.5, 0.4, 0.9),
    "member 4": Mark(0, 0.8, 1, 0.9),
}


def svg_text(figure: LandscapeFigure) -> str:
    """Return all text of the SVG."""
    root = ElementTree.fromstring(figure._render("svg"))
    return " ".join(" ".join(node.itertext()) for node in root.iter() if node.tag.endswith("text"))


@cache
def all_figures() -> list[LandscapeFigure]:
    return [
        plots.plot_slices({"member 0": bowl_curve(1.0), "member 1": bowl_curve(2.0)}, METADATA),
        plots.plot_paths({"members 0 and 1": barrier_curve(4.0)}, METADATA),
        plots.plot_grid("surface-0", "member 0", make_grid(*ROWS, **ORIGIN), METADATA),
        plots.plot_plane("plane", make_grid(*ROWS, **THREE), METADATA),
    ]


@pytest.mark.slow
def test_a_figure_has_png_svg_and_json_files_without_external_references() -> None:
    for figure in all_figures():
        files = figure.files()
        assert not re.search(r"url\((?!#)|@import|<script|href=\"http", files["svg"].decode())
        assert files["png"].startswith(b"\x89PNG")
        assert ElementTree.fromstring(files["svg"]).tag.endswith("svg")
        stored = json.loads(files["json"])
        assert stored["caption"] == figure.caption
        assert stored["about"] == METADATA
        assert {"lines", "surface"} & set(stored)


@pytest.mark.slow
def test_equal_data_give_equal_bytes() -> None:
    one, other = (plots.plot_slices({"member 0": bowl_curve(1.0)}, METADATA) for _ in range(2))
    assert one.files() == other.files()


@pytest.mark.slow
def test_text_in_the_svg_is_searchable() -> None:
    first = all_figures()[0]
    assert "loss" in svg_text(first)
    assert re.sub(r"\s+", "", first.caption[:30]) in re.sub(r"\s+", "", svg_text(first))


@pytest.mark.slow
def test_captions_are_computed_from_the_data() -> None:
    slices, paths, grid, plane = (figure.caption for figure in all_figures())
    assert "2 members, each along a random direction" in slices
    assert "The loss is 1.00 to 2.00 at the member and 2.00 to 3.00 at a distance of 1." in slices
    assert (
        "Evaluated on 1,000 train samples of hills; BatchNorm uses the running statistics of the member; shaded"
        in slices
    )
    assert "The loss rises by 4.00 above the linear interpolation" in paths
    assert "by 4.00 above their mean" in paths
    assert "the error rises by 50.0 percentage points" in paths
    assert "0.200 at the member (dot); its minimum is at (0, 1): 0.100 (cross)" in grid
    assert "BatchNorm" not in grid
    assert "Members 0, 1 and 4 lie 1.58 to 1.80 apart" in plane
    assert "0.300 to 1.00 at the members and 0.200 at their centroid" in plane
    assert plots.plot_slices({"member 3": bowl_curve(1.0)}, METADATA).caption.startswith(
        "Member 3 along a random direction"
    )


def test_a_path_shows_its_barrier_if_there_is_one() -> None:
    steep, flat = (plots.plot_paths({"members 0 and 1": barrier_curve(height)}, METADATA) for height in (4.0, -1.0))
    assert "members 0 and 1: barrier 4.00" in svg_text(steep)
    assert "members 0 and 1: barrier 0" in svg_text(flat)
    assert len(steep.figure.axes[0].lines) == len(flat.figure.axes[0].lines) + 1 == 3
    assert steep.data["barriers"]["members 0 and 1"]["loss"] == {"above_line": 4.0, "above_mean": 4.0}


@pytest.mark.parametrize("pairs", [1, 3, 6, 10])
def test_the_legend_of_paths_is_above_all_curves(pairs: int) -> None:
    figure = plots.plot_paths({f"members {n} and {n + 1}": barrier_curve(4.0 - n / 9) for n in range(pairs)}, METADATA)
    figure.figure.canvas.draw()
    axes = figure.figure.axes[0]
    legend = axes.get_legend()
    assert legend is not None
    lowest = axes.transData.inverted().transform(legend.get_window_extent())[0][1]
    assert lowest > max(figure.data["lines"]["members 0 and 1"]["losses"])


@pytest.mark.slow
def test_losses_of_different_magnitude_use_a_logarithmic_scale() -> None:
    deep = LossCurve((-1.0, 0.0, 1.0), (9.0, 0.01, 9.0), (0.001,) * 3, (0.5,) * 3, "none")
    assert plots.plot_slices({"member 0": deep}, METADATA).figure.axes[0].get_yscale() == "log"
    assert plots.plot_slices({"member 0": bowl_curve(1.0)}, METADATA).figure.axes[0].get_yscale() == "linear"
    ticks = [
        svg_text(plots.plot_grid("s", "member 0", make_grid(*rows, **ORIGIN), METADATA)) for rows in (WIDE_ROWS, ROWS)
    ]
    assert "90.0" in ticks[0]  # the highest level, not its logarithm
    assert "1.00" in ticks[1]


@pytest.mark.slow
def test_nan_is_null_in_json_and_masked_in_the_plot() -> None:
    figure = plots.plot_grid("s", "member 0", make_grid(*WIDE_ROWS, **ORIGIN), METADATA)
    assert json.loads(figure.files()["json"])["surface"]["losses"][1][2] is None
    assert figure.files()["png"]
    with_nan = plots.plot_paths(
        {"members 0 and 1": LossCurve((0.0, 0.5, 1.0), (1.0, NAN, 1.0), (NAN,) * 3, (0.5,) * 3, "none")}, METADATA
    )
    assert "NaN" in with_nan.caption


def test_a_constant_loss_can_be_plotted() -> None:
    assert plots.plot_grid("s", "member 0", make_grid(*((0.0,) * 3,) * 3, **ORIGIN), METADATA).files()["png"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0"),
        (1234.5, "1234"),
        (12.345, "12.3"),
        (0.012345, "0.0123"),
        (1.5e-7, "1.50e-07"),
        (NAN, "NaN"),
    ],
)
def test_numbers_have_three_significant_digits(number: float, text: str) -> None:
    assert format_significant(number) == text


def test_more_curves_than_colors_differ_in_line_style() -> None:
    many = plots.plot_slices({f"member {number}": bowl_curve(1.0) for number in range(9)}, METADATA)
    styles = {(line.get_color(), line.get_linestyle()) for line in many.figure.axes[0].lines}
    assert len(styles) == 9


def test_the_error_without_matplotlib_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    original_import = builtins.__import__

    def import_without_matplotlib(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", import_without_matplotlib)
    with pytest.raises(RecipeError, match="pip install"):
        plots.figure_style()


# Plots of a run.


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    train(recipe("deep_ensemble", "conv_bn", members=3, samples=16), out, trust=TRUST)
    return out


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluate few points, and skip rendering, which is tested above."""
    monkeypatch.setattr(LandscapeFigure, "_render", lambda _, file_format: file_format.encode())
    for name, points in (("LINE_POINTS", 5), ("GRID_POINTS", 3), ("PATH_POINTS", 3), ("PLANE_POINTS", 3)):
        monkeypatch.setattr(render, name, points)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_plots_are_written_to_the_run_folder(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "plateaux")
    events: list[Any] = []
    figures = render.plot_landscape(open_run(run, trust=TRUST), limit=8, progress=events.append)
    names = ["slices", "surface-0", "surface-1", "surface-2", "paths", "plane-0-1-2"]
    assert [figure.name for figure in figures] == names
    expected = {f"{name}.{extension}" for name in names for extension in ("png", "svg", "json")}
    assert {file.name for file in (run / "landscape").iterdir()} == expected
    assert caplog.messages[0].startswith("plots (slices, paths, plane) of 3 members on train samples: about ")
    assert events[-1].done == events[-1].total
    stored = json.loads((run / "landscape" / "paths.json").read_text())
    assert (
        stored["about"].items() >= {"samples": 8, "batchnorm": "eval", "split": "train", "augmentation": "none"}.items()
    )
    assert stored["about"]["hashes"].keys() == {"member 0", "member 1", "member 2"}
    assert stored["lines"]["members 1 and 2"]["statistics"] == "recomputed"


@pytest.mark.usefixtures("quick")
def test_members_and_plots_can_be_selected(run: Path) -> None:
    opened = open_run(run, trust=TRUST)
    (figure,) = render.plot_landscape(opened, ["paths"], limit=8, members=[2, 0], batchnorm="train")
    assert list(figure.data["lines"]) == ["members 2 and 0"]
    assert figure.data["lines"]["members 2 and 0"]["statistics"] == "batch"


@pytest.mark.parametrize(
    ("kinds", "members", "message"),
    [
        (["slice"], None, "did you mean 'slices'"),
        (["plane"], [0, 1], "needs 3 members"),
        (["paths"], [0], "needs 2 members"),
    ],
)
@pytest.mark.usefixtures("quick")
def test_impossible_plots_are_rejected(run: Path, kinds: list[str], members: list[int] | None, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        render.plot_landscape(open_run(run, trust=TRUST), kinds, members=members)


@pytest.mark.usefixtures("quick")
def test_paths_need_members_of_one_architecture(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "architecture_hash", lambda *args: architecture_hash(*args) + str(args[1]))
    with pytest.raises(RunError, match="members of one architecture"):
        render.plot_landscape(open_run(run, trust=TRUST), ["paths"])


@pytest.mark.usefixtures("quick")
def test_ctrl_c_keeps_the_finished_plots(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(render, "evaluate_plane", stop)
    with pytest.raises(Interrupted, match="1 plot complete"):
        render.plot_landscape(open_run(run, trust=TRUST), ["paths", "plane"], limit=8)
