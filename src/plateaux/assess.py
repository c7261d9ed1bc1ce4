"""The evaluation walk: one forward pass per offer, shared by every measure that asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from plateaux.exchange import Executor, Measure, Offer, View
from plateaux.types import Batch, Tree, Value


@torch.no_grad()
def assess(
    executor: Executor,
    views: Sequence[View],
    batches: Iterable[Batch],
    measures: Mapping[str, Measure],
    *,
    seen: Callable[[int], None] = lambda _: None,
) -> dict[str, Mapping[str, Value]]:
    """Return what every measure finds about the members' predictions; `seen` hears of the samples done."""
    offers: dict[Offer, list[str]] = {}
    for name, measure in measures.items():
        offers.setdefault(measure.offer, []).append(name)
    sums: dict[str, Tree] = {}
    for batch in batches:
        for offer, names in offers.items():
            table = executor.gather(executor.each(offer, views, [batch] * len(views)))
            for name in names:
                sums[name] = _merge(measures[name], sums.get(name), measures[name].settle(table, batch))
        seen(len(batch))
    return {name: measure.finish(sums[name]) for name, measure in measures.items() if name in sums}


class evaluating:
    """Hold networks in evaluation mode for a while, and put each layer back to the mode it was in."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._layers = [layer for module in modules for layer in module.modules()]

    def __enter__(self) -> None:
        self._modes = [layer.training for layer in self._layers]
        for layer in self._layers:
            layer.training = False

    def __exit__(self, *_: object) -> None:
        for layer, mode in zip(self._layers, self._modes, strict=True):
            layer.training = mode


def _merge(measure: Measure, old: Tree | None, new: Tree) -> Tree:
    if old is None:
        return new
    if measure.merge == "cat":
        return {name: torch.cat([old[name], new[name]]) for name in new}
    return {name: old[name] + new[name] for name in new}
