"""Build the method, loss, executor, optimizer and LR scheduler of a recipe."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, SequentialLR

from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.recipe import DataConfig, LossConfig, MethodConfig, ModelConfig, Recipe, member_value
from plateaux.config.schema import ConfigKeyError, accepts, check, options_for_member
from plateaux.core import registry
from plateaux.core.errors import RecipeError, suggest
from plateaux.core.executor import Executor
from plateaux.core.method import Method
from plateaux.core.types import TensorTree
from plateaux.models.backbone import check_backbone
from plateaux.optim.losses import get_loss


def check_plugins(recipe: Recipe, components: Components = NO_COMPONENTS) -> None:
    """Check every name and option of a recipe without reading data or building a network."""
    if components.data is None:
        factory = registry.dataset.get(recipe.data.name, allow=components.trust)
        check("data", factory, recipe.data.options, also=DataConfig.model_fields)
    check_backbone(dict(recipe.model), mixes=recipe.data.mixup + recipe.data.cutmix > 0)
    for number in range(recipe.members):
        if components.model is None:
            name = member_value("model.name", recipe.model.name, number, recipe.members)
            factory = registry.model.get(name, allow=components.trust)
            options = options_for_member(factory, recipe.model.options, number, recipe.members)
            check("model", factory, options, also=ModelConfig.model_fields)
        build_method(recipe, number, components)
        build_lr_scheduler(recipe, build_optimizer(recipe, number, {"weight": nn.Parameter(torch.zeros(1, 1))}), 1)


def loss_options(recipe: Recipe, number: int) -> dict[str, Any]:
    """Return the options that one member's loss has."""
    recipe = recipe.for_member(number)
    return options_for_member(get_loss(recipe.loss.name), recipe.loss.options, number, recipe.members)


def method_options(recipe: Recipe, number: int, components: Components = NO_COMPONENTS) -> dict[str, Any]:
    """Return the options that one member's method has."""
    recipe = recipe.for_member(number)
    factory = registry.method.get(recipe.method.name, allow=components.trust)
    return options_for_member(factory, recipe.method.options, number, recipe.members)


def build_method(recipe: Recipe, number: int = 0, components: Components = NO_COMPONENTS) -> Method:
    """Return one member's method."""
    loss = components.loss
    if loss is None:
        make_loss = get_loss(recipe.loss.name)
        loss = make_loss(**check("loss", make_loss, loss_options(recipe, number), also=LossConfig.model_fields))
    factory = registry.method.get(recipe.method.name, allow=components.trust)
    options = check("method", factory, method_options(recipe, number, components), also=MethodConfig.model_fields)
    if accepts(factory, "epochs"):
        options["epochs"] = recipe.train.epochs
    made: Method = factory(loss, **options)
    if recipe.optimizer.gradient_accumulation_steps > 1 and not made.objective.per_sample:
        raise RecipeError(
            f"method {recipe.method.name!r} settles whole batches, so optimizer.gradient_accumulation_steps must be 1; "
            "use a smaller data.batch_size instead"
        )
    if "unlabeled" in made.objective.extra_inputs and recipe.data.unlabeled is None and components.unlabeled is None:
        raise RecipeError(
            f"method {recipe.method.name!r} looks at unlabelled samples: set data.unlabeled, such as "
            "'tinyimagenet32@1000', or have it look at the labelled ones (method.disagree_on = 'labeled')"
        )
    return made


def build_executor(recipe: Recipe, components: Components = NO_COMPONENTS) -> Executor:
    """Return the executor; it is handed those settings it has an option for."""
    factory = registry.executor.get(recipe.executor.name, allow=components.trust)
    settings = {**recipe.executor.model_dump(exclude={"name"}), "randomness": recipe.train.randomness}
    return factory(**{name: value for name, value in settings.items() if accepts(factory, name)})  # type: ignore[no-any-return]


def build_optimizer(recipe: Recipe, number: int, params: TensorTree) -> torch.optim.Optimizer:
    """Return one member's optimiser; biases and normalisation may go without decay."""
    part = recipe.for_member(number).optimizer
    known = {n: c for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)}
    names = {n.lower(): c for n, c in known.items() if n not in ("Optimizer", "LBFGS")}
    if part.name.lower() not in names:
        raise RecipeError(
            f"torch.optim has no optimiser {part.name!r} that works step by step; {suggest(part.name, known)}"
        )
    factory = names[part.name.lower()]
    scalars = {
        "lr": member_value("optimizer.lr", part.lr, number, recipe.members),
        "weight_decay": member_value("optimizer.weight_decay", part.weight_decay, number, recipe.members),
    }
    if not accepts(factory, "weight_decay") and scalars.pop("weight_decay"):
        raise RecipeError(f"{part.name} has no weight_decay; leave it out, or choose another optimizer.name")
    chosen = options_for_member(factory, part.options, number, recipe.members)
    _known_keys("optimizer", factory, chosen, type(part).model_fields)
    decayed = [p for p in params.values() if part.decay_filter == "all" or p.ndim > 1]
    spared = [p for p in params.values() if part.decay_filter == "matrices" and p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
    return factory([group for group in groups if group["params"]], **{**scalars, **chosen})


SHORT = {
    "cosine": "CosineAnnealingLR", "multistep": "MultiStepLR", "step": "StepLR", "linear": "LinearLR",
    "constant": "ConstantLR", "exponential": "ExponentialLR", "polynomial": "PolynomialLR",
}  # fmt: skip


SPANS = ("T_max", "total_iters", "step_size", "T_0", "milestones")  # options that count time: epochs in a recipe


def build_lr_scheduler(recipe: Recipe, optimizer: torch.optim.Optimizer, steps: int) -> tuple[LRScheduler | None, bool]:
    """Return the schedule and whether it moves with every step rather than every epoch."""
    parts = recipe.lr_scheduler
    if not parts:
        return None, False
    if len({part.interval for part in parts}) > 1:
        raise RecipeError("every [[lr_scheduler]] must say the same interval: 'epoch' or 'step'")
    unit = steps if parts[0].interval == "step" else 1
    stages: list[LRScheduler] = []
    ends: list[int] = []
    begin = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own way of chaining schedules
        for position, part in enumerate(parts):
            last = position == len(parts) - 1
            if part.epochs is None and not last:
                raise RecipeError(
                    f"[[lr_scheduler]] {part.name!r} is followed by another: say for how many epochs it lasts"
                )
            span = part.epochs if part.epochs is not None else recipe.train.epochs - begin
            stages.append(_stage(part.name, part.options, optimizer, span, unit))
            begin += span
            ends.append(round(begin * unit))
        whole = stages[0] if len(stages) == 1 else SequentialLR(optimizer, stages, ends[:-1])
    return whole, parts[0].interval == "step"


def _stage(name: str, options: dict[str, Any], optimizer: Any, span: float, unit: int) -> LRScheduler:
    from torch.optim import lr_scheduler

    known = {n: c for n, c in vars(lr_scheduler).items() if isinstance(c, type) and issubclass(c, LRScheduler)}
    barred = {"LRScheduler", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau", "LambdaLR", "MultiplicativeLR"}
    full = SHORT.get(name, name)
    if full not in known or full in barred:
        allowed = [*SHORT, *(n for n in known if n not in barred)]
        raise RecipeError(f"torch.optim.lr_scheduler has no {name!r} that a recipe can name; {suggest(name, allowed)}")
    factory = known[full]
    _known_keys("lr_scheduler", factory, options, ("name", "epochs", "interval"))
    timed = {k: _times(v, unit) if k in SPANS else v for k, v in options.items()}
    for whole in ("T_max", "total_iters"):
        if accepts(factory, whole):
            timed.setdefault(whole, max(1, round(span * unit)))
    return factory(optimizer, **timed)


def _times(value: Any, unit: int) -> Any:
    return [round(v * unit) for v in value] if isinstance(value, list | tuple) else round(value * unit)


def _known_keys(section: str, factory: Callable[..., Any], options: dict[str, Any], also: Any) -> None:
    for name in options:
        if name in ("params", "optimizer") or not accepts(factory, name):
            from inspect import signature

            allowed = {*signature(factory).parameters, *also} - {"params", "optimizer", "self"}
            raise ConfigKeyError(section, name, f"[{section}] has no key {name!r}; {suggest(name, allowed)}")
