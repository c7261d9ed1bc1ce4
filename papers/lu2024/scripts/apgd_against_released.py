# A record, not run at HEAD. It ran at commit c1a6729de43f: `git checkout c1a6729de43f`, then `python studies/apgd_against_released.py`.
"""Compare the worst-case sharpness found by our APGD and by the released APGD, and the number of gradients.

    python studies/apgd_against_released.py runs/deep_ensemble           # every member; about ten minutes each
    python studies/apgd_against_released.py --quick                      # trains a small network first; 1-2 minutes

Both start from the same weights on the same 20 groups of training samples, with the same number of steps and the
default radii of `plateaux.loss_landscape.probes.worst_case`. The released algorithm (studies/_released_apgd.py, with
two defects fixed) steps in delta; ours in delta / |w|. The output has for each norm: the mean over groups of the loss
increase, in how many groups ours is at least as large, and the number of gradients of each.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import _released_apgd as released_apgd
import torch
from torch import Tensor

import plateaux
from plateaux.config.builders.data import build_data, eval_batches
from plateaux.config.components import NO_COMPONENTS
from plateaux.core import tensor_tree
from plateaux.core.member import MemberModule
from plateaux.core.types import Batch, TensorTree
from plateaux.evaluation.loading import data_splits_info, load_members
from plateaux.loss_landscape.apgd import Ball, Norm, run_apgd
from plateaux.loss_landscape.groups import Group, group_gradient, group_losses, split_groups
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.perturbations import perturbation_scale
from plateaux.loss_landscape.probes.worst_case import RADII
from plateaux.storage.run import Run
from plateaux.training.train import train

GROUPS, MIN_WINS = 20, 15  # ours must be at least as large in the mean and in this many groups
TOLERANCE = 1e-6  # relative, of the loss increase: the resolution of float32 losses


def small_run(folder: Path) -> Run:
    """Train a small network on a few hundred images."""
    recipe = plateaux.Recipe.from_dict(
        {
            "members": 1,
            "data": {"name": "cifar10", "limit": 640, "batch_size": 64},
            "model": {"name": "resnet8", "width": 4},
            "optimizer": {"name": "SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 2e-4},
            "train": {"epochs": 8},
            "executor": {"threads": 1},
        }
    )
    return train(recipe, folder)


def loss_surfaces(
    run: Run, samples: int, batch_size: int, members: Sequence[int] | None
) -> Iterator[tuple[int, CountingSurface]]:
    """Yield the loss surface of every finished member on the first `samples` training samples."""
    recipe = run.resolved_recipe()
    data = build_data(recipe, NO_COMPONENTS)
    batches = list(eval_batches(recipe, data, data.train, torch.arange(samples), batch_size=batch_size))
    for member in range(recipe.members) if members is None else members:
        if run.progress(member).weights_source:
            module = load_members(run, data_splits_info(run), [member], NO_COMPONENTS)[0].eval()
            yield member, CountingSurface(MemberModule(module), batches, seed=member)


class CountingSurface(LossSurface):
    """A loss surface that counts gradients."""

    num_gradients = 0

    def gradient(self, batch: Batch, at: TensorTree | None = None) -> tuple[Tensor, TensorTree]:
        self.num_gradients += 1
        return super().gradient(batch, at)


def flat_loss(surface: LossSurface, group: Group) -> tuple[released_apgd.LossAndGradFn, released_apgd.FlatLossFn]:
    """Return the loss of a group as functions of flat weights, for the released algorithm."""

    def loss_and_grad(flat: Tensor) -> tuple[float, Tensor]:
        tensor_tree.write(surface.params, unflatten(flat, surface.origin))
        loss, gradient = group_gradient(surface, group)
        return loss, flatten(gradient)

    def loss_fn(flat: Tensor) -> float:
        tensor_tree.write(surface.params, unflatten(flat, surface.origin))
        return float(group_losses(surface, group).mean())

    return loss_and_grad, loss_fn


def flatten(tree: TensorTree) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tree.values()])


def unflatten(flat: Tensor, like: TensorTree) -> TensorTree:
    pieces = flat.split([tensor.numel() for tensor in like.values()])
    return {name: piece.reshape(tensor.shape) for (name, tensor), piece in zip(like.items(), pieces, strict=True)}


@dataclass
class Comparison:
    """The loss increases found by both algorithms per group, and their numbers of gradients."""

    gradients: list[int] = field(default_factory=lambda: [0, 0])
    ours: list[float] = field(default_factory=list)
    released: list[float] = field(default_factory=list)

    @property
    def means(self) -> tuple[float, float]:
        return sum(self.ours) / len(self.ours), sum(self.released) / len(self.released)

    @property
    def wins(self) -> int:
        return sum(a >= b * (1 - TOLERANCE) for a, b in zip(self.ours, self.released, strict=True))

    @property
    def is_as_good(self) -> bool:
        ours, released = self.means
        is_cheaper = self.gradients[0] <= self.gradients[1]
        return is_cheaper and ours >= released * (1 - TOLERANCE) and self.wins >= MIN_WINS / GROUPS * len(self.ours)


def run_both(surface: CountingSurface, *, norm: Norm, adaptive: bool, radius: float, steps: int, m: int) -> Comparison:
    """Run both algorithms on every group."""
    ball = Ball(radius, norm, perturbation_scale(surface.origin, adaptive=adaptive))
    comparison = Comparison()
    origin = flatten(surface.origin)
    with surface.at_params(surface.origin):
        for i, group in enumerate(split_groups(surface.batches, m)):
            surface.num_gradients = 0
            ours = run_apgd(surface, group, ball, steps=steps, generator=surface.generator(i))[0]
            comparison.gradients[0] += surface.num_gradients
            initial, best, num_gradients = released_apgd.maximize_loss(
                origin, *flat_loss(surface, group), radius=radius, norm=norm, adaptive=adaptive, steps=steps
            )
            comparison.gradients[1] += num_gradients
            comparison.ours.append(ours.best_loss - ours.initial_loss)
            comparison.released.append(best - initial)
    return comparison


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--quick", action="store_true", help="small groups; without a run, a small network is trained")
    parser.add_argument("--m", type=int, help="samples per group")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--radius", type=float, nargs="*", default=[], help="radii (default: those of the probe)")
    parser.add_argument("--members", type=int, nargs="*", help="members to compare (default: all)")
    parser.add_argument("--norm", nargs="*", choices=["l2", "linf"], default=["l2", "linf"])
    options = parser.parse_args()
    if options.run is None and not options.quick:
        parser.error("pass a run folder with resnet members, or --quick")
    m = options.m or (16 if options.quick else 128)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        run = Run.open(options.run) if options.run else small_run(Path(scratch) / "run")
        return compare(run, options, m)


def compare(run: Run, options: argparse.Namespace, m: int) -> int:
    """Print a row for every member, norm, and radius; return 1 if ours is worse in any."""
    worse: list[str] = []
    print("member | norm | adaptive | radius | ours | released | at least as large | gradients, ours and released")
    for member, surface in loss_surfaces(run, GROUPS * m, m, options.members):
        for norm, adaptive in ((norm, adaptive) for norm in options.norm for adaptive in (True, False)):
            for radius in options.radius or [RADII[norm, adaptive]]:
                result = run_both(surface, norm=norm, adaptive=adaptive, radius=radius, steps=options.steps, m=m)
                row = f"{member} | {norm} | {'yes' if adaptive else 'no'} | {radius:g}"
                ours, released = result.means
                counts = f"{result.wins} of {len(result.ours)} | {result.gradients[0]} and {result.gradients[1]}"
                print(f"{row} | {ours:.5f} | {released:.5f} | {counts}", flush=True)
                worse += [] if result.is_as_good else [row]
    print(f"the released algorithm finds more at: {'; '.join(worse)}" if worse else "ours finds at least as much")
    return int(bool(worse))


if __name__ == "__main__":
    raise SystemExit(main())
