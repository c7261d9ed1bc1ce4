"""Options that the functions on a trained run share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from plateaux.core.errors import RecipeError

CacheDtype = Literal["float32", "float16", "off"]
"""How logits are cached next to the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """How to evaluate a run. A function refuses a field that it does not support.

    Args:
        members: Ids of the members that form the ensemble. None: all trained members.
        limit: Use only the first N samples of each split.
        ensemble_sizes: Also evaluate ensembles of 1, 2, ... members.
        device: "cpu", "cuda", "cuda:1", ... None: the best available device.
        executor: The `[executor]` section of a recipe, such as `{"name": "mesh"}`, to distribute the evaluation.
        cache_logits: Store logits next to the run as "float32" or "float16", or not at all ("off").
        no_cache: Run forward passes even if logits are cached.
        corruption_cache: A folder that keeps generated corrupted images.
    """

    members: Sequence[int] | None = None
    limit: int | None = None
    ensemble_sizes: bool = False
    device: str | None = None
    executor: Mapping[str, Any] | None = None
    cache_logits: CacheDtype = "float32"
    no_cache: bool = False
    corruption_cache: str | Path | None = None

    def require(self, function: str, *supported: str) -> None:
        """Raise an error if a field is set that `function` does not support."""
        defaults = EvalOptions()
        for field in fields(self):
            if field.name not in supported and getattr(self, field.name) != getattr(defaults, field.name):
                raise RecipeError(
                    f"{function} was given EvalOptions({field.name}={getattr(self, field.name)!r}), which it does not "
                    f"support; supported: {', '.join(supported)}"
                )


DEFAULT_OPTIONS = EvalOptions()
