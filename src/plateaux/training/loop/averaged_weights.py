"""Averaged weights (SWA): a member is used at the mean of its weights over the last steps, not at the last weights.

Averaged weights produce other activations than those seen in training, so the statistics of BatchNorm are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext

from plateaux.core import tensor_tree
from plateaux.core.member import Forward, at_params
from plateaux.core.types import Inputs
from plateaux.models.modes import update_bn
from plateaux.training.loop.state import TrainState


@contextmanager
def averaged_params(
    state: TrainState, batches: Callable[[], Iterable[Inputs]], forward: Forward = nullcontext
) -> Iterator[None]:
    """Temporarily set a member to its averaged weights, with BatchNorm statistics computed from batches."""
    average = state.average
    if average is None or not average.count:
        yield
        return
    params = {name: average.tree[name] for name in state.params}
    with at_params(state.params, params, buffers=state.buffers):
        tensor_tree.write(state.buffers, {**state.buffers, **average.tree})
        update_bn(state.module, batches(), forward)
        yield


def describe_weights(state: TrainState, epoch: int) -> str:
    """Return which weights of a member are used after this number of epochs, for the log."""
    count = 0 if state.average is None else state.average.count
    return f"epoch {epoch}, the mean of the last {count} steps" if count else f"epoch {epoch}"
