"""Slices, paths and planes, against quadratic landscapes and slow twins."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plateaux.core import tensor_tree
from plateaux.core.errors import RecipeError
from plateaux.core.member import MemberModule
from plateaux.core.types import Batch, TensorTree
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.slices import (
    LossGrid,
    compute_barrier,
    evaluate_grid,
    evaluate_line,
    evaluate_path,
    evaluate_plane,
    random_direction,
)


class Bowl(LossSurface):
    """A landscape that is |w|^2 / 2 for every sample, whatever the network says."""

    def losses_from_logits(self, logits: Tensor, batch: Batch) -> Tensor:
        height = sum((p.double() ** 2).sum() for p in self.params.values()) / 2
        return torch.as_tensor(height).expand(len(batch)) + batch.y  # labels 0 and 1: a spread over samples


def net(seed: int = 0, *, norm: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    middle = [nn.BatchNorm2d(3)] if norm else []
    return nn.Sequential(nn.Conv2d(1, 3, 3), *middle, nn.ReLU(), nn.Flatten(), nn.Linear(12, 4)).eval()


def batches() -> list[Batch]:
    chance = torch.Generator().manual_seed(1)
    whole = Batch(torch.randn(10, 1, 4, 4, generator=chance), torch.arange(10) % 2, torch.arange(10))
    return [whole.take(slice(0, 6)), whole.take(slice(6, 10))]


def ground(seed: int = 0, *, norm: bool = False, training: bool = False) -> LossSurface:
    return LossSurface(MemberModule(net(seed, norm=norm).train(training)), batches(), seed=3)


def state(seed: int, *, norm: bool = False) -> TensorTree:
    found = tensor_tree.clone(net(seed, norm=norm).state_dict())
    if norm:
        found["1.running_mean"] += 0.1 * seed
        found["1.running_var"] *= 1 + seed
    return found


# Directions.


def test_every_filter_of_a_direction_is_as_long_as_the_filter_it_moves() -> None:
    home = ground().origin
    found = random_direction(home, torch.Generator().manual_seed(0))
    for name in ("0.weight", "3.weight"):
        for drawn, weight in zip(found[name], home[name], strict=True):
            assert float(drawn.norm()) == pytest.approx(float(weight.norm()), rel=1e-5)
            assert abs(float(F.cosine_similarity(drawn.flatten(), weight.flatten(), dim=0))) < 0.99


def test_biases_and_normalisation_stay_still_unless_they_are_told_to_move() -> None:
    home = ground(norm=True).origin
    still = random_direction(home, torch.Generator().manual_seed(0))
    moving = random_direction(home, torch.Generator().manual_seed(0), vectors="move")
    for name in ("0.bias", "1.weight", "1.bias"):
        assert not still[name].any()
        assert torch.equal(moving[name].abs(), home[name].abs())
    assert torch.equal(still["0.weight"], moving["0.weight"])


def test_a_filter_of_zeros_stays_zero() -> None:
    home = ground().origin
    home["0.weight"][1] = 0
    assert not random_direction(home, torch.Generator().manual_seed(0))["0.weight"][1].any()


def test_directions_can_be_scaled_by_layer_or_not_at_all() -> None:
    home = ground().origin
    whole = random_direction(home, torch.Generator().manual_seed(0), normalization="layer")
    bare = random_direction(home, torch.Generator().manual_seed(0), normalization="none", vectors="move")
    assert float(whole["3.weight"].norm()) == pytest.approx(float(home["3.weight"].norm()), rel=1e-5)
    assert torch.allclose(whole["3.weight"] / whole["3.weight"].norm(), bare["3.weight"] / bare["3.weight"].norm())
    assert bare["0.bias"].any()


def test_a_direction_depends_on_its_generator_alone(untouched_randomness: None) -> None:
    home = {"0.weight": torch.arange(6.0).view(2, 3)}
    drawn = [random_direction(home, torch.Generator().manual_seed(seed))["0.weight"] for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


# One and two dimensions.


def test_a_slice_of_a_parabola_is_a_parabola() -> None:
    bowl = Bowl(MemberModule(net()), batches())
    along = random_direction(bowl.origin, torch.Generator().manual_seed(0))
    found = evaluate_line(bowl, along, extent=2.0, points=5)
    assert found.at == (-2.0, -1.0, 0.0, 1.0, 2.0)
    a, b, c = (
        float(tensor_tree.dot(*pair)) for pair in ((along, along), (along, bowl.origin), (bowl.origin, bowl.origin))
    )
    wanted = [(c + 2 * t * b + t * t * a) / 2 + 0.5 for t in found.at]
    assert found.losses == pytest.approx(wanted, rel=1e-5)
    spread = torch.tensor([0.0, 1.0] * 5).std() / 10**0.5
    assert found.stderrs == pytest.approx([float(spread)] * 5, rel=1e-5)


def test_the_middle_of_a_slice_is_the_member_and_it_is_left_as_it_was() -> None:
    here = ground(norm=True)
    before = tensor_tree.clone(here.module.state_dict())
    along = random_direction(here.origin, here.generator("slice", 0))
    found = evaluate_line(here, along, points=11)
    assert found.losses[5] == float(here.all_losses().mean())
    assert found.statistics == "own"
    for again in (evaluate_line(here, along, points=3, update_bn=True), evaluate_grid(here, along, along, points=3)):
        assert again.statistics in ("own", "recomputed")
    assert all(torch.equal(tensor, before[name]) for name, tensor in here.module.state_dict().items())


def test_accuracy_is_counted_beside_the_loss() -> None:
    here = ground()
    with torch.no_grad():
        right = [float((here.module(b.x).argmax(-1) == b.y).sum()) for b in here.batches]
    found = evaluate_line(here, random_direction(here.origin, here.generator("slice")), points=3)
    assert found.accuracies[1] == pytest.approx(sum(right) / 10)


def test_mixed_labels_count_as_their_largest_part() -> None:
    here = ground()
    soft = [Batch(b.x, F.one_hot(b.y, 4) * 0.6 + 0.1, b.index) for b in here.batches]
    mixed = LossSurface(here.member, soft)
    along = random_direction(here.origin, here.generator("slice"))
    assert evaluate_line(mixed, along, points=3).accuracies == evaluate_line(here, along, points=3).accuracies


def test_a_surface_has_its_slices_as_rows_and_columns() -> None:
    here = ground()
    x, y = (random_direction(here.origin, here.generator("slice", number)) for number in (0, 1))
    found = evaluate_grid(here, x, y, extent=0.5, points=5)
    assert found.losses[2] == pytest.approx(evaluate_line(here, x, extent=0.5, points=5).losses)
    assert [row[2] for row in found.losses] == pytest.approx(evaluate_line(here, y, extent=0.5, points=5).losses)
    assert found.marks["member"].loss == found.losses[2][2]
    at = found.lowest
    assert at[2] == min(min(row) for row in found.losses)
    assert found.losses[found.y.index(at[1])][found.x.index(at[0])] == at[2]


def test_the_lowest_point_leaves_out_what_is_no_number() -> None:
    nan = float("nan")
    bumpy = LossGrid((0.0, 1.0), (0.0, 1.0), ((nan, 2.0), (1.0, 3.0)), ((0.0,) * 2,) * 2, "none")
    assert bumpy.lowest == (0.0, 1.0, 1.0)


def test_a_line_of_one_point_is_refused() -> None:
    here = ground()
    with pytest.raises(RecipeError, match="at least 2 points"):
        evaluate_line(here, here.origin, points=1)


# Between members.


def test_barriers_by_both_definitions_are_the_closed_forms() -> None:
    at = [0.0, 0.25, 0.5, 0.75, 1.0]
    flat = compute_barrier(at, [1.0, 2.0, 3.0, 4.0, 5.0])  # a slope: nothing rises above the line, 2 above the mean
    assert (flat.above_line, flat.above_mean) == (0.0, 2.0)
    hill = compute_barrier(at, [1.0, 1.0, 4.0, 1.0, 1.0])
    assert (hill.above_line, hill.above_mean) == (3.0, 3.0)
    assert compute_barrier(at, [1.0, 0.5, 0.2, 0.5, 1.0]) == compute_barrier(at, [1.0] * 5)
    broken = compute_barrier(at, [1.0, float("nan"), 1.0, 1.0, 1.0])
    assert broken.above_line != broken.above_line
    assert broken.above_mean != broken.above_mean


def test_a_path_begins_and_ends_at_the_members_and_runs_straight_between() -> None:
    here = ground()
    found = evaluate_path(here, state(0), state(1), points=5)
    for seed, end in ((0, 0), (1, -1)):
        assert found.losses[end] == float(ground(seed).all_losses().mean())
    halfway = {name: (a + state(1)[name]) / 2 for name, a in state(0).items()}
    assert found.losses[2] == pytest.approx(float(here.all_losses(halfway).mean()), rel=1e-6)
    assert found.statistics == "none"


def test_a_path_from_a_member_to_itself_has_no_barrier() -> None:
    found = evaluate_path(ground(), state(0), state(0), points=5)
    assert len(set(found.losses)) == 1
    assert compute_barrier(found.at, found.losses).above_line == 0


@pytest.mark.parametrize("reestimate", [False, True])
def test_statistics_along_a_path_are_mixed_or_taken_anew(reestimate: bool) -> None:
    here = ground(norm=True)
    found = evaluate_path(here, state(0, norm=True), state(1, norm=True), points=3, update_bn=reestimate)
    mixed = {name: (a + state(1, norm=True)[name]) / 2 for name, a in state(0, norm=True).items()}
    twin = net(norm=True)
    twin.load_state_dict({**mixed, "1.num_batches_tracked": torch.tensor(0)})
    if reestimate:
        seen = [twin[0](batch.x) for batch in here.batches]  # type: ignore[index]
        each = [(x.mean((0, 2, 3)), x.var((0, 2, 3))) for x in seen]
        twin[1].running_mean, twin[1].running_var = (sum(part) / 2 for part in zip(*each, strict=True))  # type: ignore[index, union-attr]
    with torch.no_grad():
        losses = torch.cat([F.cross_entropy(twin(b.x), b.y, reduction="none") for b in here.batches])
    assert found.losses[1] == pytest.approx(float(losses.mean()), rel=1e-5)
    assert found.statistics == ("recomputed" if reestimate else "interpolated")


def test_statistics_of_every_batch_are_recorded_as_such_and_nothing_moves() -> None:
    here = ground(norm=True, training=True)
    before = tensor_tree.clone(here.module.state_dict())
    found = evaluate_path(here, state(0, norm=True), state(1, norm=True), points=3)
    assert found.statistics == "batch"
    assert all(torch.equal(tensor, before[name]) for name, tensor in here.module.state_dict().items())


def test_a_plane_goes_through_its_members() -> None:
    here = ground()
    members = {f"member {seed}": state(seed) for seed in (0, 1, 2)}
    found = evaluate_plane(here, members, points=5, margin=0.5)
    apart = [
        [float(tensor_tree.norm(tensor_tree.add(a, b, times=-1.0))) for b in members.values()] for a in members.values()
    ]
    places = [(mark.x, mark.y) for mark in found.marks.values()]
    for i, one in enumerate(places):
        for j, other in enumerate(places):
            distance = ((one[0] - other[0]) ** 2 + (one[1] - other[1]) ** 2) ** 0.5
            assert distance == pytest.approx(apart[i][j], rel=1e-5, abs=1e-6)
    assert [mark.loss for mark in found.marks.values()] == [float(ground(s).all_losses().mean()) for s in (0, 1, 2)]
    assert places[0] == (0.0, 0.0)
    assert places[1][1] == 0.0
    assert found.x[0] < 0 < found.x[-1]


def test_the_loss_in_the_plane_of_a_bowl_is_that_of_a_bowl() -> None:
    bowl = Bowl(MemberModule(net()), batches())
    members = {str(seed): tensor_tree.scale(bowl.origin, 1.0) for seed in range(3)}
    members["1"] = {name: tensor + 1 for name, tensor in bowl.origin.items()}
    members["2"] = {name: tensor * 3 for name, tensor in bowl.origin.items()}
    found = evaluate_plane(bowl, members, points=4)
    # |w|^2 is a paraboloid of curvature one along both axes: second differences are the squared step.
    for values, places in ((found.losses[0], found.x), ([row[0] for row in found.losses], found.y)):
        step = places[1] - places[0]
        assert values[2] - 2 * values[1] + values[0] == pytest.approx(step**2, rel=1e-3)


@pytest.mark.parametrize(
    ("scales", "words"), [((1, 1, 2), "same weights"), ((1, 2, 3), "on one line"), ((1, 2), "three members")]
)
def test_members_that_span_no_plane_are_refused(scales: tuple[int, ...], words: str) -> None:
    here = ground()
    with pytest.raises(RecipeError, match=words):
        evaluate_plane(
            here, {str(number): tensor_tree.scale(here.origin, scale) for number, scale in enumerate(scales)}
        )
