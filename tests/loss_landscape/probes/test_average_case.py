"""Average-case sharpness agrees with closed forms, and its standard errors with repetition."""

from __future__ import annotations

from functools import partial

import pytest
import quadratics
import torch
from torch.func import functional_call, vmap

from plateaux.core.member import MemberModule
from plateaux.core.types import Estimate
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.perturbations import perturb, perturbation_scale, sample_direction
from plateaux.loss_landscape.probes.average_case import average

PROBES = {norm: partial(average, norm=norm) for norm in ("l2", "linf")}
SPREAD = {"l2": 1.0, "linf": 1 / 3}  # the variance of one draw


def run_probe(surface: LossSurface, norm: str = "l2", **options: object) -> Estimate:
    return PROBES[norm](**{"m": 4, **options}).run(surface)[""]


@pytest.mark.parametrize("norm", PROBES)
@pytest.mark.parametrize("adaptive", [True, False])
def test_the_average_case_of_a_quadratic_equals_the_closed_form(norm: str, adaptive: bool) -> None:
    w, curvature = quadratics.vector(0), quadratics.matrix(1, shift=1.0)
    slopes = quadratics.near_zero_slopes(w, curvature, 12)
    t = w.abs() if adaptive else torch.ones_like(w)
    truth = 0.5 * 0.3**2 * SPREAD[norm] * float((t * t * curvature.diag()).sum())
    result = run_probe(quadratics.bowl(w, curvature, slopes), norm, radius=0.3, adaptive=adaptive, mc_samples=200)
    assert result.mc_stderr is not None
    assert abs(result.value - truth) < 4 * result.mc_stderr
    assert result.mc_stderr < 0.2 * abs(truth)


def test_one_draw_on_a_quadratic_equals_the_closed_form() -> None:
    w, curvature, slopes = quadratics.vector(0), quadratics.matrix(1), quadratics.vector(2)[None].expand(4, -1)
    surface = quadratics.bowl(w, curvature, slopes, seed=3)
    noise = sample_direction(surface.origin, surface.generator("average_l2", 0))
    delta = 0.3 * w.abs() * torch.cat([tensor.flatten() for tensor in noise.values()])
    truth = delta @ (slopes[0] + curvature @ w) + delta @ curvature @ delta / 2
    result = run_probe(surface, radius=0.3, mc_samples=1)
    assert result.value == pytest.approx(float(truth))
    assert result.mc_stderr is None
    assert result.stderr == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("norm", PROBES)
def test_noise_has_the_expected_standard_deviation(norm: str) -> None:
    surface = quadratics.make_surface()
    many = sample_direction(
        {"w": torch.empty(40, 500, dtype=torch.float64)}, quadratics.draw(0), "normal" if norm == "l2" else "uniform"
    )
    assert float(many["w"].mean()) == pytest.approx(0, abs=0.03)
    assert float(many["w"].var()) == pytest.approx(SPREAD[norm], rel=0.05)
    assert norm == "l2" or float(many["w"].abs().max()) <= 1
    assert run_probe(surface, norm, radius=0.0).value == 0


def truth_of(norm: str, radius: float) -> float:
    """The mean increase of the loss of the small network, from many draws."""
    surface = quadratics.make_surface()
    count = 30_000
    scale = perturbation_scale(surface.origin, adaptive=True)
    assert scale is not None
    law = "normal" if norm == "l2" else "uniform"
    like = {name: torch.empty(count, *w.shape, dtype=w.dtype) for name, w in surface.origin.items()}
    noise = sample_direction(like, quadratics.draw(77), law)  # type: ignore[arg-type]
    there = {name: w + radius * scale[name] * noise[name] for name, w in surface.origin.items()}
    batch = quadratics.samples()
    losses = vmap(lambda w: surface.losses_from_logits(functional_call(surface.module, w, (batch.x,)), batch).mean())(
        there
    )
    return float(losses.mean() - surface.all_losses().mean())


@pytest.mark.slow
@pytest.mark.parametrize("norm", PROBES)
def test_the_monte_carlo_interval_has_the_nominal_coverage(norm: str) -> None:
    truth = truth_of(norm, 0.3)
    result = [
        run_probe(
            quadratics.make_surface(batches=quadratics.cut(quadratics.samples(), (6, 6)), seed=seed),
            norm,
            radius=0.3,
            m=6,
            mc_samples=20,
        )
        for seed in range(50)
    ]
    inside = sum(abs(item.value - truth) <= 1.96 * item.mc_stderr for item in result if item.mc_stderr is not None)
    assert inside >= 45
    numbers, draws = torch.tensor([item.value for item in result]), torch.tensor([item.mc_stderr for item in result])
    assert float(draws.mean()) == pytest.approx(float(numbers.std()), rel=0.35)  # and the interval is not too wide


def test_the_standard_error_of_the_data_is_that_over_samples() -> None:
    surface = quadratics.make_surface()
    result = run_probe(surface, radius=0.3, m=12, mc_samples=50)
    scale = perturbation_scale(surface.origin, adaptive=True)
    origin, generator = surface.all_losses(), surface.generator("average_l2", 0)
    rises = torch.zeros_like(origin)
    with surface.at_params(surface.origin):
        for _ in range(50):
            perturb(surface, sample_direction(surface.origin, generator), scale=scale, times=0.3)
            rises += surface.all_losses() - origin
    assert result.value == pytest.approx(float(rises.mean() / 50))
    assert result.stderr == pytest.approx(float((rises / 50).std()) / 12**0.5)


@pytest.mark.parametrize("norm", PROBES)
@pytest.mark.parametrize(("dtype", "exact"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_only_the_adaptive_average_case_is_scale_invariant(norm: str, dtype: torch.dtype, exact: float) -> None:
    batch = quadratics.samples(dtype=dtype)
    surface = quadratics.make_surface(quadratics.net(batchnorm=True, dtype=dtype), [batch])
    there = quadratics.make_surface(quadratics.rescale_layers(quadratics.net(batchnorm=True, dtype=dtype)), [batch])
    one = [run_probe(item, norm, radius=0.3).value for item in (surface, there)]
    assert one[0] == pytest.approx(one[1], rel=exact)
    plain = [run_probe(item, norm, radius=0.3, adaptive=False).value for item in (surface, there)]
    assert plain[0] != pytest.approx(plain[1], rel=1e-2)
    assert PROBES[norm]().scale_invariant
    assert not PROBES[norm](eta=0.1).scale_invariant
    assert not PROBES[norm](adaptive=False).scale_invariant


def test_zero_weights_are_perturbed_only_with_eta() -> None:
    module = quadratics.net()
    with torch.no_grad():
        for weight in module.parameters():
            weight.zero_()
    assert run_probe(quadratics.make_surface(module)).value == 0
    assert run_probe(quadratics.make_surface(module), eta=1.0).value != 0


@pytest.mark.parametrize("training", [False, True])
def test_weights_and_buffers_are_restored(training: bool) -> None:
    surface = quadratics.make_surface(
        quadratics.net(batchnorm=True).train(training), quadratics.cut(quadratics.samples(), (5, 7))
    )
    before = quadratics.state(surface.module)
    assert run_probe(surface, radius=0.3).value != 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in surface.module.state_dict().items())


def test_the_value_does_not_depend_on_batches_input_names_or_memory_format() -> None:
    full = run_probe(quadratics.make_surface())
    named = [quadratics.with_named_inputs(piece) for piece in quadratics.cut(quadratics.samples(), (5, 7))]
    for other in (
        quadratics.make_surface(batches=quadratics.cut(quadratics.samples(), (1, 3, 8))),
        quadratics.make_surface(quadratics.NamedInputs(), named),
    ):
        assert run_probe(other).value == pytest.approx(full.value, rel=1e-9)
    plain = {"w": torch.empty(3, 4, 2, 2)}
    last = {"w": torch.empty(3, 4, 2, 2).to(memory_format=torch.channels_last)}
    one, two = sample_direction(plain, quadratics.draw(0))["w"], sample_direction(last, quadratics.draw(0))["w"]
    assert torch.equal(one, two)
    assert two.is_contiguous(memory_format=torch.channels_last)


def test_the_declared_number_of_passes_is_exact() -> None:
    surface = quadratics.Counting(MemberModule(quadratics.net()), quadratics.cut(quadratics.samples(), (7, 5)))
    probe = PROBES["l2"](m=5, mc_samples=6)
    probe.run(surface)
    assert surface.passes == pytest.approx(probe.passes(12))
    assert probe.samples == 1024
