"""One member as a callable, records of its layers, and temporary changes of its weights and buffers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from plateaux.core import tensor_tree
from plateaux.core.errors import RecipeError
from plateaux.core.types import Inputs, TensorTree

Forward = Callable[[], AbstractContextManager[Any]]
"""Opens the context of one forward pass: its random state and its precision."""


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """The inputs and the output of one layer in one forward pass."""

    name: str
    inputs: Tensor
    output: Tensor


class MemberModule:
    """One member as an output function sees it: call it, or record what its layers compute."""

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
        self.own = own or {}  # the weights of this member, which vmap stacks
        self.buffers = buffers or {}
        self.replaced = replaced  # tensors used instead of those of the module, as under vmap
        self.kind = kind  # only members of the same kind can be stacked

    def __call__(self, x: Inputs, params: TensorTree | None = None) -> Tensor:
        """Return the output of the network, or its `.logits`; `params` replace weights of the member."""
        replaced = {**(self.replaced or {}), **(params or {})}
        with self.forward():
            if replaced:
                assert isinstance(self.module, nn.Module)
                out = functional_call(self.module, replaced, *_arguments(x))
            else:
                args, kwargs = _arguments(x)
                out = self.module(*args, **kwargs)
        logits = out if isinstance(out, Tensor) else getattr(out, "logits", None)
        if not isinstance(logits, Tensor):
            raise RecipeError(
                f"The model {type(self.module).__name__} returned a {type(out).__name__}. Expected: a tensor of logits "
                "[B, C], or an object with the attribute logits. Wrap it in a module that returns the logits alone"
            )
        return logits

    def call_preserving_buffers(self, x: Inputs) -> Tensor:
        """Return the output without updating buffers, such as the running statistics of BatchNorm."""
        copies = {name: buffer.clone() for name, buffer in self.buffers.items()}
        if not copies:
            return self(x)
        module = getattr(self.module, "_orig_mod", self.module)  # torch.compile renames the parts of a module
        return MemberModule(module, forward=self.forward, replaced={**(self.replaced or {}), **copies})(x)

    def record(self, x: Inputs, layers: Sequence[str]) -> tuple[Tensor, Mapping[str, LayerRecord]]:
        """Return the output, and the inputs and outputs of the named layers in the same forward pass."""
        assert isinstance(self.module, nn.Module)
        records: dict[str, LayerRecord] = {}

        def make_hook(name: str) -> Callable[..., None]:
            def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
                records[name] = LayerRecord(name, args[0], output)

            return hook

        handles = [self.module.get_submodule(name).register_forward_hook(make_hook(name)) for name in layers]
        try:
            return self(x), records
        finally:
            for handle in handles:
                handle.remove()


def find_last_linear(member: MemberModule, x: Inputs) -> LayerRecord | None:
    """Run a forward pass and return the record of the nn.Linear whose output is that of the network; None without one.

    The layer must see one row per sample, `[B, D]`.
    """
    assert isinstance(member.module, nn.Module)
    layers = [name for name, layer in member.module.named_modules() if isinstance(layer, nn.Linear)]
    output, records = member.record(x, layers)
    matches = (r for r in records.values() if is_same_tensor(r.output, output) and r.inputs.ndim == 2)
    return next(matches, None)


@contextmanager
def at_params(
    params: TensorTree,
    at: TensorTree | None,
    *,
    buffers: TensorTree | None = None,
    origin: TensorTree | None = None,
) -> Iterator[None]:
    """Write other values into parameters, and restore them and the buffers on exit; with `at=None`, do nothing.

    `origin` holds the values to restore, if the caller has a copy of them already.
    """
    if at is None:
        yield
        return
    origin = tensor_tree.clone(params) if origin is None else origin
    try:
        tensor_tree.write(params, at)
        with preserve_buffers(buffers or {}):
            yield
    finally:
        tensor_tree.write(params, origin)


@contextmanager
def preserve_buffers(buffers: TensorTree) -> Iterator[None]:
    """Restore the values of buffers on exit."""
    before = tensor_tree.clone(buffers)
    try:
        yield
    finally:
        tensor_tree.write(buffers, before)


@contextmanager
def preserve_module_buffers(module: nn.Module) -> Iterator[None]:
    """Restore the buffers of a module on exit: their values, and the tensors that a forward pass may have replaced."""
    bound = [(layer._buffers, name, buffer) for layer in module.modules() for name, buffer in layer._buffers.items()]
    try:
        with preserve_buffers(dict(module.named_buffers())):
            yield
    finally:
        for buffers, name, buffer in bound:
            if buffers.get(name) is not buffer:
                buffers[name] = buffer


def pruning_masks(module: nn.Module) -> TensorTree:
    """Return the masks of pruned parameters by parameter name; they are buffers called `<parameter>_mask`."""
    buffers = {name: buffer for name, buffer in module.named_buffers() if name.endswith("_mask")}
    return {name: buffers[f"{name}_mask"] for name, _ in module.named_parameters() if f"{name}_mask" in buffers}


def is_same_tensor(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are the same view of the same memory."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _arguments(x: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((x,), {}) if isinstance(x, Tensor) else ((), dict(x))
