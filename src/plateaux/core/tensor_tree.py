"""Arithmetic on tensor trees: the tensors of one member by name.

Nothing here has a member axis. The `_foreach_` kernels of torch process a tree in one call, because a loop over a
hundred small tensors costs more than the arithmetic.
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
    # On a CPU, reading the number is free and saves a pass; on other devices it would synchronize.
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
    """Multiply a by a factor, in place."""
    torch._foreach_mul_(_list(a), factor)


def multiply_(a: TensorTree, b: TensorTree) -> None:
    """Multiply a by b entry by entry, in place."""
    torch._foreach_mul_(_list(a), _like(a, b))


def clamp_(a: TensorTree, limit: float) -> None:
    """Clamp the entries of a to [-limit, limit], in place."""
    torch._foreach_clamp_max_(_list(a), limit)
    torch._foreach_clamp_min_(_list(a), -limit)


def norm(a: TensorTree) -> Tensor:
    """Return the Euclidean norm over all tensors, as a scalar tensor."""
    total: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(_list(a))))
    return total


def dot(a: TensorTree, b: TensorTree) -> Tensor:
    """Return the inner product over all tensors, as a scalar tensor."""
    return torch.stack([x.sum() for x in torch._foreach_mul(_list(a), _like(a, b))]).sum()


def clone(a: Mapping[str, Tensor]) -> TensorTree:
    """Return a detached copy."""
    return {name: tensor.detach().clone() for name, tensor in a.items()}


def write(target: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Copy the values of source into the tensors of target, in place."""
    if not target:  # a network without buffers
        return
    with torch.no_grad():
        torch._foreach_copy_(list(target.values()), [source[name] for name in target])


def size(a: Iterable[Tensor]) -> int:
    """Return the size of all tensors in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in a)


def _list(a: TensorTree) -> list[Tensor]:
    return list(a.values())


def _like(a: TensorTree, b: TensorTree) -> list[Tensor]:
    return [b[name] for name in a]


def _with_names(a: TensorTree, values: Iterable[Tensor]) -> TensorTree:
    return dict(zip(a, values, strict=True))


def is_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether no entry of any tensor is NaN or infinite."""
    return not tensors or bool(torch.isfinite(torch.stack(torch._foreach_norm(list(tensors)))).all())
