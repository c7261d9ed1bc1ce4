"""What `evaluate` returns: results by metric, as records, as a data frame, and as readable tables."""

from __future__ import annotations

import html
import io
from collections.abc import Iterator, Sequence
from typing import Any, overload

from plateaux.core.errors import suggest
from plateaux.core.imports import pandas_frame
from plateaux.core.text_table import PlainConsole, Table
from plateaux.evaluation.results import MetricResult
from plateaux.evaluation.robustness import Baseline, robustness
from plateaux.evaluation.tables import result_tables, tables


class Evaluation(Sequence[MetricResult]):
    """The results of an evaluation, in order.

    >>> result = plateaux.evaluate("runs/quickstart")  # doctest: +SKIP
    >>> result["accuracy"].ensemble.value, result["accuracy"].members[0].stderr  # doctest: +SKIP
    """

    def __init__(self, results: Sequence[MetricResult]) -> None:
        self.results = tuple(results)

    @overload
    def __getitem__(self, key: str | int) -> MetricResult: ...
    @overload
    def __getitem__(self, key: slice) -> Evaluation: ...
    def __getitem__(self, key: str | int | slice) -> MetricResult | Evaluation:
        """Return the result of a metric by its name, or results by position."""
        if isinstance(key, slice):
            return Evaluation(self.results[key])
        if isinstance(key, int):
            return self.results[key]
        found = [result for result in self.results if result.metric == key]
        if not found:
            raise KeyError(f"There is no result of {key!r}; {suggest(key, [result.metric for result in self.results])}")
        if len(found) > 1:
            splits = ", ".join(dict.fromkeys(result.split for result in found))
            raise KeyError(f"{key!r} was evaluated on several splits ({splits}); choose one: .on(split)[{key!r}]")
        return found[0]

    def __len__(self) -> int:
        return len(self.results)

    def __iter__(self) -> Iterator[MetricResult]:
        return iter(self.results)

    def on(self, split: str) -> Evaluation:
        """Return the results on one split."""
        chosen = [result for result in self.results if result.split == split]
        if not chosen:
            raise KeyError(f"There is no result on {split!r}; {suggest(split, {r.split for r in self.results})}")
        return Evaluation(chosen)

    def robustness(self, baseline: Baseline | None = None) -> Evaluation:
        """Return the means over corrupted splits: accuracy (cACC), mean corruption error (mCE), and other metrics.

        Args:
            baseline: Five errors for each corruption, one per severity, to normalize the mCE.
        """
        return Evaluation(robustness(self.results, baseline))

    def to_records(self) -> list[dict[str, Any]]:
        """Return one flat dictionary for every row of every result."""
        return [record for result in self.results for record in result.to_records()]

    def to_frame(self) -> Any:
        """Return the records as a pandas DataFrame, if pandas is installed."""
        return pandas_frame(self.to_records())

    def __repr__(self) -> str:
        console = PlainConsole(file=io.StringIO(), width=100, color_system=None, force_jupyter=False)
        for table in tables(self.results, console.width):
            console.print(table)
        assert isinstance(console.file, io.StringIO)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) or "Evaluation([])"

    def _repr_html_(self) -> str:
        return "\n".join(_html_table(table) for table in result_tables(self.results))


def _html_table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in table.text_rows())
    caption = f"<caption>{html.escape(table.title)}</caption>"
    return f"<table>{caption}<thead>{row(table.header, 'th')}</thead><tbody>{body}</tbody></table>"
