"""Reference diversity metrics, sample by sample in Python loops.

Also random logits, and a loop that sums the state of a metric over batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise, permutations
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from plateaux.core.metric import Metric
from plateaux.core.types import Batch, Estimate

Array = NDArray[Any]
Rows = Mapping[str, Estimate]
ALL_MEMBERS, MEAN = "members together", "mean of pairs"


def softmax(logits: Array) -> Array:
    """Probabilities of one sample's logits, in float64."""
    e = np.exp(logits.astype(np.float64) - logits.max())
    return e / e.sum()


def probabilities(logits: Array) -> Array:
    return np.array([[softmax(sample) for sample in member] for member in logits])


def first_largest(values: Array) -> int:
    best = 0
    for c in range(len(values)):
        if values[c] > values[best]:
            best = c
    return best


def predictions(logits: Array) -> list[list[int]]:
    return [[first_largest(sample) for sample in member] for member in logits]


def incorrect(logits: Array, y: Array) -> list[list[bool]]:
    return [[pred != label for pred, label in zip(member, y, strict=True)] for member in predictions(logits)]


def pair_names(members: int) -> dict[str, tuple[int, int]]:
    return {f"members {i} and {j}": (i, j) for i, j in combinations(range(members), 2)}


def disagreement(logits: Array, y: Array) -> dict[str, float]:
    preds, n = predictions(logits), logits.shape[1]
    rows = {
        name: sum(preds[i][s] != preds[j][s] for s in range(n)) / n for name, (i, j) in pair_names(len(logits)).items()
    }
    return {**rows, MEAN: sum(rows.values()) / len(rows)}


def der(logits: Array, y: Array) -> dict[str, float]:
    dis, n = disagreement(logits, y), logits.shape[1]
    errors = [sum(member) / n for member in incorrect(logits, y)]
    rows = {name: divide(dis[name], (errors[i] + errors[j]) / 2) for name, (i, j) in pair_names(len(logits)).items()}
    return {**rows, ALL_MEMBERS: divide(dis[MEAN], sum(errors) / len(errors))}


def divide(above: float, below: float) -> float:
    return above / below if below else math.nan


def kl(logits: Array, y: Array) -> dict[str, float]:
    p, rows = probabilities(logits), {}
    for i, j in permutations(range(len(logits)), 2):
        total = 0.0
        for s in range(logits.shape[1]):
            total += sum(a * math.log(a / b) for a, b in zip(p[i][s], p[j][s], strict=True) if a > 0)
        rows[f"member {i} to {j}"] = total / logits.shape[1]
    return {**rows, MEAN: sum(rows.values()) / len(rows)}


def variance(logits: Array, y: Array, space: str = "logits", ddof: int = 1) -> dict[str, float]:
    values = logits.astype(np.float64) if space == "logits" else probabilities(logits)
    members, samples, classes = values.shape
    total = 0.0
    for s in range(samples):
        for c in range(classes):
            mean = sum(values[m, s, c] for m in range(members)) / members
            total += sum((values[m, s, c] - mean) ** 2 for m in range(members)) / (members - ddof)
    return {ALL_MEMBERS: total / samples}


def unique(logits: Array, y: Array) -> dict[str, float]:
    preds = predictions(logits)
    return {ALL_MEMBERS: sum(len({member[s] for member in preds}) for s in range(len(y))) / len(y)}


def pds(logits: Array, y: Array, normalize: bool = False) -> dict[str, float]:
    p, (_, samples, classes) = probabilities(logits), logits.shape
    total = sum(max(member[s][c] for member in p) for s in range(samples) for c in range(classes))
    return {ALL_MEMBERS: total / samples / (classes if normalize else 1)}


def error_overlap(logits: Array, y: Array) -> dict[str, float]:
    errors = [{s for s in range(len(y)) if member[s]} for member in incorrect(logits, y)]
    rows = {
        name: divide(len(errors[i] & errors[j]), len(errors[i] | errors[j]))
        for name, (i, j) in pair_names(len(logits)).items()
    }
    return {**rows, MEAN: mean_of_known(list(rows.values()))}


def mean_of_known(numbers: Sequence[float]) -> float:
    known = [number for number in numbers if not math.isnan(number)]
    return divide(sum(known), len(known))


def q_counts(logits: Array, y: Array, i: int, j: int) -> tuple[int, int, int, int]:
    """n11 both correct, n10 only i, n01 only j, n00 neither."""
    w, n = incorrect(logits, y), {(a, b): 0 for a in (False, True) for b in (False, True)}
    for s in range(len(y)):
        n[w[i][s], w[j][s]] += 1
    return n[False, False], n[False, True], n[True, False], n[True, True]


def q_statistic(logits: Array, y: Array) -> dict[str, float]:
    rows = {}
    for name, (i, j) in pair_names(len(logits)).items():
        n11, n10, n01, n00 = q_counts(logits, y, i, j)
        rows[name] = divide(n11 * n00 - n01 * n10, n11 * n00 + n01 * n10)
    return {**rows, MEAN: mean_of_known(list(rows.values()))}


def eir(logits: Array, y: Array) -> dict[str, float]:
    n = len(y)
    members = sum(sum(member) for member in incorrect(logits, y)) / len(logits) / n
    rows = {}
    for name, pooled in (
        ("ensemble (mean probability)", probabilities(logits).mean(0)),
        ("ensemble (mean logit)", logits.astype(np.float64).mean(0)),
    ):
        ensemble = sum(first_largest(pooled[s]) != y[s] for s in range(n)) / n
        rows[name] = divide(members - ensemble, members)
    return rows


def oracle(logits: Array, y: Array) -> dict[str, float]:
    w = incorrect(logits, y)
    return {ALL_MEMBERS: sum(not all(member[s] for member in w) for s in range(len(y))) / len(y)}


def entropy(p: Array) -> float:
    return -sum(a * math.log(a) for a in p if a > 0)


def predictive_entropy(logits: Array, y: Array) -> dict[str, float]:
    p = probabilities(logits).mean(0)
    return {ALL_MEMBERS: sum(entropy(p[s]) for s in range(len(y))) / len(y)}


def expected_entropy(logits: Array, y: Array) -> dict[str, float]:
    p = probabilities(logits)
    rows = {f"member {m}": sum(entropy(p[m][s]) for s in range(len(y))) / len(y) for m in range(len(logits))}
    return {**rows, ALL_MEMBERS: sum(rows.values()) / len(rows)}


def mutual_information(logits: Array, y: Array) -> dict[str, float]:
    """The mean KL divergence of the members from their mean, which is an equivalent definition."""
    p, total = probabilities(logits), 0.0
    for s in range(len(y)):
        mean = p[:, s].mean(0)
        total += sum(a * math.log(a / b) for m in range(len(p)) for a, b in zip(p[m, s], mean, strict=True) if a > 0)
    return {ALL_MEMBERS: total / len(p) / len(y)}


def cka(logits: Array, y: Array) -> dict[str, float]:
    """|Y'X|^2 / (|X'X| |Y'Y|) of centered features."""
    x = logits.astype(np.float64)
    x = x - x.mean(1, keepdims=True)
    rows = {}
    for name, (i, j) in pair_names(len(x)).items():
        scale = np.linalg.norm(x[i].T @ x[i]) * np.linalg.norm(x[j].T @ x[j])
        rows[name] = divide(float(np.linalg.norm(x[j].T @ x[i]) ** 2), float(scale))
    return {**rows, MEAN: mean_of_known(list(rows.values()))}


def evaluate(metric: Metric, logits: Tensor, y: Tensor, cuts: Sequence[int] = ()) -> Rows:
    """Evaluate a metric with `reduce="sum"` on outputs `[M, N, ...]`, in batches that end at `cuts`."""
    assert metric.reduce == "sum"
    assert len(logits) >= metric.min_members
    total: dict[str, Tensor] = {}
    for start, end in pairwise([0, *cuts, len(y)]):
        if end > start:
            ids = torch.arange(start, end)
            new = metric.update(logits[:, start:end], Batch(ids, y[start:end], ids))
            total = {name: total[name] + new[name] for name in new} if total else new
    return metric.compute(total)


def random_logits(
    members: int, samples: int, classes: int, *, seed: int = 0, correlation: float = 0.5
) -> tuple[Tensor, Tensor]:
    """Random logits of correlated members that are correct more often than not, and the labels."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (samples,), generator=generator)
    common = torch.randn(1, samples, classes, generator=generator, dtype=torch.float64)
    own = torch.randn(members, samples, classes, generator=generator, dtype=torch.float64)
    logits = 2 * (correlation * common + (1 - correlation) * own)
    logits[:, torch.arange(samples), y] += 1
    return logits, y


def bootstrap(metric: Metric, logits: Tensor, y: Tensor, row: str, times: int = 300) -> float:
    """Return the bootstrap standard error of a row."""
    generator = torch.Generator().manual_seed(1)
    numbers = []
    for _ in range(times):
        ids = torch.randint(len(y), (len(y),), generator=generator)
        numbers.append(evaluate(metric, logits[:, ids], y[ids])[row].value)
    return float(np.nanstd(numbers))


@st.composite
def logits_and_cuts(draw: st.DrawFn, min_members: int = 2) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Logits with many ties, the labels, and the ends of batches."""
    members, samples = draw(st.integers(min_members, 4)), draw(st.integers(1, 20))
    classes, seed = draw(st.integers(1, 4)), draw(st.integers(0, 999))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-2, 3, (members, samples, classes), generator=generator).double()
    y = torch.randint(classes, (samples,), generator=generator)
    return logits, y, tuple(sorted(draw(st.sets(st.integers(1, samples), max_size=3))))


def reordered(rows: Mapping[str, float], order: Sequence[int]) -> dict[str, float]:
    """Return the rows of `logits[order]` with the names that they have for `logits`."""
    renamed = {}
    for name, number in rows.items():
        parts = [str(order[int(part)]) if part.isdigit() else part for part in name.split()]
        if parts[:1] == ["members"] and parts[2:3] == ["and"]:
            parts[1], parts[3] = sorted((parts[1], parts[3]))
        renamed[" ".join(parts)] = number
    return renamed


def check_cuts(metric: Metric, logits: Tensor, y: Tensor, cuts: Sequence[int]) -> None:
    """Fail if the rows depend on the split into batches."""
    full, parts = evaluate(metric, logits, y), evaluate(metric, logits, y, cuts)
    assert list(full) == list(parts)
    for row, value in full.items():
        assert same(parts[row].value, value.value, 1e-9), row
        assert (parts[row].stderr is None) == (value.stderr is None), row
        assert same(parts[row].stderr or 0.0, value.stderr or 0.0, 1e-6), row


def check_order(metric: Metric, logits: Tensor, y: Tensor, order: Sequence[int]) -> None:
    """Fail if the rows depend on the order of members."""
    rows, other = evaluate(metric, logits, y), evaluate(metric, logits[list(order)], y)
    shifted = reordered({name: value.value for name, value in other.items()}, order)
    assert set(shifted) == set(rows)
    for row, value in rows.items():
        assert same(shifted[row], value.value, 1e-9), row


def same(one: float, other: float, within: float) -> bool:
    return (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=within, abs_tol=within)
