"""Measure a run: walk once over the data, or over what is kept of it, and write one object per measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from plateaux.config.components import NOTHING_GIVEN, Given
from plateaux.core.callbacks import Say, Seen, nothing
from plateaux.core.runtime import is_rank_zero
from plateaux.evaluation.evaluator import Panel
from plateaux.evaluation.metric_specs import measures_named
from plateaux.evaluation.prediction_cache import Keep
from plateaux.evaluation.ray_evaluator import SpreadPanel
from plateaux.evaluation.results import Measurement
from plateaux.evaluation.splits import targets
from plateaux.storage.run import Run

STANDARD = ("accuracy", "nll", "brier", "ece")


def evaluate(
    root: str | Path,
    *,
    on: str | Sequence[str] = "test",
    measures: Sequence[str] = STANDARD,
    members: Sequence[int] | None = None,
    sizes: bool = False,
    samples: int | None = None,
    keep: Keep = "float32",
    fresh: bool = False,
    cache: str | Path | None = None,
    given: Given = NOTHING_GIVEN,
    device: str | None = None,
    executor: Mapping[str, Any] | None = None,
    seen: Seen = nothing,
    say: Say = nothing,
) -> list[Measurement]:
    """Measure members and their ensemble on `test`, `validation` or `train` samples, or `corrupted` ones.

    `members` takes some of them as the ensemble, `sizes` adds curves over ensembles of 1, 2, ... members, `samples`
    takes the first so many. Logits are kept beside the run, and a second call needs no forward pass, unless `fresh`.
    Corrupted images are made when they are needed, or once, in the folder `cache`. On `executor = {"name": "ray"}`
    members x samples are spread over a cluster; logits are not kept then.
    """
    kind = SpreadPanel if (executor or {}).get("name") == "ray" else Panel
    panel = kind(Run.open(root), members, given=given, device=device, executor=executor, keep=keep, say=say)
    chosen = measures_named(measures, allow=given.allow)
    found: list[Measurement] = []
    with closing(panel):
        for target in targets(panel.run.recipe, panel.facts, [on] if isinstance(on, str) else on, cache=cache):
            found += panel.measure(target, chosen, sizes=sizes, samples=samples, fresh=fresh, seen=seen)
    if is_rank_zero():
        for each in found:
            panel.write(each)
    return found
