import pytest
import torch
import torch.nn.functional as F
from torch import nn

from plateaux.core import tensor_tree
from plateaux.core.member import MemberModule
from plateaux.core.types import Batch
from plateaux.loss_landscape.loss_surface import LossSurface


def ground(*, training: bool = False, **options: object) -> LossSurface:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4))
    x, y = torch.randn(10, 1, 4, 4), torch.randint(0, 4, (10,))
    whole = Batch(x, y, torch.arange(10))
    return LossSurface(
        MemberModule(net.train(training)), [whole.take(slice(0, 6)), whole.take(slice(6, 10))], seed=3, **options
    )  # type: ignore[arg-type]


def shifted(here: LossSurface) -> tensor_tree.TensorTree:
    return {name: tensor + 0.1 for name, tensor in here.origin.items()}


def test_losses_are_the_cross_entropy_of_every_sample() -> None:
    here = ground()
    with torch.no_grad():
        wanted = torch.cat([F.cross_entropy(here.module(b.x), b.y, reduction="none") for b in here.batches])
    assert torch.allclose(here.all_losses(), wanted.double(), atol=1e-6)
    assert here.all_losses().dtype == torch.float64
    assert here.samples == 10
    assert here.num_params == sum(p.numel() for p in here.module.parameters())


def test_standing_elsewhere_ends_where_the_member_stood() -> None:
    here = ground()
    before = here.all_losses()
    there = here.all_losses(shifted(here))
    assert not torch.allclose(before, there)
    assert torch.equal(here.all_losses(), before)
    with pytest.raises(ZeroDivisionError), here.at_params(shifted(here)):
        raise ZeroDivisionError
    assert all(torch.equal(here.params[name], tensor) for name, tensor in here.origin.items())


def test_the_gradient_is_that_of_the_function_handed_to_torch_func() -> None:
    here = ground()
    batch = here.batches[0]
    for at in (here.origin, shifted(here)):
        loss, gradient = here.gradient(batch, at)
        wanted, value = torch.func.grad_and_value(lambda w: here.loss_fn(batch)(w).mean())(at)
        assert torch.allclose(loss.to(value.dtype), value)
        assert all(torch.allclose(gradient[name], wanted[name], atol=1e-6) for name in wanted)


def test_a_weight_that_is_not_used_has_a_gradient_of_zero() -> None:
    here = ground()
    here.module.register_parameter("idle", nn.Parameter(torch.ones(2)))
    here = LossSurface(here.member, here.batches)
    assert torch.equal(here.gradient(here.batches[0])[1]["idle"], torch.zeros(2))


def test_buffers_never_move_whatever_the_mode_of_batchnorm() -> None:
    here = ground(training=True)
    before = {name: b.clone() for name, b in here.module.named_buffers()}
    here.all_losses()
    here.gradient(here.batches[0])
    here.loss_fn(here.batches[0])(here.origin)
    assert all(torch.equal(b, before[name]) for name, b in here.module.named_buffers())


def test_a_network_without_buffers_may_be_in_training_mode() -> None:
    here = ground(training=True)
    plain = LossSurface(MemberModule(nn.Sequential(nn.Flatten(), nn.Linear(16, 4)).train()), here.batches)
    assert plain.all_losses().shape == (10,)


def test_recording_is_without_a_graph_and_moves_nothing() -> None:
    here = ground(training=True)
    before = {name: b.clone() for name, b in here.module.named_buffers()}
    logits, seen = here.record(here.batches[0], ["4"])
    assert not logits.requires_grad
    assert torch.equal(seen["4"].output, logits)
    assert torch.allclose(here.losses_from_logits(logits.double(), here.batches[0]), here.losses(here.batches[0]))
    assert all(torch.equal(b, before[name]) for name, b in here.module.named_buffers())


def test_unit_logits_do_not_feel_the_scale_of_the_last_layer() -> None:
    here = ground(normalize_logits=True)
    doubled = {name: 2 * w if name.startswith("4.") else w for name, w in here.origin.items()}
    assert torch.allclose(here.all_losses(), here.all_losses(doubled), atol=1e-6)
    assert not torch.allclose(ground().all_losses(), ground().all_losses(doubled), atol=1e-2)


def test_randomness_depends_on_the_key_and_on_the_words() -> None:
    here = ground()
    draw = [torch.rand(2, generator=here.generator(*words)).tolist() for words in (("a",), ("a",), ("a", 1), ("b",))]
    assert draw[0] == draw[1]
    assert len({tuple(each) for each in draw}) == 3
