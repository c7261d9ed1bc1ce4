"""Keep members on disk between their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from plateaux.storage.store import Store
from plateaux.training.state import TrainState


def offload_to_disk(scratch: Store) -> Callable[[TrainState], AbstractContextManager[None]]:
    """Return the function that wakes a parked member for its turn and parks it again.

    Between turns a member's weights, buffers and optimiser state lie on disk, and its tensors hold no memory.
    """

    @contextmanager
    def awake(learner: TrainState) -> Iterator[None]:
        name = f"{learner.number}.pt"
        if scratch.has(name):
            _restore(learner, scratch.get_state(name))
        try:
            yield
        finally:
            scratch.put_state(name, _offload(learner))

    return awake


def _movable_tensors(learner: TrainState) -> dict[str, torch.Tensor]:
    """Return every tensor that moves with a member, by a name that lasts."""
    found = {f"params.{n}": p for n, p in learner.params.items()}
    found |= {f"buffers.{n}": b for n, b in learner.buffers.items()}
    found |= {f"average.{n}": t for n, t in learner.average.tree.items()} if learner.average is not None else {}
    for name, param in learner.params.items():
        for slot, value in learner.optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"state.{name}.{slot}"] = value
    return found


def _offload(learner: TrainState) -> dict[str, torch.Tensor]:
    moving = _movable_tensors(learner)
    copy = {name: tensor.detach() for name, tensor in moving.items()}
    for tensor in moving.values():
        tensor.data = tensor.data.new_empty(0)
    return copy


def _restore(learner: TrainState, copy: dict[str, torch.Tensor]) -> None:
    for name, tensor in _movable_tensors(learner).items():
        tensor.data = copy[name].to(tensor.device)
