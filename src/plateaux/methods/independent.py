"""Members that never meet: the deep ensemble."""

from __future__ import annotations

from plateaux.exchange import Method, Objective, Settle
from plateaux.registry import method


@method
def deep_ensemble(loss: Settle) -> Method:
    """Train every member on its own, from its own start, in its own order."""
    return Method(Objective(loss))
