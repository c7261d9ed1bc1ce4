"""What SAM calls sharpness: at random places a little way off, and one step up the slope."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from plateaux.core import tensor_tree
from plateaux.core.errors import RecipeError, suggest
from plateaux.core.registry import probe
from plateaux.core.stats.estimates import mean_of_independent
from plateaux.core.types import Estimate, TensorTree
from plateaux.loss_landscape import perturbations
from plateaux.loss_landscape.groups import REMAINDER, Group, group_gradient, group_losses, num_grouped, split_groups
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.probe import Probe

Direction = Literal["sphere", "gaussian", "filter"]

DIRECTIONS = {
    "sphere": "u uniform on the unit sphere",
    "gaussian": "u of independent N(0, 1)",
    "filter": "u Gaussian, every filter scaled to the length of that filter of the weights, vectors left alone",
}


@probe
def sam_sharpness(
    *, rho: float = 0.005, directions: int = 100, direction: Direction = "sphere", samples: int = 1024
) -> Probe:
    """SAM-sharpness: the mean difference of the loss at random places rho away (100 of them at .005).

    `sphere`: unit directions. `gaussian`: every weight gets rho N(0, 1). `filter`: directions as long, filter by
    filter, as the weights. Also the standard deviation over places, and the largest difference; all signed.
    """
    if direction not in get_args(Direction):
        raise RecipeError(f"There is no direction {direction!r}; {suggest(direction, get_args(Direction))}")
    perturbations.check_options(lengths={"rho": rho}, counts={"directions": directions, "samples": samples})

    def ask(ground: LossSurface) -> dict[str, Estimate]:
        home = ground.all_losses()
        sums, largest = torch.zeros_like(home), home
        means: list[Tensor] = []
        with ground.at_params(ground.origin):
            for number in range(directions):
                way, times = _away(ground.origin, ground.generator("sam_sharpness", number), direction)
                perturbations.perturb(ground, way, times=rho * times)
                rise = ground.all_losses() - home
                largest = rise if not means or rise.mean() > max(means) else largest
                means.append(rise.mean())
                sums += rise
        return _reported(sums / directions, torch.stack(means), largest)

    return Probe(
        ask,
        passes=lambda given: (directions + 1) / 3 * given,
        samples=samples,
        definition=f"mean over {directions} places of L(w + {rho:g} u) - L(w), {DIRECTIONS[direction]}; signed; "
        "errors over "
        "samples and over places; float64 sums",
    )


def _away(home: TensorTree, chance: torch.Generator, direction: Direction) -> tuple[TensorTree, float]:
    """Return a direction, and what to multiply it by."""
    way = perturbations.sample_direction(home, chance)
    if direction == "sphere":
        return way, 1 / float(tensor_tree.norm(way))
    return (way if direction == "gaussian" else {name: _filters(way[name], home[name]) for name in way}), 1.0


def _filters(way: Tensor, weights: Tensor) -> Tensor:
    """Return a direction as long, filter by filter, as the weights; biases and scales stay."""
    return torch.zeros_like(way) if weights.ndim < 2 else perturbations.normalize_filters(way, weights)


def _reported(each: Tensor, means: Tensor, largest: Tensor) -> dict[str, Estimate]:
    """Return the numbers of the samples' means over places, of the places' means, and of the largest place."""
    whole, most = mean_of_independent(each.tolist()), mean_of_independent(largest.tolist())
    if len(means) < 2:
        return {"": whole, "largest": most}
    deviation = float(means.std())
    return {
        "": Estimate(whole.value, whole.stderr, deviation / len(means) ** 0.5),
        "deviation": Estimate(deviation),
        "largest": most,
    }


@probe
def sam_step(
    *, rho: float = 0.05, adaptive: bool = False, m: int = 128, samples: int = 1024, eta: float = 0.0
) -> Probe:
    """One-step SAM sharpness: the rise of a group's loss at the point rho up its own slope, where SAM descends from.

    The point is w + rho g / |g|, or with T = |w| + eta, w + rho T^2 g / |T g| where adaptive. Beside it what the slope
    alone promises, rho |g| or rho |T g|.
    """
    perturbations.check_options(lengths={"rho": rho, "eta": eta}, counts={"m": m, "samples": samples})

    def ask(ground: LossSurface) -> dict[str, Estimate]:
        scale = perturbations.perturbation_scale(ground.origin, adaptive=adaptive, eta=eta)
        with ground.at_params(ground.origin):
            found = [_stepped(ground, group, scale, rho) for group in split_groups(ground.batches, m)]
        return {
            "": mean_of_independent([rise for rise, _ in found]),
            "first order": mean_of_independent([slope for _, slope in found]),
        }

    return Probe(
        ask,
        passes=lambda given: 4 / 3 * num_grouped(given, m),
        samples=samples,
        scale_invariant=adaptive and not eta,
        definition=f"one step of length {rho:g}{' in delta / |w|' * adaptive} along each group's own gradient; mean "
        f"over groups of {m} samples, error over groups, {REMAINDER}; "
        "first order: rho times the length of the gradient",
    )


def _stepped(ground: LossSurface, group: Group, scale: TensorTree | None, rho: float) -> tuple[float, float]:
    """Return how much the loss rises in one step, and what the gradient promised."""
    tensor_tree.write(ground.params, ground.origin)
    home, way = group_gradient(ground, group)
    if scale is not None:
        tensor_tree.multiply_(way, scale)
    length = float(tensor_tree.norm(way))
    if rho * length == 0:
        return 0.0, 0.0
    perturbations.perturb(ground, way, scale=scale, times=rho / length)
    return float(group_losses(ground, group).mean()) - home, rho * length
