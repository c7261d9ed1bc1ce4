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


def ground(net: nn.Module, *shape: int, n: int = 11, classes: int = 3, cut: int = 7, **options: object) -> LossSurface:
    maker = torch.Generator().manual_seed(5)
    dtype = next(net.parameters()).dtype
    x = torch.randn(n, *(shape or (4,)), generator=maker, dtype=torch.float64).to(dtype)
    whole = Batch(x, torch.arange(n) % classes, torch.arange(n))
    return LossSurface(MemberModule(net), [whole.take(slice(0, cut)), whole.take(slice(cut, n))], seed=3, **options)  # type: ignore[arg-type]


def samples(here: LossSurface) -> tuple[Tensor, Tensor]:
    x = [batch.x for batch in here.batches if isinstance(batch.x, Tensor)]
    return torch.cat(x), torch.cat([batch.y for batch in here.batches])


@pytest.mark.parametrize("labels", ["true", "model"])
@pytest.mark.parametrize("net", [bare(bias=True), conv()], ids=["mlp", "conv"])
def test_fisher_rao_is_that_of_the_explicit_fisher_matrix(net: nn.Module, labels: str) -> None:
    here = ground(net, *((4,) if isinstance(net[0], nn.Linear) else (1, 4, 4)))  # type: ignore[index]
    x, y = samples(here)
    matrix = empirical_fisher(net, x, y) if labels == "true" else model_fisher(net, x)
    theta = weights(net)
    wanted = float(theta @ matrix @ theta)
    found = fisher_rao(labels=labels).run(here)  # type: ignore[arg-type]
    assert found["squared"].value == pytest.approx(wanted, rel=1e-10)
    assert found[""].value == pytest.approx(wanted**0.5, rel=1e-10)


def test_the_error_of_fisher_rao_is_that_of_a_mean_carried_through_the_root() -> None:
    here = ground(bare(bias=True))
    x, y = samples(here)
    squares = (gradients(here.module, x, y) @ weights(here.module)).square()
    found = fisher_rao().run(here)
    wanted = float(squares.std()) / len(squares) ** 0.5
    assert found["squared"].stderr == pytest.approx(wanted)
    assert found[""].stderr == pytest.approx(wanted / (2 * found[""].value))
    one = ground(bare(), n=1, cut=1)
    assert fisher_rao().run(LossSurface(one.member, one.batches[:1]))[""].stderr is None


@pytest.mark.parametrize("labels", ["true", "model"])
def test_the_homogeneous_form_is_the_forward_mode_one_where_there_are_no_biases(labels: str) -> None:
    for dtype, close in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        here = ground(bare(dtype=dtype))
        found, wanted = (fisher_rao(labels=labels, method=way).run(here) for way in ("logit", "jvp"))  # type: ignore[arg-type]
        assert found[""].value == pytest.approx(wanted[""].value, rel=close)
        told = fisher_rao(labels=labels, method="logit", layers=2).run(here)  # type: ignore[arg-type]
        assert told == found


def test_the_homogeneous_form_refuses_networks_it_does_not_hold_for() -> None:
    with pytest.raises(RecipeError, match=r"has biases \(0.bias, 2.bias, 4.bias\)"):
        fisher_rao(method="logit").run(ground(bare(bias=True)))
    with pytest.raises(RecipeError, match="has biases and normalization"):
        fisher_rao(method="logit").run(ground(conv(), 1, 4, 4))
    with pytest.raises(RecipeError, match="1 hidden layers does not hold"):
        fisher_rao(method="logit", layers=1).run(ground(bare()))
    bent = bare()
    bent[1] = nn.Tanh()
    with pytest.raises(RecipeError, match="2 hidden layers does not hold"):
        fisher_rao(method="logit").run(ground(bent))
    forced = fisher_rao(method="logit", force=True).run(ground(bare(bias=True)))
    assert forced[""].value != pytest.approx(fisher_rao().run(ground(bare(bias=True)))[""].value)


def test_fisher_trace_is_the_trace_of_the_explicit_fisher_matrix() -> None:
    for net, shape in ((bare(bias=True), (4,)), (conv(), (1, 4, 4))):
        here = ground(net, *shape)
        found = fisher_trace().run(here)[""]
        wanted = empirical_fisher(net, *samples(here)).trace()
        assert found.value == pytest.approx(float(wanted), rel=1e-6)
        assert found.stderr is not None


def test_rescaling_neighbouring_layers_moves_the_trace_and_not_fisher_rao() -> None:
    before, after = bare(dtype=torch.float32), bare(dtype=torch.float32)
    with torch.no_grad():
        after[0].weight *= 10
        after[2].weight /= 10
    for labels in ("true", "model"):
        one, other = (fisher_rao(labels=labels).run(ground(net))[""].value for net in (before, after))  # type: ignore[arg-type]
        assert other == pytest.approx(one, rel=1e-4)
    one, other = (fisher_trace().run(ground(net))[""].value for net in (before, after))
    assert abs(other / one - 1) > 0.5
    assert fisher_rao().scale_invariant
    assert not fisher_trace().scale_invariant


def test_convolutions_before_batchnorm_add_nothing_in_training_mode_and_something_in_evaluation_mode() -> None:
    slopes = {}
    for training in (True, False):
        here = ground(conv(training=training), 1, 4, 4)
        only = {name: tensor * (name == "0.weight") for name, tensor in here.origin.items()}
        slopes[training] = tangents.jvp_outputs(here.logits_fn(here.batches[0]), here.origin, only)[1].abs().max()
    assert slopes[True] < 1e-4  # eps keeps it from exact invariance
    assert slopes[False] > 1e-2


def test_training_mode_moves_no_buffer_and_weights_stay_where_they_were() -> None:
    here = ground(conv(training=True), 1, 4, 4)
    before = {name: tensor.clone() for name, tensor in here.module.state_dict().items()}
    fisher_rao().run(here)
    fisher_rao(labels="model").run(here)
    fisher_rao(method="logit", force=True).run(here)
    with pytest.raises(RecipeError, match="gradient per sample is not defined"):
        fisher_trace().run(here)
    assert all(torch.equal(tensor, before[name]) for name, tensor in here.module.state_dict().items())


def test_unit_logits_leave_nothing_of_the_homogeneous_form() -> None:
    here = ground(bare(), normalize_logits=True)
    for labels in ("true", "model"):
        for method in ("jvp", "logit"):
            found = fisher_rao(labels=labels, method=method).run(here)  # type: ignore[arg-type]
            assert found[""].value < 1e-12  # the loss does not feel the scale of the logits
    assert fisher_trace().run(here)[""].value > 1e-3


def test_a_network_that_answers_nothing_has_a_norm_of_zero() -> None:
    net = bare()
    nn.init.zeros_(net[4].weight)  # type: ignore[arg-type]
    found = fisher_rao().run(ground(net))
    assert found[""].value == 0
    assert found[""].stderr is None


class Doubled(torch.autograd.Function):
    """A function without a forward mode."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad


class Named(nn.Module):
    """Takes named inputs, attends to them, and may double them."""

    def __init__(self, *, forward_mode: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.forward_mode = forward_mode
        self.look = nn.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64)
        self.head = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, *, tokens: Tensor, mask: Tensor) -> Tensor:
        seen = self.look(tokens, tokens, tokens, need_weights=False)[0]
        seen = 2 * seen if self.forward_mode else Doubled.apply(seen)
        return self.head((seen * mask[..., None]).mean(1))


def test_attention_named_inputs_and_what_has_no_forward_mode_give_the_same_numbers() -> None:
    x = {"tokens": torch.randn(5, 3, 4, dtype=torch.float64), "mask": torch.ones(5, 3, dtype=torch.long)}
    batch = Batch(x, torch.arange(5) % 3, torch.arange(5))
    found = [LossSurface(MemberModule(Named(forward_mode=way)), [batch]) for way in (True, False)]
    numbers = [fisher_rao().run(here)[""].value for here in found]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-10)
    bends = [tangents.second_derivative(here.loss_fn(batch), here.origin, here.origin) for here in found]
    assert torch.allclose(bends[0], bends[1], rtol=1e-9)
    assert torch.backends.mha.get_fastpath_enabled()


def test_labels_may_be_shares_of_classes() -> None:
    here = ground(bare(dtype=torch.float32))
    shares = [Batch(b.x, torch.eye(3)[b.y], b.index) for b in here.batches]
    for factory in (fisher_rao, fisher_trace):
        one, other = (factory().run(LossSurface(here.member, batches))[""].value for batches in (here.batches, shares))
        assert one == pytest.approx(other, rel=1e-5)


def test_passes_are_what_is_done() -> None:
    assert fisher_rao().passes(30) == 30
    assert fisher_rao(method="logit").passes(30) == pytest.approx(10)
    assert fisher_trace().passes(30) == 30


def test_errors_of_samples_and_draws_are_told_apart() -> None:
    maker = torch.Generator().manual_seed(0)
    found = []
    for _ in range(200):
        of_samples, of_draws = torch.randn(40, generator=maker), torch.randn(8, 1, generator=maker)
        found.append(mean_over_draws(of_samples + of_draws / 2 + 2 * torch.randn(8, 40, generator=maker)))
    by_sample, by_draw = (1 / 40) ** 0.5, (1 / 4 / 8 + 4 / (8 * 40)) ** 0.5
    assert (sum((v.stderr or 0) ** 2 for v in found) / 200) ** 0.5 == pytest.approx(by_sample, rel=0.05)
    assert (sum((v.mc_stderr or 0) ** 2 for v in found) / 200) ** 0.5 == pytest.approx(by_draw, rel=0.05)
    assert mean_over_draws(torch.ones(1, 4)).mc_stderr is None
    assert mean_over_draws(torch.ones(2, 1)).stderr is None
    assert mean_over_draws(torch.arange(4.0)[None]).stderr == mean_over_samples(torch.arange(4.0)).stderr
