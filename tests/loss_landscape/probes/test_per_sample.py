from __future__ import annotations

import numpy as np
import pytest
import torch
from reference.fisher import gradients, input_hessians
from scipy.stats import spearmanr
from torch import Tensor, nn

from plateaux.core.errors import RecipeError
from plateaux.core.member import MemberModule
from plateaux.core.stats.ranking import spearman
from plateaux.core.types import Batch
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.per_sample import mean_over_draws
from plateaux.loss_landscape.probes.per_sample import gradient_norm, input_curvature, input_curvatures, rank_agreement


class Bowl(nn.Module):
    """A network of two classes whose cross entropy is nearly a quadratic form of the input."""

    def __init__(self, form: Tensor) -> None:
        super().__init__()
        self.form = nn.Parameter(form)

    def forward(self, x: Tensor) -> Tensor:
        value = ((x @ self.form) * x).sum(1) / 2
        return torch.stack([torch.zeros_like(value), value - 40], 1)  # -> the loss of class 1 is 40 - value


def mlp(*, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def make_surface(
    net: nn.Module, *shape: int, n: int = 9, cut: int = 5, seed: int = 3, **options: object
) -> LossSurface:
    dtype = next(net.parameters()).dtype
    x = torch.randn(n, *(shape or (4,)), generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)
    full = Batch(x, torch.arange(n) % 3, torch.arange(n))
    return LossSurface(MemberModule(net), [full.take(slice(0, cut)), full.take(slice(cut, n))], seed=seed, **options)  # type: ignore[arg-type]


def samples(surface: LossSurface) -> tuple[Tensor, Tensor]:
    x = [batch.x for batch in surface.batches if isinstance(batch.x, Tensor)]
    return torch.cat(x), torch.cat([batch.y for batch in surface.batches])


def test_gradient_norms_equal_those_of_separate_backward_passes() -> None:
    surface = make_surface(mlp())
    norms = gradients(surface.module, *samples(surface)).square().sum(1)
    result = gradient_norm(quantiles=(0.25, 0.5)).run(surface)
    assert set(result) == {"", "25 %", "50 %"}
    assert result[""].value == pytest.approx(float(norms.mean()), rel=1e-8)
    assert result[""].stderr == pytest.approx(float(norms.std()) / 3, rel=1e-6)
    assert result["50 %"].value == pytest.approx(float(norms.median()), rel=1e-8)
    assert result["25 %"].value == pytest.approx(float(norms.quantile(0.25)), rel=1e-8)


def test_the_standard_error_of_a_quantile_matches_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    maker = torch.Generator().manual_seed(0)
    result, surface = [], make_surface(mlp())
    for _ in range(300):
        sampled = torch.randn(400, generator=maker, dtype=torch.float64).exp()
        monkeypatch.setattr(
            "plateaux.loss_landscape.probes.per_sample.squared_gradient_norms", lambda _, sampled=sampled: sampled
        )
        result.append(gradient_norm(quantiles=(0.9,)).run(surface)["90 %"])
    assert np.mean([v.stderr for v in result]) == pytest.approx(np.std([v.value for v in result]), rel=0.15)


def test_the_standard_error_over_samples_excludes_the_variance_of_draws() -> None:
    generator = torch.Generator().manual_seed(0)
    estimates = []
    for _ in range(200):  # every sample has its own mean, of variance 1; every draw adds noise of variance 4
        own, noise = (torch.randn(rows, 100, generator=generator) for rows in (1, 4))
        estimates.append(mean_over_draws(own + 2 * noise))
    assert sum(100 * (each.stderr or 0) ** 2 for each in estimates) / 200 == pytest.approx(1.0, abs=0.1)
    assert sum((each.mc_stderr or 0) ** 2 for each in estimates) / 200 == pytest.approx(4 / 4 / 100, rel=0.15)


def test_input_curvature_is_the_squared_norm_of_the_input_hessian() -> None:
    surface = make_surface(mlp())
    expected = input_hessians(surface.module, *samples(surface)).square().sum((1, 2))
    result = input_curvatures(surface, mc_samples=400, radius=1e-5)
    errors = result.std(0) / 400**0.5
    assert bool(((result.mean(0) - expected).abs() < 4 * errors).all())
    probe = input_curvature(mc_samples=50, radius=1e-5).run(surface)[""]
    assert probe.mc_stderr is not None
    assert abs(probe.value - float(expected.mean())) < 4 * probe.mc_stderr
    assert probe.stderr == pytest.approx(float(expected.std()) / 3, rel=0.15)


def test_input_curvature_of_a_quadratic_form_does_not_depend_on_the_radius() -> None:
    torch.manual_seed(0)
    form = torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.ones(4, dtype=torch.long)
    surface = LossSurface(MemberModule(Bowl(form)), [Batch(x, y, torch.arange(4))])
    for radius in (1e-3, 1e-2, 0.1):  # for a diagonal form, every draw equals Tr(H^2)
        result = input_curvatures(surface, mc_samples=3, radius=radius)
        assert torch.allclose(result, torch.full((3, 4), 14.0, dtype=torch.float64), rtol=1e-6)


def test_input_curvature_agrees_across_batch_sizes_up_to_draws() -> None:
    full, pieces = make_surface(mlp(), n=8, cut=8), make_surface(mlp(), n=8, cut=3)
    one = input_curvatures(LossSurface(full.member, full.batches[:1], seed=3), mc_samples=60)
    other = input_curvatures(pieces, mc_samples=60)
    spread = (one.var(0) / 60 + other.var(0) / 60).sqrt()
    assert bool(((one.mean(0) - other.mean(0)).abs() < 4 * spread).all())


def test_input_curvature_is_scale_invariant_and_gradient_norms_are_not() -> None:
    numbers: dict[str, list[float]] = {"curvature": [], "gradient": []}
    for factor in (1.0, 10.0):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
        with torch.no_grad():
            for weight, times in zip(net.parameters(), (factor, factor, 1 / factor, 1.0), strict=True):
                weight *= times
        numbers["curvature"].append(input_curvature().run(make_surface(net))[""].value)
        numbers["gradient"].append(gradient_norm().run(make_surface(net))[""].value)
    assert numbers["curvature"][0] == pytest.approx(numbers["curvature"][1], rel=1e-4)
    assert abs(numbers["gradient"][1] / numbers["gradient"][0] - 1) > 0.5
    assert input_curvature().scale_invariant
    assert not gradient_norm().scale_invariant


def test_float32_agrees_with_float64_at_the_default_radius() -> None:
    one, other = (
        input_curvature().run(make_surface(mlp(dtype=kind)))[""].value for kind in (torch.float32, torch.float64)
    )
    assert one == pytest.approx(other, rel=0.01)


class Tokens(nn.Module):
    """A network with integer inputs and an optional floating-point input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, *, words: Tensor, also: Tensor | None = None) -> Tensor:
        embedded = self.embedding(words).mean(1)
        return self.head(embedded if also is None else (embedded + also).tanh())


def test_floating_point_inputs_are_perturbed_and_integers_are_rejected() -> None:
    torch.manual_seed(0)
    words = torch.randint(0, 5, (6, 2))
    ids, y = torch.arange(6), torch.arange(6) % 3
    surface = LossSurface(MemberModule(Tokens()), [Batch({"words": words, "also": torch.randn(6, 4)}, y, ids)])
    assert input_curvature(mc_samples=2).run(surface)[""].value > 0
    assert gradient_norm().run(surface)[""].value > 0
    with pytest.raises(RecipeError, match="inputs are integers"):
        input_curvature().run(LossSurface(MemberModule(Tokens()), [Batch({"words": words}, y, ids)]))


def test_batchnorm_in_training_mode_is_rejected_and_the_state_is_restored() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    surface = make_surface(net.eval())
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    for probe in (gradient_norm(), input_curvature(mc_samples=2), rank_agreement(mc_samples=2)):
        assert probe.run(surface)[""].value == probe.run(surface)[""].value
    net.train()
    for probe in (gradient_norm(), input_curvature(mc_samples=2), rank_agreement(mc_samples=2)):
        with pytest.raises(RecipeError, match="BatchNorm in training mode"):
            probe.run(surface)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


def test_normalized_logits_change_every_value() -> None:
    for probe in (gradient_norm(), input_curvature(mc_samples=2)):
        plain, unit = (probe.run(make_surface(mlp(), normalize_logits=way))[""].value for way in (False, True))
        assert plain != pytest.approx(unit, rel=0.01)


def test_rank_agreement_is_spearmans_correlation() -> None:
    surface = make_surface(mlp(), n=30, cut=20)
    norms = gradients(surface.module, *samples(surface)).square().sum(1)
    curvatures = input_curvatures(surface, mc_samples=4, radius=1e-3)
    result = rank_agreement(mc_samples=4).run(surface)[""]
    assert result.value == pytest.approx(spearmanr(norms, curvatures.mean(0)).statistic, abs=1e-12)
    left_out = [spearmanr(norms, np.delete(curvatures.numpy(), d, 0).mean(0)).statistic for d in range(4)]
    assert result.mc_stderr == pytest.approx((3 * np.var(left_out)) ** 0.5, abs=1e-9)
    assert result.stderr is not None
    assert rank_agreement(mc_samples=1).run(surface)[""].mc_stderr is None


def test_spearman_agrees_with_scipy_with_and_without_ties() -> None:
    draw = np.random.default_rng(0)
    for x in (draw.normal(size=50), draw.integers(0, 4, 50)):
        y = x + draw.normal(size=50)
        for other in (y, np.round(y)):
            assert spearman(x, other).value == pytest.approx(spearmanr(x, other).statistic, abs=1e-12)
    assert spearman(y, y).value == 1
    assert spearman(y, y).stderr == pytest.approx(0, abs=1e-2)
    assert np.isnan(spearman(np.ones(5), np.arange(5)).value)
    with pytest.raises(ValueError, match="5 first and 4 second scores"):
        spearman(np.ones(5), np.ones(4))


@pytest.mark.parametrize("mixed", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("rounded", [False, True])
def test_the_standard_error_of_spearman_matches_repetition(mixed: float, rounded: bool) -> None:
    draw = np.random.default_rng(1)
    result = []
    for _ in range(400):
        x = draw.normal(size=200)
        y = mixed * x + draw.normal(size=200)
        result.append(spearman(np.round(x) if rounded else x, y))
    assert np.mean([v.stderr for v in result]) == pytest.approx(np.std([v.value for v in result]), rel=0.1)


def test_options_out_of_range_are_rejected() -> None:
    with pytest.raises(RecipeError, match=r"quantiles = \[0.5, 1.0\]"):
        gradient_norm(quantiles=(0.5, 1.0))


def test_the_declared_number_of_passes() -> None:
    assert gradient_norm().passes(30) == 30
    assert input_curvature(mc_samples=5).passes(30) == pytest.approx(120)
    assert rank_agreement(mc_samples=5).passes(30) == pytest.approx(150)
