"""How alarmed: how well doubt tells a run's own samples from samples of elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.core.callbacks import Say, Seen
from plateaux.core.errors import DataError, RecipeError, UnknownNameError
from plateaux.core.metric import Metric
from plateaux.core.runtime import is_rank_zero
from plateaux.core.stats.estimates import mean_of_paired
from plateaux.core.types import Batch, Estimate, TensorTree
from plateaux.ensembles.ood_scores import DEFINITION, OOD_SCORES, compare
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.prediction_cache import CacheDtype
from plateaux.evaluation.results import MetricResult
from plateaux.evaluation.row_names import TOGETHER, row_name
from plateaux.evaluation.splits import eval_split, ood_split
from plateaux.storage.run import Run, RunLike

OPENOOD = {  # the near and far sets of OpenOOD 1.5, by the data set a run is about
    "cifar10": {"near": ("cifar100", "tin"), "far": ("mnist", "svhn", "texture", "places365")},
    "cifar100": {"near": ("cifar10", "tin"), "far": ("mnist", "svhn", "texture", "places365")},
}
Suites = Mapping[str, Sequence[str]]
"""Data sets by suite: {"near": ["cifar100"], "far": ["mnist", "textures32"]}."""


def parse_ood_suites(words: Sequence[str], about: str) -> tuple[dict[str, list[str]], bool]:
    """Return the data sets by suite, and whether those that are not there may be left out.

    >>> parse_ood_suites(["near=cifar100,tin", "far=mnist"], "cifar10")[0]
    {'near': ['cifar100', 'tin'], 'far': ['mnist']}
    """
    found: dict[str, list[str]] = {}
    by_name = False
    for word in words:
        suite, equals, names = word.partition("=")
        if not equals:
            known = OPENOOD.get(about, {})
            if suite not in known:
                raise RecipeError(
                    f"--ood {word}: name the sets, such as near=cifar100,tin far=mnist; near and far alone stand for "
                    f"OpenOOD's sets, which there are for {' and '.join(OPENOOD)}, and this run is about {about}"
                )
            by_name, names = True, ",".join(known[suite])
        found.setdefault(suite, []).extend(name.strip() for name in names.split(",") if name.strip())
    return found, by_name


def detect_ood(
    root: RunLike,
    suites: Suites,
    *,
    members: Sequence[int] | None = None,
    limit: int | None = None,
    skip_missing: bool = False,
    cache_logits: CacheDtype = "float32",
    no_cache: bool = False,
    components: Components = NO_COMPONENTS,
    device: str | None = None,
    executor: Mapping[str, Any] | None = None,
    seen: Seen = lambda *_: None,
    say: Say = lambda _: None,
) -> list[MetricResult]:
    """Measure how well each score tells test samples from those of other sets: by members alone, and by all together.

    Larger scores are more out of distribution, and out of distribution is positive.
    """
    panel = Evaluator(
        Run.open(root),
        members,
        components=components,
        device=device,
        executor=executor,
        cache_logits=cache_logits,
        say=say,
    )
    everyone = tuple(range(len(panel.numbers)))
    casts = [*((position,) for position in everyone if len(everyone) > 1), everyone]
    options: dict[str, Any] = {"samples": limit, "fresh": no_cache, "seen": seen}
    own = eval_split(panel.recipe, panel.data_info, "test")
    inside, about = panel.accumulate(own, {"alarms": SCORES}, casts, **options)
    found: list[MetricResult] = []
    for suite, names in suites.items():
        one_suite: list[MetricResult] = []
        for name in names:
            try:
                outside, other = panel.accumulate(
                    ood_split(name, suite, components), {"alarms": SCORES}, casts, **options
                )
            except (DataError, UnknownNameError) as problem:
                if not skip_missing:
                    raise
                say(f"{name} is left out: {problem}")
                continue
            rows: dict[str, Estimate] = {}
            for cast in casts:
                row = f"member {panel.numbers[cast[0]]}" if len(cast) < len(everyone) or len(cast) == 1 else TOGETHER
                apart = compare(_scores_by_name(inside[cast, "alarms"]), _scores_by_name(outside[cast, "alarms"]))
                rows |= {row_name(row, score, what): v for score, each in apart.items() for what, v in each.items()}
            data = {**about, "outside": other}
            one_suite.append(panel.result("ood", f"{name} ({suite})", rows, SCORES, data))
        found += one_suite
        if len(one_suite) > 1:
            found.append(_mean_of_suite(panel, suite, one_suite, about))
    if is_rank_zero():
        for each in found:
            panel.write(each)
    return found


def _settle(table: Tensor, batch: Batch) -> TensorTree:
    # In float64: of fitted networks float32 would tie the surest samples.
    return {"scores": torch.stack([alarm(table) for alarm in OOD_SCORES.values()], -1)}


SCORES = Metric(_settle, lambda _: {}, reduce="cat", higher_is_better=None, definition=DEFINITION)


def _scores_by_name(found: TensorTree) -> dict[str, Any]:
    return {name: found["scores"][:, column].cpu().numpy() for column, name in enumerate(OOD_SCORES)}


def _mean_of_suite(
    panel: Evaluator, suite: str, found: Sequence[MetricResult], about: Mapping[str, Any]
) -> MetricResult:
    rows = {name: mean_of_paired([each.rows[name] for each in found]) for name in found[0].rows}
    names = [each.split.split(" (")[0] for each in found]
    return panel.result(
        "ood", f"mean of {suite} ({', '.join(names)})", rows, SCORES, {**about, "sets": [each.split for each in found]}
    )
