"""Answers of a cascade: one backend per stage, each run only on the inputs that did not stop before.

A stage takes the inputs and the logits of the members before it. It runs its own members and returns the answers of all
members so far, their logits, and its confidence. Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plateaux.prediction.predictor import Arrays, Backend

QUERIED = "members_queried"  # the output that only a cascade has
PREVIOUS = "previous_logits"  # an input of a stage: the logits of the members before it
LOGITS, CONFIDENCE = "member_logits", "stage_confidence"  # outputs of a stage besides its answers


class StageBackend:
    """A cascade as one backend per stage. Threads may share it."""

    def __init__(self, stages: Sequence[Backend], members: Sequence[int], threshold: float) -> None:
        """Take the stages in order, the number of members after each, and the confidence at which inputs stop."""
        self.stages, self.members, self.threshold = list(stages), list(members), threshold

    def __call__(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        count = len(next(iter(arrays.values())))
        rows, inputs = np.arange(count), dict(arrays)
        answers: dict[str, NDArray[Any]] = {QUERIED: np.full(count, self.members[-1], dtype=np.int64)}
        for stage, members in zip(self.stages, self.members, strict=True):
            found = dict(stage(inputs))
            logits, confidence = found.pop(LOGITS, None), found.pop(CONFIDENCE, None)
            for name, values in found.items():
                if len(rows) == count:
                    answers[name] = np.array(values)
                else:
                    answers[name][rows] = values
            if logits is None or confidence is None:  # the last stage
                break
            goes_on = ~(confidence >= self.threshold)
            answers[QUERIED][rows[~goes_on]] = members
            rows = rows[goes_on]
            if not len(rows):
                break
            inputs = {**{name: values[rows] for name, values in arrays.items()}, PREVIOUS: logits[goes_on]}
        return answers


def stage_inputs(inputs: Sequence[str], stage: int) -> list[str]:
    """Return the names of the inputs of a stage; the first is 0."""
    return [*inputs, *([PREVIOUS] if stage else [])]


def stage_outputs(answers: Sequence[str], *, is_last: bool) -> list[str]:
    """Return the names of the outputs of a stage."""
    return [*answers, *(() if is_last else (LOGITS, CONFIDENCE))]
