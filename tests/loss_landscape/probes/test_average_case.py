"""The average case is that of the closed form, and its errors are honest."""

from __future__ import annotations

import math

import pytest
import quadratics
import torch
from torch.func import functional_call, vmap

from plateaux.core.errors import RecipeError
from plateaux.core.member import MemberModule
from plateaux.core.types import Estimate
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.perturbations import perturb, perturbation_scale, sample_direction
from plateaux.loss_landscape.probes.average_case import average_l2, average_linf

PROBES = {"l2": average_l2, "linf": average_linf}
SPREAD = {"l2": 1.0, "linf": 1 / 3}  # the variance of one draw


def asked(here: LossSurface, norm: str = "l2", **options: object) -> Estimate:
    return PROBES[norm](**{"m": 4, **options}).run(here)[""]


@pytest.mark.parametrize("norm", PROBES)
@pytest.mark.parametrize("adaptive", [True, False])
def test_on_a_bowl_the_average_case_is_the_closed_form(norm: str, adaptive: bool) -> None:
    w, curvature = quadratics.vector(0), quadratics.matrix(1, lift=1.0)
    slopes = quadratics.near_level(w, curvature, 12)
    t = w.abs() if adaptive else torch.ones_like(w)
    truth = 0.5 * 0.3**2 * SPREAD[norm] * float((t * t * curvature.diag()).sum())
    found = asked(quadratics.bowl(w, curvature, slopes), norm, radius=0.3, adaptive=adaptive, mc_samples=200)
    assert found.mc_stderr is not None
    assert abs(found.value - truth) < 4 * found.mc_stderr
    assert found.mc_stderr < 0.2 * abs(truth)


def test_on_a_bowl_of_one_draw_the_number_is_that_of_the_draw() -> None:
    w, curvature, slopes = quadratics.vector(0), quadratics.matrix(1), quadratics.vector(2)[None].expand(4, -1)
    here = quadratics.bowl(w, curvature, slopes, key=3)
    noise = sample_direction(here.origin, here.generator("average_l2", 0))
    delta = 0.3 * w.abs() * torch.cat([tensor.flatten() for tensor in noise.values()])
    truth = delta @ (slopes[0] + curvature @ w) + delta @ curvature @ delta / 2
    found = asked(here, radius=0.3, mc_samples=1)
    assert found.value == pytest.approx(float(truth))
    assert found.mc_stderr is None
    assert found.stderr == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("norm", PROBES)
def test_draws_have_the_promised_spread(norm: str) -> None:
    here = quadratics.ground()
    many = sample_direction(
        {"w": torch.empty(40, 500, dtype=torch.float64)}, quadratics.draw(0), "normal" if norm == "l2" else "uniform"
    )
    assert float(many["w"].mean()) == pytest.approx(0, abs=0.03)
    assert float(many["w"].var()) == pytest.approx(SPREAD[norm], rel=0.05)
    assert norm == "l2" or float(many["w"].abs().max()) <= 1
    assert asked(here, norm, radius=0.0).value == 0


def truth_of(norm: str, radius: float) -> float:
    """The mean rise of the tiny network, from very many draws at once."""
    here = quadratics.ground()
    count = 30_000
    scale = perturbation_scale(here.origin, adaptive=True)
    assert scale is not None
    law = "normal" if norm == "l2" else "uniform"
    like = {name: torch.empty(count, *w.shape, dtype=w.dtype) for name, w in here.origin.items()}
    noise = sample_direction(like, quadratics.draw(77), law)  # type: ignore[arg-type]
    there = {name: w + radius * scale[name] * noise[name] for name, w in here.origin.items()}
    batch = quadratics.samples()
    losses = vmap(lambda w: here.losses_from_logits(functional_call(here.module, w, (batch.x,)), batch).mean())(there)
    return float(losses.mean() - here.all_losses().mean())


@pytest.mark.parametrize("norm", PROBES)
def test_the_true_value_lies_within_the_error_of_draws_as_often_as_promised(norm: str) -> None:
    truth = truth_of(norm, 0.3)
    found = [
        asked(
            quadratics.ground(batches=quadratics.cut(quadratics.samples(), (6, 6)), key=seed),
            norm,
            radius=0.3,
            m=6,
            mc_samples=20,
        )
        for seed in range(50)
    ]
    inside = sum(abs(each.value - truth) <= 1.96 * each.mc_stderr for each in found if each.mc_stderr is not None)
    assert inside >= 45
    numbers, draws = torch.tensor([each.value for each in found]), torch.tensor([each.mc_stderr for each in found])
    assert float(draws.mean()) == pytest.approx(float(numbers.std()), rel=0.35)  # nor is it too wide


def test_the_error_of_the_data_is_that_of_the_samples() -> None:
    here = quadratics.ground()
    found = asked(here, radius=0.3, m=12, mc_samples=50)
    scale = perturbation_scale(here.origin, adaptive=True)
    home, chance = here.all_losses(), here.generator("average_l2", 0)
    rises = torch.zeros_like(home)
    with here.at_params(here.origin):
        for _ in range(50):
            perturb(here, sample_direction(here.origin, chance), scale=scale, times=0.3)
            rises += here.all_losses() - home
    assert found.value == pytest.approx(float(rises.mean() / 50))
    assert found.stderr == pytest.approx(float((rises / 50).std()) / 12**0.5)


@pytest.mark.parametrize("norm", PROBES)
@pytest.mark.parametrize(("dtype", "exact"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_rescaling_neighbouring_layers_moves_the_plain_average_only(
    norm: str, dtype: torch.dtype, exact: float
) -> None:
    batch = quadratics.samples(dtype=dtype)
    here = quadratics.ground(quadratics.net(batchnorm=True, dtype=dtype), [batch])
    there = quadratics.ground(quadratics.rescaled(quadratics.net(batchnorm=True, dtype=dtype)), [batch])
    one = [asked(each, norm, radius=0.3).value for each in (here, there)]
    assert one[0] == pytest.approx(one[1], rel=exact)
    plain = [asked(each, norm, radius=0.3, adaptive=False).value for each in (here, there)]
    assert plain[0] != pytest.approx(plain[1], rel=1e-2)
    assert PROBES[norm]().scale_invariant
    assert not PROBES[norm](eta=0.1).scale_invariant
    assert not PROBES[norm](adaptive=False).scale_invariant


def test_weights_of_zero_do_not_move_but_with_eta_they_do() -> None:
    module = quadratics.net()
    with torch.no_grad():
        for weight in module.parameters():
            weight.zero_()
    assert asked(quadratics.ground(module)).value == 0
    assert asked(quadratics.ground(module), eta=1.0).value != 0


@pytest.mark.parametrize("training", [False, True])
def test_weights_and_buffers_are_left_as_they_were(training: bool) -> None:
    here = quadratics.ground(
        quadratics.net(batchnorm=True).train(training), quadratics.cut(quadratics.samples(), (5, 7))
    )
    before = quadratics.state(here.module)
    assert asked(here, radius=0.3).value != 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in here.module.state_dict().items())


def test_neither_the_cut_into_batches_nor_names_of_inputs_nor_the_layout_change_the_number() -> None:
    whole = asked(quadratics.ground())
    named = [quadratics.named(piece) for piece in quadratics.cut(quadratics.samples(), (5, 7))]
    for other in (
        quadratics.ground(batches=quadratics.cut(quadratics.samples(), (1, 3, 8))),
        quadratics.ground(quadratics.Named(), named),
    ):
        assert asked(other).value == pytest.approx(whole.value, rel=1e-9)
    plain = {"w": torch.empty(3, 4, 2, 2)}
    last = {"w": torch.empty(3, 4, 2, 2).to(memory_format=torch.channels_last)}
    one, two = sample_direction(plain, quadratics.draw(0))["w"], sample_direction(last, quadratics.draw(0))["w"]
    assert torch.equal(one, two)
    assert two.is_contiguous(memory_format=torch.channels_last)


def test_it_costs_as_many_passes_as_it_says() -> None:
    here = quadratics.Counting(MemberModule(quadratics.net()), quadratics.cut(quadratics.samples(), (7, 5)))
    probe = average_l2(m=5, mc_samples=6)
    probe.run(here)
    assert here.passes == pytest.approx(probe.passes(12))
    assert probe.samples == 1024


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"radius": -0.1}, "radius = -0.1"),
        ({"radius": math.nan}, "radius = nan"),
        ({"m": 0}, "m = 0"),
        ({"mc_samples": 0}, "mc_samples = 0"),
        ({"samples": -3}, "samples = -3"),
        ({"eta": -1.0}, "eta = -1.0"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, object], words: str) -> None:
    for make in PROBES.values():
        with pytest.raises(RecipeError, match=words):
            make(**options)  # type: ignore[arg-type]
