"""Save and load the training state of a member."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from plateaux.config.builders.model import member_state_dict, shared_param_names
from plateaux.config.recipe import Recipe
from plateaux.training.state import GradScaler, TrainState


def state_dict(learner: TrainState) -> dict[str, Any]:
    """Return all that a member needs to go on exactly as if nothing had happened."""
    learner.sync_lr()
    schedule = learner.lr_scheduler if learner.shared_lr_scheduler is None else learner.shared_lr_scheduler.lr_scheduler
    return {
        "params": {name: param.detach() for name, param in learner.params.items()},
        "buffers": dict(learner.buffers),
        "optimizer": learner.optimizer.state_dict(),
        "lr_scheduler": schedule.state_dict() if schedule is not None else None,
        "scaler": asdict(learner.scaler) if learner.scaler is not None else None,
        "average": learner.average.state_dict() if learner.average is not None else None,
    }


@torch.no_grad()
def load_state_dict(learner: TrainState, state: dict[str, Any]) -> None:
    """Put a member back to where `state_of` saw it."""
    for name, param in learner.params.items():
        param.copy_(state["params"][name])
    for name, buffer in learner.buffers.items():
        buffer.copy_(state["buffers"][name])
    learner.optimizer.load_state_dict(state["optimizer"])
    if learner.lr_scheduler is not None:
        learner.lr_scheduler.load_state_dict(state["lr_scheduler"])
    if learner.shared_lr_scheduler is not None:
        learner.shared_lr_scheduler.return_to(learner.optimizer, state["lr_scheduler"])
    if learner.scaler is not None:
        learner.scaler = GradScaler(**state["scaler"])
    if learner.average is not None:
        learner.average.load_state_dict(state["average"], next(iter(learner.params.values())).device)


def member_weights(recipe: Recipe, learner: TrainState) -> dict[str, torch.Tensor]:
    """Return the weights a member's file holds."""
    return member_state_dict(learner.module, shared_param_names(recipe, learner.module))
