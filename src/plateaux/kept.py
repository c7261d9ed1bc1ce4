"""What must be kept of every sample: one number that says how sure each row was, and whether it was right.

Several measures need it, and the walk settles equal settles once: it is kept once for all of them.
"""

from __future__ import annotations

from torch import Tensor

from plateaux.bins import guesses, pack
from plateaux.tables import log_probabilities
from plateaux.types import Batch, Tree


def confidences(table: Tensor, batch: Batch) -> Tree:
    """Return confidence and rightness of every sample and row `[B, R]`, packed in four bytes."""
    log_confidence, guess = guesses(log_probabilities(table))
    return {"kept": pack(log_confidence, guess == batch.y).T}
