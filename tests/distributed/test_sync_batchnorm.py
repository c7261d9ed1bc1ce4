"""BatchNorm over processes is BatchNorm of the whole batch: outputs, gradients and running statistics."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from laws.meshes import mesh
from reference import batchnorm as reference
from torch import Tensor, nn

from plateaux.core.errors import RecipeError
from plateaux.distributed.sync_batchnorm import SyncedBatchNorm, convert_sync_batchnorm

SHAPES = {"flat": (7, 3), "line": (7, 3, 4), "image": (7, 3, 4, 5)}
CUTS = [(0, 3, 7), (0, 1, 7), (0, 0, 7)]  # in the last, one process has no samples


def problem(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw, dtype=torch.float64)

    return 2 * normal(*shape) + 1, normal(*shape), normal(shape[1]), normal(shape[1])


def layer_for(shape: tuple[int, ...], momentum: float | None) -> nn.Module:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    return kind(shape[1], momentum=momentum).double()


def run_passes(shape: tuple[int, ...], cut: tuple[int, ...], momentum: float | None) -> dict[str, Any]:
    """Run a synchronized layer twice on the samples of this process, and return outputs, gradients, and buffers."""
    import torch.distributed as dist

    x, grad, weight, bias = problem(shape)
    own = slice(cut[dist.get_rank()], cut[dist.get_rank() + 1])
    layer = layer_for(shape, momentum)
    convert_sync_batchnorm(layer, dist.group.WORLD)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    for _ in range(2):
        mine = x[own].clone().requires_grad_()
        out = layer(mine)
    out.backward(grad[own])
    for p in layer.parameters():
        dist.all_reduce(p.grad)
    assert mine.grad is not None
    found = {"out": out.detach(), "x": mine.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    return found | {name: buffer.clone() for name, buffer in layer.named_buffers()}


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", SHAPES)
def test_two_processes_equal_one_layer_on_the_full_batch(
    kind: str, cut: tuple[int, ...], momentum: float | None
) -> None:
    x, grad, weight, bias = (t.numpy() for t in problem(SHAPES[kind]))
    found = mesh(2).run("tests.distributed.test_sync_batchnorm:run_passes", SHAPES[kind], cut, momentum)
    close = {"rtol": 0, "atol": 1e-12}
    np.testing.assert_allclose(torch.cat([each["out"] for each in found]), reference.forward(x, weight, bias), **close)
    truth = dict(zip(("x", "weight", "bias"), reference.backward(x, weight, grad), strict=True))
    np.testing.assert_allclose(torch.cat([each["x"] for each in found]), truth["x"], **close)
    mean, var = np.zeros(3), np.ones(3)
    for rate in (1, 0.5) if momentum is None else (momentum, momentum):
        mean, var = reference.running(mean, var, x, rate)
    for each in found:
        np.testing.assert_allclose(each["weight"], truth["weight"], **close)
        np.testing.assert_allclose(each["bias"], truth["bias"], **close)
        np.testing.assert_allclose(each["running_mean"], mean, **close)
        np.testing.assert_allclose(each["running_var"], var, **close)
        assert int(each["num_batches_tracked"]) == 2


@pytest.mark.parametrize("kind", SHAPES)
def test_the_reference_equals_the_layer_of_torch(kind: str) -> None:
    x, grad, weight, bias = problem(SHAPES[kind])
    layer = layer_for(SHAPES[kind], 0.1)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    x.requires_grad_()
    out = layer(x)
    out.backward(grad)
    plain = x.detach().numpy()
    np.testing.assert_allclose(out.detach(), reference.forward(plain, weight.numpy(), bias.numpy()), rtol=0, atol=1e-12)
    for mine, its in zip(
        reference.backward(plain, weight.numpy(), grad.numpy()),
        (x.grad, layer.weight.grad, layer.bias.grad),
        strict=True,
    ):
        np.testing.assert_allclose(its, mine, rtol=0, atol=1e-12)
    np.testing.assert_allclose(layer.running_var, reference.running(np.zeros(3), np.ones(3), plain, 0.1)[1], atol=1e-12)


def run_empty_batch() -> dict[str, Tensor]:
    import torch.distributed as dist

    layer = nn.BatchNorm2d(3)
    convert_sync_batchnorm(layer, dist.group.WORLD)
    assert layer(torch.zeros(0, 3, 2, 2)).shape == (0, 3, 2, 2)
    return dict(layer.named_buffers())


def test_a_batch_without_samples_on_any_process_changes_no_statistics() -> None:
    for buffers in mesh(2).run("tests.distributed.test_sync_batchnorm:run_empty_batch"):
        assert torch.equal(buffers["running_var"], torch.ones(3))
        assert torch.equal(buffers["running_mean"], torch.zeros(3))
        assert int(buffers["num_batches_tracked"]) == 0


def test_evaluation_equals_the_layer_of_torch() -> None:
    layer, synced = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    for each in (layer, synced):
        each.running_mean = torch.tensor([1.0, 2.0, 3.0])
        each.eval()
    convert_sync_batchnorm(synced, None)
    x = torch.randn(4, 3, 2, 2)
    assert torch.equal(synced(x), layer(x))


def test_every_batchnorm_of_a_network_is_synchronized_and_keeps_its_names() -> None:
    net = nn.Sequential(nn.Conv2d(1, 3, 1), nn.Sequential(nn.BatchNorm2d(3)), nn.BatchNorm2d(3, affine=False))
    before = list(net.state_dict())
    convert_sync_batchnorm(net, "group")
    assert list(net.state_dict()) == before
    assert [type(m) for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)] == [SyncedBatchNorm] * 2
    assert net[2].group == "group"


def run_timm() -> float:
    """Return how far timm's layer with its activation is from itself on the whole batch."""
    import torch.distributed as dist

    from plateaux.core.imports import optional_import

    BatchNormAct2d = optional_import("timm.layers", extra="vision").BatchNormAct2d
    x = problem((8, 3, 2, 2))[0].float()
    own = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    alone, shared = BatchNormAct2d(3), BatchNormAct2d(3)
    convert_sync_batchnorm(shared, dist.group.WORLD)
    convert_sync_batchnorm(shared, dist.group.WORLD)  # twice does no harm
    gap = float((shared(x[own]) - alone(x)[own]).abs().max())
    shared.eval(), alone.eval()
    return max(gap, float((shared(x) - alone(x)).abs().max()))


def test_the_batchnorm_layer_of_timm_keeps_its_activation() -> None:
    if find_spec("timm") is None:
        pytest.skip("timm is not installed")
    assert max(mesh(2).run("tests.distributed.test_sync_batchnorm:run_timm")) < 1e-5


def test_a_custom_batchnorm_layer_is_refused_by_name() -> None:
    class Odd(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    with pytest.raises(RecipeError, match=r"'1' is a custom BatchNorm \(Odd\)"):
        convert_sync_batchnorm(nn.Sequential(nn.Conv2d(1, 3, 1), Odd(3)), None)
