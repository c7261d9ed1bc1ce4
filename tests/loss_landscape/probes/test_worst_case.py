"""Worst-case sharpness agrees with closed forms, and APGD is at least as strong as the released code."""

from __future__ import annotations

import math
from functools import cache, partial

import pytest
import quadratics
import torch
import torch.nn.functional as F
from reference import released_apgd
from torch import Tensor, nn

from plateaux.core import registry, tensor_tree
from plateaux.core.errors import RecipeError
from plateaux.core.member import MemberModule
from plateaux.core.types import Batch
from plateaux.loss_landscape.apgd import Ball, Iterate, _finish, _random_point, checkpoints, run_apgd
from plateaux.loss_landscape.groups import group_gradient, group_losses, split_groups
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.perturbations import perturbation_scale
from plateaux.loss_landscape.probes.worst_case import worst

PROBES = {norm: partial(worst, norm=norm) for norm in ("l2", "linf")}
RADIUS = {"l2": 0.3, "linf": 0.05}


def run_probe(surface: LossSurface, norm: str = "l2", **options: object) -> float:
    return PROBES[norm](**{"radius": RADIUS[norm], "m": 4, **options}).run(surface)[""].value


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_the_l2_worst_case_of_a_quadratic_solves_the_trust_region_problem(adaptive: bool, seed: int) -> None:
    w, curvature, slopes = quadratics.vector(seed), quadratics.matrix(seed), quadratics.vector(seed + 9)[None]
    t = w.abs() if adaptive else torch.ones_like(w)
    slope = t * (slopes[0] + curvature @ w)
    truth = quadratics.max_in_ball(slope, t[:, None] * curvature * t, 0.7)
    surface = quadratics.bowl(w, curvature, slopes)
    errors = [truth - run_probe(surface, radius=0.7, adaptive=adaptive, steps=steps) for steps in (5, 20, 80, 320)]
    assert all(error > -1e-9 for error in errors), "no result exceeds the true maximum"
    assert errors[0] >= errors[1] - 1e-12
    assert errors[1] < 1e-2 * truth
    assert errors[1] >= errors[3] - 1e-12
    assert errors[3] < 1e-6 * truth


@pytest.mark.parametrize("adaptive", [True, False])
def test_the_linf_worst_case_of_a_diagonal_quadratic_is_a_corner(adaptive: bool) -> None:
    w, slopes = quadratics.vector(0), quadratics.vector(1)[None]
    curvature = quadratics.vector(2).abs().diag()
    t = w.abs() if adaptive else torch.ones_like(w)
    corner = 0.3 * (t * (slopes[0] + curvature @ w)).abs().sum() + 0.3**2 / 2 * (t * t * curvature.diag()).sum()
    report = PROBES["linf"](radius=0.3, adaptive=adaptive).run(quadratics.bowl(w, curvature, slopes))
    assert report[""].value == pytest.approx(float(corner), rel=1e-12)
    assert report["converged"].value == pytest.approx(1.0)


@pytest.mark.parametrize("largest", ["initial", "best", "last"])
def test_the_result_is_the_largest_of_the_first_the_best_and_the_last_loss(largest: str) -> None:
    surface = quadratics.bowl(quadratics.vector(0), quadratics.matrix(0), quadratics.vector(9)[None])
    initial, direction = group_gradient(surface, surface.batches)
    u = tensor_tree.scale(direction, -0.01 if largest == "initial" else 0.01)
    best = Iterate(tensor_tree.scale(direction, 0.02), initial + (5.0 if largest == "best" else -5.0), direction)
    found = _finish(surface, surface.batches, Ball(1.0), u, best, initial, initial)
    wanted = {"initial": tensor_tree.scale(u, 0.0), "best": best.u, "last": u}[largest]
    assert float(tensor_tree.norm(tensor_tree.add(found.best_u, tensor_tree.scale(wanted, -1.0)))) == 0
    assert (found.best_loss > initial) == (largest != "initial")


@pytest.mark.parametrize("norm", PROBES)
def test_the_ascent_leaves_a_point_with_zero_gradient(norm: str) -> None:
    curvature = quadratics.matrix(3, shift=6.0)
    surface = quadratics.bowl(
        torch.zeros(quadratics.SIZE, dtype=torch.float64), curvature, torch.zeros(1, quadratics.SIZE).double()
    )
    highest = 0.5 * 0.3**2 * float(torch.linalg.eigvalsh(curvature)[-1])
    rise = run_probe(surface, norm, radius=0.3, adaptive=False, steps=200)
    assert rise == pytest.approx(highest, rel=1e-6) if norm == "l2" else rise > highest


@pytest.mark.parametrize("norm", PROBES)
def test_a_radius_of_zero_gives_zero(norm: str) -> None:
    report = PROBES[norm](radius=0.0, restarts=2, m=4).run(quadratics.make_surface())
    assert report[""].value == 0
    assert report["converged"].value == 1


@pytest.mark.parametrize("norm", PROBES)
@pytest.mark.parametrize(("dtype", "exact"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_only_the_adaptive_worst_case_is_scale_invariant(norm: str, dtype: torch.dtype, exact: float) -> None:
    batch = quadratics.samples(dtype=dtype)
    surface = quadratics.make_surface(quadratics.net(batchnorm=True, dtype=dtype), [batch])
    there = quadratics.make_surface(quadratics.rescale_layers(quadratics.net(batchnorm=True, dtype=dtype)), [batch])
    assert run_probe(there, norm) == pytest.approx(run_probe(surface, norm), rel=exact)
    assert run_probe(there, norm, adaptive=False) != pytest.approx(run_probe(surface, norm, adaptive=False), rel=1e-2)
    assert run_probe(there, norm, eta=0.1) != pytest.approx(run_probe(surface, norm, eta=0.1), rel=1e-2)
    assert PROBES[norm]().scale_invariant
    assert not PROBES[norm](eta=0.1).scale_invariant
    assert not PROBES[norm](adaptive=False).scale_invariant


@pytest.mark.parametrize("norm", PROBES)
@pytest.mark.parametrize("restarts", [1, 3])
def test_zero_weights_are_not_perturbed(norm: str, restarts: int) -> None:
    pruned, frozen = quadratics.net(), quadratics.net()
    with torch.no_grad():
        for module in (pruned, frozen):
            module[2].weight.zero_(), module[2].bias.zero_(), module[4].bias.zero_()
    for part in (frozen[2].weight, frozen[2].bias, frozen[4].bias):
        part.requires_grad_(False)
    with torch.no_grad():  # not zero, so that the layer can be perturbed
        for module in (pruned, frozen):
            module[2].weight[0, :] = 0.5
    frozen[2].weight.requires_grad_(True)
    one, other = (
        run_probe(quadratics.make_surface(pruned), norm, restarts=restarts),
        run_probe(quadratics.make_surface(frozen), norm),
    )
    assert math.isfinite(one)
    assert one == pytest.approx(other, rel=1e-6) if restarts == 1 else one >= other - 1e-9
    assert run_probe(quadratics.make_surface(pruned), norm, eta=0.1) > one


def test_the_adaptive_worst_case_of_zero_weights_is_zero() -> None:
    module = quadratics.net()
    with torch.no_grad():
        for weight in module.parameters():
            weight.zero_()
    assert run_probe(quadratics.make_surface(module), restarts=2) == 0


@pytest.mark.parametrize("sizes", [(12,), (4, 4, 4), (5, 1, 6), (3, 3, 3, 3), (1,) * 12])
def test_groups_do_not_depend_on_batches(sizes: tuple[int, ...]) -> None:
    surface = quadratics.make_surface(batches=quadratics.cut(quadratics.samples(), sizes))
    full = quadratics.make_surface(batches=[quadratics.samples()])
    assert run_probe(surface) == pytest.approx(run_probe(full), rel=1e-9)
    alone = [
        run_probe(quadratics.make_surface(batches=[quadratics.samples().take(slice(i, i + 4))])) for i in (0, 4, 8)
    ]
    value = PROBES["l2"](radius=0.3, m=4).run(surface)[""]
    assert value.value == pytest.approx(sum(alone) / 3, rel=1e-9)
    assert value.stderr == pytest.approx(float(torch.tensor(alone).std()) / 3**0.5, rel=1e-6)


def test_an_incomplete_group_is_left_out_unless_it_is_the_only_one() -> None:
    batch = quadratics.samples()
    sizes = [[sum(map(len, group)) for group in split_groups(quadratics.cut(batch, (5, 7)), m)] for m in (5, 7, 12, 99)]
    assert sizes == [[5, 5], [7], [12], [12]]
    ids = [piece.index.tolist() for group in split_groups(quadratics.cut(batch, (5, 7)), 4) for piece in group]
    assert ids == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert PROBES["l2"](m=99).run(quadratics.make_surface())[""].stderr is None
    with pytest.raises(RecipeError, match="sample of data is empty"):
        next(split_groups([], 4))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm", PROBES)
def test_weights_and_buffers_are_restored(norm: str, training: bool) -> None:
    surface = quadratics.make_surface(
        quadratics.net(batchnorm=True).train(training), quadratics.cut(quadratics.samples(), (5, 7))
    )
    before = quadratics.state(surface.module)
    assert run_probe(surface, norm) > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in surface.module.state_dict().items())


def test_named_inputs_are_supported() -> None:
    batches = [quadratics.with_named_inputs(piece) for piece in quadratics.cut(quadratics.samples(), (5, 7))]
    assert run_probe(quadratics.make_surface(quadratics.NamedInputs(), batches)) == pytest.approx(
        run_probe(quadratics.make_surface()), rel=1e-9
    )


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_the_best_loss_is_attained_in_the_ball(norm: str) -> None:
    surface = quadratics.make_surface()
    scale = perturbation_scale(surface.origin, adaptive=True)
    ball = Ball(0.3, norm, scale)  # type: ignore[arg-type]
    with surface.at_params(surface.origin):
        ascents = run_apgd(surface, surface.batches, ball, steps=20, generator=quadratics.draw(0), restarts=3)
    for item in ascents:
        u = torch.cat([tensor.flatten() for tensor in item.best_u.values()])
        assert float(u.norm() if norm == "l2" else u.abs().max()) <= 0.3 * (1 + 1e-9)
        there = tensor_tree.add(surface.origin, tensor_tree.multiply(scale, item.best_u))  # type: ignore[arg-type]
        assert item.initial_loss == pytest.approx(float(surface.all_losses().mean()))
        assert item.best_loss == pytest.approx(float(surface.all_losses(there).mean()))
        assert item.initial_loss <= item.halfway_loss <= item.best_loss


def test_more_restarts_find_no_smaller_loss_and_report_their_spread() -> None:
    surface = quadratics.make_surface(seed=5)
    one, many = PROBES["l2"](radius=1.0, m=4).run(surface), PROBES["l2"](radius=1.0, m=4, restarts=4).run(surface)
    assert "restarts" not in one
    assert many[""].value >= one[""].value
    assert many["restarts"].value <= many[""].value
    assert many["restarts"].mc_stderr is not None
    assert many["restarts"].mc_stderr > 0
    assert many == PROBES["l2"](radius=1.0, m=4, restarts=4).run(surface)
    assert many != PROBES["l2"](radius=1.0, m=4, restarts=4).run(quadratics.make_surface(seed=6))


def test_random_starts_escape_a_local_maximum() -> None:
    """The gradient at the weights leads to a local maximum; the global maximum is on the other side."""

    class Hills(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.w
            return (0.1 * a + 5 * torch.relu(-a - 0.3) ** 2 + 0 * b).expand(len(x), 1)

    batch = Batch(torch.zeros(1, 1).double(), torch.zeros(1, dtype=torch.long), torch.arange(1))
    surface = quadratics.SurfaceOfLosses(MemberModule(Hills()), [batch])
    options = {"radius": 1.0, "adaptive": False}
    assert PROBES["l2"](**options).run(surface)[""].value == pytest.approx(0.1)  # type: ignore[arg-type]
    assert PROBES["l2"](**options, restarts=8).run(surface)[""].value == pytest.approx(5 * 0.49 - 0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_random_starts_are_uniform_in_the_ball(norm: str) -> None:
    origin = {"w": torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)}
    ball = Ball(0.5, norm, perturbation_scale(origin, adaptive=True))  # type: ignore[arg-type]
    generator = quadratics.draw(0)
    starts = torch.stack([_random_point(origin, ball, generator)["w"] for _ in range(2000)])
    assert torch.equal(starts[:, 2], torch.zeros(2000, dtype=torch.float64))
    far = starts.norm(dim=1) if norm == "l2" else starts.abs().amax(1)
    assert float(far.max()) <= 0.5
    assert float((far < 0.25).double().mean()) == pytest.approx(0.25, abs=0.04)  # uniform by area
    assert torch.allclose(starts.mean(0), torch.zeros(3, dtype=torch.float64), atol=0.03)


class Cliff(nn.Module):
    """A loss that is NaN or infinite beyond 1 in one direction."""

    def __init__(self, at: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([at, 0.0], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w[0] + torch.where(self.w[0] > 1, torch.inf, 0.0)).expand(len(x), 1)


def on_cliff(at: float) -> LossSurface:
    return quadratics.SurfaceOfLosses(
        MemberModule(Cliff(at)), [Batch(torch.zeros(1, 1), torch.zeros(1), torch.arange(1))]
    )


def test_nan_and_infinite_losses_are_ignored() -> None:
    rise = PROBES["l2"](radius=2.5, adaptive=False, steps=60).run(on_cliff(0.0))[""].value
    assert 0.5 < rise <= 1
    many = PROBES["l2"](radius=2.5, adaptive=False, steps=60, restarts=6).run(on_cliff(0.0))[""].value
    assert rise <= many <= 1


def test_a_nan_loss_at_the_weights_gives_nan() -> None:
    assert math.isnan(PROBES["l2"](adaptive=False).run(on_cliff(2.0))[""].value)


@pytest.mark.parametrize("sizes", [(12,), (7, 5)])
def test_the_declared_number_of_passes_is_exact(sizes: tuple[int, ...]) -> None:
    surface = quadratics.Counting(MemberModule(quadratics.net()), quadratics.cut(quadratics.samples(), sizes))
    probe = PROBES["l2"](m=5, steps=6, restarts=2)
    probe.run(surface)
    assert surface.passes == pytest.approx(probe.passes(12))


def test_checkpoints_become_more_frequent() -> None:
    assert sorted(checkpoints(100)) == [22, 41, 57, 70, 80, 87, 93, 99]
    assert sorted(checkpoints(20)) == [5, 9, 12, 14, 16, 18, 19, 20]
    assert min(checkpoints(1)) == 1


def test_the_sharpbalance_preset_has_100_groups_of_5() -> None:
    for name in PROBES:
        made = PROBES[name](preset="sharpbalance")
        assert made.samples == 500
        assert "at most 0.5" in made.definition
        assert "groups of 5 samples" in made.definition
        assert "at most 0.1;" in PROBES[name](preset="sharpbalance", radius=0.1).definition
    assert PROBES["l2"]().samples == 1024
    assert {"worst_l2", "worst_linf"} <= set(registry.probe.names())


@cache
def trained() -> LossSurface:
    """A resnet8 trained on images that are a template per class plus noise."""
    templates = torch.randn(10, 3, 12, 12, generator=quadratics.draw(0))
    y = torch.arange(48) % 10
    x = 0.5 * templates[y] + torch.randn(48, 3, 12, 12, generator=quadratics.draw(1))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = registry.model.get("resnet8")(shape=(3, 12, 12), classes=10, width=4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(30):
        part = slice(24 * (step % 2), 24 * (step % 2) + 24)
        optimizer.zero_grad()
        F.cross_entropy(module(x[part]), y[part]).backward()
        optimizer.step()
    return LossSurface(MemberModule(module.eval()), [Batch(x, y, torch.arange(48))])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "adaptive", "radius"),
    [("l2", True, 0.5), ("l2", False, 0.1), ("linf", True, 0.01), ("linf", False, 0.002)],
)
def test_apgd_on_a_trained_resnet_is_at_least_as_strong_as_the_released_code(
    norm: str, adaptive: bool, radius: float
) -> None:
    surface = trained()
    ball = Ball(radius, norm, perturbation_scale(surface.origin, adaptive=adaptive))  # type: ignore[arg-type]
    flat = torch.cat([tensor.flatten() for tensor in surface.origin.values()])
    ours, theirs = [], []
    with surface.at_params(surface.origin):
        for group in split_groups(surface.batches, 12):

            def look(at: Tensor, group: list[Batch] = group) -> tuple[float, Tensor]:  # type: ignore[assignment]
                nn.utils.vector_to_parameters(at, surface.params.values())
                loss, way = group_gradient(surface, group)
                return loss, torch.cat([tensor.flatten() for tensor in way.values()])

            def height(at: Tensor, group: list[Batch] = group) -> float:  # type: ignore[assignment]
                nn.utils.vector_to_parameters(at, surface.params.values())
                return float(group_losses(surface, group).mean())

            ascent = run_apgd(surface, group, ball, steps=20, generator=quadratics.draw(0))[0]
            origin, best, taken = released_apgd.maximize_loss(
                flat, look, height, radius=radius, norm=norm, adaptive=adaptive
            )
            assert taken == 20
            assert ascent.initial_loss == pytest.approx(origin, rel=1e-6)
            ours.append(ascent.best_loss - origin)
            theirs.append(best - origin)
    assert min(theirs) > 1e-3
    if norm == "linf":  # both end near the same corner, and either may be ahead
        assert sum(ours) >= sum(theirs) * (1 - 1e-3)
        return
    assert sum(ours) >= sum(theirs) * (1.05 if adaptive else 1)
    assert sum(a >= b for a, b in zip(ours, theirs, strict=True)) >= 3  # of 4


def test_the_reference_projects_onto_the_ellipsoid() -> None:
    delta, t = quadratics.vector(0), quadratics.vector(1).abs()
    t[2] = 0
    result = released_apgd.project_onto_ellipsoid(delta, t, 0.4)
    assert released_apgd.weighted_norm(result, t) == pytest.approx(0.4, rel=1e-5)
    assert result[2] == 0
    away = (delta - result)[t > 0]
    normal = (result / t**2)[t > 0]  # the residual of the nearest point is orthogonal to the surface
    assert float(away @ normal / away.norm() / normal.norm()) == pytest.approx(1.0, abs=1e-9)
    inside = 1e-3 * delta * t
    assert torch.equal(released_apgd.project_onto_ellipsoid(inside, t, 0.4), inside)
