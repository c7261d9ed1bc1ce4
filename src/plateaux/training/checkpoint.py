"""Save and load the training state of a member."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from plateaux.config.builders.model import member_state_dict, shared_param_names
from plateaux.config.recipe import Recipe, diff
from plateaux.core.errors import RunError
from plateaux.training.state import GradScaler, TrainState


def state_dict(state: TrainState) -> dict[str, Any]:
    """Return everything that is needed to resume a member exactly."""
    state.sync_lr()
    scheduler = state.lr_scheduler if state.shared_lr_scheduler is None else state.shared_lr_scheduler.lr_scheduler
    return {
        "params": {name: param.detach() for name, param in state.params.items()},
        "buffers": dict(state.buffers),
        "optimizer": state.optimizer.state_dict(),
        "lr_scheduler": scheduler.state_dict() if scheduler is not None else None,
        "scaler": asdict(state.scaler) if state.scaler is not None else None,
        "average": state.average.state_dict() if state.average is not None else None,
    }


@torch.no_grad()
def load_state_dict(state: TrainState, stored: dict[str, Any]) -> None:
    """Load what `state_dict` returned; a checkpoint of another architecture is an error."""
    _check_same_shapes(state, stored)
    for name, param in state.params.items():
        param.copy_(stored["params"][name])
    _check_masks(state)
    for name, buffer in state.buffers.items():
        buffer.copy_(stored["buffers"][name])
    state.optimizer.load_state_dict(stored["optimizer"])
    if state.lr_scheduler is not None:
        state.lr_scheduler.load_state_dict(stored["lr_scheduler"])
    if state.shared_lr_scheduler is not None:
        state.shared_lr_scheduler.restore(state.optimizer, stored["lr_scheduler"])
    if state.scaler is not None:
        state.scaler = GradScaler(**stored["scaler"])
    if state.average is not None:
        state.average.load_state_dict(stored["average"], next(iter(state.params.values())).device)


def _check_masks(state: TrainState) -> None:
    """Raise an error if weights outside the masks are live: training would set them to zero without a notice."""
    pruned = [name for name, mask in state.masks.items() if bool((state.params[name] * ~mask).any())]
    if pruned:
        raise RunError(
            f"The checkpoint of member {state.number} was pruned by another rule: {pruned[0]} has live weights where "
            "this version prunes. Resume with the version that started the run, or start again with another --out"
        )


def _check_same_shapes(state: TrainState, stored: dict[str, Any]) -> None:
    """Raise RunError if the weights of a checkpoint are not those of the model."""
    for kind, own in (("params", state.params), ("buffers", state.buffers)):
        old = {name: list(tensor.shape) for name, tensor in stored[kind].items()}
        new = {name: list(tensor.shape) for name, tensor in own.items()}
        changes = diff(old, new)
        if changes:
            shown = "\n  ".join([*changes[:10], *([f"... and {len(changes) - 10} more"] if len(changes) > 10 else [])])
            raise RunError(
                f"The checkpoint of member {state.number} belongs to another architecture. Shapes (checkpoint -> "
                f"model):\n  {shown}\nPass the model that the run was started with, or choose another --out"
            )


def member_weights(recipe: Recipe, state: TrainState) -> dict[str, torch.Tensor]:
    """Return the weights that are stored in a member's file: those that it does not share with other members."""
    return member_state_dict(state.module, shared_param_names(recipe, state.module))
