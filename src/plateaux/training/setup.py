"""Members made ready to learn: built from a recipe, put back to where a checkpoint left them, parked on disk."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from plateaux.config.builders.model import architecture_hash, build_members, shared_param_names
from plateaux.config.builders.training import build_lr_scheduler, build_method, build_optimizer
from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.recipe import Recipe
from plateaux.config.schema import member_value
from plateaux.core.errors import RecipeError
from plateaux.core.executor import Executor
from plateaux.core.member import pruning_masks
from plateaux.core.outputs import supports_vmap
from plateaux.core.runtime import FORMATS
from plateaux.core.types import TensorTree
from plateaux.data.sources import DataSplits
from plateaux.models.surgery import dropout_layers
from plateaux.optim.weight_averaging import AveragedWeights
from plateaux.training.state import GradScaler, SharedLRScheduler, TrainState


def build_train_states(
    recipe: Recipe,
    data: DataSplits,
    numbers: Sequence[int],
    executor: Executor,
    *,
    device: torch.device,
    steps: int,
    components: Components = NO_COMPONENTS,
) -> list[TrainState]:
    """Return some members as they are before their first step."""
    modules = build_members(recipe, data, numbers, components)
    paces: dict[str, SharedLRScheduler] = {}
    return [
        _build_train_state(
            recipe, number, module, executor, device=device, steps=steps, components=components, paces=paces
        )
        for number, module in zip(numbers, modules, strict=True)
    ]


def shared_lr_schedulers(learners: Sequence[TrainState]) -> tuple[SharedLRScheduler, ...]:
    """Return the schedules that learners keep together, each once."""
    return tuple(
        {
            id(each.shared_lr_scheduler): each.shared_lr_scheduler
            for each in learners
            if each.shared_lr_scheduler is not None
        }.values()
    )


def _build_train_state(
    recipe: Recipe,
    number: int,
    module: nn.Module,
    executor: Executor,
    *,
    device: torch.device,
    steps: int,
    components: Components,
    paces: dict[str, SharedLRScheduler],
) -> TrainState:
    own_part = recipe.for_member(number).optimizer
    shared = shared_param_names(recipe, module)
    executor.setup_module(module)
    module.to(device=device, memory_format=FORMATS[recipe.train.memory_format])  # type: ignore[call-overload]
    module.train()
    method = build_method(recipe, number, components)
    if recipe.executor.mode == "vmap":
        _refuse_under_vmap(recipe, module)
        if not supports_vmap(method.objective.output):
            warnings.warn(
                f"what members of {recipe.method.name!r} offer cannot be stacked: they are looped", stacklevel=2
            )
    params: TensorTree = {n: p for n, p in module.named_parameters() if p.requires_grad and n not in shared}
    zeros = pruning_masks(module)
    buffers = {n: b for n, b in module.named_buffers() if n not in shared and n.removesuffix("_mask") not in zeros}
    optimizer = build_optimizer(recipe, number, params)
    pace = (
        None
        if method.objective.active is None
        else _build_lr_scheduler(recipe, number, params, optimizer, steps, paces)
    )
    schedule, every_step = build_lr_scheduler(recipe, optimizer, steps) if pace is None else (None, False)
    return TrainState(
        number=number,
        module=module,
        method=method,
        optimizer=optimizer,
        params=params,
        buffers=buffers,
        peak_lr=float(member_value("optimizer.lr", own_part.lr, number, recipe.members)),
        architecture=architecture_hash(recipe, number, components),
        lr_scheduler=schedule,
        every_step=every_step,
        shared_lr_scheduler=pace,
        masks={name: mask for name, mask in zeros.items() if name in params},
        max_grad_norm=member_value("optimizer.max_grad_norm", own_part.max_grad_norm, number, recipe.members),
        call=torch.compile(module) if recipe.train.compile and recipe.executor.mode != "vmap" else None,
        scaler=GradScaler() if recipe.train.precision == "fp16" else None,
        average=None if recipe.train.swa_start is None else AveragedWeights(recipe.train.swa_start),
    )


def _build_lr_scheduler(
    recipe: Recipe,
    number: int,
    params: TensorTree,
    optimizer: torch.optim.Optimizer,
    steps: int,
    known: dict[str, SharedLRScheduler],
) -> SharedLRScheduler | None:
    """Return the schedule of all members with the same rates to begin with."""
    if not recipe.lr_scheduler:
        return None
    rates = repr([{name: v for name, v in group.items() if name != "params"} for group in optimizer.param_groups])
    if rates not in known:
        stand_ins = {name: nn.Parameter(torch.zeros([1] * param.ndim)) for name, param in params.items()}
        leader = build_optimizer(recipe, number, dict(stand_ins))
        known[rates] = SharedLRScheduler(leader, *build_lr_scheduler(recipe, leader, steps))
    return known[rates]


def _refuse_under_vmap(recipe: Recipe, module: nn.Module) -> None:
    dropping = dropout_layers(module)
    if dropping and recipe.train.randomness == "error":
        raise RecipeError(
            f"vmap cannot give every member its own dropout exactly as a loop does ({', '.join(dropping[:3])}). "
            'Set executor.mode = "loop", or train.randomness = "different" to have it inexactly'
        )
    if recipe.train.precision in ("bf16", "fp16"):
        raise RecipeError(
            f"vmap does not run under autocast ({recipe.train.precision}); "
            'set executor.mode = "loop", or train.precision = "fp32"'
        )
