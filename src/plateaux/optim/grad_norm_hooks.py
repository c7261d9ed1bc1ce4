"""Listening to one forward and backward pass: what each layer sees, and its share of every sample's norm at once."""

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
"""A layer's name, and which of its calls."""


class GradNormHooks:
    """One forward and backward pass of a network whose layers are listened to; everything is put back at the end."""

    def __init__(
        self,
        module: nn.Module,
        watched: Mapping[str, nn.Parameter],
        samples: int,
        *,
        raw: Sequence[str],
        axes: Mapping[Call, int | None],
        check: bool = False,
    ) -> None:
        self.module, self.samples, self.raw, self.axes, self.check = module, samples, raw, axes, check
        self.names = {id(p): name for name, p in watched.items()}
        self.shapes: dict[Call, torch.Size] = {}  # of the inputs
        self.owners: dict[Call, list[str]] = {}  # parameters that a call uses
        self.strays: list[tuple[str, str]] = []  # parameters whose rule does not hold, and why
        self.used: dict[tuple[str, str], int] = defaultdict(int)  # calls of a parameter, or of a block of its rows
        self._arrived: dict[tuple[str, str], list[GradPart]] = defaultdict(list)
        self._masks = pruning_masks(module)
        self._calls: dict[str, int] = defaultdict(int)
        self._leaves: dict[str, Tensor] = {}
        self._total: Tensor | float = 0.0
        self._last: tuple[nn.Linear, Tensor, Tensor] | None = None
        self._undo = ExitStack()

    def __enter__(self) -> GradNormHooks:
        with ExitStack() as undo:
            for name, layer in self.module.named_modules():
                self._listen(name, layer, undo)
            for name in self.raw:
                self._hand_out(name, undo)
            for parameter in self.module.parameters():
                if parameter.requires_grad:
                    undo.callback(parameter.requires_grad_, True)
                    parameter.requires_grad_(False)
            self._anchor = torch.zeros((), requires_grad=True)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def finish(self, like: Tensor) -> Tensor:
        """Return the norms `[B]`, once the backward pass is over."""
        for name, leaf in self._leaves.items():
            if leaf.grad is not None:
                self._arrived[name, ""].append(leaf.grad)
        for key, parts in self._arrived.items():  # of calls whose output nobody used, nothing arrives
            self._total = self._total + squared_norm(parts, self._mask(key))
        self._arrived.clear()
        return self._total + torch.zeros(self.samples, dtype=torch.float64, device=like.device)

    def sharper(self, logits: Tensor) -> Tensor:
        """Return the logits in float64; where the last layer is linear, without what it rounded off.

        A margin of 25 rounded to float32 is off by 1e-6, and the score by twice that, relative.
        """
        layer, x, out = self._last or (None, logits, logits)
        if layer is None or out.data_ptr() != logits.data_ptr() or out.shape != logits.shape:
            return logits.double()
        bias = None if layer.bias is None else layer.bias.double()
        wide = F.linear(x.double(), layer.weight.double(), bias)
        return wide if torch.allclose(wide.to(logits.dtype), logits, rtol=1e-4, atol=1e-4) else logits.double()

    def _listen(self, name: str, layer: nn.Module, undo: ExitStack) -> None:
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
            # First of all hooks, so that the output is the layer's own, whatever others make of it.
            handle = layer.register_forward_hook(hook, prepend=True, with_kwargs=True)
            undo.callback(handle.remove)

    def _on_call(self, name: str, layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any], out: Any) -> Any:
        x = args[0] if args else next(iter(named.values()))
        kind = layer_type(layer)
        assert kind is not None
        owned = {attr: p for attr, p in layer.named_parameters(recurse=False) if id(p) in self.names}
        problem = unsupported_reason(layer, x) or (self._own_forward(layer, kind, x, out) if self.check else None)
        if problem or not owned:
            self.strays += [(self.names[id(p)], problem) for p in owned.values() if problem]
            return out
        out = self._tap(name, x, out, partial(RULES[kind], layer), owned, "")
        if isinstance(layer, nn.Linear) and x.ndim == 2:
            self._last = layer, x.detach(), out.detach()
        return out

    def _own_forward(self, layer: nn.Module, kind: type[nn.Module], x: Tensor, out: Tensor) -> str | None:
        if type(layer).forward is kind.forward and "forward" not in vars(layer):
            return None
        try:
            usual = kind.forward(layer, x)
        except (RuntimeError, NotImplementedError):
            usual = None
        same = usual is not None and usual.shape == out.shape and torch.allclose(usual, out, rtol=1e-4, atol=1e-6)
        return None if same else f"its forward is not that of {kind.__name__.lstrip('_')}"

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
        return self._tap(f"{name}.{which}", x, out, linear, owned, which) if owned else out

    def _tap(
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
            seen_by_each, out, axis = _spread(x.detach(), self.samples), _spread(out, self.samples), 0
        else:
            seen_by_each = x.detach()
        held, version = [seen_by_each], x._version

        def take(grad: Tensor) -> None:
            seen = held.pop()
            if seen._version != version:
                self.strays += [(key[0], "what it saw was changed in place") for key in keys.values()]
                return
            parts = rule(seen, grad.detach(), self.samples, axis)
            for attr, key in keys.items():
                self._give(key, parts[attr]())

        if not out.requires_grad:
            out = _Begin.apply(out.detach(), self._anchor)  # type: ignore[no-untyped-call]
        out.register_hook(take)  # type: ignore[no-untyped-call]
        return out

    def _give(self, key: tuple[str, str], part: GradPart) -> None:
        self._arrived[key].append(part)
        if len(self._arrived[key]) == self.used[key]:
            self._total = self._total + squared_norm(self._arrived.pop(key), self._mask(key))

    def _mask(self, key: tuple[str, str]) -> Tensor | None:
        name, block = key
        mask = self._masks.get(name)
        if mask is None or not name.rpartition(".")[2].startswith("in_proj"):
            return mask
        return mask.chunk(3)["qkv".index(block)]

    def _hand_out(self, name: str, undo: ExitStack) -> None:
        parent, _, attr = name.rpartition(".")
        owner = self.module.get_submodule(parent)
        parameter: Tensor = getattr(owner, attr)
        leaf = parameter.detach().expand(self.samples, *parameter.shape[1:]).requires_grad_()
        vars(owner)[attr] = leaf  # found before the parameter of that name
        undo.callback(vars(owner).pop, attr)
        self._leaves[name] = leaf


def _spread(x: Tensor, samples: int) -> Tensor:
    """Return what all samples share with an axis of samples in front."""
    lone = x if x.ndim > 1 and len(x) == 1 else x[None]
    return lone.expand(samples, *lone.shape[1:])


class _Begin(torch.autograd.Function):
    """Where the graph begins: the tensor itself, but one that others may change in place, as a leaf may not be."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None
