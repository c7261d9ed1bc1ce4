"""Rules of layers: per-sample gradients of their parameters, from their inputs and the gradient at their output.

The weight of a linear map or convolution has for each sample the gradient `sum over t of left_t x right_t`, where t
runs over positions. Its squared norm follows from that sum (the product), or from the inner products of all positions
(the Gram matrices), whichever is cheaper. Gradients of scales and shifts are small and computed directly.
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

CHUNK_BYTES = 2**22  # memory of one chunk of samples: convolutions are twice as slow if it exceeds the cache
GRAM_ADVANTAGE = 1.2  # a Gram matrix writes less memory than a product with as many multiplications
MAX_GROUPED_CONV_WEIGHTS = 50_000  # up to this size, oneDNN's grouped convolution is faster than extracting patches


@dataclass(frozen=True, slots=True)
class OuterProduct:
    """A gradient `[G, rows, columns]` for every sample, as factors left `[b, G, T, rows]`, right `[b, G, T, columns]`.

    `factors` returns both for some samples; with `is_indexed`, left is given as row numbers `[b, T]`. `product` is a
    faster way to compute the sum of the outer products, if there is one.
    """

    factors: Callable[[slice], tuple[Tensor, Tensor]]
    samples: int
    dims: tuple[int, int, int, int]  # G, T, rows, columns
    product: Callable[[slice], Tensor] | None = None
    is_indexed: bool = False


GradPart = OuterProduct | Tensor
"""The contribution of one call of a layer to the per-sample gradients of a parameter; a tensor is `[B, ...]`."""

Rule = Callable[[nn.Module, Tensor, Tensor, int, int], dict[str, Callable[[], GradPart]]]
"""Maps (layer, input, gradient at the output, samples, sample axis) to the contribution to every parameter."""


def squared_norm(parts: Sequence[GradPart], mask: Tensor | None = None) -> Tensor:
    """Return the squared norm `[B]` of the sum of all parts; masked entries are left out."""
    matrices = [part for part in parts if isinstance(part, OuterProduct)]
    if matrices:
        assert len(matrices) == len(parts)
        return _squared_norm_of_matrices(matrices, mask)
    total = sum(part for part in parts if isinstance(part, Tensor))
    assert isinstance(total, Tensor)
    return (total if mask is None else total * mask).flatten(1).double().square().sum(1)


def _squared_norm_of_matrices(parts: Sequence[OuterProduct], mask: Tensor | None) -> Tensor:
    groups, _, rows, columns = parts[0].dims
    length = sum(part.dims[1] for part in parts)
    is_indexed = any(part.is_indexed for part in parts)
    use_gram = mask is None and (is_indexed or length * (rows + columns) <= GRAM_ADVANTAGE * rows * columns)
    width = columns if is_indexed and use_gram else rows + columns
    size = 4 * groups * (length * width + (2 * length**2 if use_gram else rows * columns))
    norms = [_by_gram(parts, s) if use_gram else _by_product(parts, s, mask) for s in chunks(parts[0].samples, size)]
    return torch.cat(norms).double()


def chunks(samples: int, size: int) -> Iterator[slice]:
    """Yield slices of samples that fit into CHUNK_BYTES; `size` is the number of bytes per sample."""
    step = max(1, CHUNK_BYTES // max(1, size))
    return (slice(start, min(start + step, samples)) for start in range(0, samples, step))


def _by_product(parts: Sequence[OuterProduct], samples: slice, mask: Tensor | None) -> Tensor:
    total: Tensor | None = None
    for part in parts:
        if part.product is not None:
            product = part.product(samples)
        else:
            left, right = part.factors(samples)
            if part.is_indexed:
                left = F.one_hot(left, part.dims[2]).to(right.dtype)[:, None]
            product = torch.matmul(left.mT, right)
        product = product.flatten(1)
        total = product if total is None else total + product
    assert total is not None
    norm: Tensor = torch.linalg.vector_norm(total if mask is None else total * mask.flatten(), dim=1)
    return norm.double().square()


def _by_gram(parts: Sequence[OuterProduct], samples: slice) -> Tensor:
    factors = [part.factors(samples) for part in parts]
    terms = [
        (_inner_products(left_a, left_b) * (right_a @ right_b.mT)).flatten(1).sum(1)
        for left_a, right_a in factors
        for left_b, right_b in factors
    ]
    return torch.stack(terms).sum(0)


def _inner_products(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner products `[b, G, T, S]` of rows; row numbers are unit vectors."""
    if a.is_floating_point() and b.is_floating_point():
        return a @ b.mT
    if a.is_floating_point():
        return _inner_products(b, a).mT
    if b.is_floating_point():
        index = a[:, None, :].expand(-1, b.shape[2], -1)
        return b[:, 0].gather(2, index).mT[:, None]
    return (a[:, None, :, None] == b[:, None, None, :]).to(torch.float64)


def linear(x: Tensor, grad: Tensor, samples: int, axis: int) -> dict[str, Callable[[], GradPart]]:
    """Return the contributions to `weight` and `bias` of a linear map with input `[..., in]`."""
    right, left = _positions(x, samples, axis, 1), _positions(grad, samples, axis, 1)
    dims = (1, right.shape[1], left.shape[2], right.shape[2])
    return {
        "weight": lambda: OuterProduct(lambda s: (left[s, None], right[s, None]), samples, dims),
        "bias": lambda: left.sum(1),
    }


def _positions(x: Tensor, samples: int, axis: int, keep: int) -> Tensor:
    """Return `x` as `[B, T, ...]`, where the last `keep` dimensions are unchanged."""
    return x.movedim(axis, 0).reshape(samples, -1, *x.shape[x.ndim - keep :])


def _linear(layer: nn.Module, x: Tensor, grad: Tensor, samples: int, axis: int) -> dict[str, Callable[[], GradPart]]:
    return linear(x, grad, samples, axis)


def _embedding(layer: nn.Module, x: Tensor, grad: Tensor, samples: int, axis: int) -> dict[str, Callable[[], GradPart]]:
    assert isinstance(layer, nn.Embedding)
    numbers, right = _positions(x, samples, axis, 0), _positions(grad, samples, axis, 1)
    if layer.padding_idx is not None:
        right = right * (numbers != layer.padding_idx)[..., None]
    dims = (1, numbers.shape[1], layer.num_embeddings, layer.embedding_dim)
    return {
        "weight": lambda: OuterProduct(lambda s: (numbers[s].long(), right[s, None]), samples, dims, is_indexed=True)
    }


def _conv(layer: nn.Module, x: Tensor, grad: Tensor, samples: int, axis: int) -> dict[str, Callable[[], GradPart]]:
    assert isinstance(layer, _ConvNd)
    groups, fold, positions = layer.groups, len(x) // samples, prod(grad.shape[2:])
    rows, columns = grad.shape[1] // groups, x.shape[1] // groups * prod(layer.kernel_size)

    def factors(samples: slice) -> tuple[Tensor, Tensor]:
        images = slice(samples.start * fold, samples.stop * fold)
        left, right = grad[images].flatten(2), _patches(layer, x[images], grad)
        return _split_groups(left, groups, fold), _split_groups(right, groups, fold)

    def product(samples: slice) -> Tensor:
        return _as_grouped_convolution(layer, x[samples], grad[samples])

    is_small = fold == 1 and rows * columns <= MAX_GROUPED_CONV_WEIGHTS
    fast_product = product if is_small and _onednn_supports(layer, x) else None
    dims = (groups, fold * positions, rows, columns)
    return {
        "weight": lambda: OuterProduct(factors, samples, dims, fast_product),
        "bias": lambda: grad.flatten(2).sum(2).reshape(samples, fold, -1).sum(1),
    }


def _split_groups(x: Tensor, groups: int, fold: int) -> Tensor:
    """Reshape `[b * fold, G * channels, positions]` to `[b, G, fold * positions, channels]`."""
    split = x.reshape(len(x) // fold, fold, groups, -1, x.shape[2])
    return split.permute(0, 2, 1, 4, 3).flatten(2, 3)


def _patches(layer: _ConvNd, x: Tensor, grad: Tensor) -> Tensor:
    """Return the input patch of every output position, `[n, channels * taps, positions]`."""
    if any(layer._reversed_padding_repeated_twice):
        x = F.pad(x, layer._reversed_padding_repeated_twice, _padding_mode(layer))
    x = x.contiguous()
    strides = x.stride()[2:]
    tap_strides = [a * b for a, b in zip(strides, layer.dilation, strict=True)]
    position_strides = [a * b for a, b in zip(strides, layer.stride, strict=True)]
    shape = (*x.shape[:2], *layer.kernel_size, *grad.shape[2:])
    # A strided copy is three times as fast as F.unfold, and works for any number of dimensions.
    view = x.as_strided(shape, (*x.stride()[:2], *tap_strides, *position_strides), x.storage_offset())
    return view.reshape(len(x), x.shape[1] * prod(layer.kernel_size), prod(grad.shape[2:]))


def _padding_mode(layer: _ConvNd) -> str:
    return "constant" if layer.padding_mode == "zeros" else layer.padding_mode


def _onednn_supports(layer: _ConvNd, x: Tensor) -> bool:
    is_plain = layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    is_aligned = layer.in_channels % 16 == 0 and layer.out_channels % 16 == 0  # otherwise its reference kernel is slow
    is_cpu = x.device.type == "cpu" and x.dtype == torch.float32
    is_available = is_cpu and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return is_plain and is_aligned and is_available and isinstance(layer, nn.Conv2d)


def _as_grouped_convolution(layer: _ConvNd, x: Tensor, grad: Tensor) -> Tensor:
    """Return the per-sample weight gradients from one convolution in which every sample is a group."""
    n, output_padding = len(x), [0] * len(layer.kernel_size)
    weight = x.new_empty(1).expand(
        n * layer.out_channels, layer.in_channels, *layer.kernel_size
    )  # only its shape is used
    grads: Tensor = torch.ops.aten.convolution_backward(
        grad.reshape(1, -1, *grad.shape[2:]), x.reshape(1, -1, *x.shape[2:]), weight, None,
        layer.stride, layer.padding, layer.dilation, False, output_padding, n, [False, True, False],
    )[1]  # fmt: skip
    return grads.view(n, -1)


def _batch_norm(
    layer: nn.Module, x: Tensor, grad: Tensor, samples: int, axis: int
) -> dict[str, Callable[[], GradPart]]:
    assert isinstance(layer, _BatchNorm)
    mean, var, n = layer.running_mean, layer.running_var, len(x)
    assert mean is not None
    assert var is not None
    shape = (1, n * x.shape[1], -1, 1)
    # As one sample of n * C channels, each of which has a gradient of its own, because the statistics are fixed.
    _, scale, shift = torch.ops.aten.native_batch_norm_backward(
        grad.reshape(shape), x.reshape(shape), None, mean.repeat(n), var.repeat(n), None, None,
        False, layer.eps, [False, True, True],
    )  # fmt: skip
    shape_by_sample = (samples, -1, x.shape[1])
    return {
        "weight": lambda: scale.view(shape_by_sample).sum(1),
        "bias": lambda: shift.view(shape_by_sample).sum(1),
    }


def _group_norm(
    layer: nn.Module, x: Tensor, grad: Tensor, samples: int, axis: int
) -> dict[str, Callable[[], GradPart]]:
    assert isinstance(layer, nn.GroupNorm)
    shape = (samples, -1, x.shape[1])

    def weight() -> Tensor:
        normalized = F.group_norm(x, layer.num_groups, None, None, layer.eps)
        return (normalized * grad).flatten(2).sum(2).view(shape).sum(1)

    return {"weight": weight, "bias": lambda: grad.reshape(*x.shape[:2], -1).sum(2).view(shape).sum(1)}


def _layer_norm(
    layer: nn.Module, x: Tensor, grad: Tensor, samples: int, axis: int
) -> dict[str, Callable[[], GradPart]]:
    assert isinstance(layer, nn.LayerNorm | nn.RMSNorm)
    shape = list(layer.normalized_shape)

    def weight() -> Tensor:
        if isinstance(layer, nn.LayerNorm):
            normalized = F.layer_norm(x, shape, None, None, layer.eps)
        else:
            normalized = F.rms_norm(x, shape, None, layer.eps)
        return _positions(normalized * grad, samples, axis, len(shape)).sum(1)

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
    """Return the class whose rule applies to a layer; None without a rule."""
    return next((kind for kind in RULES if isinstance(layer, kind)), None)


def unsupported_reason(layer: nn.Module, x: Tensor) -> str | None:
    """Return why a rule does not apply to a layer or its input; None if it does."""
    if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
        return "it normalizes by statistics of the batch"
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq):
        return "it has max_norm or scale_grad_by_freq"
    if isinstance(layer, _ConvNd) and x.ndim != 2 + len(layer.kernel_size):
        return "its input has no sample axis"
    return None


def unsupported_attention_reason(layer: nn.MultiheadAttention) -> str | None:
    """Return why `attention_forward` cannot replace the forward of a layer; None if it can."""
    if layer.bias_k is not None or layer.add_zero_attn:
        return "it has bias_k or add_zero_attn"
    return "it applies dropout" if layer.training and layer.dropout > 0 else None


Project = Callable[[str, Tensor, Tensor, Tensor | None], Tensor]
"""Maps ("q", "k", or "v"; input; weight; bias) to the projected input."""


def attention_forward(
    layer: nn.MultiheadAttention, project: Project, query: Tensor, key: Tensor, value: Tensor,
    key_padding_mask: Tensor | None = None, need_weights: bool = True, attn_mask: Tensor | None = None,
    average_attn_weights: bool = True, is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute the forward of an attention layer with a separate call for every projection."""
    is_unbatched = query.ndim == 2
    if is_unbatched:
        query, key, value = query[:, None], key[:, None], value[:, None]
    batch_first = layer.batch_first and not is_unbatched
    weights = _projection_weights(layer)
    biases = (None,) * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    inputs = zip("qkv", (query, key, value), weights, biases, strict=True)
    projected = [project(which, x, w, b) for which, x, w, b in inputs]
    q, k, v = (_split_heads(x, layer.num_heads, batch_first) for x in projected)  # [B, heads, T, d]
    scores = q @ k.mT * (q.shape[-1] ** -0.5)
    if attn_mask is not None:
        full = attn_mask if attn_mask.ndim == 2 else attn_mask.reshape(len(q), -1, *attn_mask.shape[1:])
        scores = scores + _additive(full, q.dtype)
    elif is_causal:
        raise RuntimeError("is_causal needs an attn_mask")
    if key_padding_mask is not None:
        scores = scores + _additive(key_padding_mask.reshape(len(q), 1, 1, -1), q.dtype)
    probs = scores.softmax(-1)
    context = (probs @ v).transpose(1, 2).flatten(2)  # [B, T, E]
    out = layer.out_proj(context if batch_first else context.transpose(0, 1))
    attention = (probs.mean(1) if average_attn_weights else probs) if need_weights else None
    return (out[:, 0], None if attention is None else attention[0]) if is_unbatched else (out, attention)


def _projection_weights(layer: nn.MultiheadAttention) -> tuple[Tensor, ...]:
    if layer.in_proj_weight is not None:
        return tuple(layer.in_proj_weight.chunk(3))
    return layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight


def _split_heads(x: Tensor, heads: int, batch_first: bool) -> Tensor:
    x = x if batch_first else x.transpose(0, 1)
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
