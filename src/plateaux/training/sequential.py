"""Members in turn: each begins when those before it have finished, and sees them, or goes on where the last one ended.

A turn is a job like any other: the plan names the next member only when the one before it has finished, so whatever is
needed of the others lies in the run folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from plateaux.config.recipe import Recipe
from plateaux.core.errors import RunError
from plateaux.core.member import MemberModule
from plateaux.core.outputs import OutputFn
from plateaux.core.runtime import FORMATS, autocast
from plateaux.core.types import Batch
from plateaux.storage.run import Run
from plateaux.training.state import GradScaler, TrainState


def frozen_outputs(
    modules: Sequence[nn.Module], output: OutputFn, recipe: Recipe, device: torch.device
) -> Callable[[Batch], Tensor]:
    """Return what members that have finished say of a batch, a row each: as they are, in evaluation mode."""
    for module in modules:
        module.to(device=device, memory_format=FORMATS[recipe.train.memory_format])  # type: ignore[call-overload]
        module.eval()
    views = [MemberModule(module, forward=lambda: autocast(recipe.train.precision, device)) for module in modules]

    @torch.no_grad()
    def rows(batch: Batch) -> Tensor:
        return torch.stack([output(view, batch) for view in views])  # [K, B, ...]

    return rows


@torch.no_grad()
def warm_start(learner: TrainState, run: Run) -> None:
    """Put a member where the one before it ended: weights, buffers and moments; the rate begins again."""
    before = learner.number - 1
    places = {(epoch, step): name for epoch, step, name in run.progress(before).checkpoints}
    name = places.get((run.recipe.train.epochs, 0))
    if name is None:
        raise RunError(
            f"Member {learner.number} goes on where member {before} ended, and that state is not in {run.store.root} "
            'any more. Train with run.keep_checkpoints = "last" where members are to be added later'
        )
    state = run.store.get_state(name)
    for own, kept in ((learner.params, state["params"]), (learner.buffers, state["buffers"])):
        for part, tensor in own.items():
            tensor.copy_(kept[part])
    groups = learner.optimizer.state_dict()["param_groups"]
    learner.optimizer.load_state_dict({"state": state["optimizer"]["state"], "param_groups": groups})
    if learner.scaler is not None:
        learner.scaler = GradScaler(**state["scaler"])
