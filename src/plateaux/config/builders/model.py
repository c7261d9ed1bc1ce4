"""What a recipe means, made real: data, networks, method, optimiser, schedule."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, SequentialLR

from plateaux.config.recipe import DataPart, LossPart, MethodPart, ModelPart, Recipe, fingerprint, own
from plateaux.config.schema import WrongKey, accepts, check, pick
from plateaux.core import registry
from plateaux.core.errors import RecipeError, nearest
from plateaux.core.method import Executor, Method, Settle
from plateaux.core.runtime import FORMATS, dtype_of, seeded
from plateaux.core.types import Batch, Tree, key
from plateaux.data.loader import CPU, Shard, evaluation
from plateaux.data.sources import Data, Extra, Source, weights_file
from plateaux.models.backbone import Headed, Trunk, check_trunk, head, rest
from plateaux.models.lora import adapt, base_names, share_base
from plateaux.models.surgery import freeze, load_weights, prune, share
from plateaux.optim.losses import loss_by_name

Model = Callable[..., nn.Module]


@dataclass(frozen=True, slots=True)
class Given:
    """What a caller hands over in Python instead of naming it in the recipe."""

    data: Data | None = None
    model: Model | None = None
    loss: Settle | None = None
    unlabelled: Source | None = None  # samples whose labels are not looked at, laid out as the data's
    allow: tuple[str, ...] = ()  # modules outside whose functions a recipe may call


NOTHING_GIVEN = Given()


def check_names(recipe: Recipe, given: Given = NOTHING_GIVEN) -> None:
    """Check every name and option of a recipe without reading data or building a network."""
    if given.data is None:
        factory = registry.dataset.get(recipe.data.name, allow=given.allow)
        check("data", factory, recipe.data.options, also=DataPart.model_fields)
    check_trunk(dict(recipe.model), mixes=recipe.data.mixup + recipe.data.cutmix > 0)
    for number in range(recipe.members):
        if given.model is None:
            name = own("model.name", recipe.model.name, number, recipe.members)
            factory = registry.model.get(name, allow=given.allow)
            options = pick(factory, recipe.model.options, number, recipe.members)
            check("model", factory, options, also=ModelPart.model_fields)
        method_of(recipe, number, given)
        schedule_of(recipe, optimizer_of(recipe, number, {"weight": nn.Parameter(torch.zeros(1, 1))}), 1)


def data_of(recipe: Recipe, given: Given = NOTHING_GIVEN) -> Data:
    """Return the recipe's data set."""
    if given.data is not None:
        return given.data
    part = recipe.data
    factory = registry.dataset.get(part.name, allow=given.allow)
    made = factory(**check("data", factory, part.options, also=DataPart.model_fields))
    if not isinstance(made, Data):
        raise RecipeError(f"data set {part.name!r} returned {type(made).__name__}; it must return plateaux.Data")
    return made


def training_data(recipe: Recipe, given: Given = NOTHING_GIVEN) -> Data:
    """Return the recipe's data set with the unlabelled samples that its method looks at."""
    data = data_of(recipe, given)
    if "unlabelled" not in method_of(recipe, 0, given).objective.wants:
        return data
    name, _, count = (recipe.data.unlabelled or "").partition("@")
    source = given.unlabelled or _unlabelled(name, data, given)
    wanted = int(count) if count.isdigit() else len(source)
    if (count and not count.isdigit()) or not 0 < wanted <= len(source):
        raise RecipeError(
            f"data.unlabelled = {recipe.data.unlabelled!r}: write name@count, with a count from 1 to {len(source)}, "
            "or the name alone for all samples"
        )
    draw = torch.Generator().manual_seed(key(recipe.seed, "unlabelled"))
    ids = torch.randperm(len(source), generator=draw)[:wanted].sort().values
    return replace(data, unlabelled=Extra(name or "given", source, ids))


def unlabelled_facts(data: Data) -> dict[str, Any]:
    """Return what a run must remember of its unlabelled samples: which they are, so that no test is made of them."""
    extra = data.unlabelled
    if extra is None:
        return {}
    print_of = extra.source.fingerprint()
    return {"unlabelled": {"name": extra.name, "fingerprint": print_of, "ids": extra.ids.tolist()}}


def _unlabelled(name: str, data: Data, given: Given) -> Source:
    """Return the train samples of a set, or its test samples where it has no others."""
    factory = registry.dataset.get(name, allow=given.allow)
    other: Data = factory(**check("data", factory, {}))
    if other.shape != data.shape:
        raise RecipeError(
            f"data.unlabelled = {name!r} has samples of shape {list(other.shape)}, and {data.name!r} of "
            f"{list(data.shape)}: the same network must take both"
        )
    return other.train if len(other.train) else other.test


def in_order(
    recipe: Recipe,
    data: Data,
    source: Source,
    ids: torch.Tensor,
    *,
    batch: int | None = None,
    device: torch.device = CPU,
    shard: Shard | None = None,
) -> Iterator[Batch]:
    """Yield the samples `ids` in their order, as they are, laid out as the recipe's networks take them."""
    return evaluation(
        source,
        ids,
        batch=batch or max(recipe.data.batch, 256),
        mean=data.mean,
        std=data.std,
        device=device,
        dtype=dtype_of(recipe.train.precision),
        memory_format=FORMATS[recipe.train.memory_format],
        workers=recipe.data.workers,
        shard=shard,
    )


def kind_of(recipe: Recipe, number: int, given: Given = NOTHING_GIVEN) -> str:
    """Return a hash that two members share when their networks are alike."""
    name = own("model.name", recipe.model.name, number, recipe.members)
    factory = given.model or registry.model.get(name, allow=given.allow)
    options = pick(factory, recipe.model.options, number, recipe.members)
    width = {} if recipe.model.head != "mlp" else {"head": own_width(recipe, number)}
    return fingerprint({"name": name, "options": options, "adapters": adapters_of(recipe, number), **width})


def adapters_of(recipe: Recipe, number: int) -> dict[str, Any]:
    """Return the options of one member's adapters; empty: it has none."""
    part = recipe.model.adapters
    if part is None:
        return {}
    mine = {name: own(f"adapters.{name}", getattr(part, name), number, recipe.members) for name in ("rank", "alpha")}
    return {**mine, "layers": part.layers, "train": part.train}


def network(
    recipe: Recipe,
    data: Data,
    number: int,
    given: Given = NOTHING_GIVEN,
    *,
    start: int | None = None,
    trunk: Trunk | None = None,
) -> nn.Module:
    """Return one member's network as it is before its first step.

    `start` replaces the key of its initialisation; a `trunk` that is there already is not built again.
    """
    part = recipe.model
    if part.trunk is None:
        module = _whole(recipe, data, number, given, start)
    else:
        module = _headed(recipe, data, number, given, trunk or trunk_of(recipe, data, given))
    if part.sparsity:
        prune(module, part.sparsity, keep=() if part.trunk is None else ("trunk",))
    if adapters := adapters_of(recipe, number):
        with seeded(key(recipe.seed, "adapters", number), torch.device("cpu")):
            adapt(module, **adapters)
    return module.to(dtype_of(recipe.train.precision))


def trunk_of(recipe: Recipe, data: Data, given: Given = NOTHING_GIVEN) -> Trunk:
    """Return the trunk that all members share."""
    part = recipe.model
    assert part.trunk is not None
    # It must not depend on which members happen to be built here, so it has a start of its own.
    whole = _whole(recipe, data, 0, given, key(recipe.seed, "shared"))
    return Trunk(whole, part.trunk, shape=data.shape, resize=part.resize, pool=part.head != "rest")


def own_width(recipe: Recipe, number: int) -> int:
    """Return the width of one member's head."""
    return int(own("model.head_width", recipe.model.head_width, number, recipe.members))


def _headed(recipe: Recipe, data: Data, number: int, given: Given, trunk: Trunk) -> nn.Module:
    part = recipe.model
    if part.head == "rest":
        assert part.trunk is not None
        return Headed(
            trunk, rest(_whole(recipe, data, number, given, None), part.trunk, data.shape, resize=part.resize)
        )
    with seeded(key(recipe.seed, "init", number), torch.device("cpu")):
        return Headed(trunk, head(part.head, trunk.shape, classes=data.classes, width=own_width(recipe, number)))


def _whole(recipe: Recipe, data: Data, number: int, given: Given, start: int | None) -> nn.Module:
    """Return a network as its model makes it, with the weights it starts from."""
    part = recipe.model
    name = own("model.name", part.name, number, recipe.members)
    factory = given.model or registry.model.get(name, allow=given.allow)
    options = check("model", factory, pick(factory, part.options, number, recipe.members), also=ModelPart.model_fields)
    for fact in ("shape", "classes"):
        if accepts(factory, fact):
            options[fact] = getattr(data, fact)
    with seeded(key(recipe.seed, "init", number) if start is None else start, torch.device("cpu")):
        module = factory(**options)
    if not isinstance(module, nn.Module):
        raise RecipeError(f"model {name!r} returned {type(module).__name__}; it must return a torch.nn.Module")
    if part.weights:
        load_weights(
            module,
            weights_file(part.weights),
            own("model.prefix", part.prefix, number, recipe.members),
            partial=part.partial,
        )
    return module


def networks(recipe: Recipe, data: Data, numbers: Sequence[int], given: Given = NOTHING_GIVEN) -> list[nn.Module]:
    """Return the networks of some members; what is frozen is one object that all of them use."""
    prefixes = _frozen(recipe)
    trunk = trunk_of(recipe, data, given) if recipe.model.trunk else None
    adapted = recipe.model.adapters is not None
    # What is shared must not depend on which members happen to be built here, so it has a start of its own.
    alone = bool(recipe.model.freeze) or adapted
    first = network(recipe, data, 0, given, start=key(recipe.seed, "shared")) if alone else None
    modules = []
    for number in numbers:
        module = network(recipe, data, number, given, trunk=trunk)
        if first is not None and adapted:
            share_base(first, module, shared_names(recipe, module))
        elif first is not None:
            share([first, module], prefixes)
        freeze(module, prefixes)
        modules.append(module)
    return modules


def _frozen(recipe: Recipe) -> tuple[str, ...]:
    return recipe.model.freeze if recipe.model.trunk is None else ("trunk",)


def shared_names(recipe: Recipe, module: nn.Module) -> set[str]:
    """Return the names of the weights and buffers that members share."""
    if recipe.model.adapters is not None:
        return base_names(module, recipe.model.adapters.train)
    prefixes = _frozen(recipe)
    return freeze(module, prefixes) if prefixes else set()


def own_state(module: nn.Module, shared: set[str]) -> Tree:
    """Return what a member's weights file holds: all of the state that is its own."""
    return {name: tensor for name, tensor in module.state_dict().items() if name not in shared}


def loss_options(recipe: Recipe, number: int) -> dict[str, Any]:
    """Return the options that one member's loss has."""
    recipe = recipe.of_member(number)
    return pick(loss_by_name(recipe.loss.name), recipe.loss.options, number, recipe.members)


def method_options(recipe: Recipe, number: int, given: Given = NOTHING_GIVEN) -> dict[str, Any]:
    """Return the options that one member's method has."""
    recipe = recipe.of_member(number)
    factory = registry.method.get(recipe.method.name, allow=given.allow)
    return pick(factory, recipe.method.options, number, recipe.members)


def method_of(recipe: Recipe, number: int = 0, given: Given = NOTHING_GIVEN) -> Method:
    """Return one member's method."""
    loss = given.loss
    if loss is None:
        make_loss = loss_by_name(recipe.loss.name)
        loss = make_loss(**check("loss", make_loss, loss_options(recipe, number), also=LossPart.model_fields))
    factory = registry.method.get(recipe.method.name, allow=given.allow)
    options = check("method", factory, method_options(recipe, number, given), also=MethodPart.model_fields)
    if accepts(factory, "epochs"):
        options["epochs"] = recipe.train.epochs
    made: Method = factory(loss, **options)
    if recipe.optimizer.accumulate > 1 and not made.objective.samplewise:
        raise RecipeError(
            f"method {recipe.method.name!r} settles whole batches, so optimizer.accumulate must be 1; "
            "use a smaller data.batch instead"
        )
    if "unlabelled" in made.objective.wants and recipe.data.unlabelled is None and given.unlabelled is None:
        raise RecipeError(
            f"method {recipe.method.name!r} looks at unlabelled samples: set data.unlabelled, such as "
            "'tinyimagenet32@1000', or have it look at the labelled ones (method.on = 'labelled')"
        )
    return made


def executor_of(recipe: Recipe, given: Given = NOTHING_GIVEN) -> Executor:
    """Return the executor; it is handed those settings it has an option for."""
    factory = registry.executor.get(recipe.executor.name, allow=given.allow)
    settings = {**recipe.executor.model_dump(exclude={"name"}), "randomness": recipe.train.randomness}
    return factory(**{name: value for name, value in settings.items() if accepts(factory, name)})  # type: ignore[no-any-return]


def optimizer_of(recipe: Recipe, number: int, params: Tree) -> torch.optim.Optimizer:
    """Return one member's optimiser; biases and normalisation may go without decay."""
    part = recipe.of_member(number).optimizer
    known = {n: c for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)}
    names = {n.lower(): c for n, c in known.items() if n not in ("Optimizer", "LBFGS")}
    if part.name.lower() not in names:
        raise RecipeError(
            f"torch.optim has no optimiser {part.name!r} that works step by step; {nearest(part.name, known)}"
        )
    factory = names[part.name.lower()]
    scalars = {
        "lr": own("optimizer.lr", part.lr, number, recipe.members),
        "weight_decay": own("optimizer.weight_decay", part.weight_decay, number, recipe.members),
    }
    if not accepts(factory, "weight_decay") and scalars.pop("weight_decay"):
        raise RecipeError(f"{part.name} has no weight_decay; leave it out, or choose another optimizer.name")
    chosen = pick(factory, part.options, number, recipe.members)
    _known_keys("optimizer", factory, chosen, type(part).model_fields)
    decayed = [p for p in params.values() if part.decay == "all" or p.ndim > 1]
    spared = [p for p in params.values() if part.decay == "weights" and p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
    return factory([group for group in groups if group["params"]], **{**scalars, **chosen})


SHORT = {
    "cosine": "CosineAnnealingLR", "multistep": "MultiStepLR", "step": "StepLR", "linear": "LinearLR",
    "constant": "ConstantLR", "exponential": "ExponentialLR", "polynomial": "PolynomialLR",
}  # fmt: skip
SPANS = ("T_max", "total_iters", "step_size", "T_0", "milestones")  # options that count time: epochs in a recipe


def schedule_of(recipe: Recipe, optimizer: torch.optim.Optimizer, steps: int) -> tuple[LRScheduler | None, bool]:
    """Return the schedule and whether it moves with every step rather than every epoch."""
    parts = recipe.schedule
    if not parts:
        return None, False
    if len({part.per for part in parts}) > 1:
        raise RecipeError("every [[schedule]] must say the same per: 'epoch' or 'step'")
    unit = steps if parts[0].per == "step" else 1
    stages: list[LRScheduler] = []
    ends: list[int] = []
    begin = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own way of chaining schedules
        for position, part in enumerate(parts):
            last = position == len(parts) - 1
            if part.epochs is None and not last:
                raise RecipeError(
                    f"[[schedule]] {part.name!r} is followed by another: say for how many epochs it lasts"
                )
            span = part.epochs if part.epochs is not None else recipe.train.epochs - begin
            stages.append(_stage(part.name, part.options, optimizer, span, unit))
            begin += span
            ends.append(round(begin * unit))
        whole = stages[0] if len(stages) == 1 else SequentialLR(optimizer, stages, ends[:-1])
    return whole, parts[0].per == "step"


def _stage(name: str, options: dict[str, Any], optimizer: Any, span: float, unit: int) -> LRScheduler:
    from torch.optim import lr_scheduler

    known = {n: c for n, c in vars(lr_scheduler).items() if isinstance(c, type) and issubclass(c, LRScheduler)}
    barred = {"LRScheduler", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau", "LambdaLR", "MultiplicativeLR"}
    full = SHORT.get(name, name)
    if full not in known or full in barred:
        allowed = [*SHORT, *(n for n in known if n not in barred)]
        raise RecipeError(f"torch.optim.lr_scheduler has no {name!r} that a recipe can name; {nearest(name, allowed)}")
    factory = known[full]
    _known_keys("schedule", factory, options, ("name", "epochs", "per"))
    timed = {k: _times(v, unit) if k in SPANS else v for k, v in options.items()}
    for whole in ("T_max", "total_iters"):
        if accepts(factory, whole):
            timed.setdefault(whole, max(1, round(span * unit)))
    return factory(optimizer, **timed)


def _times(value: Any, unit: int) -> Any:
    return [round(v * unit) for v in value] if isinstance(value, list | tuple) else round(value * unit)


def _known_keys(section: str, factory: Callable[..., Any], given: dict[str, Any], also: Any) -> None:
    for name in given:
        if name in ("params", "optimizer") or not accepts(factory, name):
            from inspect import signature

            allowed = {*signature(factory).parameters, *also} - {"params", "optimizer", "self"}
            raise WrongKey(section, name, f"[{section}] has no key {name!r}; {nearest(name, allowed)}")
