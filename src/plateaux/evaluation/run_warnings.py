"""Warnings about the results of a run; they are stored in `warnings.json`, by weights, split, and metric.

Importing this module needs neither torch nor NumPy, because `plateaux status` shows warnings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain, combinations
from typing import TYPE_CHECKING, Any

from plateaux.config.recipe import fingerprint
from plateaux.data.warning_table import limit, warning
from plateaux.storage.json_shapes import read_shape

if TYPE_CHECKING:
    from plateaux.evaluation.results import MetricResult
    from plateaux.storage.run import Run

FILE = "warnings.json"
Z = 1.96  # of the interval of level limit("member-at-chance")
Found = Mapping[str, Mapping[str, str]]
"""Texts by metric and name; a metric without a warning has none."""
Stored = dict[str, dict[str, dict[str, dict[str, str]]]]
"""Texts by weights, split, metric, and name."""


def result_warnings(
    split: str, results: Sequence[MetricResult], counts: Sequence[int], sums: Mapping[int, float]
) -> Found:
    """Return warnings about results on one split.

    `counts` are the numbers of its samples by class, and `sums` those of all outputs of each member.
    """
    equal = [f"{a} and {b}" for a, b in combinations(sums, 2) if sums[a] == sums[b]]
    found: dict[str, dict[str, str]] = {"outputs": warning("equal-members", equal, split=split) if equal else {}}
    checks = {"accuracy": _check_accuracy, "nll": _check_nll, "ece": _check_ece}
    shares = [count / sum(counts) for count in counts if count]
    for result in results if len(shares) > 1 else []:
        if result.metric in checks:
            found[result.metric] = checks[result.metric](result, shares)
    return found


def _check_accuracy(result: MetricResult, shares: Sequence[float]) -> dict[str, str]:
    members, share, found = result.members, max(shares), dict[str, str]()
    chance = {number: each.value for number, each in members.items() if each.value - Z * (each.stderr or 0) <= share}
    if chance:
        listed = [f"{_percent(value)} (member {number})" for number, value in chance.items()]
        facts: dict[str, Any] = {"count": len(chance), "total": len(members), "share": _percent(share)}
        found |= warning("member-at-chance", listed, split=result.split, **facts)
    best = max(members, key=lambda number: members[number].value)
    value, ensemble = members[best].value, result.ensemble.value
    if value - ensemble > limit("ensemble-below-member") * (members[best].stderr or 0):
        facts = {"ensemble": _percent(ensemble), "best": best, "value": _percent(value)}
        found |= warning("ensemble-below-member", split=result.split, **facts)
    return found


def _check_nll(result: MetricResult, shares: Sequence[float]) -> dict[str, str]:
    entropy = -sum(share * math.log(share) for share in shares)
    rows = {**{f"member {number}": each.value for number, each in result.members.items()}, "ensemble": result.value}
    listed = [
        f"{value:.3f} ({name})" for name, value in rows.items() if value > entropy + limit("nll-above-frequencies")
    ]
    return warning("nll-above-frequencies", listed, split=result.split, entropy=entropy) if listed else {}


def _check_ece(result: MetricResult, shares: Sequence[float]) -> dict[str, str]:
    is_high = result.value > limit("high-ece")
    return warning("high-ece", split=result.split, ece=_percent(result.value)) if is_high else {}


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def store_warnings(run: Run, members: Sequence[int], split: str, found: Found) -> None:
    """Store the warnings about the results on a split; they replace those of the same metrics."""
    stored, weights = _read(run), _weights_name(run, members)
    if any(found.values()) or weights in stored:
        splits = stored.get(weights, {})
        stored[weights] = {
            **splits,
            split: {**splits.get(split, {}), **{name: {**each} for name, each in found.items()}},
        }
        run.store.put_json(FILE, stored, skip_unchanged=True)


def run_warnings(run: Run, members: Sequence[int] | None = None) -> dict[str, str]:
    """Return the warnings about the data, the weights, and the stored results of a run, by name.

    Those that its recipe silences are left out.
    """
    found, stored = dict(run.info.warnings), _read(run)
    name = _weights_name(run, run.trained_members() if members is None else members) if stored else ""
    for metrics in stored.get(name, {}).values():
        for name, text in chain.from_iterable(texts.items() for texts in metrics.values()):
            found[name] = f"{found[name]}; {text}" if name in found else text
    silent = {*(run.recipe.run.silence or ()), *(["high-ece"] if run.info.calibration_digest else [])}
    return {name: text for name, text in found.items() if name not in silent}


def _weights_name(run: Run, members: Sequence[int]) -> str:
    """Return a hash of the digests of the members' weights."""
    progress = {number: run.progress(number) for number in members}
    return fingerprint({str(n): each.digests.get(each.weights or "") for n, each in progress.items()})


def _read(run: Run) -> Stored:
    if not run.store.has(FILE):
        return {}
    return read_shape(Stored, run.store.get_json(FILE), run.store.root / FILE, "delete it and evaluate again")
