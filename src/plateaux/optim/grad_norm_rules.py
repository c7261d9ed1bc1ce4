"""What single layers give to the gradient of every sample, from what they saw and the gradient at their output.

A weight that multiplies has for each sample the gradient `sum over t of left_t x right_t`, where t runs over positions;
its squared norm needs that sum (the product), or the inner products of all positions (the Gram matrices), whichever is
cheaper. A weight that scales or shifts has a gradient small enough to be written down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

WORKSPACE = 2**22  # bytes that one piece of work may touch: more than fits in cache makes convolutions twice as slow
GRAM_PAYS = 1.2  # a Gram matrix writes less than a product of as many multiplications
THIN = 50_000  # weights up to which oneDNN's grouped convolution beats laying out patches


@dataclass(frozen=True, slots=True)
class OuterProduct:
    """A gradient `[groups, rows, columns]` for every sample, as left `[b, G, T, rows]`, right `[b, G, T, columns]`.

    `make` returns both for some samples; left may be row numbers `[b, T]`. `product` is a faster way to their sum.
    """

    make: Callable[[slice], tuple[Tensor, Tensor]]
    samples: int
    dims: tuple[int, int, int, int]  # G, T, rows, columns
    product: Callable[[slice], Tensor] | None = None
    numbered: bool = False


GradPart = OuterProduct | Tensor
"""What one call of a layer gives to one parameter's gradients; a tensor holds them themselves, `[B, ...]`."""

Rule = Callable[[nn.Module, Tensor, Tensor, int, int], dict[str, Callable[[], GradPart]]]
"""(layer, input, gradient at the output, samples, axis of the samples) to the part of every parameter."""


def squared_norm(parts: Sequence[GradPart], mask: Tensor | None = None) -> Tensor:
    """Return the squared norm `[B]` of the sum of all parts, where the mask lets it through."""
    matrices = [part for part in parts if isinstance(part, OuterProduct)]
    if matrices:
        assert len(matrices) == len(parts)
        return _squares_of_matrices(matrices, mask)
    whole = sum(part for part in parts if isinstance(part, Tensor))
    assert isinstance(whole, Tensor)
    return (whole if mask is None else whole * mask).flatten(1).double().square().sum(1)


def _squares_of_matrices(parts: Sequence[OuterProduct], mask: Tensor | None) -> Tensor:
    groups, _, rows, columns = parts[0].dims
    length = sum(part.dims[1] for part in parts)
    numbered = any(part.numbered for part in parts)
    gram = mask is None and (numbered or length * (rows + columns) <= GRAM_PAYS * rows * columns)
    widest = columns if numbered and gram else rows + columns
    size = 4 * groups * (length * widest + (2 * length**2 if gram else rows * columns))
    found = [_by_gram(parts, s) if gram else _by_product(parts, s, mask) for s in chunks(parts[0].samples, size)]
    return torch.cat(found).double()


def chunks(samples: int, size: int) -> Iterator[slice]:
    """Yield slices of samples, of which each takes `size` bytes, that stay within the workspace."""
    step = max(1, WORKSPACE // max(1, size))
    return (slice(start, min(start + step, samples)) for start in range(0, samples, step))


def _by_product(parts: Sequence[OuterProduct], samples: slice, mask: Tensor | None) -> Tensor:
    whole: Tensor | None = None
    for part in parts:
        if part.product is not None:
            one = part.product(samples)
        else:
            left, right = part.make(samples)
            if part.numbered:
                left = F.one_hot(left, part.dims[2]).to(right.dtype)[:, None]
            one = torch.matmul(left.mT, right)
        one = one.flatten(1)
        whole = one if whole is None else whole + one
    assert whole is not None
    norm: Tensor = torch.linalg.vector_norm(whole if mask is None else whole * mask.flatten(), dim=1)
    return norm.double().square()


def _by_gram(parts: Sequence[OuterProduct], samples: slice) -> Tensor:
    made = [part.make(samples) for part in parts]
    found = [
        (_cross_products(left, also) * (right @ other.mT)).flatten(1).sum(1)
        for left, right in made
        for also, other in made
    ]
    return torch.stack(found).sum(0)


def _cross_products(one: Tensor, other: Tensor) -> Tensor:
    """Return the inner products `[b, G, T, S]` of rows; row numbers stand for unit vectors."""
    if one.is_floating_point() and other.is_floating_point():
        return one @ other.mT
    if one.is_floating_point():
        return _cross_products(other, one).mT
    if other.is_floating_point():
        picked = one[:, None, :].expand(-1, other.shape[2], -1)
        return other[:, 0].gather(2, picked).mT[:, None]
    return (one[:, None, :, None] == other[:, None, None, :]).to(torch.float64)


def linear(x: Tensor, grad: Tensor, samples: int, axis: int) -> dict[str, Callable[[], GradPart]]:
    """Return the parts of `weight` and `bias` of a linear map with input `[..., in]`."""
    seen, left = _positions(x, samples, axis, 1), _positions(grad, samples, axis, 1)
    dims = (1, seen.shape[1], left.shape[2], seen.shape[2])
    return {
        "weight": lambda: OuterProduct(lambda s: (left[s, None], seen[s, None]), samples, dims),
        "bias": lambda: left.sum(1),
    }


def _positions(x: Tensor, samples: int, axis: int, keep: int) -> Tensor:
    """Return `x` as `[B, T, ...]` with its last `keep` dimensions kept."""
    return x.movedim(axis, 0).reshape(samples, -1, *x.shape[x.ndim - keep :])


def _linear(layer: nn.Module, x: Tensor, grad: Tensor, samples: int, axis: int) -> dict[str, Callable[[], GradPart]]:
    return linear(x, grad, samples, axis)


def _embedding(layer: nn.Module, x: Tensor, grad: Tensor, samples: int, axis: int) -> dict[str, Callable[[], GradPart]]:
    assert isinstance(layer, nn.Embedding)
    numbers, right = _positions(x, samples, axis, 0), _positions(grad, samples, axis, 1)
    if layer.padding_idx is not None:
        right = right * (numbers != layer.padding_idx)[..., None]
    dims = (1, numbers.shape[1], layer.num_embeddings, layer.embedding_dim)
    return {"weight": lambda: OuterProduct(lambda s: (numbers[s].long(), right[s, None]), samples, dims, numbered=True)}


def _conv(layer: nn.Module, x: Tensor, grad: Tensor, samples: int, axis: int) -> dict[str, Callable[[], GradPart]]:
    assert isinstance(layer, _ConvNd)
    groups, fold, spots = layer.groups, len(x) // samples, prod(grad.shape[2:])
    rows, columns = grad.shape[1] // groups, x.shape[1] // groups * prod(layer.kernel_size)

    def make(some: slice) -> tuple[Tensor, Tensor]:
        part = slice(some.start * fold, some.stop * fold)
        return _grouped(grad[part].flatten(2), groups, fold), _grouped(_patches(layer, x[part], grad), groups, fold)

    def product(some: slice) -> Tensor:
        return _as_grouped_convolution(layer, x[some], grad[some])

    fast = product if fold == 1 and rows * columns <= THIN and _onednn_takes(layer, x) else None
    dims = (groups, fold * spots, rows, columns)
    return {
        "weight": lambda: OuterProduct(make, samples, dims, fast),
        "bias": lambda: grad.flatten(2).sum(2).reshape(samples, fold, -1).sum(1),
    }


def _grouped(x: Tensor, groups: int, fold: int) -> Tensor:
    """Turn `[b * fold, G * channels, spots]` into `[b, G, fold * spots, channels]`."""
    apart = x.reshape(len(x) // fold, fold, groups, -1, x.shape[2])
    return apart.permute(0, 2, 1, 4, 3).flatten(2, 3)


def _patches(layer: _ConvNd, x: Tensor, grad: Tensor) -> Tensor:
    """Return what every position of the output was made of, `[n, channels * taps, spots]`."""
    if any(layer._reversed_padding_repeated_twice):
        x = F.pad(x, layer._reversed_padding_repeated_twice, _padding_mode(layer))
    x = x.contiguous()
    steps = x.stride()[2:]
    taps = [step * dilation for step, dilation in zip(steps, layer.dilation, strict=True)]
    moves = [step * stride for step, stride in zip(steps, layer.stride, strict=True)]
    shape = (*x.shape[:2], *layer.kernel_size, *grad.shape[2:])
    # A strided copy: three times as fast as F.unfold, and the same for any number of dimensions.
    view = x.as_strided(shape, (*x.stride()[:2], *taps, *moves), x.storage_offset())
    return view.reshape(len(x), x.shape[1] * prod(layer.kernel_size), prod(grad.shape[2:]))


def _padding_mode(layer: _ConvNd) -> str:
    return "constant" if layer.padding_mode == "zeros" else layer.padding_mode


def _onednn_takes(layer: _ConvNd, x: Tensor) -> bool:
    plain = layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    even = layer.in_channels % 16 == 0 and layer.out_channels % 16 == 0  # else it takes a slow reference kernel
    here = x.device.type == "cpu" and x.dtype == torch.float32
    here = here and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return plain and even and here and isinstance(layer, nn.Conv2d)


def _as_grouped_convolution(layer: _ConvNd, x: Tensor, grad: Tensor) -> Tensor:
    """Return the samples' weight gradients as one convolution's in which every sample is a group."""
    n, pairs = len(x), [0] * len(layer.kernel_size)
    weight = x.new_empty(1).expand(n * layer.out_channels, layer.in_channels, *layer.kernel_size)  # only its shape
    found: Tensor = torch.ops.aten.convolution_backward(
        grad.reshape(1, -1, *grad.shape[2:]), x.reshape(1, -1, *x.shape[2:]), weight, None,
        layer.stride, layer.padding, layer.dilation, False, pairs, n, [False, True, False],
    )[1]  # fmt: skip
    return found.view(n, -1)


def _batch_norm(
    layer: nn.Module, x: Tensor, grad: Tensor, samples: int, axis: int
) -> dict[str, Callable[[], GradPart]]:
    assert isinstance(layer, _BatchNorm)
    mean, var, n = layer.running_mean, layer.running_var, len(x)
    assert mean is not None
    assert var is not None
    shape = (1, n * x.shape[1], -1, 1)
    # To one sample of n * C channels, of which each has a gradient of its own, the statistics being fixed.
    _, scale, shift = torch.ops.aten.native_batch_norm_backward(
        grad.reshape(shape), x.reshape(shape), None, mean.repeat(n), var.repeat(n), None, None,
        False, layer.eps, [False, True, True],
    )  # fmt: skip
    whole = (samples, -1, x.shape[1])
    return {"weight": lambda: scale.view(whole).sum(1), "bias": lambda: shift.view(whole).sum(1)}


def _group_norm(
    layer: nn.Module, x: Tensor, grad: Tensor, samples: int, axis: int
) -> dict[str, Callable[[], GradPart]]:
    assert isinstance(layer, nn.GroupNorm)
    whole = (samples, -1, x.shape[1])

    def weight() -> Tensor:
        normal = F.group_norm(x, layer.num_groups, None, None, layer.eps)
        return (normal * grad).flatten(2).sum(2).view(whole).sum(1)

    return {"weight": weight, "bias": lambda: grad.reshape(*x.shape[:2], -1).sum(2).view(whole).sum(1)}


def _layer_norm(
    layer: nn.Module, x: Tensor, grad: Tensor, samples: int, axis: int
) -> dict[str, Callable[[], GradPart]]:
    assert isinstance(layer, nn.LayerNorm | nn.RMSNorm)
    shape = list(layer.normalized_shape)

    def weight() -> Tensor:
        if isinstance(layer, nn.LayerNorm):
            normal = F.layer_norm(x, shape, None, None, layer.eps)
        else:
            normal = F.rms_norm(x, shape, None, layer.eps)
        return _positions(normal * grad, samples, axis, len(shape)).sum(1)

    return {"weight": weight, "bias": lambda: _positions(grad, samples, axis, len(shape)).sum(1)}


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: _linear,
    nn.Conv1d: _conv,
    nn.Conv2d: _conv,
    nn.Conv3d: _conv,
    nn.Embedding: _embedding,
    _BatchNorm: _batch_norm,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _layer_norm,
}


def layer_type(layer: nn.Module) -> type[nn.Module] | None:
    """Return the kind of layer whose rule fits, if any."""
    return next((kind for kind in RULES if isinstance(layer, kind)), None)


def unsupported_reason(layer: nn.Module, x: Tensor) -> str | None:
    """Say why a rule does not fit a layer or its input, or nothing."""
    if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
        return "it normalises by statistics of the batch"
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq):
        return "it has max_norm or scale_grad_by_freq"
    if isinstance(layer, _ConvNd) and x.ndim != 2 + len(layer.kernel_size):
        return "its input has no axis of samples"
    return None


def unsupported_attention_reason(layer: nn.MultiheadAttention) -> str | None:
    """Say why `attend` cannot stand in for a layer, or nothing."""
    if layer.bias_k is not None or layer.add_zero_attn:
        return "it has bias_k or add_zero_attn"
    return "it drops units" if layer.training and layer.dropout > 0 else None


Project = Callable[[str, Tensor, Tensor, Tensor | None], Tensor]
"""(one of q, k, v; input; weight; bias) to the projected input."""


def attention_forward(
    layer: nn.MultiheadAttention, project: Project, query: Tensor, key: Tensor, value: Tensor,
    key_padding_mask: Tensor | None = None, need_weights: bool = True, attn_mask: Tensor | None = None,
    average_attn_weights: bool = True, is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Do what the layer's own forward does, with every projection a call of its own."""
    lone = query.ndim == 2
    if lone:
        query, key, value = query[:, None], key[:, None], value[:, None]
    first = layer.batch_first and not lone
    weights = _weights(layer)
    biases = (None,) * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    seen = zip("qkv", (query, key, value), weights, biases, strict=True)
    heads = [_heads(project(which, x, w, b), layer.num_heads, first) for which, x, w, b in seen]  # [B, heads, T, d]
    q, k, v = heads
    scores = q @ k.mT * (q.shape[-1] ** -0.5)
    if attn_mask is not None:
        full = attn_mask if attn_mask.ndim == 2 else attn_mask.reshape(len(q), -1, *attn_mask.shape[1:])
        scores = scores + _additive(full, q.dtype)
    elif is_causal:
        raise RuntimeError("is_causal needs an attn_mask")
    if key_padding_mask is not None:
        scores = scores + _additive(key_padding_mask.reshape(len(q), 1, 1, -1), q.dtype)
    share = scores.softmax(-1)
    mixed = (share @ v).transpose(1, 2).flatten(2)  # [B, T, E]
    out = layer.out_proj(mixed if first else mixed.transpose(0, 1))
    looks = (share.mean(1) if average_attn_weights else share) if need_weights else None
    return (out[:, 0], None if looks is None else looks[0]) if lone else (out, looks)


def _weights(layer: nn.MultiheadAttention) -> tuple[Tensor, ...]:
    if layer.in_proj_weight is not None:
        return tuple(layer.in_proj_weight.chunk(3))
    return layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight


def _heads(x: Tensor, heads: int, batch_first: bool) -> Tensor:
    x = x if batch_first else x.transpose(0, 1)
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
