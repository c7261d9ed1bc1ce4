from __future__ import annotations

import pytest
import torch
from reference.fisher import empirical_fisher, gradients, model_fisher, weights
from torch import Tensor, nn

from plateaux.core.errors import RecipeError
from plateaux.core.member import MemberModule
from plateaux.core.types import Batch
from plateaux.loss_landscape import forward_mode as tangents
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.per_sample import mean_over_draws, mean_over_samples
from plateaux.loss_landscape.probes.fisher import fisher_rao, fisher_trace


def bare(*, bias: bool = False, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    sizes = ((4, 6), (6, 5), (5, 3))
    first, second, last = (nn.Linear(*size, bias=bias, dtype=dtype) for size in sizes)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)


def conv(*, training: bool = False) -> nn.Sequential:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4))
    net(torch.randn(20, 1, 4, 4))
    return net.double().train(training)


def make_surface(
    net: nn.Module, *shape: int, n: int = 11, classes: int = 3, cut: int = 7, **options: object
) -> LossSurface:
    maker = torch.Generator().manual_seed(5)
    dtype = next(net.parameters()).dtype
    x = torch.randn(n, *(shape or (4,)), generator=maker, dtype=torch.float64).to(dtype)
    full = Batch(x, torch.arange(n) % classes, torch.arange(n))
    return LossSurface(MemberModule(net), [full.take(slice(0, cut)), full.take(slice(cut, n))], seed=3, **options)  # type: ignore[arg-type]


def samples(surface: LossSurface) -> tuple[Tensor, Tensor]:
    x = [batch.x for batch in surface.batches if isinstance(batch.x, Tensor)]
    return torch.cat(x), torch.cat([batch.y for batch in surface.batches])


@pytest.mark.parametrize("labels", ["true", "model"])
@pytest.mark.parametrize("net", [bare(bias=True), conv()], ids=["mlp", "conv"])
def test_fisher_rao_equals_that_of_the_explicit_fisher_matrix(net: nn.Module, labels: str) -> None:
    surface = make_surface(net, *((4,) if isinstance(net[0], nn.Linear) else (1, 4, 4)))  # type: ignore[index]
    x, y = samples(surface)
    matrix = empirical_fisher(net, x, y) if labels == "true" else model_fisher(net, x)
    theta = weights(net)
    expected = float(theta @ matrix @ theta)
    result = fisher_rao(labels=labels).run(surface)  # type: ignore[arg-type]
    assert result["squared"].value == pytest.approx(expected, rel=1e-10)
    assert result[""].value == pytest.approx(expected**0.5, rel=1e-10)


def test_the_standard_error_of_fisher_rao_follows_the_delta_method() -> None:
    surface = make_surface(bare(bias=True))
    x, y = samples(surface)
    squares = (gradients(surface.module, x, y) @ weights(surface.module)).square()
    result = fisher_rao().run(surface)
    expected = float(squares.std()) / len(squares) ** 0.5
    assert result["squared"].stderr == pytest.approx(expected)
    assert result[""].stderr == pytest.approx(expected / (2 * result[""].value))
    one = make_surface(bare(), n=1, cut=1)
    assert fisher_rao().run(LossSurface(one.member, one.batches[:1]))[""].stderr is None


def test_fisher_trace_equals_that_of_the_explicit_fisher_matrix() -> None:
    for net, shape in ((bare(bias=True), (4,)), (conv(), (1, 4, 4))):
        surface = make_surface(net, *shape)
        result = fisher_trace().run(surface)[""]
        expected = empirical_fisher(net, *samples(surface)).trace()
        assert result.value == pytest.approx(float(expected), rel=1e-6)
        assert result.stderr is not None


def test_fisher_rao_is_scale_invariant_and_the_trace_is_not() -> None:
    before, after = bare(dtype=torch.float32), bare(dtype=torch.float32)
    with torch.no_grad():
        after[0].weight *= 10
        after[2].weight /= 10
    for labels in ("true", "model"):
        one, other = (fisher_rao(labels=labels).run(make_surface(net))[""].value for net in (before, after))  # type: ignore[arg-type]
        assert other == pytest.approx(one, rel=1e-4)
    one, other = (fisher_trace().run(make_surface(net))[""].value for net in (before, after))
    assert abs(other / one - 1) > 0.5
    assert fisher_rao().scale_invariant
    assert not fisher_trace().scale_invariant


def test_convolutions_before_batchnorm_contribute_only_in_evaluation_mode() -> None:
    slopes = {}
    for training in (True, False):
        surface = make_surface(conv(training=training), 1, 4, 4)
        only = {name: tensor * (name == "0.weight") for name, tensor in surface.origin.items()}
        slopes[training] = (
            tangents.jvp_outputs(surface.logits_fn(surface.batches[0]), surface.origin, only)[1].abs().max()
        )
    assert slopes[True] < 1e-4  # eps keeps it from exact invariance
    assert slopes[False] > 1e-2


def test_weights_and_buffers_are_restored_in_training_mode() -> None:
    surface = make_surface(conv(training=True), 1, 4, 4)
    before = {name: tensor.clone() for name, tensor in surface.module.state_dict().items()}
    fisher_rao().run(surface)
    fisher_rao(labels="model").run(surface)
    with pytest.raises(RecipeError, match="gradient per sample is not defined"):
        fisher_trace().run(surface)
    assert all(torch.equal(tensor, before[name]) for name, tensor in surface.module.state_dict().items())


def test_the_norm_is_zero_for_normalized_logits() -> None:
    surface = make_surface(bare(), normalize_logits=True)
    for labels in ("true", "model"):
        result = fisher_rao(labels=labels).run(surface)  # type: ignore[arg-type]
        assert result[""].value < 1e-12  # the loss does not depend on the scale of the logits
    assert fisher_trace().run(surface)[""].value > 1e-3


def test_a_network_with_zero_logits_has_a_norm_of_zero() -> None:
    net = bare()
    nn.init.zeros_(net[4].weight)  # type: ignore[arg-type]
    result = fisher_rao().run(make_surface(net))
    assert result[""].value == 0
    assert result[""].stderr is None


class Doubled(torch.autograd.Function):
    """A function without a forward-mode rule."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad


class Named(nn.Module):
    """A network with named inputs and attention, with an optional custom function that doubles them."""

    def __init__(self, *, forward_mode: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.forward_mode = forward_mode
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64)
        self.head = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, *, tokens: Tensor, mask: Tensor) -> Tensor:
        attended = self.attention(tokens, tokens, tokens, need_weights=False)[0]
        attended = 2 * attended if self.forward_mode else Doubled.apply(attended)
        return self.head((attended * mask[..., None]).mean(1))


def test_attention_named_inputs_and_the_double_backward_fallback_agree_with_the_reference() -> None:
    x = {"tokens": torch.randn(5, 3, 4, dtype=torch.float64), "mask": torch.ones(5, 3, dtype=torch.long)}
    batch = Batch(x, torch.arange(5) % 3, torch.arange(5))
    result = [LossSurface(MemberModule(Named(forward_mode=way)), [batch]) for way in (True, False)]
    numbers = [fisher_rao().run(surface)[""].value for surface in result]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-10)
    bends = [tangents.second_derivative(surface.loss_fn(batch), surface.origin, surface.origin) for surface in result]
    assert torch.allclose(bends[0], bends[1], rtol=1e-9)
    assert torch.backends.mha.get_fastpath_enabled()


def test_labels_can_be_class_probabilities() -> None:
    surface = make_surface(bare(dtype=torch.float32))
    shares = [Batch(b.x, torch.eye(3)[b.y], b.index) for b in surface.batches]
    for factory in (fisher_rao, fisher_trace):
        one, other = (
            factory().run(LossSurface(surface.member, batches))[""].value for batches in (surface.batches, shares)
        )
        assert one == pytest.approx(other, rel=1e-5)


def test_the_declared_number_of_passes() -> None:
    assert fisher_rao().passes(30) == 30
    assert fisher_trace().passes(30) == 30


def test_standard_errors_over_samples_and_draws_are_separate() -> None:
    maker = torch.Generator().manual_seed(0)
    result = []
    for _ in range(200):
        of_samples, of_draws = torch.randn(40, generator=maker), torch.randn(8, 1, generator=maker)
        result.append(mean_over_draws(of_samples + of_draws / 2 + 2 * torch.randn(8, 40, generator=maker)))
    by_sample, by_draw = (1 / 40) ** 0.5, (1 / 4 / 8 + 4 / (8 * 40)) ** 0.5
    assert (sum((v.stderr or 0) ** 2 for v in result) / 200) ** 0.5 == pytest.approx(by_sample, rel=0.05)
    assert (sum((v.mc_stderr or 0) ** 2 for v in result) / 200) ** 0.5 == pytest.approx(by_draw, rel=0.05)
    assert mean_over_draws(torch.ones(1, 4)).mc_stderr is None
    assert mean_over_draws(torch.ones(2, 1)).stderr is None
    assert mean_over_draws(torch.arange(4.0)[None]).stderr == mean_over_samples(torch.arange(4.0)).stderr
