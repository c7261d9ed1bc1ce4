from __future__ import annotations

import pytest
import torch
from reference.fisher import relative_flatness as reference
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


def make_surface(
    net: nn.Module, *shape: int, n: int = 11, cut: int = 7, seed: int = 3, **options: object
) -> LossSurface:
    dtype = next(net.parameters()).dtype
    x = torch.randn(n, *(shape or (4,)), generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)
    full = Batch(x, torch.arange(n) % 3, torch.arange(n))
    return LossSurface(MemberModule(net), [full.take(slice(0, cut)), full.take(slice(cut, n))], seed=seed, **options)  # type: ignore[arg-type]


def explicit(surface: LossSurface, layer: str) -> float:
    x = torch.cat([batch.x for batch in surface.batches if isinstance(batch.x, Tensor)])
    return reference(surface.module, layer, x, torch.cat([batch.y for batch in surface.batches]))


@pytest.mark.parametrize(("net", "shape"), [(mlp(), (4,)), (conv(), (1, 4, 4))], ids=["mlp", "conv"])
def test_the_closed_form_equals_that_of_the_explicit_hessian(net: nn.Module, shape: tuple[int, ...]) -> None:
    surface = make_surface(net, *shape)
    result = relative_flatness().run(surface)[""]
    assert result.value == pytest.approx(explicit(surface, "4"), rel=1e-10)
    assert result.stderr is not None
    assert result.mc_stderr is None


def test_the_closed_form_holds_in_training_mode_and_restores_buffers() -> None:
    surface = make_surface(conv(training=True), 1, 4, 4, n=8, cut=8)
    before = {name: tensor.clone() for name, tensor in surface.module.state_dict().items()}
    surface = LossSurface(surface.member, surface.batches[:1])
    one, other = relative_flatness().run(surface), relative_flatness(layer="0", mc_samples=2).run(surface)
    assert all(torch.equal(tensor, before[name]) for name, tensor in surface.module.state_dict().items())
    assert other[""].value != one[""].value
    assert one[""].value == pytest.approx(explicit(surface, "4"), rel=1e-10)


@pytest.mark.parametrize(
    ("net", "shape", "layer"),
    [(mlp(), (4,), "0"), (mlp(), (4,), "2"), (conv(), (1, 4, 4), "0")],
    ids=["mlp", "wide", "conv"],
)
def test_random_directions_are_within_four_standard_errors(net: nn.Module, shape: tuple[int, ...], layer: str) -> None:
    surface = make_surface(net, *shape)
    result = relative_flatness(layer=layer, mc_samples=40).run(surface)[""]
    assert result.mc_stderr is not None
    assert abs(result.value - explicit(surface, layer)) < 4 * result.mc_stderr
    assert result.mc_stderr < 0.25 * abs(result.value)


def test_the_sum_over_all_directions_is_exact_for_wide_and_tall_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()  # 4 x 2 is tall, 3 x 4 is wide
    surface = make_surface(net, 2)
    for layer, shape in (("0", (2, 2)), ("2", (3, 4))):

        def one_entry(size: tuple[int, ...], draw: int, expected: tuple[int, ...] = shape) -> Tensor:
            assert size == expected
            return torch.eye(size[0] * size[1], dtype=torch.float64)[draw].view(size)

        monkeypatch.setattr(
            "plateaux.loss_landscape.probes.relative_flatness._random_signs",
            lambda surface, size, draw, one=one_entry: one(size, draw),
        )
        result = layer_flatness(surface, layer, mc_samples=shape[0] * shape[1]).sum(0).mean()
        assert float(result) == pytest.approx(explicit(surface, layer), rel=1e-10)


def test_both_methods_agree_on_the_standard_error_over_samples() -> None:
    surface = make_surface(mlp(), n=60, cut=40)
    one, other = relative_flatness().run(surface)[""], relative_flatness(layer="4", mc_samples=40).run(surface)[""]
    assert other.stderr == pytest.approx(one.stderr, rel=0.25)
    assert other.value == pytest.approx(one.value, abs=4 * (other.mc_stderr or 0))


def test_directions_depend_only_on_the_seed_of_the_surface() -> None:
    probe = relative_flatness(layer="2", mc_samples=3)
    one, again, other = (probe.run(make_surface(mlp(), seed=seed))[""].value for seed in (3, 3, 4))
    assert one == again != other


def test_relative_flatness_is_scale_invariant() -> None:
    before, after = mlp(dtype=torch.float32), mlp(dtype=torch.float32)
    with torch.no_grad():
        for name, factor in (("0.weight", 10), ("0.bias", 10), ("2.weight", 0.1), ("4.weight", 7), ("2.weight", 1 / 7)):
            dict(after.named_parameters())[name].mul_(factor)
        dict(after.named_parameters())["2.bias"].div_(7)
    for options in ({}, {"scaling": "std"}, {"layer": "0"}, {"layer": "2"}):
        probe = relative_flatness(**options, mc_samples=3)  # type: ignore[arg-type]
        one, other = (probe.run(make_surface(net))[""].value for net in (before, after))
        assert other == pytest.approx(one, rel=1e-4)
        assert probe.scale_invariant
    plain = [curvature_trace(make_surface(net)) for net in (before, after)]
    assert abs(plain[1] / plain[0] - 1) > 0.5


def curvature_trace(surface: LossSurface) -> float:
    """Return the trace of the Hessian of the last layer, which is not scale-invariant."""
    result = 0.0
    for batch in surface.batches:
        logits, records = surface.record(batch, ["4"])
        p = logits.softmax(-1)
        result += float((records["4"].inputs.square().sum(1) * (p * (1 - p)).sum(1)).sum())
    return result


def test_scaling_moves_the_standard_deviation_of_features_into_the_layer() -> None:
    torch.manual_seed(0)
    features, weight = torch.rand(9, 5, dtype=torch.float64) * torch.arange(5), torch.randn(3, 5, dtype=torch.float64)
    scaled, own = standardize_features(features, weight)
    assert torch.allclose(scaled @ own.T, features @ weight.T)
    assert torch.allclose(scaled[:, 1:].std(0, correction=0), torch.ones(4, dtype=torch.float64))
    assert torch.equal(own[:, 0], weight[:, 0])  # a constant feature does not change
    surface, net = make_surface(mlp()), mlp()
    features = torch.cat([surface.record(batch, ["4"])[1]["4"].inputs for batch in surface.batches])
    scale = features.std(0, correction=0)
    scale[scale == 0] = 1
    with torch.no_grad():
        net[4].weight *= scale  # type: ignore[operator]
        net[2].weight /= scale[:, None]  # type: ignore[operator]
        net[2].bias /= scale  # type: ignore[operator]
    expected = relative_flatness().run(make_surface(net))[""].value
    assert relative_flatness(scaling="std").run(surface)[""].value == pytest.approx(expected, rel=1e-10)


def test_almost_certain_predictions_keep_full_precision() -> None:
    gap = torch.tensor([30.0], dtype=torch.float64)
    logits = torch.stack([gap, torch.zeros(1, dtype=torch.float64)], 1)
    weight = torch.tensor([[1000.0, 1.0], [1000.0, 3.0]])
    features = torch.tensor([[1.0, 2.0]])
    p = torch.sigmoid(-gap)
    result = last_layer_flatness(features, logits, weight)
    assert torch.allclose(result, 5 * p * (1 - p) * 4, rtol=1e-12, atol=0)


def test_many_samples_are_processed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    features, weight = torch.randn(10, 4), torch.randn(3, 4)
    full = last_layer_flatness(features, features @ weight.T, weight)
    monkeypatch.setattr("plateaux.loss_landscape.probes.relative_flatness.MAX_ROWS", 3)
    assert torch.allclose(last_layer_flatness(features, features @ weight.T, weight), full)


def test_unsupported_cases_are_rejected_with_an_alternative() -> None:
    with pytest.raises(RecipeError, match="allowed: 0, 2, 4"):
        relative_flatness(layer="1").run(make_surface(mlp()))
    with pytest.raises(RecipeError, match="select the layer by name"):
        relative_flatness().run(make_surface(mlp(), normalize_logits=True))
    with pytest.raises(RecipeError, match=r"this Sequential has none; select a layer: layer = '4'"):
        relative_flatness().run(make_surface(nn.Sequential(*mlp(), nn.Tanh())))
    with pytest.raises(RecipeError, match="scaling"):
        relative_flatness(layer="4", scaling="std")
    assert (
        relative_flatness(layer="4", mc_samples=2).run(make_surface(mlp(), normalize_logits=True))[""].mc_stderr
        is not None
    )


def test_the_declared_number_of_passes() -> None:
    assert relative_flatness().passes(30) == pytest.approx(10)
    assert relative_flatness(layer="4", mc_samples=5).passes(30) == 600
