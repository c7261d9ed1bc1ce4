"""Reference joint losses: loops over members, samples, and classes, written from the formulas.

A table is nested lists `[R][K][C]` of logits, labeled samples first. What must not get a gradient is taken from a
second table, `still`: equal to the first, but not moved when slopes are taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Table = list[list[list[float]]]
Losses = list[list[float]]


def softmax(logits: Sequence[float]) -> list[float]:
    top = max(logits)
    powers = [math.exp(z - top) for z in logits]
    return [power / sum(powers) for power in powers]


def cross_entropy(logits: Sequence[float], label: int) -> float:
    top = max(logits)
    return math.log(sum(math.exp(z - top) for z in logits)) + top - logits[label]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def one_pair(mine: Sequence[float], other: Sequence[float]) -> float:
    """A2D of one sample: the class is the other's likeliest."""
    p, q = softmax(other), softmax(mine)
    y = p.index(max(p))
    return -math.log(p[y] * (1 - q[y]) + q[y] * (1 - p[y]) + 1e-7)


def chosen(size: int, total: int, on: str) -> range:
    return {"labeled": range(size), "unlabeled": range(size, total), "both": range(total)}[on]


def a2d(
    table: Table, still: Table, labels: list[int], *, diversity_weight: float, disagree_on: str, training: str
) -> Losses:
    size, total = len(labels), len(table[0])

    def alike(row: int, sample: int) -> float:
        if training == "sequential":
            return mean([one_pair(table[row][sample], still[s][sample]) for s in range(row)])
        return mean([one_pair(table[row][sample], table[s][sample]) for s in range(len(table)) if s != row])

    losses = []
    for row in range(len(table)):
        values = {sample: alike(row, sample) for sample in chosen(size, total, disagree_on)}
        everywhere = mean(list(values.values()))
        losses.append(
            [
                cross_entropy(table[row][b], labels[b])
                + diversity_weight * (values[b] if disagree_on == "labeled" else everywhere)
                for b in range(size)
            ]
        )
    return losses


def mutual_information(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """Of probabilities `[U][C]` of two rows."""
    classes, found = range(len(one[0])), 0.0
    for c in classes:
        for d in classes:
            joint = mean([p[c] * q[d] for p, q in zip(one, other, strict=True)])
            apart = mean([p[c] for p in one]) * mean([q[d] for q in other])
            found += joint * math.log(joint / apart) if joint > 0 else 0.0
    return found


def l1(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    return -mean([sum(abs(a - b) for a, b in zip(p, q, strict=True)) for p, q in zip(one, other, strict=True)])


def kl(p: Sequence[float], q: Sequence[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def collapse(name: str, row: Sequence[Sequence[float]], source: Table, shares: Sequence[float]) -> float:
    classes = range(len(row[0]))
    own = [mean([p[c] for p in row]) for c in classes]
    everyones = [mean([p[c] for each in source for p in each]) for c in classes]
    if name == "kl_backward":
        return kl(own, everyones)
    if name == "kl_forward":
        return kl(everyones, own)
    if name == "entropy":
        return sum(a * math.log(a) for a in own)
    return sum(abs(a - b) for a, b in zip(own, shares, strict=True)) / 2


def divdis(
    table: Table,
    still: Table,
    labels: list[int],
    *,
    diversity_weight: float,
    regularizer_weight: float,
    disagree_on: str,
    diversity: str,
    regularizer: str,
    class_ratio: Sequence[float],
) -> Losses:
    size, total = len(labels), len(table[0])
    target = [[softmax(row[k]) for k in chosen(size, total, disagree_on)] for row in table]
    source = [[softmax(row[b]) for b in range(size)] for row in still]
    pair = mutual_information if diversity == "mi" else l1
    losses = []
    for r, row in enumerate(table):
        alike = mean([pair(target[r], target[s]) for s in range(len(table)) if s != r])
        extra = diversity_weight * alike + regularizer_weight * collapse(regularizer, target[r], source, class_ratio)
        losses.append([cross_entropy(row[b], labels[b]) + extra for b in range(size)])
    return losses


def hardness(table: Table, labels: list[int], floor: float) -> list[float]:
    logits = [
        [mean([row[b][c] for row in table]) for c in range(len(table[0][0]))] for b in range(len(labels))
    ]  # averaged over rows
    losses = [cross_entropy(logits[b], labels[b]) for b in range(len(labels))]
    return [loss / max(mean(losses), floor) ** 2 for loss in losses]


def sed(table: Table, still: Table, labels: list[int], *, diversity_weight: float, floor: float) -> Losses:
    alpha = hardness(still, labels, floor)
    return [
        [
            cross_entropy(table[r][b], labels[b])
            + diversity_weight
            * alpha[b]
            * mean([one_pair(table[r][b], table[s][b]) for s in range(len(table)) if s != r])
            for b in range(len(labels))
        ]
        for r in range(len(table))
    ]


def total(losses: Losses) -> float:
    """What a step descends: the sum over rows of the mean over samples."""
    return sum(mean(row) for row in losses)


def slopes(of: Callable[[Table], Losses], table: Table, *, width: float = 1e-5) -> Table:
    """Return the gradient of the total by central differences, one logit at a time."""

    def moved(r: int, k: int, c: int, by: float) -> float:
        other = [[list(sample) for sample in row] for row in table]
        other[r][k][c] += by
        return total(of(other))

    return [
        [
            [(moved(r, k, c, width) - moved(r, k, c, -width)) / (2 * width) for c in range(len(table[r][k]))]
            for k in range(len(table[r]))
        ]
        for r in range(len(table))
    ]
