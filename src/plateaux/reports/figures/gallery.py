"""Images on which the members disagree most and least, with their predictions."""

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

PER_KIND, COLUMNS = 8, 4  # images of each kind, and per row
MAX_PIXELS = 64  # per side of an image
CLASS_CHARS = 11  # of a class name
MAX_LISTED_MEMBERS = 4  # more members are summarized by counts


@dataclass(frozen=True, slots=True)
class SplitPredictions:
    """The predictions of members on a split."""

    split: str
    members: Sequence[int]
    ids: NDArray[np.int64]  # [N]
    labels: NDArray[np.int64]  # [N]
    probabilities: NDArray[np.float32]  # [M, N, C]


Images = Callable[[NDArray[np.int64]], NDArray[Any]]
"""Loads images `[n, channels, height, width]` by sample id, as bytes or from 0 to 1."""


def gallery(predictions: SplitPredictions, images: Images, names: Sequence[str] = ()) -> ReportFigure | None:
    """Draw the images with the largest and the smallest mutual information of the members' predictions."""
    disagreement = member_disagreement(predictions.probabilities)
    if len(predictions.members) < 2 or not np.isfinite(disagreement).any():
        return None
    order = np.argsort(np.where(np.isfinite(disagreement), disagreement, -1.0), kind="stable")
    count = min(PER_KIND, len(order) // 2)
    if not count:
        return None
    indices = np.concatenate([order[::-1][:count], order[:count]])
    arrays = [_to_image(image) for image in images(predictions.ids[indices])]
    rows = -(-count // COLUMNS)
    with style.figure_style():
        height = 0.3 + 3.2 * rows
        # All cells have equal size, and automatic layout of many cells is slow.
        figure, cells = style.new_figure(height, 2 * rows, COLUMNS, layout=None, squeeze=False)
        figure.subplots_adjust(0.01, 0.01, 0.99, 1 - 0.42 / height, wspace=0.1, hspace=0.42)
        for axes in cells.ravel():
            axes.set_axis_off()
        for position, (at, image) in enumerate(zip(indices, arrays, strict=True)):
            half, place = divmod(position, count)
            axes = cells.ravel()[half * rows * COLUMNS + place]
            options = {"cmap": "gray"} if image.ndim == 2 else {}
            axes.imshow(image, interpolation="none", **options)
            axes.set_title(_prediction_text(predictions, int(at), names), fontsize=6.8, loc="center")
        return style.finalize(
            "gallery",
            "Samples with the most and the least disagreement",
            _caption(predictions, disagreement, count),
            figure,
        )


def member_disagreement(probabilities: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the mutual information of the members' predictions for each sample, in nats."""
    p = probabilities.astype(np.float64)
    information: NDArray[np.float64] = _entropy(p.mean(0)) - _entropy(p).mean(0)
    return information


def _entropy(p: NDArray[np.float64]) -> NDArray[np.float64]:
    entropy: NDArray[np.float64] = -(p * np.log(np.maximum(p, 1e-300))).sum(-1)
    return entropy


def _prediction_text(predictions: SplitPredictions, at: int, names: Sequence[str]) -> str:
    """Return two lines: the label, and the predictions of the members."""

    def name(number: int) -> str:
        return style.wrap_label(names[number], CLASS_CHARS, 1) if number < len(names) else str(number)

    classes = [int(class_id) for class_id in predictions.probabilities[:, at].argmax(-1)]
    if len(classes) <= MAX_LISTED_MEMBERS and max(len(name(class_id)) for class_id in classes) <= 2:
        text = " ".join(name(class_id) for class_id in classes)
    else:
        counts = Counter(classes).most_common(2)
        text = "\n".join(f"{count} of {name(class_id)}" for class_id, count in counts)
        others = len(classes) - sum(count for _, count in counts)
        text += f" + {others}" if others else ""
    return f"is {name(int(predictions.labels[at]))}\n{text}"


def _to_image(image: NDArray[Any]) -> NDArray[Any]:
    """Return an image for matplotlib, subsampled if it is large: gray [H, W], or [H, W, 3]."""
    step = max(1, -(-max(image.shape[-2:]) // MAX_PIXELS))
    small = image[:, ::step, ::step]
    if small.dtype != np.uint8:
        small = (np.clip(np.nan_to_num(small), 0.0, 1.0) * 255).astype(np.uint8)
    return small[0] if len(small) != 3 else small.transpose(1, 2, 0)


def _caption(predictions: SplitPredictions, disagreement: NDArray[np.float64], count: int) -> str:
    classes = predictions.probabilities.argmax(-1)
    fraction = float((classes != classes[0]).any(0).mean())
    most, least = float(np.nanmax(disagreement)), float(np.nanmin(disagreement))
    samples = pluralize(len(predictions.ids), f"{predictions.split} sample")
    return (
        f"{pluralize(len(predictions.members), 'member')} disagree on {format_number(fraction, True)} of {samples}. "
        f"First the {count} samples with the most disagreement (mutual information up to {format_number(most)} nats), "
        f"then the {count} with the least (from {format_number(max(least, 0.0))}). Above each image: the label, then "
        "the predicted classes in the order of members, or how many members predict a class."
    )
