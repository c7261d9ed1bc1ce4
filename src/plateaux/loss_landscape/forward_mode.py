"""Directional derivatives with respect to the weights, for all samples at once and without per-sample gradients.

    logits, derivatives = jvp_outputs(surface.logits_fn(batch), surface.origin, direction)

Forward-mode differentiation takes one pass. Operations without a forward-mode rule (an LSTM, a custom function) fall
back to double backward passes: the same values, but slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from plateaux.core.types import TensorTree

ParamsFn = Callable[[TensorTree], Tensor]
"""A function of the weights with one value or row per sample."""


def jvp_outputs(function: ParamsFn, at: TensorTree, direction: TensorTree) -> tuple[Tensor, Tensor]:
    """Return the value of a function and its derivative along a direction (a Jacobian-vector product)."""
    with math_sdpa():
        try:
            return _forward(function, at, direction)
        except RuntimeError:  # no forward-mode rule for some operation; any other error is raised again below
            with torch.enable_grad():
                leaves = _leaves(at)
                value = function(leaves)
                return value.detach(), _jvp_by_double_backward(value, leaves, direction).detach()


def second_derivative(function: ParamsFn, at: TensorTree, direction: TensorTree) -> Tensor:
    """Return the second derivative of a function along a direction: v' H v for every sample."""
    with math_sdpa():
        try:
            return _forward(lambda params: _forward(function, params, direction)[1], at, direction)[1]
        except RuntimeError:
            with torch.enable_grad():
                leaves = _leaves(at)
                first = _jvp_by_double_backward(function(leaves), leaves, direction)
                return _jvp_by_double_backward(first, leaves, direction).detach()


def _forward(function: ParamsFn, at: TensorTree, direction: TensorTree) -> tuple[Tensor, Tensor]:
    result = jvp(function, (at,), (direction,))
    return result[0], result[1]


def _leaves(at: TensorTree) -> TensorTree:
    return {name: tensor.detach().requires_grad_() for name, tensor in at.items()}


def _jvp_by_double_backward(value: Tensor, leaves: TensorTree, direction: TensorTree) -> Tensor:
    """Return J v by two backward passes: the first gives J' u, and u' J v is linear in u with gradient J v."""
    u = torch.zeros_like(value, requires_grad=True)
    vjps = torch.autograd.grad(value, list(leaves.values()), u, create_graph=True, allow_unused=True)
    pairs = zip(vjps, direction.values(), strict=True)
    product = sum(((p * v).sum() for p, v in pairs if p is not None), torch.zeros_like(value).sum())
    return torch.autograd.grad(product, u, create_graph=True)[0]


@contextmanager
def math_sdpa() -> Iterator[None]:
    """Compute attention with plain operations, which support every kind of differentiation."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
