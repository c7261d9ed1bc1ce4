"""SAM-sharpness is that of the closed form with honest errors, and one step up the slope is SAM's own."""

from __future__ import annotations

import math

import pytest
import quadratics
import torch
from torch import nn
from torch.func import functional_call, vmap

from plateaux.core.errors import RecipeError
from plateaux.core.member import MemberModule
from plateaux.core.types import Batch
from plateaux.loss_landscape.groups import split_groups
from plateaux.loss_landscape.probes.sam_sharpness import sam_sharpness, sam_step
from plateaux.optim import sam

DIRECTIONS = ("sphere", "gaussian", "filter")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_on_a_bowl_it_is_the_closed_form(direction: str) -> None:
    w, curvature = quadratics.vector(0), quadratics.matrix(1, lift=1.0)
    slopes = quadratics.near_level(w, curvature, 5)
    rows = [w[0:2], w[2:4]]  # the filters of the first tensor; the second is a vector
    lengths = [float(row @ row) / 2 for row in rows]
    weights = {
        "sphere": torch.full_like(w, 1 / quadratics.SIZE),
        "gaussian": torch.ones_like(w),
        "filter": torch.tensor([lengths[0]] * 2 + [lengths[1]] * 2 + [0.0] * 3, dtype=torch.float64),
    }[direction]
    truth = 0.5 * 0.4**2 * float((weights * curvature.diag()).sum())
    found = sam_sharpness(rho=0.4, directions=300, direction=direction).run(quadratics.bowl(w, curvature, slopes))  # type: ignore[arg-type]
    assert found[""].mc_stderr is not None
    assert abs(found[""].value - truth) < 4 * found[""].mc_stderr
    assert found[""].mc_stderr < 0.3 * abs(truth)
    assert found["largest"].value > found[""].value
    assert found["deviation"].value == pytest.approx(found[""].mc_stderr * 300**0.5)


def test_the_slope_counts_with_its_sign() -> None:
    w, slopes = quadratics.vector(0), quadratics.vector(1)[None]
    flat = torch.zeros(quadratics.SIZE, quadratics.SIZE, dtype=torch.float64)
    found = sam_sharpness(rho=0.4, directions=400).run(quadratics.bowl(w, flat, slopes))
    assert abs(found[""].value) < 4 * (found[""].mc_stderr or 0)
    spread = 0.4 * float(slopes.norm()) / quadratics.SIZE**0.5
    assert found["deviation"].value == pytest.approx(spread, rel=0.1)
    assert 1.5 * spread < found["largest"].value <= 0.4 * float(slopes.norm())


def truth_of(rho: float) -> float:
    """The mean rise of the tiny network over the sphere, from very many directions at once."""
    here = quadratics.ground()
    flat = torch.randn(30_000, here.num_params, generator=quadratics.draw(77), dtype=torch.float64)
    flat = rho * flat / flat.norm(dim=1, keepdim=True)
    pieces = flat.split([w.numel() for w in here.origin.values()], 1)
    there = {name: w + d.reshape(-1, *w.shape) for (name, w), d in zip(here.origin.items(), pieces, strict=True)}
    batch = quadratics.samples()
    losses = vmap(lambda w: here.losses_from_logits(functional_call(here.module, w, (batch.x,)), batch).mean())(there)
    return float(losses.mean() - here.all_losses().mean())


def test_the_true_value_lies_within_the_error_of_draws_as_often_as_promised() -> None:
    truth = truth_of(1.0)
    found = [sam_sharpness(rho=1.0, directions=25).run(quadratics.ground(key=seed))[""] for seed in range(50)]
    inside = sum(abs(each.value - truth) <= 1.96 * each.mc_stderr for each in found if each.mc_stderr is not None)
    assert inside >= 45
    numbers, draws = torch.tensor([each.value for each in found]), torch.tensor([each.mc_stderr for each in found])
    assert float(draws.mean()) == pytest.approx(float(numbers.std()), rel=0.35)  # nor is it too wide


def test_at_the_usual_radius_float32_weights_give_what_float64_weights_give() -> None:
    found = []
    for dtype in (torch.float64, torch.float32):
        module = quadratics.net(dtype=torch.float32).to(dtype)  # the same weights
        here = quadratics.ground(module, [quadratics.samples(200, dtype=dtype)])
        home = here.all_losses().mean()
        ways = torch.randn(here.num_params, generator=quadratics.draw(0), dtype=torch.float64)
        ways = 0.005 * ways / ways.norm()
        pieces = ways.split([w.numel() for w in here.origin.values()])
        there = {n: w + d.view(w.shape).to(dtype) for (n, w), d in zip(here.origin.items(), pieces, strict=True)}
        found.append(float(here.all_losses(there).mean() - home))
    assert found[1] == pytest.approx(found[0], abs=2e-7)
    small = sam_sharpness(directions=20).run(
        quadratics.ground(quadratics.net(dtype=torch.float32), [quadratics.samples(dtype=torch.float32)])
    )
    assert 0 < small["deviation"].value < 5e-3


def test_each_error_is_that_of_its_own_sample() -> None:
    found = sam_sharpness(rho=0.5, directions=1).run(quadratics.ground())
    assert set(found) == {"", "largest"}
    assert found[""] == found["largest"]
    assert found[""].mc_stderr is None
    assert found[""].stderr is not None
    same = [quadratics.samples(1).take(torch.zeros(8, dtype=torch.long))]
    assert sam_sharpness(rho=0.5, directions=5).run(quadratics.ground(batches=same))[""].stderr == pytest.approx(
        0, abs=1e-12
    )


def test_a_direction_by_filters_is_unmoved_by_rescaling_and_leaves_vectors_alone() -> None:
    def bare(factor: float) -> nn.Module:
        module = quadratics.net()
        with torch.no_grad():
            for layer in (module[0], module[2], module[4]):
                layer.bias.zero_()
        return quadratics.rescaled(module, factor)

    found = [
        sam_sharpness(rho=0.3, directions=10, direction="filter").run(quadratics.ground(bare(c)))[""]
        for c in (1.0, 4.0)
    ]
    assert found[0].value == pytest.approx(found[1].value, rel=1e-9)
    plain = [sam_sharpness(rho=0.3, directions=10).run(quadratics.ground(bare(c)))[""] for c in (1.0, 4.0)]
    assert plain[0].value != pytest.approx(plain[1].value, rel=1e-2)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("probe", [sam_sharpness(directions=4), sam_step(m=5)])
def test_weights_and_buffers_are_left_as_they_were(training: bool, probe: object) -> None:
    here = quadratics.ground(
        quadratics.net(batchnorm=True).train(training), quadratics.cut(quadratics.samples(), (5, 7))
    )
    before = quadratics.state(here.module)
    assert probe.run(here)[""].value != 0  # type: ignore[attr-defined]
    assert all(torch.equal(tensor, before[name]) for name, tensor in here.module.state_dict().items())


@pytest.mark.parametrize("probe", [sam_sharpness(directions=4), sam_step(m=4), sam_step(m=6, adaptive=True)])
def test_neither_the_cut_into_batches_nor_names_of_inputs_change_the_number(probe: object) -> None:
    whole = probe.run(quadratics.ground())[""]  # type: ignore[attr-defined]
    named = [quadratics.named(piece) for piece in quadratics.cut(quadratics.samples(), (5, 7))]
    for other in (
        quadratics.ground(batches=quadratics.cut(quadratics.samples(), (1, 3, 8))),
        quadratics.ground(quadratics.Named(), named),
    ):
        found = probe.run(other)[""]  # type: ignore[attr-defined]
        assert found.value == pytest.approx(whole.value, rel=1e-8)
        assert found.stderr == pytest.approx(whole.stderr, rel=1e-8)


@pytest.mark.parametrize("adaptive", [True, False])
def test_one_step_on_a_bowl_is_the_closed_form(adaptive: bool) -> None:
    w, curvature, slopes = quadratics.vector(0), quadratics.matrix(1), quadratics.vector(2)[None].expand(3, -1)
    t = w.abs() if adaptive else torch.ones_like(w)
    slope = slopes[0] + curvature @ w
    delta = 0.3 * t * t * slope / (t * slope).norm()
    found = sam_step(rho=0.3, adaptive=adaptive).run(quadratics.bowl(w, curvature, slopes))
    assert found["first order"].value == pytest.approx(0.3 * float((t * slope).norm()))
    assert found[""].value == pytest.approx(float(delta @ slope + delta @ curvature @ delta / 2))


@pytest.mark.parametrize(("adaptive", "reach"), [(False, sam.sam_direction), (True, sam.asam_elementwise)])
def test_one_step_ends_where_the_update_of_training_climbs_to(adaptive: bool, reach: sam.AscentDirection) -> None:
    here = quadratics.ground()
    rises = []
    for (batch,) in split_groups(here.batches, 4):
        _, gradient = here.gradient(batch)
        peak = sam.perturbed_params(here.origin, gradient, 0.3, reach)
        rises.append(float(here.losses(batch, peak).mean() - here.losses(batch).mean()))
    found = sam_step(rho=0.3, m=4, adaptive=adaptive).run(here)[""]
    assert found.value == pytest.approx(sum(rises) / 3)
    assert found.stderr == pytest.approx(float(torch.tensor(rises).std()) / 3**0.5, rel=1e-5)


def test_one_step_in_proportion_is_unmoved_by_rescaling() -> None:
    pair = [quadratics.ground(), quadratics.ground(quadratics.rescaled(quadratics.net()))]
    adaptive = [sam_step(rho=0.3, m=4, adaptive=True).run(each) for each in pair]
    assert adaptive[0][""].value == pytest.approx(adaptive[1][""].value, rel=1e-9)
    assert adaptive[0]["first order"].value == pytest.approx(adaptive[1]["first order"].value, rel=1e-9)
    plain = [sam_step(rho=0.3, m=4).run(each)[""].value for each in pair]
    assert plain[0] != pytest.approx(plain[1], rel=1e-2)
    assert (sam_step(adaptive=True).scale_invariant, sam_step().scale_invariant) == (True, False)


def test_without_a_radius_or_a_slope_there_is_nothing() -> None:
    assert sam_step(rho=0.0).run(quadratics.ground())[""].value == 0
    assert sam_sharpness(rho=0.0, directions=2).run(quadratics.ground())[""].value == 0
    bottom = quadratics.bowl(
        torch.zeros(quadratics.SIZE).double(), quadratics.matrix(0), torch.zeros(2, quadratics.SIZE).double()
    )
    assert sam_step().run(bottom)[""].value == 0


def test_in_two_pieces_a_group_has_the_gradient_of_the_whole() -> None:
    batch: Batch = quadratics.samples()
    whole = sam_step(rho=0.2, m=12).run(quadratics.ground(batches=[batch]))
    pieces = sam_step(rho=0.2, m=12).run(quadratics.ground(batches=quadratics.cut(batch, (7, 5))))
    assert pieces["first order"].value == pytest.approx(whole["first order"].value, rel=1e-12)


@pytest.mark.parametrize("probe", [sam_sharpness(directions=3), sam_step(m=5)])
def test_they_cost_as_many_passes_as_they_say(probe: object) -> None:
    here = quadratics.Counting(MemberModule(quadratics.net()), quadratics.cut(quadratics.samples(), (7, 5)))
    probe.run(here)  # type: ignore[attr-defined]
    assert here.passes == pytest.approx(probe.passes(12))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (sam_sharpness, {"rho": -0.1}, "rho = -0.1"),
        (sam_sharpness, {"directions": 0}, "directions = 0"),
        (sam_sharpness, {"direction": "spher"}, "did you mean 'sphere'"),
        (sam_step, {"rho": math.inf}, "rho = inf"),
        (sam_step, {"m": 0}, "m = 0"),
        (sam_step, {"eta": -1.0}, "eta = -1.0"),
    ],
)
def test_impossible_options_are_refused(make: object, options: dict[str, object], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        make(**options)  # type: ignore[operator]
