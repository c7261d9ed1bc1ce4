"""Calibrated doubt: fitted on held-out samples, stored with their ids, and never judged on the same ones.

calibration.json             temperatures, conformal thresholds, the threshold of abstention
calibration-ids.safetensors  ids of the samples they were fitted on
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.core.callbacks import Say, Seen
from plateaux.core.errors import RecipeError, RunError
from plateaux.core.metric import Metric
from plateaux.core.stats.estimates import mean, proportion
from plateaux.core.types import Estimate, derive_seed
from plateaux.ensembles import conformal as conformal_sets
from plateaux.ensembles import selective
from plateaux.ensembles.conformal import Conformal
from plateaux.ensembles.log_probs import log_probabilities
from plateaux.ensembles.selective import RejectionThreshold
from plateaux.ensembles.temperature import ORDERS, Order, Temperatures, apply, calibrate_then_pool, pool_then_calibrate
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.prediction_cache import CacheDtype
from plateaux.evaluation.predictions import MemberOutputs, error_probability, predict_all
from plateaux.evaluation.results import MetricResult
from plateaux.evaluation.row_names import MEAN_PROBABILITY, row_name
from plateaux.evaluation.splits import eval_split
from plateaux.storage.run import Run, RunLike

FILE, IDS = "calibration.json", "calibration-ids.safetensors"


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was fitted on held-out samples of a run."""

    split: str
    fingerprint: str  # of the source the samples are from
    ids: Tensor
    hashes: tuple[str, ...]  # of the members' weights
    order: Order  # the one that is used
    temperatures: Mapping[Order, Temperatures]
    sets: tuple[Conformal, ...]
    threshold: RejectionThreshold

    def log_p(self, table: Tensor, order: Order | None = None) -> Tensor:
        """Return the ensemble's calibrated log-probabilities `[N, C]`."""
        return apply(table, self.temperatures[order or self.order])

    def to_dict(self) -> dict[str, Any]:
        return {
            "split": self.split,
            "fingerprint": self.fingerprint,
            "samples": len(self.ids),
            "hashes": list(self.hashes),
            "order": self.order,
            "temperatures": {order: each.to_dict() for order, each in self.temperatures.items()},
            "sets": [each.to_dict() for each in self.sets],
            "threshold": self.threshold.to_dict(),
        }

    def write(self, run: Run) -> None:
        run.store.put_tensors(IDS, {"ids": self.ids})
        run.store.put_json(FILE, self.to_dict())

    @classmethod
    def read(cls, run: Run) -> Calibration:
        """Return what is stored with the run."""
        if not run.store.has(FILE):
            root = run.store.root
            raise RunError(f"{root} is not calibrated; `plateaux calibrate {root} --split validation` does it")
        tree, ids = run.store.get_json(FILE), run.store.get_tensors(IDS)["ids"]
        temperatures: dict[Order, Temperatures] = {
            order: Temperatures.from_dict(tree["temperatures"][order]) for order in ORDERS
        }
        sets = tuple(Conformal.from_dict(each) for each in tree["sets"])
        threshold = RejectionThreshold.from_dict(tree["threshold"])
        hashes = tuple(tree["hashes"])
        return cls(tree["split"], tree["fingerprint"], ids, hashes, tree["order"], temperatures, sets, threshold)


def calibrate(
    root: RunLike,
    *,
    split: str = "validation",
    fraction: float = 1.0,
    alphas: Sequence[float] = (0.1, 0.05),
    conformal: conformal_sets.Kind = "aps",
    target_risk: float = 0.05,
    bound: selective.Bound = "none",
    order: Order = "pool then calibrate",
    components: Components = NO_COMPONENTS,
    device: str | None = None,
    cache_logits: CacheDtype = "float32",
    seen: Seen = lambda *_: None,
    say: Say = lambda _: None,
) -> Calibration:
    """Fit temperatures, conformal sets and a threshold of abstention on held-out samples, and store them in the run.

    `part` takes a seeded share of the samples, so that the others are left to judge by.
    """
    panel = Evaluator(Run.open(root), components=components, device=device, cache_logits=cache_logits, say=say)
    target = eval_split(panel.recipe, panel.data_info, split)
    if target.family == "train":
        raise RecipeError("Members were trained on the train samples: doubt fitted there is too small; hold some out")
    heard = predict_all(panel, target, seen=seen)
    if not 0 < fraction <= 1:
        raise RecipeError(f"part = {fraction}: give a share above 0 and at most 1")
    if fraction < 1:
        generator = torch.Generator().manual_seed(derive_seed(panel.recipe.seed, "calibrate", split))
        count = max(1, round(fraction * len(heard.y)))
        heard = heard.take(torch.randperm(len(heard.y), generator=generator)[:count].sort().values)
    temperatures: dict[Order, Temperatures] = {
        "pool then calibrate": pool_then_calibrate(heard.logits, heard.y),
        "calibrate then pool": calibrate_then_pool(heard.logits, heard.y),
    }
    log_p = apply(heard.logits, temperatures[order])
    sets = tuple(conformal_sets.fit(log_p, heard.y, heard.ids, alpha, conformal) for alpha in alphas)
    threshold = selective.fit(error_probability(log_p), log_p.argmax(-1) != heard.y, target_risk, bound=bound)
    fingerprint = panel.known(target)["fingerprint"]
    made = Calibration(split, fingerprint, heard.ids, tuple(panel.hashes), order, temperatures, sets, threshold)
    made.write(panel.run)
    for words in [*temperatures[order].remarks, *(each.remark for each in sets), threshold.remark]:
        if words:
            say(words)
    return made


def evaluate_calibration(
    root: RunLike,
    *,
    split: str = "test",
    exclude_calibration_ids: bool = False,
    components: Components = NO_COMPONENTS,
    device: str | None = None,
    cache_logits: CacheDtype = "float32",
    seen: Seen = lambda *_: None,
    say: Say = lambda _: None,
) -> list[MetricResult]:
    """Measure what calibration did, on samples it was not fitted on; `unseen` leaves those out that it was."""
    panel = Evaluator(Run.open(root), components=components, device=device, cache_logits=cache_logits, say=say)
    fitted = Calibration.read(panel.run)
    _same_weights(fitted, panel)
    target = eval_split(panel.recipe, panel.data_info, split)
    heard = predict_all(panel, target, seen=seen)
    known = panel.known(target)
    if known["fingerprint"] == fitted.fingerprint:
        old = torch.isin(heard.ids, fitted.ids)
        if old.any() and not exclude_calibration_ids:
            raise RunError(
                f"{int(old.sum()):,} of the {len(old):,} {split} samples are those the calibration was fitted on; "
                "numbers "
                "on them would flatter. Add --exclude-calibration-ids to leave them out, or choose other samples"
            )
        heard = heard.take(~old)
        if not len(heard.y):
            raise RunError(f"The calibration was fitted on all {split} samples: none are left to judge it by")
    kinds = [f"{each.kind} {each.alpha:g}" for each in fitted.sets]
    asked = {"sets": kinds, "risk": fitted.threshold.risk, "bound": fitted.threshold.bound, "fitted on": fitted.split}
    data = {**known, "name": panel.data_info.name, "samples": len(heard.y), **asked}
    words = f"fitted on {len(fitted.ids):,} {fitted.split} samples; {fitted.order}"
    measure = Metric(lambda *_: {}, lambda _: {}, higher_is_better=None, group="uncertainty", definition=words)
    found = [panel.result("calibrated", split, _calibration_estimates(heard, fitted, panel.numbers), measure, data)]
    for each in found:
        panel.write(each)
    return found


def _same_weights(fitted: Calibration, panel: Evaluator) -> None:
    if fitted.hashes != tuple(panel.hashes):
        raise RunError(
            f"{panel.run.store.root} was calibrated with other weights than it has now; run `plateaux calibrate` again"
        )


def _calibration_estimates(heard: MemberOutputs, fitted: Calibration, numbers: Sequence[int]) -> dict[str, Estimate]:
    rows: dict[str, Estimate] = {}
    before = log_probabilities(heard.logits.double())
    own = fitted.temperatures["calibrate then pool"].values
    for position, number in enumerate(numbers):
        scaled = (heard.logits[position].double() / own[position]).log_softmax(-1)
        rows[row_name(f"member {number}", "temperature")] = Estimate(own[position])
        rows[row_name(f"member {number}", "nll before")] = _nll(before[position], heard.y)
        rows[row_name(f"member {number}", "nll after")] = _nll(scaled, heard.y)
    if len(numbers) > 1:
        rows[row_name(MEAN_PROBABILITY, "nll before")] = _nll(before[-2], heard.y)
    for order in ORDERS:
        rows[row_name(f"ensemble ({order})", "nll after")] = _nll(fitted.log_p(heard.logits, order), heard.y)
    log_p = fitted.log_p(heard.logits)
    name = f"ensemble ({fitted.order})"
    for each in fitted.sets:
        sets = each.sets(log_p, heard.ids)
        wanted = f"{100 * (1 - each.alpha):g} % sets"
        rows[row_name(name, f"{wanted}: coverage")] = conformal_sets.coverage(sets, heard.y)
        rows[row_name(name, f"{wanted}: classes")] = conformal_sets.mean_size(sets)
    used = fitted.threshold.accepts(error_probability(log_p))
    wrong = log_p.argmax(-1) != heard.y
    rows[row_name(name, "answered")] = proportion(float(used.sum()), len(used))
    if used.any():
        rows[row_name(name, "wrong of those answered")] = proportion(float((wrong & used).sum()), float(used.sum()))
    return rows


def _nll(log_p: Tensor, y: Tensor) -> Estimate:
    losses = -log_p.gather(-1, y[:, None])[:, 0].double()
    return mean(float(losses.sum()), float((losses * losses).sum()), len(y))
