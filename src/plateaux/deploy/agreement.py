"""Compare the answers of two backends: numbers within a tolerance, decisions equal except next to a threshold.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plateaux.core.errors import RunError
from plateaux.deploy.manifest import CalibrationRecord, SetRule
from plateaux.prediction.stage_backend import QUERIED

TOLERANCE = 1e-5  # of probabilities
SCORE_TOLERANCE = 1e-4  # of entropy, mutual information, and OOD score, relative to their size above 1

PROBABILITIES = ("probability", "probabilities")
TOLERANCES = {
    **dict.fromkeys(PROBABILITIES, TOLERANCE),
    **dict.fromkeys(("entropy", "mutual_information", "ood_score"), SCORE_TOLERANCE),
}
TOLERANCES |= {f"raw_{name}": tolerance for name, tolerance in TOLERANCES.items()}

NamedArrays = Mapping[str, NDArray[Any]]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Agreement:
    """The largest difference of a probability, and the decisions that differ next to a threshold."""

    samples: int = 0
    max_difference: float = 0.0
    near_threshold: int = 0  # labels, classes of sets, and abstentions that differ, all within the tolerance

    def __add__(self, other: Agreement) -> Agreement:
        difference = max(self.max_difference, other.max_difference)
        return Agreement(self.samples + other.samples, difference, self.near_threshold + other.near_threshold)


def compare_answers(
    expected: NamedArrays,
    found: NamedArrays,
    calibration: CalibrationRecord | None,
    what: str,
    near_stop: Mask | None = None,
) -> Agreement:
    """Return how far answers are from those expected. Raise a `RunError` that begins with `what` if that is too far.

    `near_stop` says which samples are next to a threshold of a cascade, so that one more or one member less may have
    been queried for them. Where that is the case, no other answer is compared.
    """
    if set(expected) != set(found):
        raise RunError(f"{what} has the outputs {sorted(found)} instead of {sorted(expected)}")
    samples = len(expected["label"])
    for name, values in found.items():
        if values.shape != expected[name].shape:
            raise RunError(f"{what} returns {name} of shape {list(values.shape)}, not {list(expected[name].shape)}")
    difference, num_near = 0.0, 0
    if QUERIED in found:
        differs = expected[QUERIED] != found[QUERIED]
        _check_decisions(QUERIED, differs, np.zeros_like(differs) if near_stop is None else near_stop, what)
        num_near = int(differs.sum())
        expected, found = ({name: a[~differs] for name, a in each.items()} for each in (expected, found))
    for name in [name for name in TOLERANCES if name in found]:
        scale = np.maximum(1.0, np.abs(expected[name].astype(np.float64)))
        apart = _check_numbers(name, expected[name] / scale, found[name] / scale, TOLERANCES[name], what)
        difference = max(difference, apart) if name in PROBABILITIES else difference
    near = _near_decisions(expected, found, calibration)
    for name, mask in near.items():
        differs = expected[name] != found[name]
        _check_decisions(name, differs, mask, what)
        num_near += int(differs.sum())
    return Agreement(samples, difference, num_near)


def _check_decisions(name: str, differs: Mask, near: Mask, what: str) -> None:
    if (differs & ~near).any():
        row = int(np.argwhere(differs & ~near)[0][0])
        raise RunError(
            f"{what} disagrees with the expected {name} of sample {row}, which is not within {TOLERANCE:g} of a "
            "threshold"
        )


def _check_numbers(name: str, expected: NDArray[Any], found: NDArray[Any], tolerance: float, what: str) -> float:
    difference = float(np.abs(expected.astype(np.float64) - found.astype(np.float64)).max(initial=0.0))
    if not difference <= tolerance:  # also if it is NaN
        raise RunError(f"{what} differs from the expected {name} by {difference:.2g}; at most {tolerance:g} is allowed")
    return difference


def _near_decisions(
    expected: NamedArrays, found: NamedArrays, calibration: CalibrationRecord | None
) -> dict[str, Mask]:
    """Return for each decision where it is next to a threshold, from the expected answers."""
    p = expected["probabilities"].astype(np.float64)
    top = _two_largest(p)
    is_tied = top[:, 1] - top[:, 0] <= 2 * TOLERANCE
    near = {"label": is_tied}
    if "raw_label" in found:
        raw = _two_largest(expected["raw_probabilities"].astype(np.float64))
        near["raw_label"] = raw[:, 1] - raw[:, 0] <= 2 * TOLERANCE
    if "is_ood" in found:
        limit = None if calibration is None else calibration.alarm.threshold
        scores = expected["ood_score"].astype(np.float64)
        tolerance = SCORE_TOLERANCE * np.maximum(1.0, np.abs(scores))
        near["is_ood"] = np.abs(scores - (np.inf if limit is None else limit)) <= tolerance
    if "abstain" in found:
        limit = calibration.max_error_probability if calibration is not None else None
        near["abstain"] = np.abs(1 - top[:, 1] - (np.inf if limit is None else limit)) <= TOLERANCE
    if "prediction_set" in found:
        sets = None if calibration is None else calibration.sets
        near["prediction_set"] = _near_set_threshold(p, sets) if sets is not None else np.zeros(p.shape, dtype=bool)
        if sets is not None and sets.never_empty:
            near["prediction_set"] |= is_tied[:, None]
    return near


def _two_largest(p: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.partition(p, -2, axis=1)[:, -2:] if p.shape[1] > 1 else np.pad(p, ((0, 0), (1, 0)))


def _near_set_threshold(p: NDArray[np.float64], rule: SetRule) -> Mask:
    if rule.threshold is None:
        return np.zeros(p.shape, dtype=bool)
    if rule.kind == "lac":
        return np.abs(1 - p - rule.threshold) <= TOLERANCE
    order = np.argsort(-p, axis=1, kind="stable")
    ranked = np.take_along_axis(p, order, axis=1)
    penalty = rule.penalty if rule.kind == "raps" else 0.0
    scores = ranked.cumsum(1) + penalty * np.maximum(0, np.arange(1, p.shape[1] + 1) - rule.k_reg)
    # The score of a class includes all likelier ones. Classes of almost equal probability may change places.
    is_tied = -np.diff(ranked, axis=1) <= 2 * TOLERANCE
    near = np.abs(scores - rule.threshold) <= TOLERANCE
    near[:, 1:] |= is_tied
    near[:, :-1] |= is_tied
    mask = np.zeros(p.shape, dtype=bool)
    np.put_along_axis(mask, order, near, axis=1)
    return mask
