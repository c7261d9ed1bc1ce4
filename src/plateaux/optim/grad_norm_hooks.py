"""Hooks on the layers of a network that compute per-sample gradient norms during one forward and backward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plateaux.core.member import pruning_masks
from plateaux.optim.grad_norm_rules import (
    RULES,
    GradPart,
    attention_forward,
    layer_type,
    linear,
    squared_norm,
    unsupported_attention_reason,
    unsupported_reason,
)

Call = tuple[str, int]
"""The name of a layer, and the index of its call in the forward pass."""


class GradNormHooks:
    """Hooks for one forward and backward pass of a network; all changes are undone on exit."""

    def __init__(
        self,
        module: nn.Module,
        watched: Mapping[str, nn.Parameter],
        samples: int,
        *,
        expanded: Sequence[str],
        axes: Mapping[Call, int | None],
        check: bool = False,
    ) -> None:
        self.module, self.samples, self.expanded, self.axes, self.check = module, samples, expanded, axes, check
        self.names = {id(p): name for name, p in watched.items()}
        self.shapes: dict[Call, torch.Size] = {}  # of the inputs
        self.owners: dict[Call, list[str]] = {}  # parameters that a call uses
        self.unsupported: list[tuple[str, str]] = []  # parameters whose rule does not apply, and the reason
        self.used: dict[tuple[str, str], int] = defaultdict(
            int
        )  # number of calls that use a parameter, or a block of its rows
        self._parts: dict[tuple[str, str], list[GradPart]] = defaultdict(list)
        self._masks = pruning_masks(module)
        self._calls: dict[str, int] = defaultdict(int)
        self._leaves: dict[str, Tensor] = {}
        self._total: Tensor | float = 0.0
        self._last: tuple[nn.Linear, Tensor, Tensor] | None = None
        self._undo = ExitStack()

    def __enter__(self) -> GradNormHooks:
        with ExitStack() as undo:
            for name, layer in self.module.named_modules():
                self._register(name, layer, undo)
            for name in self.expanded:
                self._expand(name, undo)
            for parameter in self.module.parameters():
                if parameter.requires_grad:
                    undo.callback(parameter.requires_grad_, True)
                    parameter.requires_grad_(False)
            self._anchor = torch.zeros((), requires_grad=True)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def squared_norms(self, like: Tensor) -> Tensor:
        """Return the squared norms `[B]`, after the backward pass."""
        for name, leaf in self._leaves.items():
            if leaf.grad is not None:
                self._parts[name, ""].append(leaf.grad)
        for key, parts in self._parts.items():  # calls whose output is not used get no gradient
            self._total = self._total + squared_norm(parts, self._mask(key))
        self._parts.clear()
        return self._total + torch.zeros(self.samples, dtype=torch.float64, device=like.device)

    def float64_logits(self, logits: Tensor) -> Tensor:
        """Return the logits in float64; if the last layer is linear, it is computed again in float64.

        A margin of 25 in float32 has an error of 1e-6, and the squared norm a relative error of twice that.
        """
        layer, x, out = self._last or (None, logits, logits)
        if layer is None or out.data_ptr() != logits.data_ptr() or out.shape != logits.shape:
            return logits.double()
        bias = None if layer.bias is None else layer.bias.double()
        wide = F.linear(x.double(), layer.weight.double(), bias)
        return wide if torch.allclose(wide.to(logits.dtype), logits, rtol=1e-4, atol=1e-4) else logits.double()

    def _register(self, name: str, layer: nn.Module, undo: ExitStack) -> None:
        inner = [layer, layer.out_proj] if isinstance(layer, nn.MultiheadAttention) else [layer]
        if not any(id(p) in self.names for part in inner for p in part.parameters(recurse=False)):
            return
        if isinstance(layer, nn.MultiheadAttention):
            if unsupported_attention_reason(layer) is None and "forward" not in vars(layer):
                forward = partial(attention_forward, layer, partial(self._project, name, layer))
                object.__setattr__(layer, "forward", forward)
                undo.callback(vars(layer).pop, "forward")
        elif layer_type(layer) is not None:
            hook = partial(self._on_call, name)
            # Before all other hooks, so that the output is that of the layer, even if other hooks replace it.
            handle = layer.register_forward_hook(hook, prepend=True, with_kwargs=True)
            undo.callback(handle.remove)

    def _on_call(self, name: str, layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any], out: Any) -> Any:
        x = args[0] if args else next(iter(named.values()))
        kind = layer_type(layer)
        assert kind is not None
        owned = {attr: p for attr, p in layer.named_parameters(recurse=False) if id(p) in self.names}
        reason = unsupported_reason(layer, x) or (self._custom_forward(layer, kind, x, out) if self.check else None)
        if reason or not owned:
            self.unsupported += [(self.names[id(p)], reason) for p in owned.values() if reason]
            return out
        out = self._watch(name, x, out, partial(RULES[kind], layer), owned, "")
        if isinstance(layer, nn.Linear) and x.ndim == 2:
            self._last = layer, x.detach(), out.detach()
        return out

    def _custom_forward(self, layer: nn.Module, kind: type[nn.Module], x: Tensor, out: Tensor) -> str | None:
        """Return a reason if the forward of a subclass computes something else than its base class."""
        if type(layer).forward is kind.forward and "forward" not in vars(layer):
            return None
        try:
            expected = kind.forward(layer, x)
        except (RuntimeError, NotImplementedError):
            return f"its forward is not that of {kind.__name__.lstrip('_')}"
        is_same = expected.shape == out.shape and torch.allclose(expected, out, rtol=1e-4, atol=1e-6)
        return None if is_same else f"its forward is not that of {kind.__name__.lstrip('_')}"

    def _project(
        self, name: str, layer: nn.MultiheadAttention, which: str, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        names = {"weight": "in_proj_weight" if layer._qkv_same_embed_dim else f"{which}_proj_weight"}
        owned = {}
        for short, attr in {**names, "bias": "in_proj_bias"}.items():
            parameter = getattr(layer, attr)
            if parameter is not None and id(parameter) in self.names:
                owned[short] = parameter
        out = F.linear(x, weight, bias)
        return self._watch(f"{name}.{which}", x, out, linear, owned, which) if owned else out

    def _watch(
        self, name: str, x: Tensor, out: Tensor, rule: Callable[..., dict[str, Callable[[], GradPart]]],
        owned: Mapping[str, nn.Parameter], block: str,
    ) -> Tensor:  # fmt: skip
        number = self._calls[name]
        self._calls[name] += 1
        self.shapes[name, number] = x.shape
        axis = self.axes.get((name, number), 0)
        keys = {attr: (self.names[id(p)], block) for attr, p in owned.items()}
        self.owners[name, number] = [key[0] for key in keys.values()]
        for key in keys.values():
            self.used[key] += 1
        if axis is None:
            inputs, out, axis = _expand_samples(x.detach(), self.samples), _expand_samples(out, self.samples), 0
        else:
            inputs = x.detach()
        saved, version = [inputs], x._version  # a list, so that the memory is freed when the gradient arrives

        def on_gradient(grad: Tensor) -> None:
            inputs = saved.pop()
            if inputs._version != version:
                self.unsupported += [(key[0], "its input was changed in place") for key in keys.values()]
                return
            parts = rule(inputs, grad.detach(), self.samples, axis)
            for attr, key in keys.items():
                self._add_part(key, parts[attr]())

        if not out.requires_grad:
            out = _GraphStart.apply(out.detach(), self._anchor)  # type: ignore[no-untyped-call]
        out.register_hook(on_gradient)  # type: ignore[no-untyped-call]
        return out

    def _add_part(self, key: tuple[str, str], part: GradPart) -> None:
        self._parts[key].append(part)
        if len(self._parts[key]) == self.used[key]:
            self._total = self._total + squared_norm(self._parts.pop(key), self._mask(key))

    def _mask(self, key: tuple[str, str]) -> Tensor | None:
        name, block = key
        mask = self._masks.get(name)
        if mask is None or not name.rpartition(".")[2].startswith("in_proj"):
            return mask
        return mask.chunk(3)["qkv".index(block)]

    def _expand(self, name: str, undo: ExitStack) -> None:
        """Replace a parameter `[1, ...]` by one copy per sample."""
        parent, _, attr = name.rpartition(".")
        owner = self.module.get_submodule(parent)
        parameter: Tensor = getattr(owner, attr)
        leaf = parameter.detach().expand(self.samples, *parameter.shape[1:]).requires_grad_()
        vars(owner)[attr] = leaf  # attributes of the instance come before its parameters
        undo.callback(vars(owner).pop, attr)
        self._leaves[name] = leaf


def _expand_samples(x: Tensor, samples: int) -> Tensor:
    """Return a tensor that all samples share with a sample axis in front."""
    single = x if x.ndim > 1 and len(x) == 1 else x[None]
    return single.expand(samples, *single.shape[1:])


class _GraphStart(torch.autograd.Function):
    """Starts the graph at a tensor. Unlike a leaf, its result can be changed in place by later layers."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None
