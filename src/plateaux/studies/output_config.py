"""The tables and figures that a study declares, next to the numbers of the paper that it repeats."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from plateaux.config.schema import ConfigSection
from plateaux.core.ranges import Number

MEMBERS = "members"  # the row of a column: mean and standard error over single members


class ColumnConfig(ConfigSection):
    """One column of a table: a metric on a split."""

    title: str
    metric: str
    split: str = "test"
    row: str = ""  # such as "mean of members", or "members"; default: the ensemble, else the mean of pairs or members


class TableConfig(ConfigSection):
    """A table of a study. Its rows are conditions, all or those with the values in `where`."""

    title: str
    columns: tuple[ColumnConfig, ...] = Field(min_length=1)
    where: dict[str, Any] = Field(default_factory=dict)
    paper: dict[str, tuple[Number | None, ...]] = Field(default_factory=dict)  # row label -> published numbers


class FigureConfig(ConfigSection):
    """A figure of a study: a family of figures of the report, its options, and the conditions that it shows."""

    title: str
    family: str
    where: dict[str, Any] = Field(default_factory=dict)
    options: dict[str, str] = Field(default_factory=dict)  # such as {split = "corrupted"}


class FiguresConfig(ConfigSection):
    """The figures of the report: families by name, and figures with options."""

    only: tuple[str, ...] = ()
    draw: tuple[FigureConfig, ...] = ()
