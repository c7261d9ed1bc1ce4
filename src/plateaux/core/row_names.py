"""Names of the rows of a metric result: readable text with typed fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, permutations
from typing import Literal, TypeVar

from plateaux.core.stats.estimates import mean_of_independent
from plateaux.core.types import Estimate

RowKind = Literal[
    "member", "pair", "ordered_pair", "ensemble", "all_members", "mean_of_members", "mean_of_pairs", "size", "other"
]
PART = " · "
T = TypeVar("T")


class RowName(str):
    """The name of one row of a metric result.

    It is a string, so it compares, sorts, and serializes as its text ("member 2 · class 1"). Code reads the fields:

    kind: what the row describes; `size` is the mean over ensembles of one size, `other` a row of a custom metric.
    members: ids of the members that the row is about, where it is about some of them; for `size`, their number.
    part: the rest of the name, such as ("class 1", "recall").
    """

    kind: RowKind
    members: tuple[int, ...]
    part: tuple[str, ...]

    def __new__(cls, base: str, kind: RowKind, members: Sequence[int] = (), part: Sequence[str] = ()) -> RowName:
        self = super().__new__(cls, PART.join([base, *part]))
        self.kind, self.members, self.part = kind, tuple(members), tuple(part)
        return self

    def __reduce__(self) -> tuple[Callable[[str], RowName], tuple[str]]:
        return RowName.parse, (str(self),)

    @classmethod
    def member(cls, number: int) -> RowName:
        return cls(f"member {number}", "member", [number])

    @classmethod
    def pair(cls, one: int, other: int) -> RowName:
        return cls(f"members {one} and {other}", "pair", [one, other])

    @classmethod
    def ordered_pair(cls, one: int, other: int) -> RowName:
        """Return the name of a pair whose order matters, such as KL(p_one || p_other)."""
        return cls(f"member {one} to {other}", "ordered_pair", [one, other])

    @classmethod
    def ensemble(cls, combination: str) -> RowName:
        """Return the name of the ensemble's row; `combination` is how the members' predictions are combined."""
        return cls(f"ensemble ({combination})", "ensemble")

    @classmethod
    def size(cls, members: int) -> RowName:
        return cls(f"{members} member{'s' * (members > 1)}", "size", [members])

    @classmethod
    def parse(cls, text: str) -> RowName:
        """Return the row name for stored text. This is the only parser of row names.

        >>> name = RowName.parse("members 0 and 2 · class 1")
        >>> name.kind, name.members, name.part
        ('pair', (0, 2), ('class 1',))
        >>> RowName.parse("my row").kind
        'other'
        """
        if isinstance(text, cls):
            return text
        base, *part = text.split(PART)
        if base in _FIXED:
            return cls(base, _FIXED[base], (), part)
        for kind, pattern in _PATTERNS.items():
            if found := re.fullmatch(pattern, base):
                return cls(base, kind, [int(number) for number in found.groups()], part)
        return cls(base, "ensemble" if re.fullmatch(r"ensemble \(.*\)", base) else "other", (), part)

    @property
    def base(self) -> RowName:
        """The name without its part."""
        return RowName(str(self).split(PART)[0], self.kind, self.members)

    def with_part(self, *part: str) -> RowName:
        """Return the name of one number within this row.

        >>> str(RowName.member(2).with_part("class 1", "recall"))
        'member 2 · class 1 · recall'
        """
        return RowName(str(self.base), self.kind, self.members, [*self.part, *(text for text in part if text)])

    def renumbered(self, ids: Sequence[int]) -> RowName:
        """Return the name with the ids of members instead of their positions."""
        build = _OF_MEMBERS.get(self.kind)
        return self if build is None else build(*(ids[position] for position in self.members)).with_part(*self.part)


_OF_MEMBERS: dict[RowKind, Callable[..., RowName]] = {
    "member": RowName.member,
    "pair": RowName.pair,
    "ordered_pair": RowName.ordered_pair,
}
_FIXED: dict[str, RowKind] = {
    "members together": "all_members",
    "mean of members": "mean_of_members",
    "mean of pairs": "mean_of_pairs",
}
_PATTERNS: dict[RowKind, str] = {
    "member": r"member (\d{1,9})",  # int() rejects numbers of thousands of digits
    "pair": r"members (\d{1,9}) and (\d{1,9})",
    "ordered_pair": r"member (\d{1,9}) to (\d{1,9})",
    "size": r"(\d{1,9}) members?",
}
MEAN_PROBABILITY = RowName.ensemble("mean probability")
MEAN_LOGIT = RowName.ensemble("mean logit")
ALL_MEMBERS = RowName.parse("members together")  # a property of all members that is not a prediction of the ensemble
MEAN_OF_MEMBERS = RowName.parse("mean of members")
MEAN_OF_PAIRS = RowName.parse("mean of pairs")


def row_name(base: str, *part: str) -> RowName:
    """Return the name of one number within the row `base`, which may be given as text."""
    return RowName.parse(base).with_part(*part)


def row_names(rows: int) -> list[RowName]:
    """Return the names of the rows of `log_probabilities`: every member, then the two ensembles."""
    if rows == 1:
        return [RowName.member(0)]
    return [*map(RowName.member, range(rows - 2)), MEAN_PROBABILITY, MEAN_LOGIT]


def pairs(members: int) -> list[tuple[int, int]]:
    """Return every pair of members once."""
    return list(combinations(range(members), 2))


def ordered_pairs(members: int) -> list[tuple[int, int]]:
    """Return every pair of members in both orders."""
    return list(permutations(range(members), 2))


def with_member_ids(rows: Mapping[str, T] | Mapping[RowName, T], ids: Sequence[int]) -> dict[RowName, T]:
    """Return the rows with the ids of members instead of their positions.

    >>> with_member_ids({"member 0": 1, "members 0 and 1 · class 1": 2, "mean of pairs": 3}, [2, 5])
    {'member 2': 1, 'members 2 and 5 · class 1': 2, 'mean of pairs': 3}
    """
    return {RowName.parse(name).renumbered(ids): value for name, value in rows.items()}


def with_mean_of_members(rows: Mapping[RowName, Estimate]) -> dict[RowName, Estimate]:
    """Return the rows with the mean of the members after the members' own rows."""
    members = {name: value for name, value in rows.items() if name.kind == "member" and not name.part}
    if not members or ALL_MEMBERS in rows:
        return dict(rows)
    mean = mean_of_independent([value.value for value in members.values()])
    rest = {name: value for name, value in rows.items() if name not in members}
    return {**members, MEAN_OF_MEMBERS: mean, **rest}
