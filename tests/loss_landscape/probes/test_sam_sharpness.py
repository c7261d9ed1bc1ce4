"""SAM-sharpness agrees with closed forms, and `sam_step` with the ascent step of the SAM update."""

from __future__ import annotations

import pytest
import quadratics
import torch
from torch import nn
from torch.func import functional_call, hessian, vmap

from plateaux.core.member import MemberModule
from plateaux.core.types import Batch
from plateaux.loss_landscape.groups import split_groups
from plateaux.loss_landscape.probes.sam_sharpness import sam_sharpness, sam_step
from plateaux.optim import sam

DIRECTIONS = ("sphere", "gaussian", "filter")
FORMS = ("antithetic", "paper")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_sam_sharpness_of_a_quadratic_equals_the_closed_form(direction: str, form: str) -> None:
    w, curvature = quadratics.vector(0), quadratics.matrix(1, shift=1.0)
    slopes = quadratics.near_zero_slopes(w, curvature, 5)
    rows = [w[0:2], w[2:4]]  # the filters of the first tensor; the second is a vector
    lengths = [float(row @ row) / 2 for row in rows]
    weights = {
        "sphere": torch.full_like(w, 1 / quadratics.SIZE),
        "gaussian": torch.ones_like(w),
        "filter": torch.tensor([lengths[0]] * 2 + [lengths[1]] * 2 + [0.0] * 3, dtype=torch.float64),
    }[direction]
    truth = 0.5 * 0.4**2 * float((weights * curvature.diag()).sum())
    probe = sam_sharpness(rho=0.4, directions=300, direction=direction, form=form)  # type: ignore[arg-type]
    result = probe.run(quadratics.bowl(w, curvature, slopes))
    assert result[""].mc_stderr is not None
    assert abs(result[""].value - truth) < 4 * result[""].mc_stderr
    assert result[""].mc_stderr < 0.3 * abs(truth)
    assert result["largest"].value > result[""].value
    of_directions = result[""].mc_stderr * 300**0.5
    assert result["deviation"].value == pytest.approx(of_directions) or form == "antithetic"
    assert result["deviation"].value >= 0.999 * of_directions  # points differ at least as much as the means of pairs


def test_an_antithetic_pair_has_no_first_order_noise() -> None:
    """With equal curvature in all directions, one pair gives the exact value, whatever the gradient is."""
    w, curvature = quadratics.vector(0), 3.0 * torch.eye(quadratics.SIZE, dtype=torch.float64)
    steep = quadratics.bowl(w, curvature, 1e3 * quadratics.vector(1)[None].expand(4, -1))
    pair = sam_sharpness(rho=0.1, directions=2).run(steep)
    assert pair[""].value == pytest.approx(0.5 * 0.1**2 * 3.0, rel=1e-8)
    assert pair[""].mc_stderr == pytest.approx(0, abs=1e-9)
    paper = sam_sharpness(rho=0.1, directions=2, form="paper").run(steep)
    assert abs(paper[""].value) > 100 * pair[""].value
    assert min(pair["deviation"].value, paper["deviation"].value) > 10  # of the points, not of the pairs


def test_sam_sharpness_of_an_unfitted_network_is_its_curvature_not_first_order_noise() -> None:
    surface = quadratics.make_surface()
    batch = quadratics.samples()

    def loss(w: dict[str, torch.Tensor]) -> torch.Tensor:
        return surface.losses_from_logits(functional_call(surface.module, w, (batch.x,)), batch).mean()

    blocks = hessian(loss)({name: tensor.detach() for name, tensor in surface.origin.items()})
    trace = sum(float(blocks[n][n].reshape(t.numel(), t.numel()).trace()) for n, t in surface.origin.items())
    truth = 0.5 * 0.005**2 * trace / surface.num_params
    pairs, paper = (sam_sharpness(form=form).run(surface)[""] for form in FORMS)
    assert pairs.mc_stderr is not None
    assert paper.mc_stderr is not None
    assert abs(pairs.value - truth) < 4 * pairs.mc_stderr
    assert pairs.mc_stderr < 0.5 * truth
    assert paper.mc_stderr > 20 * pairs.mc_stderr
    assert paper.mc_stderr > 5 * truth  # nothing can be seen in it


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_changes_of_the_loss_are_signed(form: str) -> None:
    w, slopes = quadratics.vector(0), quadratics.vector(1)[None]
    flat = torch.zeros(quadratics.SIZE, quadratics.SIZE, dtype=torch.float64)
    result = sam_sharpness(rho=0.4, directions=400, form=form).run(quadratics.bowl(w, flat, slopes))  # type: ignore[arg-type]
    assert abs(result[""].value) < 4 * (result[""].mc_stderr or 0) + 1e-12
    spread = 0.4 * float(slopes.norm()) / quadratics.SIZE**0.5
    assert result["deviation"].value == pytest.approx(spread, rel=0.1)
    assert 1.5 * spread < result["largest"].value <= 0.4 * float(slopes.norm())


def truth_of(rho: float) -> float:
    """The mean increase of the loss of the small network over the sphere, from many directions."""
    surface = quadratics.make_surface()
    flat = torch.randn(15_000, surface.num_params, generator=quadratics.draw(77), dtype=torch.float64)
    flat = rho * flat / flat.norm(dim=1, keepdim=True)
    flat = torch.cat([flat, -flat])
    pieces = flat.split([w.numel() for w in surface.origin.values()], 1)
    there = {name: w + d.reshape(-1, *w.shape) for (name, w), d in zip(surface.origin.items(), pieces, strict=True)}
    batch = quadratics.samples()
    losses = vmap(lambda w: surface.losses_from_logits(functional_call(surface.module, w, (batch.x,)), batch).mean())(
        there
    )
    return float(losses.mean() - surface.all_losses().mean())


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_the_monte_carlo_interval_has_the_nominal_coverage(form: str) -> None:
    truth, probe = truth_of(1.0), sam_sharpness(rho=1.0, directions=25, form=form)  # type: ignore[arg-type]
    result = [probe.run(quadratics.make_surface(seed=seed))[""] for seed in range(50)]
    inside = sum(abs(item.value - truth) <= 1.96 * item.mc_stderr for item in result if item.mc_stderr is not None)
    assert inside >= 45
    numbers, draws = torch.tensor([item.value for item in result]), torch.tensor([item.mc_stderr for item in result])
    assert float(draws.mean()) == pytest.approx(float(numbers.std()), rel=0.35)  # and the interval is not too wide


def test_float32_agrees_with_float64_at_the_default_radius() -> None:
    result = []
    for dtype in (torch.float64, torch.float32):
        module = quadratics.net(dtype=torch.float32).to(dtype)  # the same weights
        surface = quadratics.make_surface(module, [quadratics.samples(200, dtype=dtype)])
        origin = surface.all_losses().mean()
        ways = torch.randn(surface.num_params, generator=quadratics.draw(0), dtype=torch.float64)
        ways = 0.005 * ways / ways.norm()
        pieces = ways.split([w.numel() for w in surface.origin.values()])
        there = {n: w + d.view(w.shape).to(dtype) for (n, w), d in zip(surface.origin.items(), pieces, strict=True)}
        result.append(float(surface.all_losses(there).mean() - origin))
    assert result[1] == pytest.approx(result[0], abs=2e-7)
    small = sam_sharpness(directions=20).run(
        quadratics.make_surface(quadratics.net(dtype=torch.float32), [quadratics.samples(dtype=torch.float32)])
    )
    assert 0 < small["deviation"].value < 5e-3


def test_standard_errors_over_samples_and_points_are_separate() -> None:
    assert set(sam_sharpness(rho=0.5, directions=1).run(quadratics.make_surface())) == {"", "largest"}
    result = sam_sharpness(rho=0.5, directions=1, form="paper").run(quadratics.make_surface())
    assert set(result) == {"", "largest"}
    assert result[""] == result["largest"]
    assert result[""].mc_stderr is None
    assert result[""].stderr is not None
    same = [quadratics.samples(1).take(torch.zeros(8, dtype=torch.long))]
    assert sam_sharpness(rho=0.5, directions=5).run(quadratics.make_surface(batches=same))[""].stderr == pytest.approx(
        0, abs=1e-12
    )


def test_filter_directions_are_scale_invariant_and_fix_vectors() -> None:
    def bare(factor: float) -> nn.Module:
        module = quadratics.net()
        with torch.no_grad():
            for layer in (module[0], module[2], module[4]):
                layer.bias.zero_()
        return quadratics.rescale_layers(module, factor)

    result = [
        sam_sharpness(rho=0.3, directions=10, direction="filter").run(quadratics.make_surface(bare(c)))[""]
        for c in (1.0, 4.0)
    ]
    assert result[0].value == pytest.approx(result[1].value, rel=1e-9)
    plain = [sam_sharpness(rho=0.3, directions=10).run(quadratics.make_surface(bare(c)))[""] for c in (1.0, 4.0)]
    assert plain[0].value != pytest.approx(plain[1].value, rel=1e-2)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("probe", [sam_sharpness(directions=4), sam_step(m=5)])
def test_weights_and_buffers_are_restored(training: bool, probe: object) -> None:
    surface = quadratics.make_surface(
        quadratics.net(batchnorm=True).train(training), quadratics.cut(quadratics.samples(), (5, 7))
    )
    before = quadratics.state(surface.module)
    assert probe.run(surface)[""].value != 0  # type: ignore[attr-defined]
    assert all(torch.equal(tensor, before[name]) for name, tensor in surface.module.state_dict().items())


@pytest.mark.parametrize("probe", [sam_sharpness(directions=4), sam_step(m=4), sam_step(m=6, adaptive=True)])
def test_the_value_does_not_depend_on_batches_or_input_names(probe: object) -> None:
    full = probe.run(quadratics.make_surface())[""]  # type: ignore[attr-defined]
    named = [quadratics.with_named_inputs(piece) for piece in quadratics.cut(quadratics.samples(), (5, 7))]
    for other in (
        quadratics.make_surface(batches=quadratics.cut(quadratics.samples(), (1, 3, 8))),
        quadratics.make_surface(quadratics.NamedInputs(), named),
    ):
        result = probe.run(other)[""]  # type: ignore[attr-defined]
        assert result.value == pytest.approx(full.value, rel=1e-8)
        assert result.stderr == pytest.approx(full.stderr, rel=1e-8)


@pytest.mark.parametrize("adaptive", [True, False])
def test_one_step_on_a_quadratic_equals_the_closed_form(adaptive: bool) -> None:
    w, curvature, slopes = quadratics.vector(0), quadratics.matrix(1), quadratics.vector(2)[None].expand(3, -1)
    t = w.abs() if adaptive else torch.ones_like(w)
    slope = slopes[0] + curvature @ w
    delta = 0.3 * t * t * slope / (t * slope).norm()
    result = sam_step(rho=0.3, adaptive=adaptive).run(quadratics.bowl(w, curvature, slopes))
    assert result["first order"].value == pytest.approx(0.3 * float((t * slope).norm()))
    assert result[""].value == pytest.approx(float(delta @ slope + delta @ curvature @ delta / 2))


@pytest.mark.parametrize(("adaptive", "ascent_direction"), [(False, sam.sam_direction), (True, sam.asam_elementwise)])
def test_one_step_ends_at_the_perturbed_weights_of_the_sam_update(
    adaptive: bool, ascent_direction: sam.AscentDirection
) -> None:
    surface = quadratics.make_surface()
    rises = []
    for (batch,) in split_groups(surface.batches, 4):
        _, gradient = surface.gradient(batch)
        perturbed = sam.perturbed_params(surface.origin, gradient, 0.3, ascent_direction)
        rises.append(float(surface.losses(batch, perturbed).mean() - surface.losses(batch).mean()))
    result = sam_step(rho=0.3, m=4, adaptive=adaptive).run(surface)[""]
    assert result.value == pytest.approx(sum(rises) / 3)
    assert result.stderr == pytest.approx(float(torch.tensor(rises).std()) / 3**0.5, rel=1e-5)


def test_the_adaptive_step_is_scale_invariant() -> None:
    pair = [quadratics.make_surface(), quadratics.make_surface(quadratics.rescale_layers(quadratics.net()))]
    adaptive = [sam_step(rho=0.3, m=4, adaptive=True).run(item) for item in pair]
    assert adaptive[0][""].value == pytest.approx(adaptive[1][""].value, rel=1e-9)
    assert adaptive[0]["first order"].value == pytest.approx(adaptive[1]["first order"].value, rel=1e-9)
    plain = [sam_step(rho=0.3, m=4).run(item)[""].value for item in pair]
    assert plain[0] != pytest.approx(plain[1], rel=1e-2)
    assert (sam_step(adaptive=True).scale_invariant, sam_step().scale_invariant) == (True, False)


def test_a_zero_radius_or_gradient_gives_zero() -> None:
    assert sam_step(rho=0.0).run(quadratics.make_surface())[""].value == 0
    assert sam_sharpness(rho=0.0, directions=2).run(quadratics.make_surface())[""].value == 0
    bottom = quadratics.bowl(
        torch.zeros(quadratics.SIZE).double(), quadratics.matrix(0), torch.zeros(2, quadratics.SIZE).double()
    )
    assert sam_step().run(bottom)[""].value == 0


def test_the_gradient_of_a_group_does_not_depend_on_its_batches() -> None:
    batch: Batch = quadratics.samples()
    full = sam_step(rho=0.2, m=12).run(quadratics.make_surface(batches=[batch]))
    pieces = sam_step(rho=0.2, m=12).run(quadratics.make_surface(batches=quadratics.cut(batch, (7, 5))))
    assert pieces["first order"].value == pytest.approx(full["first order"].value, rel=1e-12)


@pytest.mark.parametrize("probe", [*(sam_sharpness(directions=3, form=form) for form in FORMS), sam_step(m=5)])
def test_the_declared_number_of_passes_is_exact(probe: object) -> None:
    surface = quadratics.Counting(MemberModule(quadratics.net()), quadratics.cut(quadratics.samples(), (7, 5)))
    probe.run(surface)  # type: ignore[attr-defined]
    assert surface.passes == pytest.approx(probe.passes(12))  # type: ignore[attr-defined]
