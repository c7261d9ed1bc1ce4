"""One custom training loop and one loop of the engine on the same batches, for the tests of SharpnessAware."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from cases import Corner, corner, make_state, steps
from torch import Tensor, nn

from plateaux.core.method import Method
from plateaux.core.types import Batch, TensorTree, derive_seed
from plateaux.optim import SharpnessAware

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


def batches_of(own: Corner, count: int = 4) -> list[Batch]:
    """Return batches with the samples of a corner in other orders."""
    generator = torch.Generator().manual_seed(5)
    size = len(own.batch)
    return [own.batch.take(torch.randperm(size, generator=generator)) for _ in range(count)]


def weights_and_buffers(module: nn.Module) -> TensorTree:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def same_bits(a: TensorTree, b: TensorTree) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def engine(own: Corner, method: Method, batches: Sequence[Batch], *, name: str = "sgd", **options: Any) -> TensorTree:
    """Return the weights and buffers after the engine's steps."""
    module = copy.deepcopy(own.module)
    limit = options.pop("max_grad_norm", None)
    state = make_state(module, method, max_grad_norm=limit)
    state.optimizer = OPTIMIZERS[name](module.parameters())
    steps(state, batches, **options)
    return weights_and_buffers(module)


def wrapped(module: nn.Module, name: str = "sgd", *, rho: float = 0.3, **options: Any) -> SharpnessAware:
    return SharpnessAware(OPTIMIZERS[name](module.parameters()), rho=rho, model=module, **options)


def seeded(module: nn.Module, batch: Batch) -> Tensor:
    """Run a forward pass with the random numbers that the engine uses for it."""
    torch.manual_seed(derive_seed(batch.seed, "forward", 0))
    return module(batch.x)  # type: ignore[no-any-return]


def plain_step(optimizer: SharpnessAware, module: nn.Module, batch: Batch) -> None:
    """Take a step as in the guide; the seed is set for the first pass only."""
    optimizer.zero_grad()
    F.cross_entropy(seeded(module, batch), batch.y).backward()
    with optimizer.perturbed():
        F.cross_entropy(module(batch.x), batch.y).backward()
    optimizer.step()


def same_start(net: str = "mlp", **options: Any) -> tuple[Corner, nn.Module]:
    """Return a corner, and a copy of its network for the custom loop."""
    own = corner(net, **options)
    return own, copy.deepcopy(own.module)
