"""Deep ensembles: members train independently."""

from __future__ import annotations

from plateaux.core.method import LossFn, Method, Objective
from plateaux.core.registry import method


@method
def deep_ensemble(loss: LossFn) -> Method:
    """Train members independently, each with its own initialization and data order."""
    return Method(Objective(loss))
