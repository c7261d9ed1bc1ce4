import pytest
import torch
import torch.nn.functional as F
from torch import nn

from plateaux.core import tensor_tree
from plateaux.core.member import MemberModule
from plateaux.core.types import Batch
from plateaux.loss_landscape.loss_surface import LossSurface


def make_surface(*, training: bool = False, **options: object) -> LossSurface:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4))
    x, y = torch.randn(10, 1, 4, 4), torch.randint(0, 4, (10,))
    full = Batch(x, y, torch.arange(10))
    return LossSurface(
        MemberModule(net.train(training)), [full.take(slice(0, 6)), full.take(slice(6, 10))], seed=3, **options
    )  # type: ignore[arg-type]


def shifted(surface: LossSurface) -> tensor_tree.TensorTree:
    return {name: tensor + 0.1 for name, tensor in surface.origin.items()}


def test_losses_are_the_cross_entropy_of_every_sample() -> None:
    surface = make_surface()
    with torch.no_grad():
        expected = torch.cat([F.cross_entropy(surface.module(b.x), b.y, reduction="none") for b in surface.batches])
    assert torch.allclose(surface.all_losses(), expected.double(), atol=1e-6)
    assert surface.all_losses().dtype == torch.float64
    assert surface.samples == 10
    assert surface.num_params == sum(p.numel() for p in surface.module.parameters())


def test_at_params_restores_the_weights() -> None:
    surface = make_surface()
    before = surface.all_losses()
    there = surface.all_losses(shifted(surface))
    assert not torch.allclose(before, there)
    assert torch.equal(surface.all_losses(), before)
    with pytest.raises(ZeroDivisionError), surface.at_params(shifted(surface)):
        raise ZeroDivisionError
    assert all(torch.equal(surface.params[name], tensor) for name, tensor in surface.origin.items())


def test_the_gradient_equals_that_of_loss_fn_by_torch_func() -> None:
    surface = make_surface()
    batch = surface.batches[0]
    for at in (surface.origin, shifted(surface)):
        loss, gradient = surface.gradient(batch, at)
        expected, value = torch.func.grad_and_value(lambda w: surface.loss_fn(batch)(w).mean())(at)
        assert torch.allclose(loss.to(value.dtype), value)
        assert all(torch.allclose(gradient[name], expected[name], atol=1e-6) for name in expected)


def test_an_unused_weight_has_a_gradient_of_zero() -> None:
    surface = make_surface()
    surface.module.register_parameter("idle", nn.Parameter(torch.ones(2)))
    surface = LossSurface(surface.member, surface.batches)
    assert torch.equal(surface.gradient(surface.batches[0])[1]["idle"], torch.zeros(2))


def test_buffers_do_not_change_with_batchnorm_in_training_mode() -> None:
    surface = make_surface(training=True)
    before = {name: b.clone() for name, b in surface.module.named_buffers()}
    surface.all_losses()
    surface.gradient(surface.batches[0])
    surface.loss_fn(surface.batches[0])(surface.origin)
    assert all(torch.equal(b, before[name]) for name, b in surface.module.named_buffers())


def test_a_network_without_buffers_can_be_in_training_mode() -> None:
    surface = make_surface(training=True)
    plain = LossSurface(MemberModule(nn.Sequential(nn.Flatten(), nn.Linear(16, 4)).train()), surface.batches)
    assert plain.all_losses().shape == (10,)


def test_record_has_no_graph_and_changes_no_buffers() -> None:
    surface = make_surface(training=True)
    before = {name: b.clone() for name, b in surface.module.named_buffers()}
    logits, records = surface.record(surface.batches[0], ["4"])
    assert not logits.requires_grad
    assert torch.equal(records["4"].output, logits)
    assert torch.allclose(
        surface.losses_from_logits(logits.double(), surface.batches[0]), surface.losses(surface.batches[0])
    )
    assert all(torch.equal(b, before[name]) for name, b in surface.module.named_buffers())


def test_normalized_logits_do_not_depend_on_the_scale_of_the_last_layer() -> None:
    surface = make_surface(normalize_logits=True)
    doubled = {name: 2 * w if name.startswith("4.") else w for name, w in surface.origin.items()}
    assert torch.allclose(surface.all_losses(), surface.all_losses(doubled), atol=1e-6)
    assert not torch.allclose(make_surface().all_losses(), make_surface().all_losses(doubled), atol=1e-2)


def test_generators_depend_on_the_seed_and_the_labels() -> None:
    surface = make_surface()
    samples = [
        torch.rand(2, generator=surface.generator(*labels)).tolist() for labels in (("a",), ("a",), ("a", 1), ("b",))
    ]
    assert samples[0] == samples[1]
    assert len({tuple(item) for item in samples}) == 3
