"""Build the training state of members from a recipe."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from plateaux.config.builders.model import architecture_hash, build_members, shared_param_names
from plateaux.config.builders.training import build_lr_scheduler, build_optimizer
from plateaux.config.experiment import Experiment
from plateaux.config.recipe import Recipe
from plateaux.config.schema import member_value
from plateaux.core.errors import RecipeError
from plateaux.core.executor import Collectives
from plateaux.core.member import pruning_masks
from plateaux.core.outputs import supports_vmap
from plateaux.core.runtime import FORMATS, param_dtype
from plateaux.core.types import TensorTree
from plateaux.data.sources import DataSplits
from plateaux.models.backbone import Backbone
from plateaux.models.surgery import dropout_layers
from plateaux.optim.weight_averaging import AveragedWeights
from plateaux.storage.feature_cache import FeatureSource
from plateaux.training.loop.state import GradScaler, SharedLRScheduler, TrainState


def build_train_states(
    experiment: Experiment,
    data: DataSplits,
    numbers: Sequence[int],
    executor: Collectives,
    *,
    device: torch.device,
    steps: int,
) -> list[TrainState]:
    """Return the training states of members before their first step."""
    recipe, components = experiment.recipe, experiment.components
    backbone = _cached_backbone(recipe, data, executor, device)
    modules = build_members(recipe, data, numbers, components, backbone=backbone)
    shared_schedulers: dict[str, SharedLRScheduler] = {}
    return [
        _build_train_state(
            experiment,
            number,
            module,
            executor,
            device=device,
            steps=steps,
            shared_schedulers=shared_schedulers,
        )
        for number, module in zip(numbers, modules, strict=True)
    ]


def _cached_backbone(recipe: Recipe, data: DataSplits, executor: Collectives, device: torch.device) -> Backbone | None:
    """Return the backbone of the feature cache if the members can use it too, so that a process holds it once.

    Members of another dtype or on another device need a copy; LoRA and synchronized BatchNorm change their backbone.
    """
    if not isinstance(data.train, FeatureSource) or recipe.model.lora is not None or executor.data_size > 1:
        return None
    is_same = param_dtype(recipe.train.precision) == torch.float32 and data.train.spec.device == device
    return data.train.backbone if is_same else None


def shared_lr_schedulers(states: Sequence[TrainState]) -> tuple[SharedLRScheduler, ...]:
    """Return the learning-rate schedules that members share, each once."""
    schedulers = [state.shared_lr_scheduler for state in states if state.shared_lr_scheduler is not None]
    return tuple({id(scheduler): scheduler for scheduler in schedulers}.values())


def _build_train_state(
    experiment: Experiment,
    number: int,
    module: nn.Module,
    executor: Collectives,
    *,
    device: torch.device,
    steps: int,
    shared_schedulers: dict[str, SharedLRScheduler],
) -> TrainState:
    recipe = experiment.recipe
    config = recipe.for_member(number).optimizer
    shared_names = shared_param_names(recipe, module)
    executor.setup_module(module)
    module.to(device=device, memory_format=FORMATS[recipe.train.memory_format])  # type: ignore[call-overload]
    module.train()
    method = experiment.method(number)
    if recipe.executor.mode == "vmap":
        _check_vmap(recipe, module)
        if not supports_vmap(method.objective.output):
            warnings.warn(
                f"Outputs of method {recipe.method.name!r} do not support vmap. Falling back to a loop", stacklevel=2
            )
    params: TensorTree = {n: p for n, p in module.named_parameters() if p.requires_grad and n not in shared_names}
    masks = pruning_masks(module)
    buffers = {
        name: buffer
        for name, buffer in module.named_buffers()
        if name not in shared_names and name.removesuffix("_mask") not in masks
    }
    optimizer = build_optimizer(recipe, number, params)
    shared_scheduler = None
    if method.objective.active is not None:
        shared_scheduler = _get_shared_scheduler(recipe, number, params, optimizer, steps, shared_schedulers)
    scheduler, every_step = None, False
    if shared_scheduler is None:
        scheduler, every_step = build_lr_scheduler(recipe, optimizer, steps)
    return TrainState(
        number=number,
        module=module,
        method=method,
        optimizer=optimizer,
        params=params,
        buffers=buffers,
        peak_lr=float(member_value("optimizer.lr", config.lr, number, recipe.members)),
        architecture=architecture_hash(recipe, number, experiment.components),
        lr_scheduler=scheduler,
        every_step=every_step,
        shared_lr_scheduler=shared_scheduler,
        masks={name: mask for name, mask in masks.items() if name in params},
        max_grad_norm=member_value("optimizer.max_grad_norm", config.max_grad_norm, number, recipe.members),
        call=torch.compile(module) if recipe.train.compile and recipe.executor.mode != "vmap" else None,
        scaler=GradScaler() if recipe.train.precision == "fp16" else None,
        average=None if recipe.train.swa_start is None else AveragedWeights(recipe.train.swa_start),
    )


def _get_shared_scheduler(
    recipe: Recipe,
    number: int,
    params: TensorTree,
    optimizer: torch.optim.Optimizer,
    steps: int,
    known: dict[str, SharedLRScheduler],
) -> SharedLRScheduler | None:
    """Return the schedule that all members with the same initial hyperparameters share; build it once."""
    if not recipe.lr_scheduler:
        return None
    key = repr([{name: v for name, v in group.items() if name != "params"} for group in optimizer.param_groups])
    if key not in known:
        placeholders = {name: nn.Parameter(torch.zeros([1] * param.ndim)) for name, param in params.items()}
        placeholder_optimizer = build_optimizer(recipe, number, dict(placeholders))
        known[key] = SharedLRScheduler(placeholder_optimizer, *build_lr_scheduler(recipe, placeholder_optimizer, steps))
    return known[key]


def _check_vmap(recipe: Recipe, module: nn.Module) -> None:
    """Raise RecipeError if vmap would change the results of this network."""
    dropout = dropout_layers(module)
    if dropout and recipe.train.randomness == "error":
        raise RecipeError(
            f"vmap cannot reproduce the dropout masks of a loop ({', '.join(dropout[:3])}). "
            'Set executor.mode = "loop", or set train.randomness = "different" to accept other masks'
        )
    if recipe.train.precision in ("bf16", "fp16"):
        raise RecipeError(
            f"vmap does not support autocast (train.precision = {recipe.train.precision!r}). "
            'Set executor.mode = "loop", or set train.precision = "fp32"'
        )
