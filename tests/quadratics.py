"""Loss surfaces with known properties: quadratic losses, and small networks to rescale, prune, and split."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from plateaux.core.member import MemberModule
from plateaux.core.types import Batch, TensorTree
from plateaux.loss_landscape.loss_surface import LossSurface

SIZE = 7  # weights of a quadratic, in two tensors


class Bowl(nn.Module):
    """Sample x has the loss x . w + 1/2 w H w at the weights w."""

    def __init__(self, w: Tensor, curvature: Tensor) -> None:
        super().__init__()
        self.a = nn.Parameter(w[:4].clone().view(2, 2))
        self.b = nn.Parameter(w[4:].clone())
        self.curvature = curvature

    def forward(self, x: Tensor) -> Tensor:
        w = torch.cat([self.a.flatten(), self.b])
        return (x @ w + w @ self.curvature @ w / 2)[:, None]


class SurfaceOfLosses(LossSurface):
    """A surface whose module returns the losses of the samples."""

    def losses_from_logits(self, logits: Tensor, batch: Batch) -> Tensor:
        return logits[:, 0]


def bowl(w: Tensor, curvature: Tensor, slopes: Tensor, *, seed: int = 0) -> SurfaceOfLosses:
    """Return a quadratic loss whose samples have the given slopes `[N, p]`."""
    count = len(slopes)
    batch = Batch(slopes, torch.zeros(count, dtype=torch.long), torch.arange(count))
    return SurfaceOfLosses(MemberModule(Bowl(w, curvature)), [batch], seed=seed)


def matrix(seed: int, *, shift: float = 0.0) -> Tensor:
    """Return a symmetric matrix with eigenvalues on both sides of `shift`."""
    network = torch.randn(SIZE, SIZE, generator=draw(seed), dtype=torch.float64)
    return (network + network.T) / 2 + shift * torch.eye(SIZE, dtype=torch.float64)


def vector(seed: int) -> Tensor:
    return torch.randn(SIZE, generator=draw(seed), dtype=torch.float64)


def near_zero_slopes(w: Tensor, curvature: Tensor, count: int) -> Tensor:
    """Return slopes `[count, p]` that almost cancel the gradient at w, so that the curvature dominates."""
    return 0.2 * torch.randn(count, SIZE, generator=draw(3), dtype=torch.float64) - curvature @ w


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def max_in_ball(slope: Tensor, curvature: Tensor, radius: float) -> float:
    """Return the largest slope . u + 1/2 u H u with |u| = radius, by eigenvectors and bisection.

    The maximum solves (l - H) u = slope with l above every eigenvalue and |u| = radius.
    """
    values, vectors = torch.linalg.eigh(curvature)
    along = vectors.T @ slope
    low, high = float(values[-1]), float(values[-1]) + float(along.norm()) / radius
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if float((along / (middle - values)).norm()) > radius else (low, middle)
    u = along / (high - values)
    return float(along @ u + (values * u * u).sum() / 2)


def net(*, batchnorm: bool = False, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    """Return a small ReLU network with four inputs and three classes."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        norm = [nn.BatchNorm1d(6)] if batchnorm else []
        network = nn.Sequential(nn.Linear(4, 6), *norm, nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
        if batchnorm:
            network[1].running_mean.normal_()
            network[1].running_var.uniform_(0.5, 2)
    return network.to(dtype).eval()


def rescale_layers(module: nn.Sequential, factor: float = 4.0) -> nn.Sequential:
    """Multiply one layer by a factor and divide the next by it, which does not change the function."""
    layers = [part for part in module if isinstance(part, nn.Linear)]
    with torch.no_grad():
        layers[-2].weight.mul_(factor), layers[-2].bias.mul_(factor)
        layers[-1].weight.div_(factor)
    return module


def samples(count: int = 12, *, dtype: torch.dtype = torch.float64, seed: int = 1) -> Batch:
    x = torch.randn(count, 4, generator=draw(seed), dtype=torch.float64).to(dtype)
    return Batch(x, torch.arange(count) % 3, torch.arange(count))


def cut(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """Split a batch into batches of these sizes."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [batch.take(slice(end - size, end)) for end, size in zip(ends, sizes, strict=True)]


def make_surface(
    module: nn.Module | None = None, batches: Sequence[Batch] | None = None, *, seed: int = 0
) -> LossSurface:
    return LossSurface(MemberModule(module or net()), batches or [samples()], seed=seed)


def state(module: nn.Module) -> TensorTree:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


class NamedInputs(nn.Module):
    """A network that takes its inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, *, one: Tensor, two: Tensor) -> Tensor:
        out: Tensor = self.inner(one + two)
        return out


def with_named_inputs(batch: Batch) -> Batch:
    """Return a batch whose inputs are named halves."""
    assert isinstance(batch.x, Tensor)
    return Batch({"one": batch.x / 2, "two": batch.x / 2}, batch.y, batch.index)


class Counting(LossSurface):
    """A surface that counts passes over samples: one for a gradient, a third for a loss."""

    passes = 0.0

    def losses(self, batch: Batch, at: TensorTree | None = None) -> Tensor:
        self.passes += len(batch) / 3
        return super().losses(batch, at)

    def gradient(self, batch: Batch, at: TensorTree | None = None) -> tuple[Tensor, TensorTree]:
        self.passes += len(batch)
        return super().gradient(batch, at)
