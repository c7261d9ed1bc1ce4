"""Derivatives along a line through the weights, of every sample at once and without any sample's gradient.

    logits, slopes = slope(ground.outputs(batch), ground.home, direction)

Forward mode carries the direction along in one pass. What it cannot go through (an LSTM, a function without a rule of
its own) is done by backward passes of backward passes instead: the same numbers, more slowly.
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
"""Weights to numbers of every sample."""


def jvp_outputs(function: ParamsFn, at: TensorTree, along: TensorTree) -> tuple[Tensor, Tensor]:
    """Return the function there, and its first derivative in the direction `along`."""
    with math_sdpa():
        try:
            return _forward(function, at, along)
        except RuntimeError:  # forward mode is missing somewhere; any other trouble comes again
            with torch.enable_grad():
                leaves = _leaves(at)
                value = function(leaves)
                return value.detach(), _jvp_by_double_backward(value, leaves, along).detach()


def second_derivative(function: ParamsFn, at: TensorTree, along: TensorTree) -> Tensor:
    """Return the second derivative of the function there in the direction `along`: v'Hv of every sample."""
    with math_sdpa():
        try:
            return _forward(lambda there: _forward(function, there, along)[1], at, along)[1]
        except RuntimeError:
            with torch.enable_grad():
                leaves = _leaves(at)
                return _jvp_by_double_backward(
                    _jvp_by_double_backward(function(leaves), leaves, along), leaves, along
                ).detach()


def _forward(function: ParamsFn, at: TensorTree, along: TensorTree) -> tuple[Tensor, Tensor]:
    found = jvp(function, (at,), (along,))
    return found[0], found[1]


def _leaves(at: TensorTree) -> TensorTree:
    return {name: tensor.detach().requires_grad_() for name, tensor in at.items()}


def _jvp_by_double_backward(value: Tensor, leaves: TensorTree, along: TensorTree) -> Tensor:
    """Return J v: a backward pass from u brings J'u to the weights, and u'Jv is linear in u."""
    u = torch.zeros_like(value, requires_grad=True)
    pulled = torch.autograd.grad(value, list(leaves.values()), u, create_graph=True, allow_unused=True)
    pairs = zip(pulled, along.values(), strict=True)
    product = sum(((p * v).sum() for p, v in pairs if p is not None), torch.zeros_like(value).sum())
    return torch.autograd.grad(product, u, create_graph=True)[0]


@contextmanager
def math_sdpa() -> Iterator[None]:
    """Open a context in which attention is computed by operations that can be differentiated in any way."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
