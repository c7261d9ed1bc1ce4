"""Reference diversity metrics, sample by sample in Python loops.

Below them: tables of logits to try both on, and a walk that adds up what a measure settles.
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


def probabilities(table: Array) -> Array:
    return np.array([[softmax(sample) for sample in member] for member in table])


def first_largest(values: Array) -> int:
    best = 0
    for c in range(len(values)):
        if values[c] > values[best]:
            best = c
    return best


def guesses(table: Array) -> list[list[int]]:
    return [[first_largest(sample) for sample in member] for member in table]


def wrong(table: Array, y: Array) -> list[list[bool]]:
    return [[guess != label for guess, label in zip(member, y, strict=True)] for member in guesses(table)]


def pair_names(members: int) -> dict[str, tuple[int, int]]:
    return {f"members {i} and {j}": (i, j) for i, j in combinations(range(members), 2)}


def disagreement(table: Array, y: Array) -> dict[str, float]:
    found, n = guesses(table), table.shape[1]
    rows = {
        name: sum(found[i][s] != found[j][s] for s in range(n)) / n for name, (i, j) in pair_names(len(table)).items()
    }
    return {**rows, MEAN: sum(rows.values()) / len(rows)}


def der(table: Array, y: Array) -> dict[str, float]:
    dis, n = disagreement(table, y), table.shape[1]
    errors = [sum(member) / n for member in wrong(table, y)]
    rows = {name: over(dis[name], (errors[i] + errors[j]) / 2) for name, (i, j) in pair_names(len(table)).items()}
    return {**rows, ALL_MEMBERS: over(dis[MEAN], sum(errors) / len(errors))}


def over(above: float, below: float) -> float:
    return above / below if below else math.nan


def kl(table: Array, y: Array) -> dict[str, float]:
    p, rows = probabilities(table), {}
    for i, j in permutations(range(len(table)), 2):
        total = 0.0
        for s in range(table.shape[1]):
            total += sum(a * math.log(a / b) for a, b in zip(p[i][s], p[j][s], strict=True) if a > 0)
        rows[f"member {i} to {j}"] = total / table.shape[1]
    return {**rows, MEAN: sum(rows.values()) / len(rows)}


def variance(table: Array, y: Array, space: str = "logits", ddof: int = 1) -> dict[str, float]:
    values = table.astype(np.float64) if space == "logits" else probabilities(table)
    members, samples, classes = values.shape
    total = 0.0
    for s in range(samples):
        for c in range(classes):
            middle = sum(values[m, s, c] for m in range(members)) / members
            total += sum((values[m, s, c] - middle) ** 2 for m in range(members)) / (members - ddof)
    return {ALL_MEMBERS: total / samples}


def unique(table: Array, y: Array) -> dict[str, float]:
    found = guesses(table)
    return {ALL_MEMBERS: sum(len({member[s] for member in found}) for s in range(len(y))) / len(y)}


def pds(table: Array, y: Array, normalize: bool = False) -> dict[str, float]:
    p, (_, samples, classes) = probabilities(table), table.shape
    total = sum(max(member[s][c] for member in p) for s in range(samples) for c in range(classes))
    return {ALL_MEMBERS: total / samples / (classes if normalize else 1)}


def error_overlap(table: Array, y: Array) -> dict[str, float]:
    errors = [{s for s in range(len(y)) if member[s]} for member in wrong(table, y)]
    rows = {
        name: over(len(errors[i] & errors[j]), len(errors[i] | errors[j]))
        for name, (i, j) in pair_names(len(table)).items()
    }
    return {**rows, MEAN: mean_of_known(list(rows.values()))}


def mean_of_known(numbers: Sequence[float]) -> float:
    known = [number for number in numbers if not math.isnan(number)]
    return over(sum(known), len(known))


def q_counts(table: Array, y: Array, i: int, j: int) -> tuple[int, int, int, int]:
    """n11 both right, n10 only i, n01 only j, n00 none."""
    w, n = wrong(table, y), {(a, b): 0 for a in (False, True) for b in (False, True)}
    for s in range(len(y)):
        n[w[i][s], w[j][s]] += 1
    return n[False, False], n[False, True], n[True, False], n[True, True]


def q_statistic(table: Array, y: Array) -> dict[str, float]:
    rows = {}
    for name, (i, j) in pair_names(len(table)).items():
        n11, n10, n01, n00 = q_counts(table, y, i, j)
        rows[name] = over(n11 * n00 - n01 * n10, n11 * n00 + n01 * n10)
    return {**rows, MEAN: mean_of_known(list(rows.values()))}


def eir(table: Array, y: Array) -> dict[str, float]:
    n = len(y)
    members = sum(sum(member) for member in wrong(table, y)) / len(table) / n
    rows = {}
    for name, pooled in (
        ("ensemble (mean probability)", probabilities(table).mean(0)),
        ("ensemble (mean logit)", table.astype(np.float64).mean(0)),
    ):
        ensemble = sum(first_largest(pooled[s]) != y[s] for s in range(n)) / n
        rows[name] = over(members - ensemble, members)
    return rows


def oracle(table: Array, y: Array) -> dict[str, float]:
    w = wrong(table, y)
    return {ALL_MEMBERS: sum(not all(member[s] for member in w) for s in range(len(y))) / len(y)}


def entropy(p: Array) -> float:
    return -sum(a * math.log(a) for a in p if a > 0)


def predictive_entropy(table: Array, y: Array) -> dict[str, float]:
    p = probabilities(table).mean(0)
    return {ALL_MEMBERS: sum(entropy(p[s]) for s in range(len(y))) / len(y)}


def expected_entropy(table: Array, y: Array) -> dict[str, float]:
    p = probabilities(table)
    rows = {f"member {m}": sum(entropy(p[m][s]) for s in range(len(y))) / len(y) for m in range(len(table))}
    return {**rows, ALL_MEMBERS: sum(rows.values()) / len(rows)}


def mutual_information(table: Array, y: Array) -> dict[str, float]:
    """The mean divergence of members from their mean: the same number by another road."""
    p, total = probabilities(table), 0.0
    for s in range(len(y)):
        middle = p[:, s].mean(0)
        total += sum(a * math.log(a / b) for m in range(len(p)) for a, b in zip(p[m, s], middle, strict=True) if a > 0)
    return {ALL_MEMBERS: total / len(p) / len(y)}


def cka(table: Array, y: Array) -> dict[str, float]:
    """|Y'X|^2 / (|X'X| |Y'Y|) of centred features."""
    x = table.astype(np.float64)
    x = x - x.mean(1, keepdims=True)
    rows = {}
    for name, (i, j) in pair_names(len(x)).items():
        scale = np.linalg.norm(x[i].T @ x[i]) * np.linalg.norm(x[j].T @ x[j])
        rows[name] = over(float(np.linalg.norm(x[j].T @ x[i]) ** 2), float(scale))
    return {**rows, MEAN: mean_of_known(list(rows.values()))}


def measured(measure: Metric, table: Tensor, y: Tensor, cuts: Sequence[int] = ()) -> Rows:
    """Return what a measure of sums says of a table `[M, N, ...]`, taken in batches that end at `cuts`."""
    assert measure.reduce == "sum"
    assert len(table) >= measure.min_members
    total: dict[str, Tensor] = {}
    for start, end in pairwise([0, *cuts, len(y)]):
        if end > start:
            ids = torch.arange(start, end)
            new = measure.update(table[:, start:end], Batch(ids, y[start:end], ids))
            total = {name: total[name] + new[name] for name in new} if total else new
    return measure.compute(total)


def table_of(members: int, samples: int, classes: int, *, seed: int = 0, alike: float = 0.5) -> tuple[Tensor, Tensor]:
    """Logits of members that agree in part and are right more often than not, and the labels."""
    chance = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (samples,), generator=chance)
    common = torch.randn(1, samples, classes, generator=chance, dtype=torch.float64)
    own = torch.randn(members, samples, classes, generator=chance, dtype=torch.float64)
    table = 2 * (alike * common + (1 - alike) * own)
    table[:, torch.arange(samples), y] += 1
    return table, y


def bootstrap(measure: Metric, table: Tensor, y: Tensor, row: str, times: int = 300) -> float:
    """Return the spread of a row's number over resamples of the samples."""
    chance = torch.Generator().manual_seed(1)
    numbers = []
    for _ in range(times):
        ids = torch.randint(len(y), (len(y),), generator=chance)
        numbers.append(measured(measure, table[:, ids], y[ids])[row].value)
    return float(np.nanstd(numbers))


@st.composite
def cut_tables(draw: st.DrawFn, least: int = 2) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Logits with many ties among few values, the labels, and where batches end."""
    members, samples = draw(st.integers(least, 4)), draw(st.integers(1, 20))
    classes, seed = draw(st.integers(1, 4)), draw(st.integers(0, 999))
    chance = torch.Generator().manual_seed(seed)
    table = torch.randint(-2, 3, (members, samples, classes), generator=chance).double()
    y = torch.randint(classes, (samples,), generator=chance)
    return table, y, tuple(sorted(draw(st.sets(st.integers(1, samples), max_size=3))))


def reordered(rows: Mapping[str, float], order: Sequence[int]) -> dict[str, float]:
    """Return the rows of `table[order]` under the names they have in `table`."""
    found = {}
    for name, number in rows.items():
        words = [str(order[int(word)]) if word.isdigit() else word for word in name.split()]
        if words[:1] == ["members"] and words[2:3] == ["and"]:
            words[1], words[3] = sorted((words[1], words[3]))
        found[" ".join(words)] = number
    return found


def check_cuts(measure: Metric, table: Tensor, y: Tensor, cuts: Sequence[int]) -> None:
    """Fail unless the rows are the same however the samples are cut into batches."""
    whole, parts = measured(measure, table, y), measured(measure, table, y, cuts)
    assert list(whole) == list(parts)
    for row, value in whole.items():
        assert same(parts[row].value, value.value, 1e-9), row
        assert (parts[row].stderr is None) == (value.stderr is None), row
        assert same(parts[row].stderr or 0.0, value.stderr or 0.0, 1e-6), row


def check_order(measure: Metric, table: Tensor, y: Tensor, order: Sequence[int]) -> None:
    """Fail unless members in another order get the same rows."""
    rows, other = measured(measure, table, y), measured(measure, table[list(order)], y)
    moved = reordered({name: value.value for name, value in other.items()}, order)
    assert set(moved) == set(rows)
    for row, value in rows.items():
        assert same(moved[row], value.value, 1e-9), row


def same(one: float, other: float, within: float) -> bool:
    return (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=within, abs_tol=within)
