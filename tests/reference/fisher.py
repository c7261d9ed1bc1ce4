"""Reference Fisher matrices, relative flatness, and input Hessians."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call


def weights(module: nn.Module) -> Tensor:
    """Return all weights as one vector `[P]`."""
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def gradients(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of every sample's cross entropy `[N, P]`, one backward pass each."""
    rows = []
    for row in range(len(x)):
        loss = F.cross_entropy(module(x[row : row + 1]), y[row : row + 1])
        found = torch.autograd.grad(loss, list(module.parameters()))
        rows.append(torch.cat([g.flatten() for g in found]))
    return torch.stack(rows)


def empirical_fisher(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean outer product of the samples' gradients `[P, P]`."""
    rows = gradients(module, x, y)
    return rows.T @ rows / len(rows)


def model_fisher(module: nn.Module, x: Tensor) -> Tensor:
    """Return the Fisher matrix with every label weighed by its probability `[P, P]`."""
    p = module(x).detach().softmax(-1)
    total = torch.zeros(len(weights(module)), len(weights(module)), dtype=p.dtype)
    for label in range(p.shape[1]):
        rows = gradients(module, x, torch.full((len(x),), label))
        total += (rows * p[:, label : label + 1]).T @ rows / len(x)
    return total


def relative_flatness(module: nn.Module, layer: str, x: Tensor, y: Tensor) -> float:
    """Return the sum over rows s, s' of <w_s, w_s'> Tr(H_ss'), from the explicit Hessian of the layer."""
    name = f"{layer}.weight"
    weight = dict(module.named_parameters())[name].detach()

    def loss(own: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(module, {name: own}, x), y)

    rows = weight.flatten(1)
    hessian = torch.autograd.functional.hessian(loss, weight).reshape(*rows.shape, *rows.shape)  # [d, m, d, m]
    total = 0.0
    for s in range(len(rows)):
        for t in range(len(rows)):
            total += float(rows[s] @ rows[t]) * float(hessian[s, :, t, :].trace())
    return total


def input_hessians(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the Hessian of every sample's loss at its input `[N, D, D]`."""
    rows = []
    for row in range(len(x)):

        def loss(flat: Tensor, row: int = row) -> Tensor:
            return F.cross_entropy(module(flat.view(1, *x.shape[1:])), y[row : row + 1])

        rows.append(torch.autograd.functional.hessian(loss, x[row].flatten()))
    return torch.stack(rows)
