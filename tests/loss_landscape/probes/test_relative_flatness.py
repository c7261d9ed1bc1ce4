from __future__ import annotations

import pytest
import torch
from reference.fisher import relative_flatness as twin
from torch import Tensor, nn

from plateaux.core.errors import RecipeError
from plateaux.core.member import MemberModule
from plateaux.core.types import Batch
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.probes.relative_flatness import (
    last_layer_flatness,
    layer_flatness,
    relative_flatness,
    standardize_features,
)


def mlp(*, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).to(dtype)


def conv(*, training: bool = False) -> nn.Sequential:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4))
    net(torch.randn(20, 1, 4, 4))
    return net.double().train(training)


def ground(net: nn.Module, *shape: int, n: int = 11, cut: int = 7, key: int = 3, **options: object) -> LossSurface:
    dtype = next(net.parameters()).dtype
    x = torch.randn(n, *(shape or (4,)), generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)
    whole = Batch(x, torch.arange(n) % 3, torch.arange(n))
    return LossSurface(MemberModule(net), [whole.take(slice(0, cut)), whole.take(slice(cut, n))], seed=key, **options)  # type: ignore[arg-type]


def explicit(here: LossSurface, layer: str) -> float:
    x = torch.cat([batch.x for batch in here.batches if isinstance(batch.x, Tensor)])
    return twin(here.module, layer, x, torch.cat([batch.y for batch in here.batches]))


@pytest.mark.parametrize(("net", "shape"), [(mlp(), (4,)), (conv(), (1, 4, 4))], ids=["mlp", "conv"])
def test_the_closed_form_is_that_of_the_explicit_hessian(net: nn.Module, shape: tuple[int, ...]) -> None:
    here = ground(net, *shape)
    found = relative_flatness().run(here)[""]
    assert found.value == pytest.approx(explicit(here, "4"), rel=1e-10)
    assert found.stderr is not None
    assert found.mc_stderr is None


def test_the_closed_form_holds_in_training_mode_and_moves_no_buffer() -> None:
    here = ground(conv(training=True), 1, 4, 4, n=8, cut=8)
    before = {name: tensor.clone() for name, tensor in here.module.state_dict().items()}
    here = LossSurface(here.member, here.batches[:1])
    one, other = relative_flatness().run(here), relative_flatness(layer="0", mc_samples=2).run(here)
    assert all(torch.equal(tensor, before[name]) for name, tensor in here.module.state_dict().items())
    assert other[""].value != one[""].value
    assert one[""].value == pytest.approx(explicit(here, "4"), rel=1e-10)


@pytest.mark.parametrize(
    ("net", "shape", "layer"),
    [(mlp(), (4,), "0"), (mlp(), (4,), "2"), (conv(), (1, 4, 4), "0")],
    ids=["mlp", "wide", "conv"],
)
def test_random_directions_come_within_four_standard_errors(net: nn.Module, shape: tuple[int, ...], layer: str) -> None:
    here = ground(net, *shape)
    found = relative_flatness(layer=layer, mc_samples=40).run(here)[""]
    assert found.mc_stderr is not None
    assert abs(found.value - explicit(here, layer)) < 4 * found.mc_stderr
    assert found.mc_stderr < 0.25 * abs(found.value)


def test_all_directions_together_are_exact_however_wide_or_tall_a_layer_is(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()  # 4 x 2 is tall, 3 x 4 is wide
    here = ground(net, 2)
    for layer, shape in (("0", (2, 2)), ("2", (3, 4))):

        def one_entry(size: tuple[int, ...], draw: int, wanted: tuple[int, ...] = shape) -> Tensor:
            assert size == wanted
            return torch.eye(size[0] * size[1], dtype=torch.float64)[draw].view(size)

        monkeypatch.setattr(
            "plateaux.loss_landscape.probes.relative_flatness._random_signs",
            lambda ground, size, draw, one=one_entry: one(size, draw),
        )
        found = layer_flatness(here, layer, mc_samples=shape[0] * shape[1]).sum(0).mean()
        assert float(found) == pytest.approx(explicit(here, layer), rel=1e-10)


def test_the_two_forms_agree_on_the_error_of_the_samples() -> None:
    here = ground(mlp(), n=60, cut=40)
    one, other = relative_flatness().run(here)[""], relative_flatness(layer="4", mc_samples=40).run(here)[""]
    assert other.stderr == pytest.approx(one.stderr, rel=0.25)
    assert other.value == pytest.approx(one.value, abs=4 * (other.mc_stderr or 0))


def test_directions_come_from_the_key_of_the_ground_alone() -> None:
    asked = relative_flatness(layer="2", mc_samples=3)
    one, again, other = (asked.run(ground(mlp(), key=key))[""].value for key in (3, 3, 4))
    assert one == again != other


def test_rescaling_neighbouring_layers_changes_nothing() -> None:
    before, after = mlp(dtype=torch.float32), mlp(dtype=torch.float32)
    with torch.no_grad():
        for name, factor in (("0.weight", 10), ("0.bias", 10), ("2.weight", 0.1), ("4.weight", 7), ("2.weight", 1 / 7)):
            dict(after.named_parameters())[name].mul_(factor)
        dict(after.named_parameters())["2.bias"].div_(7)
    for options in ({}, {"scaling": "std"}, {"layer": "0"}, {"layer": "2"}):
        asked = relative_flatness(**options, mc_samples=3)  # type: ignore[arg-type]
        one, other = (asked.run(ground(net))[""].value for net in (before, after))
        assert other == pytest.approx(one, rel=1e-4)
        assert asked.scale_invariant
    plain = [curvature_trace(ground(net)) for net in (before, after)]
    assert abs(plain[1] / plain[0] - 1) > 0.5


def curvature_trace(here: LossSurface) -> float:
    """Return the trace of the Hessian of the last layer, which is no relative one."""
    found = 0.0
    for batch in here.batches:
        logits, seen = here.record(batch, ["4"])
        p = logits.softmax(-1)
        found += float((seen["4"].inputs.square().sum(1) * (p * (1 - p)).sum(1)).sum())
    return found


def test_scaling_moves_the_features_spread_into_the_layer() -> None:
    torch.manual_seed(0)
    features, weight = torch.rand(9, 5, dtype=torch.float64) * torch.arange(5), torch.randn(3, 5, dtype=torch.float64)
    scaled, own = standardize_features(features, weight)
    assert torch.allclose(scaled @ own.T, features @ weight.T)
    assert torch.allclose(scaled[:, 1:].std(0, correction=0), torch.ones(4, dtype=torch.float64))
    assert torch.equal(own[:, 0], weight[:, 0])  # a dead feature stays as it is
    here, net = ground(mlp()), mlp()
    seen = torch.cat([here.record(batch, ["4"])[1]["4"].inputs for batch in here.batches])
    scale = seen.std(0, correction=0)
    scale[scale == 0] = 1
    with torch.no_grad():
        net[4].weight *= scale  # type: ignore[operator]
        net[2].weight /= scale[:, None]  # type: ignore[operator]
        net[2].bias /= scale  # type: ignore[operator]
    wanted = relative_flatness().run(ground(net))[""].value
    assert relative_flatness(scaling="std").run(here)[""].value == pytest.approx(wanted, rel=1e-10)


def test_nearly_certain_samples_lose_no_digits() -> None:
    gap = torch.tensor([30.0], dtype=torch.float64)
    logits = torch.stack([gap, torch.zeros(1, dtype=torch.float64)], 1)
    weight = torch.tensor([[1000.0, 1.0], [1000.0, 3.0]])
    features = torch.tensor([[1.0, 2.0]])
    p = torch.sigmoid(-gap)
    found = last_layer_flatness(features, logits, weight)
    assert torch.allclose(found, 5 * p * (1 - p) * 4, rtol=1e-12, atol=0)


def test_many_samples_are_worked_through_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    features, weight = torch.randn(10, 4), torch.randn(3, 4)
    whole = last_layer_flatness(features, features @ weight.T, weight)
    monkeypatch.setattr("plateaux.loss_landscape.probes.relative_flatness.MAX_ROWS", 3)
    assert torch.allclose(last_layer_flatness(features, features @ weight.T, weight), whole)


def test_what_cannot_be_asked_is_refused_with_a_way_out() -> None:
    with pytest.raises(RecipeError, match="allowed: 0, 2, 4"):
        relative_flatness(layer="1").run(ground(mlp()))
    with pytest.raises(RecipeError, match="select the layer by name"):
        relative_flatness().run(ground(mlp(), normalize_logits=True))
    with pytest.raises(RecipeError, match=r"this Sequential has none; select a layer: layer = '4'"):
        relative_flatness().run(ground(nn.Sequential(*mlp(), nn.Tanh())))
    with pytest.raises(RecipeError, match="scaling"):
        relative_flatness(layer="4", scaling="std")
    with pytest.raises(RecipeError, match="mc_samples = 0"):
        relative_flatness(mc_samples=0)
    assert (
        relative_flatness(layer="4", mc_samples=2).run(ground(mlp(), normalize_logits=True))[""].mc_stderr is not None
    )


def test_passes_are_what_is_done() -> None:
    assert relative_flatness().passes(30) == pytest.approx(10)
    assert relative_flatness(layer="4", mc_samples=5).passes(30) == 600
