"""Worst-case sharpness by our ascent against the released one: which finds the larger loss, at what cost?

    python studies/apgd_against_released.py runs/deep_ensemble           # every member; about ten minutes each
    python studies/apgd_against_released.py --quick                      # trains a small network first; a minute or two

Both climb from the same weights on the same 20 groups of training samples, for as many steps, at the radii that
`plateaux.loss_landscape.probes.worst_case` takes where none is given. The released form (tests/reference/apgd.py, two
defects mended) steps in delta; ours in delta / |w|. Printed for each norm: the mean over groups of the rise of the
loss, in how many groups ours is at least as large, and how many gradients each has taken.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from reference import apgd

GROUPS, ENOUGH = 20, 15  # ours must be at least as large in the mean and in so many groups
TOLERANCE = 1e-6  # of the rise: what float32 losses leave undecided


def small_run(folder: Path) -> Run:
    """Train a small network on a few hundred images."""
    recipe = plateaux.Recipe.from_dict(
        {
            "members": 1,
            "data": {"name": "cifar10", "limit": 640, "batch_size": 64},
            "model": {"name": "resnet8", "width": 8},
            "optimizer": {"name": "SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 2e-4},
            "train": {"epochs": 8},
            "executor": {"threads": 1},
        }
    )
    return train(recipe, folder)


def grounds(run: Run, samples: int, batch: int, members: Sequence[int] | None) -> Iterator[tuple[int, Counting]]:
    """Yield every finished member with so many of the samples it was trained on."""
    recipe = run.resolved_recipe()
    data = build_data(recipe, NO_COMPONENTS)
    seen = list(eval_batches(recipe, data, data.train, torch.arange(samples), batch_size=batch))
    for number in range(recipe.members) if members is None else members:
        if run.progress(number).weights_source:
            module = load_members(run, data_splits_info(run), [number], NO_COMPONENTS)[0].eval()
            yield number, Counting(MemberModule(module), seen, seed=number)


class Counting(LossSurface):
    """A ground that counts the gradients taken on it."""

    taken = 0

    def gradient(self, batch: Batch, at: TensorTree | None = None) -> tuple[Tensor, TensorTree]:
        self.taken += 1
        return super().gradient(batch, at)


def flat_ground(ground: LossSurface, group: Group) -> tuple[apgd.Looks, apgd.Heights]:
    """Return the loss of a group as functions of flat weights, for the released form."""

    def look(flat: Tensor) -> tuple[float, Tensor]:
        tensor_tree.write(ground.params, unflat(flat, ground.origin))
        loss, found = group_gradient(ground, group)
        return loss, flatted(found)

    def height(flat: Tensor) -> float:
        tensor_tree.write(ground.params, unflat(flat, ground.origin))
        return float(group_losses(ground, group).mean())

    return look, height


def flatted(tree: TensorTree) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tree.values()])


def unflat(flat: Tensor, like: TensorTree) -> TensorTree:
    pieces = flat.split([tensor.numel() for tensor in like.values()])
    return {name: piece.reshape(tensor.shape) for (name, tensor), piece in zip(like.items(), pieces, strict=True)}


@dataclass
class Duel:
    """The rises that the two found, group by group, and the gradients they took for it."""

    gradients: list[int] = field(default_factory=lambda: [0, 0])
    ours: list[float] = field(default_factory=list)
    released: list[float] = field(default_factory=list)

    @property
    def means(self) -> tuple[float, float]:
        return sum(self.ours) / len(self.ours), sum(self.released) / len(self.released)

    @property
    def won(self) -> int:
        return sum(a >= b * (1 - TOLERANCE) for a, b in zip(self.ours, self.released, strict=True))

    @property
    def good(self) -> bool:
        mine, theirs = self.means
        cheap = self.gradients[0] <= self.gradients[1]
        return cheap and mine >= theirs * (1 - TOLERANCE) and self.won >= ENOUGH / GROUPS * len(self.ours)


def duel(ground: Counting, *, norm: Norm, adaptive: bool, radius: float, steps: int, m: int) -> Duel:
    """Let both climb on every group."""
    ball = Ball(radius, norm, perturbation_scale(ground.origin, adaptive=adaptive))
    found = Duel()
    home = flatted(ground.origin)
    with ground.at_params(ground.origin):
        for number, group in enumerate(split_groups(ground.batches, m)):
            ground.taken = 0
            ours = run_apgd(ground, group, ball, steps=steps, generator=ground.generator(number))[0]
            found.gradients[0] += ground.taken
            first, best, taken = apgd.worst(
                home, *flat_ground(ground, group), radius=radius, norm=norm, adaptive=adaptive, steps=steps
            )
            found.gradients[1] += taken
            found.ours.append(ours.best_loss - ours.initial_loss)
            found.released.append(best - first)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--quick", action="store_true", help="small groups; without a run a small network is trained")
    parser.add_argument("--m", type=int, help="samples in a group")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--radius", type=float, nargs="*", default=[], help="radii instead of the usual ones")
    parser.add_argument("--members", type=int, nargs="*", help="only these")
    parser.add_argument("--norm", nargs="*", choices=["l2", "linf"], default=["l2", "linf"])
    options = parser.parse_args()
    if options.run is None and not options.quick:
        parser.error("name a run folder with resnet members, or ask for --quick")
    m = options.m or (16 if options.quick else 128)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        run = Run.open(options.run) if options.run else small_run(Path(scratch) / "run")
        return compare(run, options, m)


def compare(run: Run, options: argparse.Namespace, m: int) -> int:
    """Print a row for every member, norm and radius; return whether ours lost any."""
    lost: list[str] = []
    print("member | norm | adaptive | radius | ours | released | at least as large | gradients, ours and released")
    for number, ground in grounds(run, GROUPS * m, m, options.members):
        for norm, adaptive in ((norm, adaptive) for norm in options.norm for adaptive in (True, False)):
            for radius in options.radius or [RADII[norm, adaptive]]:
                found = duel(ground, norm=norm, adaptive=adaptive, radius=radius, steps=options.steps, m=m)
                row = f"{number} | {norm} | {'yes' if adaptive else 'no'} | {radius:g}"
                mine, theirs = found.means
                counts = f"{found.won} of {len(found.ours)} | {found.gradients[0]} and {found.gradients[1]}"
                print(f"{row} | {mine:.5f} | {theirs:.5f} | {counts}", flush=True)
                lost += [] if found.good else [row]
    print(f"the released form finds more at: {'; '.join(lost)}" if lost else "ours finds at least as much")
    return int(bool(lost))


if __name__ == "__main__":
    raise SystemExit(main())
