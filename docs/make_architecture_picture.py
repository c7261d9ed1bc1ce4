"""Draw docs/images/architecture.svg, the packages and their layers, from the import contract in pyproject.toml.

python docs/make_architecture_picture.py            # write the picture
python docs/make_architecture_picture.py --check    # exit code 1 if the picture is out of date

Each row is one line of the `layers` contract. Folders whose files may not import each other (the `independence`
contracts) are marked as plug-in folders.
"""

from __future__ import annotations

import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _generated import ROOT, write_or_check
from _svg import BLUE, FONT, GREEN, INK, LINE, PALE, PANEL, PAPER, dark_style

PICTURE = Path(__file__).parent / "images" / "architecture.svg"
# A package that is missing here, or one that does not exist, is an error.
DESCRIPTIONS = {
    "cli": "commands, output, exit codes",
    "reports": "HTML, Markdown, JSON and CSV reports, figures",
    "studies": "grids of recipes, results, comparisons",
    "training": "planner and jobs, trainer, step, checkpoints, data partition",
    "loss_landscape": "loss surface, curvature, slices, plots",
    "serving": "HTTP service: batching, protocol, metrics, workers",
    "deploy": "bundles, export, batch prediction, Hub",
    "prediction": "predictor, input contract, predictions, calibration",
    "evaluation": "evaluator, prediction cache, metrics, OOD detection",
    "storage": "run folder, object store, caches, imported weights",
    "config": "recipe, search space, builders",
    "ensembles": "Ensemble, combination, soups, selection, conformal sets",
    "integrations": "adapters for Lightning, Hugging Face, trackers",
    "methods": "training methods",
    "distributed": "process pool, Ray pool, executors",
    "data": "sources, loader, augmentation, corruptions",
    "models": "backbones, LoRA, pruning, freezing",
    "optim": "SAM family, losses, weight averaging, gradient norms",
    "core": "types, errors, registry, tensor trees, contracts of plug-ins, statistics",
}
OPEN = {"__main__", "commands", "errors", "stats", "testing"}  # entry and public modules; not drawn
WIDTH, MARGIN, GAP, TOP = 1000, 24, 12, 64
LINE_HEIGHT, CHARACTER = 17, 6.9  # of text in 12 px


def picture() -> str:
    """Return the picture as SVG."""
    layers, plugins = read_contracts()
    names = {name for layer in layers for name in layer}
    assert names == set(DESCRIPTIONS), f"DESCRIPTIONS differs from the contract: {names ^ set(DESCRIPTIONS)}"
    parts, bottom = [], TOP
    for layer in layers:
        boxes, height = _row(layer, plugins, bottom)
        parts += boxes
        bottom += height + GAP
    height = bottom + MARGIN - GAP
    label = "The packages of Plateaux in layers, top to bottom: " + "; ".join(", ".join(layer) for layer in layers)
    head = (
        f'<svg viewBox="0 0 {WIDTH} {height}" xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{label}" '
        f'font-family="{FONT}" font-size="13">'
    )
    paper = f'<rect x="0" y="0" width="{WIDTH}" height="{height}" rx="10" fill="{PAPER}"/>'
    return "\n".join([head, dark_style(), paper, *_title(bottom - GAP), *parts, "</svg>", ""])


def read_contracts() -> tuple[list[list[str]], dict[str, list[str]]]:
    """Return the packages of each layer, top first, and the plug-in folders of each package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts: list[dict[str, Any]] = project["tool"]["importlinter"]["contracts"]
    contract = next(each for each in contracts if each["type"] == "layers" and each["containers"] == ["plateaux"])
    layers = [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]
    plugins: dict[str, list[str]] = {}
    for each in contracts:
        for module in each["modules"] if each["type"] == "independence" else ():
            folder = module.removeprefix("plateaux.").removesuffix(".*")
            plugins.setdefault(folder.partition(".")[0], []).append(folder)
    return [layer for layer in layers if not OPEN.issuperset(layer)], plugins


def _title(bottom: float) -> Iterator[str]:
    yield _text(MARGIN, 36, "A package imports only from the rows below its own", INK, bold=True)
    x = WIDTH - MARGIN - 8
    yield f'<path d="M{x} {TOP} L{x} {bottom - 10}" stroke="{PALE}" stroke-width="1.5" fill="none"/>'
    yield f'<path d="M{x - 5} {bottom - 12} L{x} {bottom} L{x + 5} {bottom - 12} Z" fill="{PALE}"/>'
    yield _text(x + 8, 50, "imports", PALE, anchor="end")


def _row(layer: list[str], plugins: dict[str, list[str]], top: float) -> tuple[list[str], float]:
    """Return the boxes of one layer, side by side, and their height."""
    space = WIDTH - 2 * MARGIN - 32
    width = (space - GAP * (len(layer) - 1)) / len(layer)
    single = len(layer) == 1
    wrapped = {name: textwrap.wrap(DESCRIPTIONS[name], int((width - 24) / CHARACTER)) for name in layer}
    lines = 0 if single else max(len(text) for text in wrapped.values())
    tagged = not single and any(name in plugins for name in layer)
    height = 44 if single else 38 + LINE_HEIGHT * (lines + tagged)
    parts = []
    for place, name in enumerate(layer):
        x = MARGIN + place * (width + GAP)
        parts.append(
            f'<rect x="{x:g}" y="{top:g}" width="{width:g}" height="{height:g}" rx="6" fill="{PANEL}" '
            f'stroke="{LINE}" stroke-width="1.5"/>'
        )
        parts.append(_text(x + 14, top + (27 if single else 24), name, BLUE, size=14, bold=True))
        tag = "plug-ins: " + ", ".join(plugins[name]) if name in plugins else ""
        if single:
            parts.append(_text(x + 160, top + 27, DESCRIPTIONS[name], PALE, size=12))
            parts.append(_text(x + width - 14, top + 27, tag, GREEN, size=12, anchor="end"))
            continue
        for number, text in enumerate([*wrapped[name], *([tag] if tag else [])]):
            color = GREEN if text == tag else PALE
            parts.append(_text(x + 14, top + 43 + LINE_HEIGHT * number, text, color, size=12))
    return [part for part in parts if part], height


def _text(x: float, y: float, text: str, color: str, *, size: int = 13, bold: bool = False, anchor: str = "") -> str:
    if not text:
        return ""
    more = (' font-weight="bold"' if bold else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{x:g}" y="{y:g}" fill="{color}" font-size="{size}"{more}>{text}</text>'


if __name__ == "__main__":
    sys.exit(write_or_check({PICTURE: picture()}))
