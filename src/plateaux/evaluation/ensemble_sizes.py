"""Metrics over the size of an ensemble: means over subsets of the members."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from math import comb
from random import Random

from plateaux.core.row_names import ALL_MEMBERS, MEAN_OF_PAIRS, MEAN_PROBABILITY, PART, RowName
from plateaux.core.stats.estimates import mean_of_paired
from plateaux.core.types import Estimate
from plateaux.evaluation.metric_loop import MemberSubset

MAX_SUBSETS = 30  # of one size


def subsets_of_every_size(members: int) -> list[MemberSubset]:
    """Return the subsets of every size: all of them, or MAX_SUBSETS sampled with a fixed seed."""
    subsets: list[MemberSubset] = []
    for size in range(1, members + 1):
        if comb(members, size) <= MAX_SUBSETS:
            subsets += combinations(range(members), size)
            continue
        random, sampled = Random(size), set[MemberSubset]()
        while len(sampled) < MAX_SUBSETS:
            sampled.add(tuple(sorted(random.sample(range(members), size))))
        subsets += sorted(sampled)
    return subsets


def mean_by_size(rows: Mapping[MemberSubset, Mapping[RowName, Estimate]]) -> dict[RowName, Estimate]:
    """Return the mean over the ensembles of each size, of the row that describes the whole ensemble."""
    means: dict[RowName, Estimate] = {}
    for size in sorted({len(subset) for subset in rows}):
        ensembles = [_ensemble_values(values) for subset, values in rows.items() if len(subset) == size]
        for part in dict.fromkeys(part for values in ensembles for part in values):
            name = RowName.size(size).with_part(part)
            means[name] = mean_of_paired([values[part] for values in ensembles if part in values])
    return means


def _ensemble_values(rows: Mapping[RowName, Estimate]) -> dict[str, Estimate]:
    """Return the values of the ensemble by part: by mean probability, of all members together, or the mean of pairs."""
    for base in (MEAN_PROBABILITY, ALL_MEMBERS, MEAN_OF_PAIRS, RowName.member(0)):
        values = {PART.join(name.part): value for name, value in rows.items() if name.base == base}
        if values:
            return values
    return {}
