"""Build the method, loss, executor, optimizer and LR scheduler of a recipe."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, SequentialLR

from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.recipe import DataConfig, LossConfig, LRSchedulerConfig, MethodConfig, ModelConfig, Recipe
from plateaux.config.schema import ConfigKeyError, accepts, check, member_options, member_value
from plateaux.config.tracker_check import check_trackers
from plateaux.core import registry
from plateaux.core.errors import RecipeError, UntrustedCodeError, first_line, suggest
from plateaux.core.executor import Executor
from plateaux.core.method import LossFn, Method
from plateaux.core.ranges import MAX_NUMBER
from plateaux.core.types import TensorTree
from plateaux.models.backbone import check_backbone
from plateaux.optim.losses import get_loss


def check_plugins(recipe: Recipe, components: Components = NO_COMPONENTS) -> None:
    """Check every name and option of a recipe without reading data or building a network."""
    check_address(recipe, components)
    check_trackers(recipe, components)
    if components.data is None:
        factory = registry.dataset.get(recipe.data.name, allow=components.trust)
        check("data", factory, recipe.data.options, also=DataConfig.model_fields)
    check_backbone(dict(recipe.model), mixes=recipe.data.mixup + recipe.data.cutmix > 0)
    for number in range(recipe.members):
        if components.model is None:
            name = member_value("model.name", recipe.model.name, number, recipe.members)
            factory = registry.model.get(name, allow=components.trust)
            options = member_options(factory, recipe.model.options, number, recipe.members)
            check("model", factory, options, also=ModelConfig.model_fields)
        build_method(recipe, number, components)
        build_lr_scheduler(recipe, build_optimizer(recipe, number, {"weight": nn.Parameter(torch.zeros(1, 1))}), 1)


def loss_options(recipe: Recipe, number: int) -> dict[str, Any]:
    """Return the loss options of one member."""
    recipe = recipe.for_member(number)
    return member_options(get_loss(recipe.loss.name), recipe.loss.options, number, recipe.members)


def method_options(recipe: Recipe, number: int, components: Components = NO_COMPONENTS) -> dict[str, Any]:
    """Return the method options of one member."""
    recipe = recipe.for_member(number)
    factory = registry.method.get(recipe.method.name, allow=components.trust)
    return member_options(factory, recipe.method.options, number, recipe.members)


def build_loss(recipe: Recipe, number: int = 0, components: Components = NO_COMPONENTS) -> LossFn:
    """Return the loss of one member."""
    if components.loss is not None:
        return components.loss
    make_loss = get_loss(recipe.loss.name)
    return make_loss(**check("loss", make_loss, loss_options(recipe, number), also=LossConfig.model_fields))


def build_method(recipe: Recipe, number: int = 0, components: Components = NO_COMPONENTS) -> Method:
    """Return the method of one member."""
    loss = build_loss(recipe, number, components)
    factory = registry.method.get(recipe.method.name, allow=components.trust)
    options = check("method", factory, method_options(recipe, number, components), also=MethodConfig.model_fields)
    if accepts(factory, "epochs"):
        options["epochs"] = recipe.train.epochs
    method: Method = factory(loss, **options)
    if recipe.optimizer.gradient_accumulation_steps > 1 and not method.objective.per_sample:
        raise RecipeError(
            f"method {recipe.method.name!r} needs full batches for its loss, so "
            "optimizer.gradient_accumulation_steps must be 1; use a smaller data.batch_size instead"
        )
    if "unlabeled" in method.objective.extra_inputs and recipe.data.unlabeled is None and components.unlabeled is None:
        raise RecipeError(
            f"method {recipe.method.name!r} needs unlabeled samples: set data.unlabeled, such as "
            "'tinyimagenet32@1000', or use the labeled ones with method.disagree_on = 'labeled'"
        )
    return method


def build_executor(recipe: Recipe, components: Components = NO_COMPONENTS) -> Executor:
    """Return the executor, with the settings that it has options for."""
    factory = registry.executor.get(recipe.executor.name, allow=components.trust)
    check_address(recipe, components)
    settings = {**recipe.executor.model_dump(exclude={"name"}), "randomness": recipe.train.randomness}
    return factory(**{name: value for name, value in settings.items() if accepts(factory, name)})  # type: ignore[no-any-return]


def check_address(recipe: Recipe, components: Components = NO_COMPONENTS) -> None:
    """Raise UntrustedCodeError if the recipe names a cluster that the caller does not trust.

    Ray clusters exchange pickled objects, so whoever chooses the cluster can run code in this process.
    """
    address = recipe.executor.address
    factory = registry.executor.get(recipe.executor.name, allow=components.trust)
    if address and accepts(factory, "address") and address not in components.trust:
        raise UntrustedCodeError(
            f"The recipe connects to the cluster executor.address = {address!r}, which can run code here. If you "
            f"trust the cluster, add: --address {address}, or --trust {address} (in Python: trust=[{address!r}]). "
            "Otherwise remove executor.address"
        )


def build_optimizer(recipe: Recipe, number: int, params: TensorTree) -> torch.optim.Optimizer:
    """Return the optimizer of one member. `decay_filter` selects the parameters with weight decay."""
    config = recipe.for_member(number).optimizer
    known = {n: c for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)}
    names = {n.lower(): c for n, c in known.items() if n not in ("Optimizer", "LBFGS")}
    if config.name.lower() not in names:
        raise RecipeError(
            f"torch.optim has no optimizer {config.name!r} that works without a closure; {suggest(config.name, known)}"
        )
    factory = names[config.name.lower()]
    scalars = {
        "lr": member_value("optimizer.lr", config.lr, number, recipe.members),
        "weight_decay": member_value("optimizer.weight_decay", config.weight_decay, number, recipe.members),
    }
    if not accepts(factory, "weight_decay") and scalars.pop("weight_decay"):
        raise RecipeError(f"{config.name} has no weight_decay; remove it, or choose another optimizer.name")
    options = member_options(factory, config.options, number, recipe.members)
    _check_options("optimizer", factory, options, type(config).model_fields)
    with_decay = [p for p in params.values() if config.decay_filter == "all" or p.ndim > 1]
    without_decay = [p for p in params.values() if config.decay_filter == "matrices" and p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": with_decay}, {"params": without_decay, "weight_decay": 0.0}]
    try:
        return factory([group for group in groups if group["params"]], **{**scalars, **options})
    except (TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as problem:
        raise RecipeError(
            f"[optimizer] {factory.__name__} refuses {scalars | options}: {first_line(problem)}"
        ) from None


SHORT_NAMES = {
    "cosine": "CosineAnnealingLR", "multistep": "MultiStepLR", "step": "StepLR", "linear": "LinearLR",
    "constant": "ConstantLR", "exponential": "ExponentialLR", "polynomial": "PolynomialLR",
}  # fmt: skip


DURATIONS = ("T_max", "total_iters", "step_size", "T_0", "milestones")  # options that a recipe gives in epochs
EXAMPLES = {"milestones": "[30, 60]", "step_size": "30", "T_0": "10", "gamma": "0.9"}


def build_lr_scheduler(recipe: Recipe, optimizer: torch.optim.Optimizer, steps: int) -> tuple[LRScheduler | None, bool]:
    """Return the LR scheduler, and whether it advances after every step instead of every epoch."""
    parts = recipe.lr_scheduler
    if not parts:
        return None, False
    if len({part.interval for part in parts}) > 1:
        raise RecipeError("all [[lr_scheduler]] sections need the same interval: 'epoch' or 'step'")
    unit = steps if parts[0].interval == "step" else 1
    stages: list[LRScheduler] = []
    ends: list[int] = []
    start = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own implementation of SequentialLR
        for position, part in enumerate(parts):
            last = position == len(parts) - 1
            if part.epochs is None and not last:
                raise RecipeError(
                    f"[[lr_scheduler]] {part.name!r} is followed by another one: set its number of epochs"
                )
            duration = part.epochs if part.epochs is not None else recipe.train.epochs - start
            stages.append(_build_stage(part, position, optimizer, duration, unit))
            start += duration
            ends.append(round(start * unit))
        scheduler = stages[0] if len(stages) == 1 else SequentialLR(optimizer, stages, ends[:-1])
    return scheduler, parts[0].interval == "step"


def _build_stage(part: LRSchedulerConfig, position: int, optimizer: Any, duration: float, unit: int) -> LRScheduler:
    from torch.optim import lr_scheduler

    known = {n: c for n, c in vars(lr_scheduler).items() if isinstance(c, type) and issubclass(c, LRScheduler)}
    excluded = {"LRScheduler", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau", "LambdaLR", "MultiplicativeLR"}
    full, options = SHORT_NAMES.get(part.name, part.name), part.options
    if full not in known or full in excluded:
        allowed = [*SHORT_NAMES, *(n for n in known if n not in excluded)]
        raise RecipeError(
            f"torch.optim.lr_scheduler has no {part.name!r} that a recipe can use; {suggest(part.name, allowed)}"
        )
    factory = known[full]
    _check_options("lr_scheduler", factory, options, ("name", "epochs", "interval"), nth=position)
    scaled = {k: _scale(v, unit) if k in DURATIONS else v for k, v in options.items()}
    for name in ("T_max", "total_iters"):
        if accepts(factory, name):
            scaled.setdefault(name, max(1, round(duration * unit)))
    for name, parameter in signature(factory).parameters.items():
        if parameter.default is Parameter.empty and name not in (*scaled, "optimizer"):
            example = f", such as {name} = {EXAMPLES[name]}" if name in EXAMPLES else ""
            text = f"[lr_scheduler] {part.name!r} needs {name!r}{example}"
            raise ConfigKeyError("lr_scheduler", name, text, nth=position)
    try:
        return factory(optimizer, **scaled)
    except (TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as problem:
        raise RecipeError(f"[lr_scheduler] {part.name!r} refuses {options}: {first_line(problem)}") from None


def _scale(value: Any, unit: int) -> Any:
    return [round(v * unit) for v in value] if isinstance(value, list | tuple) else round(value * unit)


def _check_options(
    section: str, factory: Callable[..., Any], options: dict[str, Any], also: Iterable[str], *, nth: int = 0
) -> None:
    """Check keys, and values as far as the defaults of a class of torch show what they must be."""
    parameters = signature(factory).parameters
    for name, value in options.items():
        if name in ("params", "optimizer") or name not in parameters:
            allowed = {*parameters, *also} - {"params", "optimizer", "self"}
            text = f"[{section}] has no key {name!r}; {suggest(name, allowed)}"
            raise ConfigKeyError(section, name, text, nth=nth)
        if wanted := _find_mismatch(parameters[name], value):
            raise ConfigKeyError(section, name, f"[{section}] {name} = {value!r}: must be {wanted}", nth=nth)


def _find_mismatch(parameter: Parameter, value: Any) -> str | None:
    """Return what the value of an option must be, or None if it is that, or if that is not known."""
    name, default = parameter.name, parameter.default
    if name == "milestones":
        is_increasing = _are_numbers(value) and list(value) == sorted(set(value)) and min(value, default=-1) >= 0
        return None if is_increasing else f"an increasing list of epochs, such as {EXAMPLES[name]}"
    if name in DURATIONS:
        return None if _is_number(value) and value > 0 else "a number of epochs above 0"
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, int | float) or parameter.annotation in (float, int, "float", "int"):
        return None if _is_number(value) else "a number"
    if isinstance(default, tuple) and _are_numbers(default):
        fits = _are_numbers(value) and len(value) == len(default)
        return None if fits else f"a list of {len(default)} numbers, such as {list(default)}"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_number, value))
