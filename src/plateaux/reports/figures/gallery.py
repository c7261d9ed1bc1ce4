"""The samples on which members differ most and least, as pictures with each member's answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plateaux.core.formatting import format_number, pluralize
from plateaux.reports import style
from plateaux.reports.style import ReportFigure

EACH, COLUMNS = 8, 4  # pictures of either kind, and beside each other
SIDE = 64  # pixels of a picture at most
WORD = 11  # letters of a class's name
ONE_BY_ONE = 4  # members at most whose answers are given one by one


@dataclass(frozen=True, slots=True)
class SplitPredictions:
    """What members said about some samples."""

    split: str
    members: Sequence[int]
    ids: NDArray[np.int64]  # [N]
    labels: NDArray[np.int64]  # [N]
    probabilities: NDArray[np.float32]  # [M, N, C]


Images = Callable[[NDArray[np.int64]], NDArray[Any]]
"""Pictures `[n, channels, height, width]` of some ids, as bytes or from 0 to 1."""


def gallery(said: SplitPredictions, images: Images, names: Sequence[str] = ()) -> ReportFigure | None:
    """Draw the samples on which members differ most, by the mutual information of their answers, and least."""
    apart = differing(said.probabilities)
    if len(said.members) < 2 or not np.isfinite(apart).any():
        return None
    order = np.argsort(np.where(np.isfinite(apart), apart, -1.0), kind="stable")
    each = min(EACH, len(order) // 2)
    if not each:
        return None
    chosen = np.concatenate([order[::-1][:each], order[:each]])
    pictures = [_picture(one) for one in images(said.ids[chosen])]
    rows = -(-each // COLUMNS)
    with style.figure_style():
        height = 0.3 + 3.2 * rows
        # All cells are alike, and laying out so many takes long.
        figure, cells = style.new_figure(height, 2 * rows, COLUMNS, layout=None, squeeze=False)
        figure.subplots_adjust(0.01, 0.01, 0.99, 1 - 0.42 / height, wspace=0.1, hspace=0.42)
        for axes in cells.ravel():
            axes.set_axis_off()
        for position, (at, picture) in enumerate(zip(chosen, pictures, strict=True)):
            half, place = divmod(position, each)
            axes = cells.ravel()[half * rows * COLUMNS + place]
            colours = {"cmap": "gray"} if picture.ndim == 2 else {}
            axes.imshow(picture, interpolation="none", **colours)
            axes.set_title(_answers(said, int(at), names), fontsize=6.8, loc="center")
        return style.finalize("gallery", "Where members differ most and least", _sentence(said, apart, each), figure)


def differing(probabilities: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return for every sample how far members differ: the mutual information of their answers, in nats."""
    p = probabilities.astype(np.float64)
    found: NDArray[np.float64] = _entropy(p.mean(0)) - _entropy(p).mean(0)
    return found


def _entropy(p: NDArray[np.float64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = -(p * np.log(np.maximum(p, 1e-300))).sum(-1)
    return found


def _answers(said: SplitPredictions, at: int, names: Sequence[str]) -> str:
    """Return two lines: what it is, and what members say it is."""

    def name(number: int) -> str:
        return style.wrap_label(names[number], WORD, 1) if number < len(names) else str(number)

    guesses = [int(guess) for guess in said.probabilities[:, at].argmax(-1)]
    if len(guesses) <= ONE_BY_ONE and max(len(name(guess)) for guess in guesses) <= 2:
        words = " ".join(name(guess) for guess in guesses)
    else:
        counts = Counter(guesses).most_common(2)
        words = "\n".join(f"{count} of {name(guess)}" for guess, count in counts)
        left = len(guesses) - sum(count for _, count in counts)
        words += f" + {left}" if left else ""
    return f"is {name(int(said.labels[at]))}\n{words}"


def _picture(image: NDArray[Any]) -> NDArray[Any]:
    """Return a picture as matplotlib draws it, thinned where it is large: [H, W] in grey, or [H, W, 3]."""
    step = max(1, -(-max(image.shape[-2:]) // SIDE))
    small = image[:, ::step, ::step]
    if small.dtype != np.uint8:
        small = (np.clip(np.nan_to_num(small), 0.0, 1.0) * 255).astype(np.uint8)
    return small[0] if len(small) != 3 else small.transpose(1, 2, 0)


def _sentence(said: SplitPredictions, apart: NDArray[np.float64], each: int) -> str:
    guesses = said.probabilities.argmax(-1)
    split = float((guesses != guesses[0]).any(0).mean())
    most, least = float(np.nanmax(apart)), float(np.nanmin(apart))
    return (
        f"Of {pluralize(len(said.ids), f'{said.split} sample')} {pluralize(len(said.members), 'member')} answer "
        f"{format_number(split, True)} differently. First the {each} on which they differ most (mutual "
        "information up to "
        f"{format_number(most)} nats), then the {each} on which they differ least (from "
        f"{format_number(max(least, 0.0))}); "
        "above each what it is, and what members say in their order, or how many say what."
    )
