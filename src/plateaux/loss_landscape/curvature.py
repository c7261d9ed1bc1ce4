"""The curvature of the mean loss: Hessian or Gauss-Newton matrix, given by matrix-vector products.

    hessian = Curvature(surface)
    product, forms = hessian.product_and_forms(v)  # H v, and v . H v per chunk of the samples and per tensor

Products use forward-over-reverse differentiation (`torch.func.jvp` of `grad`), or reverse-over-reverse if the network
does not support forward mode.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp

from plateaux.core.errors import RecipeError, first_line, suggest
from plateaux.core.types import Batch, TensorTree
from plateaux.loss_landscape.forward_mode import math_sdpa
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.per_sample import require_cross_entropy

Kind = Literal["hessian", "gauss_newton"]
Mode = Literal["forward_over_reverse", "reverse_over_reverse"]

MIN_CHUNKS = 8  # chunks of the samples, from which the standard error of the data is estimated
MIN_CHUNK_SAMPLES = 16  # smaller chunks cost more per sample


class Curvature:
    """A curvature matrix over all trained weights, or over those of one layer (`layer1` includes its sublayers).

    `hessian` is the mean over samples of the Hessian of the loss. `gauss_newton` is the mean of J' (diag p - p p') J,
    where J is the Jacobian of a sample's logits that enter the cross entropy and p its probabilities. The matrix is
    taken at the current weights of the member.
    """

    def __init__(self, surface: LossSurface, *, kind: Kind = "hessian", layer: str | None = None) -> None:
        self.surface, self.kind = surface, kind
        if kind == "gauss_newton":
            require_cross_entropy(surface, "The Gauss-Newton matrix")
        self.names = _param_names(surface, layer)
        self.chunks = tuple(_split_chunks(surface))
        sizes = torch.tensor([len(chunk) for chunk in self.chunks], dtype=torch.float64)
        self.chunk_weights = sizes / sizes.sum()  # [G] fractions of the samples
        self.mode: Mode = self._choose_mode()

    @property
    def size(self) -> int:
        """The number of rows and columns."""
        return sum(self.surface.origin[name].numel() for name in self.names)

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and device of the vectors."""
        return self.surface.origin[self.names[0]]

    def layers(self) -> dict[str, list[int]]:
        """Return the positions of the tensors of each layer, without those of its sublayers."""
        positions: dict[str, list[int]] = {}
        for position, name in enumerate(self.names):
            positions.setdefault(module_name(name), []).append(position)
        return positions

    def product(self, vector: Tensor) -> Tensor:
        """Return the matrix times a vector `[P]`."""
        return self.product_and_forms(vector)[0]

    def product_and_forms(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return the matrix times a vector `[P]`, and the parts of `v . H v` per chunk and tensor, `[G, T]`."""
        direction = self._unflatten(vector)
        total = [torch.zeros_like(part) for part in direction.values()]
        forms = torch.zeros(len(self.chunks), len(total), dtype=torch.float64)
        for i, (chunk, weight) in enumerate(zip(self.chunks, self.chunk_weights.tolist(), strict=True)):
            product = list(self._chunk_product(self.mode)(chunk, direction).values())
            torch._foreach_add_(total, product, alpha=weight)
            dots = torch._foreach_mul(product, list(direction.values()))
            forms[i] = torch.stack([part.sum(dtype=torch.float64) for part in dots])
        return torch.cat([part.flatten() for part in total]), forms

    def data_stderr(self, values: Tensor) -> float | None:
        """Return the standard error over samples of the mean of values per chunk `[G]`; None for one chunk."""
        count = len(values)
        if count < 2:
            return None
        deviations = values - values @ self.chunk_weights
        return float(((self.chunk_weights * deviations).square().sum() * count / (count - 1)).sqrt())

    def _unflatten(self, vector: Tensor) -> TensorTree:
        params = [self.surface.origin[name] for name in self.names]
        parts = torch.split(vector, [param.numel() for param in params])
        return {n: part.view_as(param).to(param) for n, part, param in zip(self.names, parts, params, strict=True)}

    def _choose_mode(self) -> Mode:
        """Try forward mode on two samples; if it fails, warn and use double backward."""
        two, direction = self.chunks[0].take(slice(0, 2)), {name: self.surface.origin[name] for name in self.names}
        network = type(self.surface.module).__name__
        try:
            self._chunk_product("forward_over_reverse")(two, direction)
            return "forward_over_reverse"
        except Exception as error:  # networks fail under torch.func in many ways
            reason = first_line(error)
        try:
            self._chunk_product("reverse_over_reverse")(two, direction)
        except RuntimeError as error:
            raise RecipeError(
                f"This {network} cannot be differentiated twice ({first_line(error)}); leave out probes of the "
                "curvature, or use layers with second derivatives"
            ) from error
        warnings.warn(
            f"Forward-mode differentiation failed for this {network} ({reason}). Falling back to double backward for "
            "its curvature, which is slower.",
            stacklevel=4,
        )
        return "reverse_over_reverse"

    def _chunk_product(self, mode: Mode) -> Callable[[Batch, TensorTree], TensorTree]:
        products: dict[tuple[Kind, Mode], Callable[[Batch, TensorTree], TensorTree]] = {
            ("hessian", "forward_over_reverse"): self._hessian,
            ("hessian", "reverse_over_reverse"): self._hessian_reverse,
            ("gauss_newton", "forward_over_reverse"): self._gauss_newton,
            ("gauss_newton", "reverse_over_reverse"): self._gauss_newton_reverse,
        }

        def product(batch: Batch, direction: TensorTree) -> TensorTree:
            with math_sdpa():
                return products[self.kind, mode](batch, direction)

        return product

    def _hessian(self, batch: Batch, direction: TensorTree) -> TensorTree:
        losses, (params, fixed) = self.surface.loss_fn(batch), self._split_params()
        gradient = grad(lambda at: losses({**fixed, **at}).mean())
        product: TensorTree = jvp(gradient, (params,), (direction,))[1]
        return product

    def _hessian_reverse(self, batch: Batch, direction: TensorTree) -> TensorTree:
        leaves = self._leaves()
        with torch.enable_grad():
            loss = self.surface.loss_fn(batch)(self.surface.params).mean()
            gradient = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
        return self._fill_missing(_vjp(gradient, direction, leaves))

    def _gauss_newton(self, batch: Batch, direction: TensorTree) -> TensorTree:
        all_logits, (params, fixed) = self._logits_fn(batch), self._split_params()

        def logits(at: TensorTree) -> Tensor:
            return all_logits({**fixed, **at})

        tangents = jvp(logits, (params,), (direction,))
        product: TensorTree = vjp(logits, params)[1](_cross_entropy_hvp(tangents[0], tangents[1]))[0]
        return product

    def _gauss_newton_reverse(self, batch: Batch, direction: TensorTree) -> TensorTree:
        leaves = self._leaves()
        with torch.enable_grad():
            logits = self._logits_fn(batch)(self.surface.params)
            cotangent = torch.zeros_like(logits, requires_grad=True)
            pullback = torch.autograd.grad(logits, leaves, cotangent, create_graph=True, allow_unused=True)
        (change,) = _vjp(pullback, direction, [cotangent])
        if change is None:
            return self._fill_missing([None] * len(leaves))
        curved = _cross_entropy_hvp(logits.detach(), change)
        return self._fill_missing(torch.autograd.grad(logits, leaves, curved, allow_unused=True))

    def _logits_fn(self, batch: Batch) -> Callable[[TensorTree], Tensor]:
        logits = self.surface.logits_fn(batch)
        return lambda at: self.surface.prepare_logits(logits(at))

    def _split_params(self) -> tuple[TensorTree, TensorTree]:
        """Return the weights of the matrix, and all other weights."""
        fixed = {name: p.detach() for name, p in self.surface.params.items()}
        params = {name: fixed.pop(name) for name in self.names}
        return params, fixed

    def _leaves(self) -> list[Tensor]:
        return [self.surface.params[name] for name in self.names]

    def _fill_missing(self, parts: Sequence[Tensor | None]) -> TensorTree:
        pairs = zip(self.names, parts, strict=True)
        return {name: torch.zeros_like(self.surface.origin[name]) if part is None else part for name, part in pairs}


def module_name(name: str) -> str:
    """Return the name of the module of a parameter; for a parameter of the network itself, its own name."""
    return name.rpartition(".")[0] or name


def _param_names(surface: LossSurface, layer: str | None) -> list[str]:
    names = [n for n in surface.origin if layer is None or n == layer or n.startswith(f"{layer}.")]
    if not names:
        layers = {module_name(name) for name in surface.origin}
        raise RecipeError(f"There is no layer {layer!r} with trained weights; {suggest(str(layer), layers)}")
    return names


def _split_chunks(surface: LossSurface) -> Iterator[Batch]:
    """Yield chunks of the samples. With BatchNorm in training mode, batches stay whole: their statistics matter."""
    chunk_size = -(-surface.samples // MIN_CHUNKS)
    for batch in surface.batches:
        count = min(-(-len(batch) // max(chunk_size, 1)), len(batch) // MIN_CHUNK_SAMPLES)
        if count < 2 or surface.module.training:
            yield batch
            continue
        step = -(-len(batch) // count)
        yield from (batch.take(slice(start, start + step)) for start in range(0, len(batch), step))


def _vjp(gradient: tuple[Tensor | None, ...], direction: TensorTree, inputs: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the derivatives of gradient . direction; None for inputs on which it does not depend."""
    pairs = zip(gradient, direction.values(), strict=True)
    connected = [(g, v) for g, v in pairs if g is not None and g.requires_grad]
    if not connected:
        return (None,) * len(inputs)
    outputs, cotangents = zip(*connected, strict=True)
    if _has_error_node(outputs):
        raise RuntimeError("a function in it is marked once_differentiable")
    return torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True, retain_graph=True)


def _has_error_node(outputs: Sequence[Tensor]) -> bool:
    """Return whether an autograd graph contains a node that cannot be differentiated.

    Autograd skips such a node silently if only the derivatives with respect to some tensors are requested.
    """
    queue, visited = [output.grad_fn for output in outputs], set[object]()
    while queue:
        node = queue.pop()
        if node is None or node in visited:
            continue
        if type(node).__name__ == "Error":
            return True
        visited.add(node)
        queue += [parent for parent, _ in node.next_functions]
    return False


def _cross_entropy_hvp(logits: Tensor, change: Tensor) -> Tensor:
    """Return the Hessian of the mean cross entropy with respect to the logits, times a change of the logits."""
    p = logits.softmax(-1)
    return p * (change - (p * change).sum(-1, keepdim=True)) / len(logits)
