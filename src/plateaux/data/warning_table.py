"""Warnings about data and results: one table of names, limits, and texts. `[run] silence` of a recipe leaves some out.

Importing this module needs neither torch nor NumPy, because `plateaux status` shows warnings.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

WARNINGS: Mapping[str, tuple[float, str]] = {
    "unscaled-inputs": (
        50.0,  # largest normalized value
        "Inputs of {name!r} are floats from {low:g} to {high:g}, which networks learn poorly. Expected: uint8 images, "
        "floats from 0 to 1, or values scaled to mean 0 and standard deviation 1. For images from 0 to 255, pass uint8 "
        "or divide by 255; for features, subtract the mean and divide by the standard deviation",
    ),
    "single-class": (
        1,  # class among the sampled labels
        "All of {count} sampled training labels of {name!r} have the value {value}. {cause}",
    ),
    "many-classes": (
        0.1,  # classes per training sample
        "{classes:,} classes for {samples:,} training samples: most classes have too few samples to be learned. The "
        "usual cause is a column of numbers, names, or ids as label",
    ),
    "test-only-class": (
        0,  # classes
        "{count} of {classes} classes are in the test set and not in the training set (labels {listed}), so they "
        "cannot be learned. Split the samples at random, or by class",
    ),
    "test-in-train": (
        0.05,  # of the test samples
        "{count:,} of {checked:,} test samples are also in the training set, so the results on them are too good. "
        "Remove them from one of the two",
    ),
    "repeated-rows": (
        0.05,  # of the training samples, and of the test samples
        "{repeated:,} of {samples:,} training samples are repetitions, and {count:,} of {checked:,} test samples are "
        "also in the training set, so the results on them are too good. Repeat samples after the split, and only for "
        "training",
    ),
    "outlier": (
        0.01,  # range of the central 80 % of the values, in standard deviations
        "{count} of {total} features have outliers, next to which all other values are nearly equal after scaling: "
        "{listed}. Remove the outliers, or clip the values",
    ),
    "label-in-features": (
        10,  # checked samples per class
        "{count} of {total} features tell the label exactly in all {checked:,} checked training samples: {listed}. "
        "Remove the label from the inputs",
    ),
    "probabilities": (
        1e-4,  # distance of a sum of outputs from 1
        "The outputs of {model} are probabilities: none is negative, and those of each sample have the sum 1. "
        "Expected: logits, because the loss applies the softmax. Remove the softmax from the model",
    ),
    "equal-members": (
        0,  # pairs
        "Members {listed} have equal outputs for all {split} samples, so their weights are equal. Train one of them "
        "again; the usual cause is one weight file for two members",
    ),
    "member-at-chance": (
        0.95,  # level of the interval of a member's accuracy
        "{count} of {total} members are not better than chance on {split} samples: accuracy {listed}, and the largest "
        "class has {share}. Train longer, change the learning rate, or leave them out",
    ),
    "nll-above-frequencies": (
        0.0,  # nats
        "The NLL on {split} samples is above that of the class frequencies, {entropy:.3f}: {listed}. The probabilities "
        "are too extreme, or the training has failed; `plateaux calibrate` repairs the first",
    ),
    "ensemble-below-member": (
        1.0,  # standard errors of the accuracy
        "The accuracy of the ensemble on {split} samples is {ensemble}, below that of member {best}, {value}. "
        "Weak members cost accuracy: train them longer, or leave them out",
    ),
    "high-ece": (
        0.1,  # ECE of the ensemble
        "The calibration error (ECE) of the ensemble on {split} samples is {ece}. Run `plateaux calibrate`",
    ),
}  # fmt: skip
LISTED = 5  # names in a text
logger = logging.getLogger(__name__)


def warning(name: str, /, listed: Collection[object] = (), **facts: Any) -> dict[str, str]:
    """Return the text of a warning by its name; of a long list, the first items are named."""
    shown = ", ".join(map(str, list(listed)[:LISTED])) + (", ..." if len(listed) > LISTED else "")
    return {name: WARNINGS[name][1].format(listed=shown, **facts)}


def limit(name: str) -> float:
    return WARNINGS[name][0]


def log_warnings(found: Mapping[str, str], silence: Collection[str] | None = None) -> None:
    """Log the warnings that a recipe does not silence."""
    for name, text in found.items():
        if name not in (silence or ()):
            logger.warning("%s [%s]", text, name)
