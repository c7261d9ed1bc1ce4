"""The curvature of a ground's mean loss, as a symmetric matrix that is known by its products with vectors.

    hessian = Curvature(ground)
    product, forms = hessian.applied(v)  # H v, and v . H v of every piece of the samples and every tensor

A product is taken forwards over backwards (`torch.func.jvp` of `grad`), or, where forward mode cannot, backwards twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp

from plateaux.core.errors import RecipeError, suggest
from plateaux.core.types import Batch, TensorTree
from plateaux.loss_landscape.forward_mode import math_sdpa
from plateaux.loss_landscape.loss_surface import LossSurface

Kind = Literal["hessian", "gauss_newton"]
Mode = Literal["forwards over backwards", "twice backwards"]

MIN_CHUNKS = 8  # into at least so many the samples are cut, for the error that comes from them
MIN_CHUNK_SAMPLES = 16  # but no piece below so many samples: small ones cost more a sample


class Curvature:
    """A matrix of second derivatives over all trained weights, or those of one layer (`layer1` is all within it).

    `hessian` is the mean over samples of the loss's second derivatives; `gauss_newton` that of J' (diag p - p p') J,
    where J are the derivatives of a sample's logits as the cross entropy sees them and p its probabilities. The matrix
    is that of the place where the member stands.
    """

    def __init__(self, surface: LossSurface, *, kind: Kind = "hessian", layer: str | None = None) -> None:
        self.surface, self.kind = surface, kind
        self.names = _param_names(surface, layer)
        self.chunks = tuple(_split_chunks(surface))
        sizes = torch.tensor([len(piece) for piece in self.chunks], dtype=torch.float64)
        self.chunk_weights = sizes / sizes.sum()  # [G] of the samples
        self.mode: Mode = self._choose_mode()

    @property
    def size(self) -> int:
        """How many rows and columns there are."""
        return sum(self.surface.origin[name].numel() for name in self.names)

    @property
    def like(self) -> Tensor:
        """A tensor whose type and device vectors have."""
        return self.surface.origin[self.names[0]]

    def layers(self) -> dict[str, list[int]]:
        """Return which tensors, by position, belong to each layer: those that one module holds itself."""
        found: dict[str, list[int]] = {}
        for position, name in enumerate(self.names):
            found.setdefault(module_name(name), []).append(position)
        return found

    def product(self, vector: Tensor) -> Tensor:
        """Return the matrix times a vector `[P]`."""
        return self.product_and_forms(vector)[0]

    def product_and_forms(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return the matrix times a vector `[P]`, and every piece's and tensor's part of `v . H v`, `[G, T]`."""
        along = self._unflatten(vector)
        total = [torch.zeros_like(part) for part in along.values()]
        forms = torch.zeros(len(self.chunks), len(total), dtype=torch.float64)
        for number, (piece, share) in enumerate(zip(self.chunks, self.chunk_weights.tolist(), strict=True)):
            found = list(self._chunk_product(self.mode)(piece, along).values())
            torch._foreach_add_(total, found, alpha=share)
            dots = torch._foreach_mul(found, list(along.values()))
            forms[number] = torch.stack([part.sum(dtype=torch.float64) for part in dots])
        return torch.cat([part.flatten() for part in total]), forms

    def data_stderr(self, values: Tensor) -> float | None:
        """Return the standard error of the mean over all samples of what was found on each piece `[G]`."""
        count = len(values)
        if count < 2:
            return None
        from_mean = values - values @ self.chunk_weights
        return float(((self.chunk_weights * from_mean).square().sum() * count / (count - 1)).sqrt())

    def _unflatten(self, vector: Tensor) -> TensorTree:
        homes = [self.surface.origin[name] for name in self.names]
        parts = torch.split(vector, [home.numel() for home in homes])
        return {n: part.view_as(home).to(home) for n, part, home in zip(self.names, parts, homes, strict=True)}

    def _choose_mode(self) -> Mode:
        """Try forward mode on two samples; where it fails, say so and try without."""
        two, along = self.chunks[0].take(slice(0, 2)), {name: self.surface.origin[name] for name in self.names}
        try:
            self._chunk_product("forwards over backwards")(two, along)
            return "forwards over backwards"
        except Exception as problem:  # there is no end to what a network may do that torch.func does not
            kind, said = type(self.surface.module).__name__, problem
        try:
            self._chunk_product("twice backwards")(two, along)
        except RuntimeError as problem:
            raise RecipeError(
                f"This {kind} cannot be differentiated twice ({_first_line(problem)}); "
                "leave out probes of its curvature, or use layers that have second derivatives"
            ) from problem
        warnings.warn(
            f"Curvature of this {kind} is found by going backwards twice: forward mode cannot ({_first_line(said)})",
            stacklevel=4,
        )
        return "twice backwards"

    def _chunk_product(self, manner: Mode) -> Callable[[Batch, TensorTree], TensorTree]:
        ways: dict[tuple[Kind, Mode], Callable[[Batch, TensorTree], TensorTree]] = {
            ("hessian", "forwards over backwards"): self._hessian,
            ("hessian", "twice backwards"): self._hessian_reverse,
            ("gauss_newton", "forwards over backwards"): self._gauss_newton,
            ("gauss_newton", "twice backwards"): self._gauss_newton_reverse,
        }

        def of_piece(batch: Batch, along: TensorTree) -> TensorTree:
            with math_sdpa():
                return ways[self.kind, manner](batch, along)

        return of_piece

    def _hessian(self, batch: Batch, along: TensorTree) -> TensorTree:
        losses, (moving, still) = self.surface.loss_fn(batch), self._split_params()
        slope = grad(lambda at: losses({**still, **at}).mean())
        found: TensorTree = jvp(slope, (moving,), (along,))[1]
        return found

    def _hessian_reverse(self, batch: Batch, along: TensorTree) -> TensorTree:
        params = self._leaves()
        with torch.enable_grad():
            loss = self.surface.loss_fn(batch)(self.surface.params).mean()
            slope = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
        return self._fill_missing(_vjp(slope, along, params))

    def _gauss_newton(self, batch: Batch, along: TensorTree) -> TensorTree:
        logits, (moving, still) = self._logits(batch), self._split_params()

        def of(at: TensorTree) -> Tensor:
            return logits({**still, **at})

        pushed = jvp(of, (moving,), (along,))
        found: TensorTree = vjp(of, moving)[1](_cross_entropy_hvp(pushed[0], pushed[1]))[0]
        return found

    def _gauss_newton_reverse(self, batch: Batch, along: TensorTree) -> TensorTree:
        params = self._leaves()
        with torch.enable_grad():
            out = self._logits(batch)(self.surface.params)
            pull = torch.zeros_like(out, requires_grad=True)
            back = torch.autograd.grad(out, params, pull, create_graph=True, allow_unused=True)
        (change,) = _vjp(back, along, [pull])
        if change is None:
            return self._fill_missing([None] * len(params))
        return self._fill_missing(
            torch.autograd.grad(out, params, _cross_entropy_hvp(out.detach(), change), allow_unused=True)
        )

    def _logits(self, batch: Batch) -> Callable[[TensorTree], Tensor]:
        outputs = self.surface.logits_fn(batch)
        return lambda at: self.surface.prepare_logits(outputs(at))

    def _split_params(self) -> tuple[TensorTree, TensorTree]:
        """Return the weights that the matrix is about, and all others."""
        weights = {name: p.detach() for name, p in self.surface.params.items()}
        moving = {name: weights.pop(name) for name in self.names}
        return moving, weights

    def _leaves(self) -> list[Tensor]:
        return [self.surface.params[name] for name in self.names]

    def _fill_missing(self, found: list[Tensor | None] | tuple[Tensor | None, ...]) -> TensorTree:
        pairs = zip(self.names, found, strict=True)
        return {name: torch.zeros_like(self.surface.origin[name]) if part is None else part for name, part in pairs}


def module_name(name: str) -> str:
    """Return the module that holds a weight itself; a weight of the network's own stands for itself."""
    return name.rpartition(".")[0] or name


def _param_names(ground: LossSurface, layer: str | None) -> list[str]:
    names = [n for n in ground.origin if layer is None or n == layer or n.startswith(f"{layer}.")]
    if not names:
        layers = {module_name(name) for name in ground.origin}
        raise RecipeError(f"There is no layer {layer!r} with trained weights; {suggest(str(layer), layers)}")
    return names


def _split_chunks(ground: LossSurface) -> Iterator[Batch]:
    """Yield the samples cut finely enough, but where BatchNorm would see other batches than the member's."""
    each = -(-ground.samples // MIN_CHUNKS)
    for batch in ground.batches:
        parts = min(-(-len(batch) // max(each, 1)), len(batch) // MIN_CHUNK_SAMPLES)
        if parts < 2 or ground.module.training:
            yield batch
            continue
        step = -(-len(batch) // parts)
        yield from (batch.take(slice(start, start + step)) for start in range(0, len(batch), step))


def _vjp(slope: tuple[Tensor | None, ...], along: TensorTree, to: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the derivatives of slope . along; what does not depend has none."""
    live = [(s, v) for s, v in zip(slope, along.values(), strict=True) if s is not None and s.requires_grad]
    if not live:
        return (None,) * len(to)
    outputs, weights = zip(*live, strict=True)
    if _has_error_node(outputs):
        raise RuntimeError("a function in it is marked once_differentiable")
    return torch.autograd.grad(outputs, to, weights, allow_unused=True, retain_graph=True)


def _has_error_node(outputs: Sequence[Tensor]) -> bool:
    """Say whether a graph holds a node that refuses to be differentiated.

    Autograd passes by such a node in silence where it is asked for the derivatives of some tensors only.
    """
    waiting, seen = [output.grad_fn for output in outputs], set[object]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if type(node).__name__ == "Error":
            return True
        seen.add(node)
        waiting += [after for after, _ in node.next_functions]
    return False


def _cross_entropy_hvp(out: Tensor, change: Tensor) -> Tensor:
    """Return the mean cross entropy's second derivatives over the logits, times a change of them."""
    p = out.softmax(-1)
    return p * (change - (p * change).sum(-1, keepdim=True)) / len(out)


def _first_line(problem: Exception) -> str:
    return str(problem).strip().split("\n", 1)[0].rstrip(".")
