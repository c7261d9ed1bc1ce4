"""Slices, paths, and planes against quadratic losses and slow reference implementations."""

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
    """A surface with the loss |w|^2 / 2 for every sample, independent of the logits."""

    def losses_from_logits(self, logits: Tensor, batch: Batch) -> Tensor:
        height = sum((p.double() ** 2).sum() for p in self.params.values()) / 2
        return (
            torch.as_tensor(height).expand(len(batch)) + batch.y
        )  # labels 0 and 1 give a standard deviation over samples


def net(seed: int = 0, *, norm: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    norm_layers = [nn.BatchNorm2d(3)] if norm else []
    return nn.Sequential(nn.Conv2d(1, 3, 3), *norm_layers, nn.ReLU(), nn.Flatten(), nn.Linear(12, 4)).eval()


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    full = Batch(torch.randn(10, 1, 4, 4, generator=generator), torch.arange(10) % 2, torch.arange(10))
    return [full.take(slice(0, 6)), full.take(slice(6, 10))]


def make_surface(seed: int = 0, *, norm: bool = False, training: bool = False) -> LossSurface:
    return LossSurface(MemberModule(net(seed, norm=norm).train(training)), batches(), seed=3)


def state(seed: int, *, norm: bool = False) -> TensorTree:
    result = tensor_tree.clone(net(seed, norm=norm).state_dict())
    if norm:
        result["1.running_mean"] += 0.1 * seed
        result["1.running_var"] *= 1 + seed
    return result


# Directions.


def test_every_filter_of_a_direction_has_the_norm_of_the_filter_of_the_weights() -> None:
    origin = make_surface().origin
    result = random_direction(origin, torch.Generator().manual_seed(0))
    for name in ("0.weight", "3.weight"):
        for sampled, weight in zip(result[name], origin[name], strict=True):
            assert float(sampled.norm()) == pytest.approx(float(weight.norm()), rel=1e-5)
            assert abs(float(F.cosine_similarity(sampled.flatten(), weight.flatten(), dim=0))) < 0.99


def test_biases_and_normalization_are_fixed() -> None:
    origin = make_surface(norm=True).origin
    fixed = random_direction(origin, torch.Generator().manual_seed(0))
    assert not any(fixed[name].any() for name in ("0.bias", "1.weight", "1.bias"))


def test_a_filter_of_zeros_stays_zero() -> None:
    origin = make_surface().origin
    origin["0.weight"][1] = 0
    assert not random_direction(origin, torch.Generator().manual_seed(0))["0.weight"][1].any()


def test_a_direction_depends_only_on_its_generator(rng_unchanged: None) -> None:
    origin = {"0.weight": torch.arange(6.0).view(2, 3)}
    sampled = [random_direction(origin, torch.Generator().manual_seed(seed))["0.weight"] for seed in (1, 1, 2)]
    assert torch.equal(sampled[0], sampled[1])
    assert not torch.equal(sampled[0], sampled[2])


# One and two dimensions.


def test_a_slice_of_a_parabola_is_a_parabola() -> None:
    surface = Bowl(MemberModule(net()), batches())
    direction = random_direction(surface.origin, torch.Generator().manual_seed(0))
    result = evaluate_line(surface, direction, extent=2.0, points=5)
    assert result.at == (-2.0, -1.0, 0.0, 1.0, 2.0)
    a, b, c = (
        float(tensor_tree.dot(*pair))
        for pair in ((direction, direction), (direction, surface.origin), (surface.origin, surface.origin))
    )
    expected = [(c + 2 * t * b + t * t * a) / 2 + 0.5 for t in result.at]
    assert result.losses == pytest.approx(expected, rel=1e-5)
    spread = torch.tensor([0.0, 1.0] * 5).std() / 10**0.5
    assert result.stderrs == pytest.approx([float(spread)] * 5, rel=1e-5)


def test_the_middle_of_a_slice_is_the_member_and_its_state_is_restored() -> None:
    surface = make_surface(norm=True)
    before = tensor_tree.clone(surface.module.state_dict())
    direction = random_direction(surface.origin, surface.generator("slice", 0))
    result = evaluate_line(surface, direction, points=11)
    assert result.losses[5] == float(surface.all_losses().mean())
    assert result.statistics == "own"
    assert evaluate_grid(surface, direction, direction, points=3).statistics == "own"
    assert all(torch.equal(tensor, before[name]) for name, tensor in surface.module.state_dict().items())


def test_accuracy_is_computed_with_the_loss() -> None:
    surface = make_surface()
    with torch.no_grad():
        right = [float((surface.module(b.x).argmax(-1) == b.y).sum()) for b in surface.batches]
    result = evaluate_line(surface, random_direction(surface.origin, surface.generator("slice")), points=3)
    assert result.accuracies[1] == pytest.approx(sum(right) / 10)


def test_accuracy_of_soft_labels_uses_the_largest_entry() -> None:
    surface = make_surface()
    soft = [Batch(b.x, F.one_hot(b.y, 4) * 0.6 + 0.1, b.index) for b in surface.batches]
    mixed = LossSurface(surface.member, soft)
    direction = random_direction(surface.origin, surface.generator("slice"))
    assert (
        evaluate_line(mixed, direction, points=3).accuracies == evaluate_line(surface, direction, points=3).accuracies
    )


def test_rows_and_columns_of_a_grid_are_slices() -> None:
    surface = make_surface()
    x, y = (random_direction(surface.origin, surface.generator("slice", number)) for number in (0, 1))
    result = evaluate_grid(surface, x, y, extent=0.5, points=5)
    assert result.losses[2] == pytest.approx(evaluate_line(surface, x, extent=0.5, points=5).losses)
    assert [row[2] for row in result.losses] == pytest.approx(evaluate_line(surface, y, extent=0.5, points=5).losses)
    assert result.marks["member"].loss == result.losses[2][2]
    at = result.lowest
    assert at[2] == min(min(row) for row in result.losses)
    assert result.losses[result.y.index(at[1])][result.x.index(at[0])] == at[2]


def test_the_lowest_point_ignores_nan() -> None:
    nan = float("nan")
    grid = LossGrid((0.0, 1.0), (0.0, 1.0), ((nan, 2.0), (1.0, 3.0)), ((0.0,) * 2,) * 2, "none")
    assert grid.lowest == (0.0, 1.0, 1.0)


def test_a_line_of_one_point_is_rejected() -> None:
    surface = make_surface()
    with pytest.raises(RecipeError, match="at least 2 points"):
        evaluate_line(surface, surface.origin, points=1)


# Between members.


def test_barriers_by_both_definitions_equal_the_closed_forms() -> None:
    at = [0.0, 0.25, 0.5, 0.75, 1.0]
    flat = compute_barrier(at, [1.0, 2.0, 3.0, 4.0, 5.0])  # linear: 0 above the line, 2 above the mean
    assert (flat.above_line, flat.above_mean) == (0.0, 2.0)
    peak_in_the_middle = compute_barrier(at, [1.0, 1.0, 4.0, 1.0, 1.0])
    assert (peak_in_the_middle.above_line, peak_in_the_middle.above_mean) == (3.0, 3.0)
    assert compute_barrier(at, [1.0, 0.5, 0.2, 0.5, 1.0]) == compute_barrier(at, [1.0] * 5)
    with_nan = compute_barrier(at, [1.0, float("nan"), 1.0, 1.0, 1.0])
    assert with_nan.above_line != with_nan.above_line
    assert with_nan.above_mean != with_nan.above_mean


def test_a_path_is_the_straight_line_between_two_members() -> None:
    surface = make_surface()
    result = evaluate_path(surface, state(0), state(1), points=5)
    for seed, end in ((0, 0), (1, -1)):
        assert result.losses[end] == float(make_surface(seed).all_losses().mean())
    halfway = {name: (a + state(1)[name]) / 2 for name, a in state(0).items()}
    assert result.losses[2] == pytest.approx(float(surface.all_losses(halfway).mean()), rel=1e-6)
    assert result.statistics == "none"


def test_a_path_from_a_member_to_itself_has_no_barrier() -> None:
    result = evaluate_path(make_surface(), state(0), state(0), points=5)
    assert len(set(result.losses)) == 1
    assert compute_barrier(result.at, result.losses).above_line == 0


def test_batchnorm_statistics_along_a_path_are_recomputed() -> None:
    surface = make_surface(norm=True)
    result = evaluate_path(surface, state(0, norm=True), state(1, norm=True), points=3)
    mixed = {name: (a + state(1, norm=True)[name]) / 2 for name, a in state(0, norm=True).items()}
    reference = net(norm=True)
    reference.load_state_dict({**mixed, "1.num_batches_tracked": torch.tensor(0)})
    activations = [reference[0](batch.x) for batch in surface.batches]  # type: ignore[index]
    item = [(x.mean((0, 2, 3)), x.var((0, 2, 3))) for x in activations]
    reference[1].running_mean, reference[1].running_var = (sum(part) / 2 for part in zip(*item, strict=True))  # type: ignore[index, union-attr]
    with torch.no_grad():
        losses = torch.cat([F.cross_entropy(reference(b.x), b.y, reduction="none") for b in surface.batches])
    assert result.losses[1] == pytest.approx(float(losses.mean()), rel=1e-5)
    assert result.statistics == "recomputed"


def test_batch_statistics_are_recorded_and_the_state_is_restored() -> None:
    surface = make_surface(norm=True, training=True)
    before = tensor_tree.clone(surface.module.state_dict())
    result = evaluate_path(surface, state(0, norm=True), state(1, norm=True), points=3)
    assert result.statistics == "batch"
    assert all(torch.equal(tensor, before[name]) for name, tensor in surface.module.state_dict().items())


def test_a_plane_goes_through_its_members() -> None:
    surface = make_surface()
    members = {f"member {seed}": state(seed) for seed in (0, 1, 2)}
    result = evaluate_plane(surface, members, points=5, margin=0.5)
    distances = [
        [float(tensor_tree.norm(tensor_tree.add(a, b, times=-1.0))) for b in members.values()] for a in members.values()
    ]
    positions = [(mark.x, mark.y) for mark in result.marks.values()]
    for i, one in enumerate(positions):
        for j, other in enumerate(positions):
            distance = ((one[0] - other[0]) ** 2 + (one[1] - other[1]) ** 2) ** 0.5
            assert distance == pytest.approx(distances[i][j], rel=1e-5, abs=1e-6)
    assert [mark.loss for mark in result.marks.values()] == [
        float(make_surface(s).all_losses().mean()) for s in (0, 1, 2)
    ]
    assert positions[0] == (0.0, 0.0)
    assert positions[1][1] == 0.0
    assert result.x[0] < 0 < result.x[-1]


def test_the_loss_of_a_quadratic_is_quadratic_in_the_plane() -> None:
    surface = Bowl(MemberModule(net()), batches())
    members = {str(seed): tensor_tree.scale(surface.origin, 1.0) for seed in range(3)}
    members["1"] = {name: tensor + 1 for name, tensor in surface.origin.items()}
    members["2"] = {name: tensor * 3 for name, tensor in surface.origin.items()}
    result = evaluate_plane(surface, members, points=4)
    # |w|^2 is a paraboloid of curvature one along both axes: second differences are the squared step.
    for values, positions in ((result.losses[0], result.x), ([row[0] for row in result.losses], result.y)):
        step = positions[1] - positions[0]
        assert values[2] - 2 * values[1] + values[0] == pytest.approx(step**2, rel=1e-3)


@pytest.mark.parametrize(
    ("scales", "message"), [((1, 1, 2), "same weights"), ((1, 2, 3), "on one line"), ((1, 2), "three members")]
)
def test_members_that_define_no_plane_are_rejected(scales: tuple[int, ...], message: str) -> None:
    surface = make_surface()
    with pytest.raises(RecipeError, match=message):
        evaluate_plane(
            surface, {str(number): tensor_tree.scale(surface.origin, scale) for number, scale in enumerate(scales)}
        )
