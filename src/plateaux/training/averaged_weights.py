"""An ensemble of averages: members are used at the moving average of their weights, not where their last step ended.

Averaged weights give a network other activations than any step did, so BatchNorm's statistics are taken anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext

from plateaux.core import tensor_tree
from plateaux.core.member import Forward
from plateaux.core.types import Inputs
from plateaux.models.modes import update_bn
from plateaux.training.state import TrainState, at_params


@contextmanager
def averaged_params(
    learner: TrainState, batches: Callable[[], Iterable[Inputs]], forward: Forward = nullcontext
) -> Iterator[None]:
    """Put a member at its moving average for a while, BatchNorm's statistics taken from batches; then put it back."""
    average = learner.average
    if average is None or not average.count:
        yield
        return
    with at_params(learner, {name: average.tree[name] for name in learner.params}):
        tensor_tree.write(learner.buffers, {**learner.buffers, **average.tree})
        update_bn(learner.module, batches(), forward)
        yield


def describe_weights(learner: TrainState, epoch: int) -> str:
    """Say which weights a member is used at once so many epochs are completed."""
    count = 0 if learner.average is None else learner.average.count
    return f"epoch {epoch}, the mean of the last {count} steps" if count else f"epoch {epoch}"
