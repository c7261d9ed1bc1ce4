"""Sequential training: a member starts when the members before it have finished.

It sees their outputs (`sequential`), or continues from the weights of the previous one (`chained`). Each member is a
job like any other: the plan contains the next member only after the previous one has finished, so everything it needs
from the others is in the run folder.
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
from plateaux.training.loop.state import GradScaler, TrainState


def frozen_outputs(
    modules: Sequence[nn.Module], output: OutputFn, recipe: Recipe, device: torch.device
) -> Callable[[Batch], Tensor]:
    """Return a function that computes the outputs `[K, B, ...]` of finished members in evaluation mode."""
    for module in modules:
        module.to(device=device, memory_format=FORMATS[recipe.train.memory_format])  # type: ignore[call-overload]
        module.eval()
    members = [MemberModule(module, forward=lambda: autocast(recipe.train.precision, device)) for module in modules]

    @torch.no_grad()
    def compute_outputs(batch: Batch) -> Tensor:
        return torch.stack([output(member, batch) for member in members])  # [K, B, ...]

    return compute_outputs


@torch.no_grad()
def warm_start(state: TrainState, run: Run) -> None:
    """Load the final weights, buffers and optimizer moments of the previous member; the schedule starts anew."""
    previous = state.number - 1
    checkpoints = {(epoch, step): name for epoch, step, name in run.progress(previous).checkpoints}
    name = checkpoints.get((run.recipe.train.epochs, 0))
    if name is None:
        raise RunError(
            f"Member {state.number} starts from the final checkpoint of member {previous}, which is not in "
            f'{run.store.root} any more. To add members later, train with run.keep_checkpoints = "last"'
        )
    stored = run.get_state(previous, name)
    for tensors, values in ((state.params, stored["params"]), (state.buffers, stored["buffers"])):
        for part, tensor in tensors.items():
            tensor.copy_(values[part])
    groups = state.optimizer.state_dict()["param_groups"]
    state.optimizer.load_state_dict({"state": stored["optimizer"]["state"], "param_groups": groups})
    if state.scaler is not None:
        state.scaler = GradScaler(**stored["scaler"])
