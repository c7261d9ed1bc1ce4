"""Names of the rows of a metric result."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import combinations, permutations
from typing import TypeVar

from plateaux.core.stats.estimates import mean_of_independent
from plateaux.core.types import Estimate

MEAN_PROBABILITY = "ensemble (mean probability)"


MEAN_LOGIT = "ensemble (mean logit)"


TOGETHER = "members together"  # of all members at once, and of no ensemble they make


MEAN_OF_PAIRS = "mean of pairs"


PART = " · "


T = TypeVar("T")


def row_names(rows: int) -> list[str]:
    """Return what each row of `log_probabilities` is called."""
    if rows == 1:
        return ["member 0"]
    return [*(f"member {number}" for number in range(rows - 2)), MEAN_PROBABILITY, MEAN_LOGIT]


def pairs(members: int) -> list[tuple[int, int]]:
    """Return every pair of members once."""
    return list(combinations(range(members), 2))


def ordered_pairs(members: int) -> list[tuple[int, int]]:
    """Return every pair of members in both orders."""
    return list(permutations(range(members), 2))


def pair_name(one: int, other: int) -> str:
    """Return what the row of a pair is called."""
    return f"members {one} and {other}"


def ordered_name(one: int, other: int) -> str:
    """Return what the row of a pair is called whose order matters."""
    return f"member {one} to {other}"


def row_name(*parts: str) -> str:
    """Return what one number of a larger table is called."""
    return PART.join(parts)


def with_member_ids(rows: Mapping[str, T], members: Sequence[int]) -> dict[str, T]:
    """Return the rows called by the members' numbers instead of their positions.

    >>> with_member_ids({"member 0": 1, "members 0 and 1 · class 1": 2, "mean of pairs": 3}, [2, 5])
    {'member 2': 1, 'members 2 and 5 · class 1': 2, 'mean of pairs': 3}
    """

    def name(old: str) -> str:
        first, *rest = old.split(PART)
        if first.startswith(("member ", "members ")) and first != TOGETHER:
            first = re.sub(r"\d+", lambda found: str(members[int(found[0])]), first)
        return row_name(first, *rest)

    return {name(old): value for old, value in rows.items()}


MEMBERS_MEAN = "mean of members"


def _with_mean(rows: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """Return the rows with the mean of the members' after theirs."""
    members = [value.value for name, value in rows.items() if _is_member(name)]
    if not members or TOGETHER in rows:
        return dict(rows)
    own = {name: value for name, value in rows.items() if _is_member(name)}
    rest = {name: value for name, value in rows.items() if not _is_member(name)}
    return {**own, MEMBERS_MEAN: mean_of_independent(members), **rest}


def _is_member(name: str) -> bool:
    return name.startswith("member ") and name.removeprefix("member ").isdigit()
