"""Offload members to disk between their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from plateaux.storage.store import Store
from plateaux.training.loop.state import TrainState


def offload_to_disk(scratch: Store) -> Callable[[TrainState], AbstractContextManager[None]]:
    """Return a context manager that loads a member from disk and offloads it again on exit.

    While a member is offloaded, its weights, buffers and optimizer state are on disk and use no memory.
    """

    @contextmanager
    def resident(state: TrainState) -> Iterator[None]:
        name = f"{state.number}.pt"
        if scratch.has(name):
            _restore(state, scratch.get_state(name))
        try:
            yield
        finally:
            scratch.put_state(name, _offload(state), digest=False)

    return resident


def _movable_tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """Return all tensors of a member by a stable name."""
    tensors = {f"params.{name}": param for name, param in state.params.items()}
    tensors |= {f"buffers.{name}": buffer for name, buffer in state.buffers.items()}
    if state.average is not None:
        tensors |= {f"average.{name}": tensor for name, tensor in state.average.tree.items()}
    for name, param in state.params.items():
        for slot, value in state.optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"state.{name}.{slot}"] = value
    return tensors


def _offload(state: TrainState) -> dict[str, torch.Tensor]:
    tensors = _movable_tensors(state)
    copies = {name: tensor.detach() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.data = tensor.data.new_empty(0)
    return copies


def _restore(state: TrainState, copies: dict[str, torch.Tensor]) -> None:
    for name, tensor in _movable_tensors(state).items():
        tensor.data = copies[name].to(tensor.device)
