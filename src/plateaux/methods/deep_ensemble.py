"""Members that never meet: the deep ensemble."""

from __future__ import annotations

from plateaux.core.method import LossFn, Method, Objective
from plateaux.core.registry import method


@method
def deep_ensemble(loss: LossFn) -> Method:
    """Train every member on its own, from its own start, in its own order."""
    return Method(Objective(loss))
