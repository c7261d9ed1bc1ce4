"""One member as a callable, and records of what its layers see."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from plateaux.core.types import Inputs, TensorTree

Forward = Callable[[], AbstractContextManager[Any]]
"""Opens the context of one forward pass: its random state and its precision."""


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """What one layer saw in one forward pass."""

    inputs: Tensor
    output: Tensor


class MemberModule:
    """One member as seen inside an offer: call it, or record what its layers see."""

    def __init__(
        self,
        module: Callable[..., Any],
        *,
        forward: Forward = nullcontext,
        own: TensorTree | None = None,
        buffers: TensorTree | None = None,
        replaced: TensorTree | None = None,
        kind: Hashable = None,
    ) -> None:
        self.module = module
        self.forward = forward
        self.own = own or {}  # the member's own weights and buffers: what vmap stacks
        self.buffers = buffers or {}
        self.replaced = replaced  # tensors that stand in for the module's own: how vmap sees a member
        self.kind = kind  # only members of one kind may be stacked

    def __call__(self, x: Inputs, params: TensorTree | None = None) -> Tensor:
        """Return the model's output, or its `.logits`; `params` stand in for the member's own weights."""
        stand_in = {**(self.replaced or {}), **(params or {})}
        with self.forward():
            if stand_in:
                assert isinstance(self.module, nn.Module)
                out = functional_call(self.module, stand_in, *_arguments(x))
            else:
                args, kwargs = _arguments(x)
                out = self.module(*args, **kwargs)
        return out if isinstance(out, Tensor) else out.logits

    def call_preserving_buffers(self, x: Inputs) -> Tensor:
        """Return the output for other samples; buffers, such as BatchNorm's running statistics, do not move."""
        copies = {name: buffer.clone() for name, buffer in self.buffers.items()}
        if not copies:
            return self(x)
        module = getattr(self.module, "_orig_mod", self.module)  # a compiled network has other names for its parts
        return MemberModule(module, forward=self.forward, replaced={**(self.replaced or {}), **copies})(x)

    def record(self, x: Inputs, layers: Sequence[str]) -> tuple[Tensor, Mapping[str, LayerRecord]]:
        """Return the output, and what each named layer saw on the way to it."""
        assert isinstance(self.module, nn.Module)
        seen: dict[str, LayerRecord] = {}

        def watch(name: str) -> Callable[..., None]:
            def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
                seen[name] = LayerRecord(args[0], output)

            return hook

        handles = [self.module.get_submodule(name).register_forward_hook(watch(name)) for name in layers]
        try:
            return self(x), seen
        finally:
            for handle in handles:
                handle.remove()


def _arguments(x: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((x,), {}) if isinstance(x, Tensor) else ((), dict(x))


def is_same_tensor(one: Tensor, other: Tensor) -> bool:
    """Say whether two tensors are one."""
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()
