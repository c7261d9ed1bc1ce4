"""BatchNorm over inputs [B, C, ...] in training mode, in numpy: forward, running statistics and gradients."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def forward(x: Array, weight: Array, bias: Array, eps: float = 1e-5) -> Array:
    return _wide(weight, x) * _normalised(x, eps) + _wide(bias, x)


def running(mean: Array, var: Array, x: Array, momentum: float) -> tuple[Array, Array]:
    """Return the running statistics after one batch; the variance is the unbiased one."""
    rows = _rows(x)
    return (1 - momentum) * mean + momentum * rows.mean(0), (1 - momentum) * var + momentum * rows.var(0, ddof=1)


def backward(x: Array, weight: Array, grad: Array, eps: float = 1e-5) -> tuple[Array, Array, Array]:
    """Return the gradients of inputs, weight and bias, given that of the output."""
    normal, n = _normalised(x, eps), _rows(x).shape[0]
    grad_bias, grad_weight = _rows(grad).sum(0), _rows(grad * normal).sum(0)
    scale = weight / np.sqrt(_rows(x).var(0) + eps)
    inner = grad - _wide(grad_bias, x) / n - normal * _wide(grad_weight, x) / n
    return _wide(scale, x) * inner, grad_weight, grad_bias


def _rows(x: Array) -> Array:
    return np.moveaxis(x, 1, -1).reshape(-1, x.shape[1])


def _wide(per_channel: Array, x: Array) -> Array:
    return per_channel.reshape(1, -1, *[1] * (x.ndim - 2))


def _normalised(x: Array, eps: float) -> Array:
    rows = _rows(x)
    return (x - _wide(rows.mean(0), x)) / np.sqrt(_wide(rows.var(0), x) + eps)
