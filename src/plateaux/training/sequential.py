"""Members in turn: each begins when those before it have finished, and sees them, or goes on where the last one ended.

A turn is a job like any other: the plan names the next member only when the one before it has finished, so whatever is
needed of the others lies in the run folder.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from plateaux.config.builders.model import Given, kind_of
from plateaux.config.recipe import Recipe
from plateaux.core.errors import RecipeError, RunError
from plateaux.core.method import Method, Offer, View
from plateaux.core.runtime import FORMATS, autocast
from plateaux.core.types import Batch
from plateaux.storage.run import Run
from plateaux.training.state import Learner, Scaler


def check_turns(recipe: Recipe, method: Method, given: Given) -> None:
    """Refuse what members that go on from each other cannot do."""
    if method.turn != "onward":
        return
    name = recipe.method.name
    if len({kind_of(recipe, number, given) for number in range(recipe.members)}) > 1:
        raise RecipeError(f"members of {name!r} are places on one course: give all of them the same model")
    if recipe.model.sparsity:
        raise RecipeError(f"members of {name!r} are places on one course, but are pruned apart; leave out sparsity")
    if recipe.train.patience is not None:
        raise RecipeError(f"members of {name!r} go on where the last one ended: leave out train.patience")
    if not recipe.schedule:
        warnings.warn(
            f"members of {name!r} end cycles of the learning rate, and this recipe has none: add [[schedule]] with "
            "name = 'cosine' and per = 'step'",
            stacklevel=4,
        )


def beside(
    modules: Sequence[nn.Module], offer: Offer, recipe: Recipe, device: torch.device
) -> Callable[[Batch], Tensor]:
    """Return what members that have finished say of a batch, a row each: as they are, in evaluation mode."""
    for module in modules:
        module.to(device=device, memory_format=FORMATS[recipe.train.memory_format])  # type: ignore[call-overload]
        module.eval()
    views = [View(module, forward=lambda: autocast(recipe.train.precision, device)) for module in modules]

    @torch.no_grad()
    def rows(batch: Batch) -> Tensor:
        return torch.stack([offer(view, batch) for view in views])  # [K, B, ...]

    return rows


@torch.no_grad()
def go_on(learner: Learner, run: Run) -> None:
    """Put a member where the one before it ended: weights, buffers and moments; the rate begins again."""
    before = learner.number - 1
    places = {(epoch, step): name for epoch, step, name in run.progress(before).states}
    name = places.get((run.recipe.train.epochs, 0))
    if name is None:
        raise RunError(
            f"Member {learner.number} goes on where member {before} ended, and that state is not in {run.store.root} "
            'any more. Train with run.keep_resume = "last" where members are to be added later'
        )
    state = run.store.get_state(name)
    for own, kept in ((learner.params, state["params"]), (learner.buffers, state["buffers"])):
        for part, tensor in own.items():
            tensor.copy_(kept[part])
    groups = learner.optimizer.state_dict()["param_groups"]
    learner.optimizer.load_state_dict({"state": state["optimizer"]["state"], "param_groups": groups})
    if learner.scaler is not None:
        learner.scaler = Scaler(**state["scaler"])
