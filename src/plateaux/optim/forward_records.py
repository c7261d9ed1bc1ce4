"""Forward passes of a model in a custom loop: their random states, and whether their gradients are in `.grad`.

Hooks on the model record the state of the random generators before every forward pass with gradients. The perturbed
pass of SAM starts each of its forward passes from the recorded state, so that dropout noise is the same in both passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


@dataclass(slots=True)
class RngState:
    """The states of the random generators of torch at one point in time."""

    devices: tuple[torch.device, ...]  # CUDA devices of the model
    cpu: Tensor = field(default_factory=torch.get_rng_state)
    cuda: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.cuda = [torch.cuda.get_rng_state(device) for device in self.devices]

    def restore(self) -> None:
        """Set the random generators to these states."""
        torch.set_rng_state(self.cpu)
        for device, state in zip(self.devices, self.cuda, strict=True):
            torch.cuda.set_rng_state(state, device)  # cuda-only


@dataclass(slots=True, eq=False)
class ForwardRecord:
    """One forward pass."""

    rng: RngState
    has_gradient: bool = False  # a backward pass went through its outputs


class ForwardRecords:
    """The forward passes of a module since `clear`; `on_backward` is called when a backward pass reaches one.

    The hooks refer to this object weakly, and copies of the module are not recorded.
    """

    def __init__(self, module: nn.Module, on_backward: Callable[[], None]) -> None:
        self.module = ref(module)
        self.on_backward = on_backward
        self._records: list[ForwardRecord] = []
        self._replayed: Iterator[ForwardRecord] | None = None
        self.has_replayed_gradient = False  # a backward pass went through the last replay
        for handle in (
            module.register_forward_pre_hook(_Hook(self, is_before=True)),
            module.register_forward_hook(_Hook(self, is_before=False)),
        ):
            finalize(self, handle.remove)

    @property
    def is_replaying(self) -> bool:
        return self._replayed is not None

    def with_gradient(self) -> list[ForwardRecord]:
        """Return the forward passes whose gradients are in `.grad`."""
        return [record for record in self._records if record.has_gradient]

    def clear(self) -> None:
        """Forget all forward passes."""
        self._records.clear()

    def discard_gradients(self) -> None:
        """Forget the forward passes whose gradients were discarded; others may still get a backward pass."""
        self._records[:] = [record for record in self._records if not record.has_gradient]

    def rng_state(self) -> RngState:
        """Return the current states of the random generators that the module uses."""
        return RngState(cuda_devices(self.module()))

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Start the n-th forward pass in the block from the random state of the n-th recorded one with gradients.

        The generators continue after the block as if it had not existed. Forward passes in it are not recorded.
        """
        with torch.random.fork_rng(devices=cuda_devices(self.module())):
            self._replayed = iter(self.with_gradient())
            self.has_replayed_gradient = False
            try:
                yield
            finally:
                self._replayed = None

    def before_forward(self) -> None:
        if self._replayed is None:
            self._records.append(ForwardRecord(self.rng_state()))
        elif (record := next(self._replayed, None)) is not None:
            record.rng.restore()

    def after_forward(self, output: Any) -> None:
        if not self._records:
            return
        record, is_replayed = self._records[-1], self.is_replaying
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]

        def hook(_: Tensor | None) -> None:
            if is_replayed:
                self.has_replayed_gradient = True
                return
            record.has_gradient = True
            self.on_backward()

        if not tensors:  # an output of an unknown type: assume that the loss depends on it
            hook(None)
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]


class _Hook:
    """A hook of a module that does nothing in copies of the module, which share its hooks."""

    def __init__(self, records: ForwardRecords | None = None, *, is_before: bool = True) -> None:
        self.records = (lambda: None) if records is None else ref(records)
        self.is_before = is_before

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, inputs: Any, output: Any = None) -> None:
        records = self.records()
        if records is None or records.module() is not module or not torch.is_grad_enabled():
            return
        if self.is_before:
            records.before_forward()
        else:
            records.after_forward(output)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


def cuda_devices(module: nn.Module | None) -> tuple[torch.device, ...]:
    """Return the CUDA devices that hold parameters of a module."""
    devices = {param.device for param in module.parameters()} if module is not None else set()
    return tuple(sorted((device for device in devices if device.type == "cuda"), key=str))
