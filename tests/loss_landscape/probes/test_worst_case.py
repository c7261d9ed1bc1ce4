"""The worst case is that of the closed form, of every cut of the samples, and no smaller than the released form's."""

from __future__ import annotations

import math
from functools import cache

import pytest
import quadratics
import torch
import torch.nn.functional as F
from reference import apgd
from torch import Tensor, nn

from plateaux.core import registry, tensor_tree
from plateaux.core.errors import RecipeError
from plateaux.core.member import MemberModule
from plateaux.core.types import Batch
from plateaux.loss_landscape.apgd import Ball, _random_point, checkpoints, run_apgd
from plateaux.loss_landscape.groups import group_gradient, group_losses, split_groups
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.perturbations import perturbation_scale
from plateaux.loss_landscape.probes.worst_case import worst_l2, worst_linf

PROBES = {"l2": worst_l2, "linf": worst_linf}
RADIUS = {"l2": 0.3, "linf": 0.05}


def found(here: LossSurface, norm: str = "l2", **options: object) -> float:
    return PROBES[norm](**{"radius": RADIUS[norm], "m": 4, **options}).run(here)[""].value


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_on_a_bowl_the_euclidean_worst_case_is_that_of_the_trust_region(adaptive: bool, seed: int) -> None:
    w, curvature, slopes = quadratics.vector(seed), quadratics.matrix(seed), quadratics.vector(seed + 9)[None]
    t = w.abs() if adaptive else torch.ones_like(w)
    slope = t * (slopes[0] + curvature @ w)
    truth = quadratics.highest_in_ball(slope, t[:, None] * curvature * t, 0.7)
    here = quadratics.bowl(w, curvature, slopes)
    errors = [truth - found(here, radius=0.7, adaptive=adaptive, steps=steps) for steps in (5, 20, 80, 320)]
    assert all(error > -1e-9 for error in errors), "nothing lies above the truth"
    assert errors[0] >= errors[1] - 1e-12
    assert errors[1] < 1e-2 * truth
    assert errors[1] >= errors[3] - 1e-12
    assert errors[3] < 1e-6 * truth


@pytest.mark.parametrize("adaptive", [True, False])
def test_on_a_bowl_with_a_diagonal_the_worst_corner_is_found(adaptive: bool) -> None:
    w, slopes = quadratics.vector(0), quadratics.vector(1)[None]
    curvature = quadratics.vector(2).abs().diag()
    t = w.abs() if adaptive else torch.ones_like(w)
    corner = 0.3 * (t * (slopes[0] + curvature @ w)).abs().sum() + 0.3**2 / 2 * (t * t * curvature.diag()).sum()
    report = worst_linf(radius=0.3, adaptive=adaptive).run(quadratics.bowl(w, curvature, slopes))
    assert report[""].value == pytest.approx(float(corner), rel=1e-12)
    assert report["converged"].value == pytest.approx(1.0)


@pytest.mark.parametrize("norm", PROBES)
def test_from_the_very_bottom_of_a_bowl_the_ascent_finds_a_way_up(norm: str) -> None:
    curvature = quadratics.matrix(3, lift=6.0)
    here = quadratics.bowl(
        torch.zeros(quadratics.SIZE, dtype=torch.float64), curvature, torch.zeros(1, quadratics.SIZE).double()
    )
    highest = 0.5 * 0.3**2 * float(torch.linalg.eigvalsh(curvature)[-1])
    rise = found(here, norm, radius=0.3, adaptive=False, steps=200)
    assert rise == pytest.approx(highest, rel=1e-6) if norm == "l2" else rise > highest


@pytest.mark.parametrize("norm", PROBES)
def test_a_radius_of_zero_gives_zero(norm: str) -> None:
    report = PROBES[norm](radius=0.0, restarts=2, m=4).run(quadratics.ground())
    assert report[""].value == 0
    assert report["converged"].value == 1


@pytest.mark.parametrize("norm", PROBES)
@pytest.mark.parametrize(("dtype", "exact"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_rescaling_neighbouring_layers_moves_the_plain_worst_case_only(
    norm: str, dtype: torch.dtype, exact: float
) -> None:
    batch = quadratics.samples(dtype=dtype)
    here = quadratics.ground(quadratics.net(batchnorm=True, dtype=dtype), [batch])
    there = quadratics.ground(quadratics.rescaled(quadratics.net(batchnorm=True, dtype=dtype)), [batch])
    assert found(there, norm) == pytest.approx(found(here, norm), rel=exact)
    assert found(there, norm, adaptive=False) != pytest.approx(found(here, norm, adaptive=False), rel=1e-2)
    assert found(there, norm, eta=0.1) != pytest.approx(found(here, norm, eta=0.1), rel=1e-2)
    assert PROBES[norm]().scale_invariant
    assert not PROBES[norm](eta=0.1).scale_invariant
    assert not PROBES[norm](adaptive=False).scale_invariant


@pytest.mark.parametrize("norm", PROBES)
@pytest.mark.parametrize("restarts", [1, 3])
def test_weights_of_zero_do_not_move_and_take_no_room_in_the_ball(norm: str, restarts: int) -> None:
    pruned, frozen = quadratics.net(), quadratics.net()
    with torch.no_grad():
        for module in (pruned, frozen):
            module[2].weight.zero_(), module[2].bias.zero_(), module[4].bias.zero_()
    for part in (frozen[2].weight, frozen[2].bias, frozen[4].bias):
        part.requires_grad_(False)
    with torch.no_grad():  # other than zero, so that a layer can move at all
        for module in (pruned, frozen):
            module[2].weight[0, :] = 0.5
    frozen[2].weight.requires_grad_(True)
    one, other = found(quadratics.ground(pruned), norm, restarts=restarts), found(quadratics.ground(frozen), norm)
    assert math.isfinite(one)
    assert one == pytest.approx(other, rel=1e-6) if restarts == 1 else one >= other - 1e-9
    assert found(quadratics.ground(pruned), norm, eta=0.1) > one


def test_a_network_of_zeros_has_no_adaptive_worst_case() -> None:
    module = quadratics.net()
    with torch.no_grad():
        for weight in module.parameters():
            weight.zero_()
    assert found(quadratics.ground(module), restarts=2) == 0


@pytest.mark.parametrize("sizes", [(12,), (4, 4, 4), (5, 1, 6), (3, 3, 3, 3), (1,) * 12])
def test_groups_do_not_feel_how_samples_are_cut_into_batches(sizes: tuple[int, ...]) -> None:
    here = quadratics.ground(batches=quadratics.cut(quadratics.samples(), sizes))
    whole = quadratics.ground(batches=[quadratics.samples()])
    assert found(here) == pytest.approx(found(whole), rel=1e-9)
    alone = [found(quadratics.ground(batches=[quadratics.samples().take(slice(i, i + 4))])) for i in (0, 4, 8)]
    value = worst_l2(radius=0.3, m=4).run(here)[""]
    assert value.value == pytest.approx(sum(alone) / 3, rel=1e-9)
    assert value.stderr == pytest.approx(float(torch.tensor(alone).std()) / 3**0.5, rel=1e-6)


def test_a_rest_is_left_out_unless_it_is_all_there_is() -> None:
    batch = quadratics.samples()
    sizes = [[sum(map(len, group)) for group in split_groups(quadratics.cut(batch, (5, 7)), m)] for m in (5, 7, 12, 99)]
    assert sizes == [[5, 5], [7], [12], [12]]
    ids = [piece.index.tolist() for group in split_groups(quadratics.cut(batch, (5, 7)), 4) for piece in group]
    assert ids == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert worst_l2(m=99).run(quadratics.ground())[""].stderr is None
    with pytest.raises(RecipeError, match="sample of data is empty"):
        next(split_groups([], 4))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm", PROBES)
def test_weights_and_buffers_are_left_as_they_were(norm: str, training: bool) -> None:
    here = quadratics.ground(
        quadratics.net(batchnorm=True).train(training), quadratics.cut(quadratics.samples(), (5, 7))
    )
    before = quadratics.state(here.module)
    assert found(here, norm) > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in here.module.state_dict().items())


def test_inputs_may_be_named() -> None:
    batches = [quadratics.named(piece) for piece in quadratics.cut(quadratics.samples(), (5, 7))]
    assert found(quadratics.ground(quadratics.Named(), batches)) == pytest.approx(found(quadratics.ground()), rel=1e-9)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_the_loss_was_seen_at_a_point_of_the_ball(norm: str) -> None:
    here = quadratics.ground()
    scale = perturbation_scale(here.origin, adaptive=True)
    ball = Ball(0.3, norm, scale)  # type: ignore[arg-type]
    with here.at_params(here.origin):
        climbed = run_apgd(here, here.batches, ball, steps=20, generator=quadratics.draw(0), restarts=3)
    for each in climbed:
        u = torch.cat([tensor.flatten() for tensor in each.best_u.values()])
        assert float(u.norm() if norm == "l2" else u.abs().max()) <= 0.3 * (1 + 1e-9)
        there = tensor_tree.add(here.origin, tensor_tree.multiply(scale, each.best_u))  # type: ignore[arg-type]
        assert each.initial_loss == pytest.approx(float(here.all_losses().mean()))
        assert each.best_loss == pytest.approx(float(here.all_losses(there).mean()))
        assert each.initial_loss <= each.halfway_loss <= each.best_loss


def test_more_starts_find_no_less_and_say_how_they_differ() -> None:
    here = quadratics.ground(key=5)
    one, many = worst_l2(radius=1.0, m=4).run(here), worst_l2(radius=1.0, m=4, restarts=4).run(here)
    assert "restarts" not in one
    assert many[""].value >= one[""].value
    assert many["restarts"].value <= many[""].value
    assert many["restarts"].mc_stderr is not None
    assert many["restarts"].mc_stderr > 0
    assert many == worst_l2(radius=1.0, m=4, restarts=4).run(here)
    assert many != worst_l2(radius=1.0, m=4, restarts=4).run(quadratics.ground(key=6))


def test_random_starts_leave_a_hollow_that_home_cannot_see() -> None:
    """From home the slope leads up a small hill; the high one lies on the other side."""

    class Hills(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.w
            return (0.1 * a + 5 * torch.relu(-a - 0.3) ** 2 + 0 * b).expand(len(x), 1)

    batch = Batch(torch.zeros(1, 1).double(), torch.zeros(1, dtype=torch.long), torch.arange(1))
    here = quadratics.Level(MemberModule(Hills()), [batch])
    options = {"radius": 1.0, "adaptive": False}
    assert worst_l2(**options).run(here)[""].value == pytest.approx(0.1)  # type: ignore[arg-type]
    assert worst_l2(**options, restarts=8).run(here)[""].value == pytest.approx(5 * 0.49 - 0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_random_starts_fill_the_ball_but_for_weights_that_cannot_move(norm: str) -> None:
    home = {"w": torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)}
    ball = Ball(0.5, norm, perturbation_scale(home, adaptive=True))  # type: ignore[arg-type]
    chance = quadratics.draw(0)
    starts = torch.stack([_random_point(home, ball, chance)["w"] for _ in range(2000)])
    assert torch.equal(starts[:, 2], torch.zeros(2000, dtype=torch.float64))
    far = starts.norm(dim=1) if norm == "l2" else starts.abs().amax(1)
    assert float(far.max()) <= 0.5
    assert float((far < 0.25).double().mean()) == pytest.approx(0.25, abs=0.04)  # of a disc or a square: by area
    assert torch.allclose(starts.mean(0), torch.zeros(3, dtype=torch.float64), atol=0.03)


class Cliff(nn.Module):
    """A loss that is beyond numbers from 1 on, in one direction."""

    def __init__(self, at: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([at, 0.0], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w[0] + torch.where(self.w[0] > 1, torch.inf, 0.0)).expand(len(x), 1)


def on_cliff(at: float) -> LossSurface:
    return quadratics.Level(MemberModule(Cliff(at)), [Batch(torch.zeros(1, 1), torch.zeros(1), torch.arange(1))])


def test_a_loss_beyond_numbers_is_no_worst_case() -> None:
    rise = worst_l2(radius=2.5, adaptive=False, steps=60).run(on_cliff(0.0))[""].value
    assert 0.5 < rise <= 1
    many = worst_l2(radius=2.5, adaptive=False, steps=60, restarts=6).run(on_cliff(0.0))[""].value
    assert rise <= many <= 1


def test_where_home_itself_is_beyond_numbers_the_answer_is_not_a_number() -> None:
    assert math.isnan(worst_l2(adaptive=False).run(on_cliff(2.0))[""].value)


@pytest.mark.parametrize("sizes", [(12,), (7, 5)])
def test_it_costs_as_many_passes_as_it_says(sizes: tuple[int, ...]) -> None:
    here = quadratics.Counting(MemberModule(quadratics.net()), quadratics.cut(quadratics.samples(), sizes))
    asked = worst_l2(m=5, steps=6, restarts=2)
    asked.run(here)
    assert here.passes == pytest.approx(asked.passes(12))


def test_the_pace_is_looked_at_more_and_more_often() -> None:
    assert sorted(checkpoints(100)) == [22, 41, 57, 70, 80, 87, 93, 99]
    assert sorted(checkpoints(20)) == [5, 9, 12, 14, 16, 18, 19, 20]
    assert min(checkpoints(1)) == 1


def test_the_preset_of_sharpbalance_is_a_hundred_groups_of_five() -> None:
    for name in PROBES:
        made = PROBES[name](preset="sharpbalance")
        assert made.samples == 500
        assert "at most 0.5" in made.definition
        assert "groups of 5 samples" in made.definition
        assert "at most 0.1;" in PROBES[name](preset="sharpbalance", radius=0.1).definition
    assert worst_l2().samples == 1024
    assert {"worst_l2", "worst_linf"} <= set(registry.probe.names())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"radius": -0.1}, "radius = -0.1"),
        ({"radius": math.nan}, "radius = nan"),
        ({"radius": math.inf}, "radius = inf"),
        ({"m": 0}, "m = 0"),
        ({"steps": 0}, "steps = 0"),
        ({"restarts": 0}, "restarts = 0"),
        ({"samples": 0}, "samples = 0"),
        ({"eta": -1.0}, "eta = -1.0"),
        ({"preset": "sharpbalanc"}, "did you mean 'sharpbalance'"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, object], words: str) -> None:
    for make in PROBES.values():
        with pytest.raises(RecipeError, match=words):
            make(**options)  # type: ignore[arg-type]


@cache
def trained() -> LossSurface:
    """A resnet8 that has learnt some pictures, each its class's template and noise."""
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


@pytest.mark.parametrize(
    ("norm", "adaptive", "radius"),
    [("l2", True, 0.5), ("l2", False, 0.1), ("linf", True, 0.01), ("linf", False, 0.002)],
)
def test_on_a_trained_resnet_the_ascent_finds_no_less_than_the_released_form_but_for_a_thousandth_in_a_box(
    norm: str, adaptive: bool, radius: float
) -> None:
    here = trained()
    ball = Ball(radius, norm, perturbation_scale(here.origin, adaptive=adaptive))  # type: ignore[arg-type]
    flat = torch.cat([tensor.flatten() for tensor in here.origin.values()])
    ours, theirs = [], []
    with here.at_params(here.origin):
        for group in split_groups(here.batches, 12):

            def look(at: Tensor, group: list[Batch] = group) -> tuple[float, Tensor]:  # type: ignore[assignment]
                nn.utils.vector_to_parameters(at, here.params.values())
                loss, way = group_gradient(here, group)
                return loss, torch.cat([tensor.flatten() for tensor in way.values()])

            def height(at: Tensor, group: list[Batch] = group) -> float:  # type: ignore[assignment]
                nn.utils.vector_to_parameters(at, here.params.values())
                return float(group_losses(here, group).mean())

            climbed = run_apgd(here, group, ball, steps=20, generator=quadratics.draw(0))[0]
            home, best, taken = apgd.worst(flat, look, height, radius=radius, norm=norm, adaptive=adaptive)
            assert taken == 20
            assert climbed.initial_loss == pytest.approx(home, rel=1e-6)
            ours.append(climbed.best_loss - home)
            theirs.append(best - home)
    assert min(theirs) > 1e-3
    if norm == "linf":  # both end at the same corner but for its last edges, now one ahead and now the other
        assert sum(ours) >= sum(theirs) * (1 - 1e-3)
        return
    assert sum(ours) >= sum(theirs) * (1.05 if adaptive else 1)
    assert sum(a >= b for a, b in zip(ours, theirs, strict=True)) >= 3  # of 4


def test_the_twin_projects_to_the_nearest_point_of_the_ellipsoid() -> None:
    delta, t = quadratics.vector(0), quadratics.vector(1).abs()
    t[2] = 0
    found = apgd.onto_ellipsoid(delta, t, 0.4)
    assert apgd.weighted_norm(found, t) == pytest.approx(0.4, rel=1e-5)
    assert found[2] == 0
    away = (delta - found)[t > 0]
    normal = (found / t**2)[t > 0]  # the nearest point: what is left over stands upright on the surface
    assert float(away @ normal / away.norm() / normal.norm()) == pytest.approx(1.0, abs=1e-9)
    inside = 1e-3 * delta * t
    assert torch.equal(apgd.onto_ellipsoid(inside, t, 0.4), inside)
