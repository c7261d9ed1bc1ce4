"""Pictures: what is in them, what is said below them, and that they can be made again from their numbers."""

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

from plateaux import Components
from plateaux.config.builders.model import architecture_hash
from plateaux.core.errors import Interrupted, RecipeError, RunError
from plateaux.core.formatting import format_significant
from plateaux.loss_landscape import plots, render
from plateaux.loss_landscape.plots import LandscapeFigure
from plateaux.loss_landscape.slices import Line, Mark, Surface
from plateaux.training.train import train

GIVEN = Components(trust=("cases",))
ABOUT = {"samples": 1000, "split": "train", "name": "hills"}
NAN = float("nan")


def bowl(depth: float, *, statistics: Any = "own") -> Line:
    at = (-1.0, -0.5, 0.0, 0.5, 1.0)
    return Line(at, tuple(depth + t * t for t in at), (0.1,) * 5, (0.2, 0.5, 0.9, 0.5, 0.2), statistics)


def hill(top: float) -> Line:
    return Line((0.0, 0.5, 1.0), (1.0, 2.0 + top, 3.0), (0.1,) * 3, (0.9, 0.3, 0.7), "anew")


def bumps(*rows: tuple[float, ...], **marks: Mark) -> Surface:
    return Surface((-1.0, 0.0, 1.0), (-1.0, 0.0, 1.0), rows, ((0.5,) * 3,) * 3, "none", marks)


ROWS = (1.0, 0.5, 1.0), (0.5, 0.2, 0.5), (1.0, 0.1, 1.0)
WIDE_ROWS = (90.0, 0.5, 90.0), (0.5, 0.2, NAN), (9.0, 0.1, 9.0)
HOME = {"member": Mark(0.0, 0.0, 0.2, 0.5)}
THREE = {
    "member 0": Mark(-0.9, -0.5, 0.3, 0.9),
    "member 1": Mark(0.9, -0.5, 0.4, 0.9),
    "member 4": Mark(0, 0.8, 1, 0.9),
}


def words_in(picture: LandscapeFigure) -> str:
    """Return all text of the SVG."""
    root = ElementTree.fromstring(picture._as("svg"))
    return " ".join(" ".join(part.itertext()) for part in root.iter() if part.tag.endswith("text"))


@cache
def all_pictures() -> list[LandscapeFigure]:
    return [
        plots.slices({"member 0": bowl(1.0), "member 1": bowl(2.0)}, ABOUT),
        plots.paths({"members 0 and 1": hill(4.0)}, ABOUT),
        plots.surface("surface-0", "member 0", bumps(*ROWS, **HOME), ABOUT),
        plots.plane("plane", bumps(*ROWS, **THREE), ABOUT),
    ]


def test_every_picture_is_a_png_an_svg_and_its_numbers_and_fetches_nothing() -> None:
    for picture in all_pictures():
        files = picture.files()
        assert not re.search(r"url\((?!#)|@import|<script|href=\"http", files["svg"].decode())
        assert files["png"].startswith(b"\x89PNG")
        assert ElementTree.fromstring(files["svg"]).tag.endswith("svg")
        told = json.loads(files["json"])
        assert told["caption"] == picture.caption
        assert told["about"] == ABOUT
        assert {"lines", "surface"} & set(told)


def test_the_same_numbers_give_the_same_bytes() -> None:
    one, other = (plots.slices({"member 0": bowl(1.0)}, ABOUT) for _ in range(2))
    assert one.files() == other.files()


def test_the_words_in_a_picture_can_be_read() -> None:
    first = all_pictures()[0]
    assert "loss" in words_in(first)
    assert re.sub(r"\s+", "", first.caption[:30]) in re.sub(r"\s+", "", words_in(first))


def test_captions_are_made_from_the_numbers() -> None:
    slices, paths, surface, plane = (picture.caption for picture in all_pictures())
    assert "2 members, each along a random direction" in slices
    assert "The loss is 1.00 to 2.00 in the middle and 2.00 to 3.00 at a distance of 1." in slices
    assert "Seen on 1,000 train samples of hills; BatchNorm by the member's own statistics; shaded" in slices
    assert "rises by 4.00 above the straight line" in paths
    assert "by 4.00 above their mean" in paths
    assert "the error by 50.0 points" in paths
    assert "0.200 at the member (dot) and lowest at (0, 1): 0.100 (cross)" in surface
    assert "BatchNorm" not in surface
    assert "Members 0, 1 and 4 lie 1.58 to 1.80 apart" in plane
    assert "0.300 to 1.00 at the members and 0.200 amid them" in plane
    assert plots.slices({"member 3": bowl(1.0)}, ABOUT).caption.startswith("Member 3 along a random direction")


def test_a_path_says_its_barrier_and_draws_it_where_there_is_one() -> None:
    steep, flat = (plots.paths({"members 0 and 1": hill(top)}, ABOUT) for top in (4.0, -1.0))
    assert "members 0 and 1: barrier 4.00" in words_in(steep)
    assert "members 0 and 1: barrier 0" in words_in(flat)
    assert len(steep.figure.axes[0].lines) == len(flat.figure.axes[0].lines) + 1 == 3
    assert steep.numbers["barriers"]["members 0 and 1"]["loss"] == {"above_line": 4.0, "above_mean": 4.0}


@pytest.mark.parametrize("pairs", [1, 3, 6, 10])
def test_the_legend_of_paths_stands_above_them_all(pairs: int) -> None:
    picture = plots.paths({f"members {n} and {n + 1}": hill(4.0 - n / 9) for n in range(pairs)}, ABOUT)
    picture.figure.canvas.draw()
    axes = picture.figure.axes[0]
    legend = axes.get_legend()
    assert legend is not None
    lowest = axes.transData.inverted().transform(legend.get_window_extent())[0][1]
    assert lowest > max(picture.numbers["lines"]["members 0 and 1"]["losses"])


def test_heights_that_differ_much_are_drawn_by_their_logarithms() -> None:
    deep = Line((-1.0, 0.0, 1.0), (9.0, 0.01, 9.0), (0.001,) * 3, (0.5,) * 3, "none")
    assert plots.slices({"member 0": deep}, ABOUT).figure.axes[0].get_yscale() == "log"
    assert plots.slices({"member 0": bowl(1.0)}, ABOUT).figure.axes[0].get_yscale() == "linear"
    ticks = [words_in(plots.surface("s", "member 0", bumps(*rows, **HOME), ABOUT)) for rows in (WIDE_ROWS, ROWS)]
    assert "90.0" in ticks[0]  # the highest level, not its logarithm
    assert "1.00" in ticks[1]


def test_what_is_no_number_is_null_and_leaves_a_gap() -> None:
    picture = plots.surface("s", "member 0", bumps(*WIDE_ROWS, **HOME), ABOUT)
    assert json.loads(picture.files()["json"])["surface"]["losses"][1][2] is None
    assert picture.files()["png"]
    broken = plots.paths(
        {"members 0 and 1": Line((0.0, 0.5, 1.0), (1.0, NAN, 1.0), (NAN,) * 3, (0.5,) * 3, "none")}, ABOUT
    )
    assert "NaN" in broken.caption


def test_a_level_landscape_can_be_drawn() -> None:
    assert plots.surface("s", "member 0", bumps(*((0.0,) * 3,) * 3, **HOME), ABOUT).files()["png"]


@pytest.mark.parametrize(
    ("number", "words"),
    [(0.0, "0"), (1234.5, "1234"), (12.345, "12.3"), (0.012345, "0.0123"), (1.5e-7, "1.50e-07"), (NAN, "NaN")],
)
def test_numbers_are_written_as_a_person_would(number: float, words: str) -> None:
    assert format_significant(number) == words


def test_curves_beyond_the_colours_are_dashed() -> None:
    many = plots.slices({f"member {number}": bowl(1.0) for number in range(9)}, ABOUT)
    pens = {(line.get_color(), line.get_linestyle()) for line in many.figure.axes[0].lines}
    assert len(pens) == 9


def test_without_matplotlib_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def none(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", none)
    with pytest.raises(RecipeError, match="pip install"):
        plots.check_matplotlib()


# The gallery of a run.


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    train(recipe("deep_ensemble", "conv_bn", members=3, samples=16), out, components=GIVEN)
    return out


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at few points, and leave out the painting, which is tested above."""
    monkeypatch.setattr(LandscapeFigure, "_as", lambda _, kind: kind.encode())
    for name, points in (("LINE", 5), ("SURFACE", 3), ("PATH", 3), ("PLANE", 3)):
        monkeypatch.setattr(render, name, points)


@pytest.mark.usefixtures("quick")
def test_pictures_lie_in_the_run_folder(run: Path) -> None:
    told: list[str] = []
    seen: list[tuple[int, int]] = []
    made = render.plot_landscape(run, limit=8, components=GIVEN, say=told.append, seen=lambda *n: seen.append(n))
    names = ["slices", "surface-0", "surface-1", "surface-2", "paths", "plane-0-1-2"]
    assert [each.name for each in made] == names
    wanted = {f"{name}.{ending}" for name in names for ending in ("png", "svg", "json")}
    assert {file.name for file in (run / "landscape").iterdir()} == wanted
    assert told[0].startswith("pictures of slices and paths and plane of 3 members on train samples: about ")
    assert seen[-1][0] == seen[-1][1]
    facts = json.loads((run / "landscape" / "paths.json").read_text())
    assert (
        facts["about"].items() >= {"samples": 8, "batchnorm": "eval", "split": "train", "augmentation": "none"}.items()
    )
    assert facts["about"]["hashes"].keys() == {"member 0", "member 1", "member 2"}
    assert facts["lines"]["members 1 and 2"]["statistics"] == "anew"


@pytest.mark.usefixtures("quick")
def test_some_members_and_some_pictures_can_be_asked_for(run: Path) -> None:
    (made,) = render.plot_landscape(run, ["paths"], limit=8, members=[2, 0], batchnorm="train", components=GIVEN)
    assert list(made.numbers["lines"]) == ["members 2 and 0"]
    assert made.numbers["lines"]["members 2 and 0"]["statistics"] == "batch"


@pytest.mark.parametrize(
    ("kinds", "members", "words"),
    [(["slice"], None, "did you mean 'slices'"), (["plane"], [0, 1], "takes 3 members"), (["paths"], [0], "takes 2")],
)
@pytest.mark.usefixtures("quick")
def test_what_cannot_be_drawn_is_told(run: Path, kinds: list[str], members: list[int] | None, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        render.plot_landscape(run, kinds, members=members, components=GIVEN)


@pytest.mark.usefixtures("quick")
def test_between_different_architectures_there_is_no_path(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        render, "architecture_hash", lambda *components: architecture_hash(*components) + str(components[1])
    )
    with pytest.raises(RunError, match="no straight path"):
        render.plot_landscape(run, ["paths"], components=GIVEN)


@pytest.mark.usefixtures("quick")
def test_ctrl_c_leaves_the_pictures_that_are_drawn(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(render, "plane", stop)
    with pytest.raises(Interrupted, match="1 pictures are drawn"):
        render.plot_landscape(run, ["paths", "plane"], limit=8, components=GIVEN)
