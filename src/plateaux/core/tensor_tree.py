"""Arithmetic on trees: one member's tensors by name.

Everything here is about ONE member; nothing has a member axis. torch's `_foreach_` kernels do the work, one call for
the whole tree, because a loop over a hundred small tensors costs more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from plateaux.core.types import TensorTree


def add(a: TensorTree, b: TensorTree, *, times: float | Tensor = 1.0) -> TensorTree:
    """Return a + times * b."""
    if isinstance(times, Tensor) and times.device.type != "cpu":
        return _with_names(a, torch._foreach_add(_list(a), torch._foreach_mul(_like(a, b), times)))  # cuda-only
    # On a CPU a number costs nothing to read, and saves a pass; elsewhere reading it would wait for the device.
    return _with_names(a, torch._foreach_add(_list(a), _like(a, b), alpha=float(times)))


def scale(a: TensorTree, factor: float | Tensor) -> TensorTree:
    """Return factor * a."""
    return _with_names(a, torch._foreach_mul(_list(a), factor))


def multiply(a: TensorTree, b: TensorTree) -> TensorTree:
    """Return the entrywise product of a and b."""
    return _with_names(a, torch._foreach_mul(_list(a), _like(a, b)))


def magnitude(a: TensorTree) -> TensorTree:
    """Return the entrywise absolute value of a."""
    return _with_names(a, torch._foreach_abs(_list(a)))


def add_(a: TensorTree, b: TensorTree, *, times: float = 1.0) -> None:
    """Add times * b to a, in place."""
    torch._foreach_add_(_list(a), _like(a, b), alpha=times)


def scale_(a: TensorTree, factor: float) -> None:
    """Multiply a by a number, in place."""
    torch._foreach_mul_(_list(a), factor)


def multiply_(a: TensorTree, b: TensorTree) -> None:
    """Multiply a by b entry by entry, in place."""
    torch._foreach_mul_(_list(a), _like(a, b))


def clamp_(a: TensorTree, limit: float) -> None:
    """Bring the entries of a between -limit and limit, in place."""
    torch._foreach_clamp_max_(_list(a), limit)
    torch._foreach_clamp_min_(_list(a), -limit)


def norm(a: TensorTree) -> Tensor:
    """Return the Euclidean norm over all tensors as one number."""
    total: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(_list(a))))
    return total


def dot(a: TensorTree, b: TensorTree) -> Tensor:
    """Return the inner product over all tensors as one number."""
    return torch.stack([x.sum() for x in torch._foreach_mul(_list(a), _like(a, b))]).sum()


def clone(a: Mapping[str, Tensor]) -> TensorTree:
    """Return a copy that shares no memory and no graph with a."""
    return {name: tensor.detach().clone() for name, tensor in a.items()}


def write(target: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Copy the values of source into the tensors of target, in place."""
    if not target:  # a network without buffers
        return
    with torch.no_grad():
        torch._foreach_copy_(list(target.values()), [source[name] for name in target])


def size(a: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in a)


def _list(a: TensorTree) -> list[Tensor]:
    return list(a.values())


def _like(a: TensorTree, b: TensorTree) -> list[Tensor]:
    return [b[name] for name in a]


def _with_names(a: TensorTree, values: Iterable[Tensor]) -> TensorTree:
    return dict(zip(a, values, strict=True))


def finite(tensors: Sequence[Tensor]) -> bool:
    """Say whether every entry of every tensor is a number."""
    return not tensors or bool(torch.isfinite(torch.stack(torch._foreach_norm(list(tensors)))).all())
