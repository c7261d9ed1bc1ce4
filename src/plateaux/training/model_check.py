"""Check the data and the model of a recipe before training; the model by a forward and a backward pass on two samples.

An error says what was found, what is expected, and the usual cause; nothing has been written then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from plateaux.config.builders.data import build_loader, train_val_split
from plateaux.config.builders.model import architecture_hash, build_members
from plateaux.config.builders.training import build_loss
from plateaux.config.code import code_hashes
from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.recipe import Recipe
from plateaux.config.schema import member_value
from plateaux.core import registry
from plateaux.core.errors import DataError, PlateauxError, RecipeError, first_line
from plateaux.core.member import MemberModule
from plateaux.core.runtime import fork_rng
from plateaux.core.types import Batch, Inputs, derive_seed
from plateaux.data.data_check import check_data
from plateaux.data.loader import MemberLoader
from plateaux.data.sources import DataSplits
from plateaux.data.warning_table import limit, log_warnings, warning
from plateaux.integrations.huggingface_models import model_configs
from plateaux.models.identity import describe_layers, is_built_in
from plateaux.storage.run_info import DataInfo, RunInfo

MAX_ARCHITECTURES = 8  # of the members of an ensemble that are checked
Result = TypeVar("Result")


def check_data_and_model(recipe: Recipe, data: DataSplits, components: Components, device: torch.device) -> RunInfo:
    """Check samples and networks before anything is written, and return what was found, to be stored in the run."""
    checked = check_data(data)
    found = dict(checked.warnings)
    networks = check_model(recipe, data, components, device=device, nonfinite=checked.nonfinite, warnings=found)
    log_warnings(found, recipe.run.silence)
    factory = components.model or registry.model.get(
        member_value("model.name", recipe.model.name, 0, recipe.members), allow=components.trust
    )
    info = DataInfo.from_splits(data)
    name, steps = components.model_name, data.preprocessing
    configs = None if components.model else model_configs(recipe.model.name, download=components.download)
    return RunInfo(
        info,
        model=name,
        inputs=checked.summary,
        preprocessing=steps,
        layers=None if is_built_in(factory) else describe_layers(networks),
        model_configs=configs,
        code=code_hashes(recipe, components, networks),
        warnings=found,
    )


def check_model(
    recipe: Recipe,
    data: DataSplits,
    components: Components = NO_COMPONENTS,
    *,
    device: torch.device | None = None,
    nonfinite: Tensor | None = None,
    warnings: dict[str, str] | None = None,
) -> list[nn.Module]:
    """Raise an error if a network of the recipe cannot be trained on the data; return one network per architecture.

    `nonfinite` are ids of training samples with NaN or infinity: an error if the outputs are not finite either.
    `warnings` receives what may be wrong.
    """
    device = device or torch.device("cpu")
    recipe = recipe.replaced(train=_without_auto(recipe))
    checked = []
    for number in _distinct_architectures(recipe, components):
        with fork_rng(derive_seed("check", number), device):
            module = _attempt(lambda n=number: build_members(recipe, data, [n], components)[0], _cannot_build)  # type: ignore[misc]
            module.to(device).train()
            outputs = _check_network(recipe, data, number, components, module, nonfinite)
        if warnings is not None and components.loss is None and _are_probabilities(outputs):
            warnings |= warning("probabilities", model=type(module).__name__)
        checked.append(module)
    return checked


def _without_auto(recipe: Recipe) -> dict[str, str]:
    """Return the settings that are tried first where the recipe leaves them to autotuning."""
    defaults = {"precision": "fp32", "memory_format": "contiguous"}
    return {name: value for name, value in defaults.items() if getattr(recipe.train, name) == "auto"}


def _distinct_architectures(recipe: Recipe, components: Components) -> list[int]:
    """Return the first member of every architecture. Hashing takes long, so not if no option of the model is a list."""
    model = recipe.model
    values = [model.name, model.head_width, *model.options.values(), *(dict(model.lora).values() if model.lora else ())]
    if recipe.members == 1 or not any(isinstance(value, list | tuple) for value in values):
        return [0]
    first: dict[str, int] = {}
    for number in range(min(recipe.members, 100)):
        first.setdefault(architecture_hash(recipe, number, components), number)
    return list(first.values())[:MAX_ARCHITECTURES]


def _check_network(
    recipe: Recipe,
    data: DataSplits,
    number: int,
    components: Components,
    module: nn.Module,
    nonfinite: Tensor | None,
) -> Tensor:
    """Check one network, and return its outputs for two samples."""
    params = [param for param in module.parameters() if param.requires_grad]
    if not params:
        raise RecipeError(
            f"{_name(module)} has no parameter to train. Expected: at least one. The usual cause is layers in a plain "
            "list instead of nn.ModuleList, or model.freeze that names the whole network"
        )
    device = params[0].device
    ids, _ = train_val_split(recipe, data)
    loader = build_loader(recipe, data, number, shared=False, device=device, ids=ids)
    loader = replace(loader, num_workers=0, unlabeled=None)
    batch = next(loader.batches(loader.ids[:2], 0))
    member = MemberModule(module)
    buffers = dict(module.named_buffers())
    outputs = _attempt(lambda: member(batch.x), lambda error: _cannot_run(error, module, batch.x))
    _check_buffers(buffers, module)
    _check_outputs(outputs, batch, data, module)
    loss = build_loss(recipe, number, components)
    losses = _attempt(lambda: loss(outputs[None], batch), lambda error: _cannot_compute_loss(error, outputs, batch))
    if not isinstance(losses, Tensor) or losses.shape != (1, len(batch)):
        found = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise RecipeError(
            f"The loss returned {found} for outputs {[1, *outputs.shape]}. Expected: one loss per member and sample, "
            f"[1, {len(batch)}]. The usual cause is a loss that is averaged: use reduction='none'"
        )
    _attempt(lambda: losses.sum().backward(), lambda error: _cannot_run(error, module, batch.x))  # type: ignore[no-untyped-call]
    if all(param.grad is None for param in params):
        raise RecipeError(
            f"No parameter of {_name(module)} has a gradient. Expected: a loss that depends on the weights. The usual "
            "cause is .detach(), .item(), or torch.no_grad() in the forward pass"
        )
    module.zero_grad(set_to_none=True)
    _check_single_samples(recipe, loader, member, batch)
    if nonfinite is not None:
        _check_nonfinite(loader, member, nonfinite, data)
    return outputs.detach()


def _are_probabilities(outputs: Tensor) -> bool:
    sums = outputs.double().sum(1)
    return bool((outputs >= 0).all() and ((sums - 1).abs() < limit("probabilities")).all())


def _check_buffers(before: Mapping[str, Tensor], module: nn.Module) -> None:
    """Raise an error if a forward pass replaced a saved buffer instead of changing its values."""
    after, saved = dict(module.named_buffers()), set(module.state_dict())
    replaced = [name for name, buffer in before.items() if after.get(name) is not buffer and name in saved]
    if replaced:
        name = replaced[0].rpartition(".")[2]
        raise RecipeError(
            f"{_name(module)} assigns a new tensor to its buffer {replaced[0]!r} in the forward pass. Expected: a "
            "change in place, because buffers are saved, and restored after the second pass of SAM, in place. Write "
            f"self.{name}.copy_(value) in the model, or register it with persistent=False if it need not be saved"
        )


def _check_outputs(outputs: Tensor, batch: Batch, data: DataSplits, module: nn.Module) -> None:
    if outputs.shape != (len(batch), data.classes):
        raise RecipeError(
            f"{_name(module)} returned outputs of shape {list(outputs.shape)} for {len(batch)} samples. Expected: "
            f"{[len(batch), data.classes]}, one output for each of the {data.classes} classes of {data.name!r}. The "
            "usual cause is a classifier for another data set: build it with the argument `classes`"
        )


def _check_single_samples(recipe: Recipe, loader: MemberLoader, member: MemberModule, batch: Batch) -> None:
    """Run one sample if an epoch has a batch or micro-batch of one: batch normalization may not be defined for it."""
    assert isinstance(member.module, nn.Module)
    has_batchnorm = any(isinstance(layer, _BatchNorm) for layer in member.module.modules())
    if not has_batchnorm or 1 not in _batch_sizes(recipe, len(loader.ids)):
        return
    samples, size = len(loader.ids), recipe.data.batch_size

    def explain(error: Exception) -> RecipeError:
        return RecipeError(
            f"A batch of an epoch has a single sample ({samples:,} training samples in batches of {size}), for which "
            f"batch normalization is not defined ({first_line(error)}). Set data.drop_last = true, or another "
            "data.batch_size"
        )

    single = batch.take(slice(0, 1))
    _attempt(lambda: member(single.x), explain)


def _batch_sizes(recipe: Recipe, samples: int) -> set[int]:
    """Return the sizes of the batches of an epoch, after they are split for gradient accumulation."""
    full, rest = divmod(samples, recipe.data.batch_size)
    sizes = {recipe.data.batch_size} if full else set()
    sizes |= {rest} if rest and not recipe.data.drop_last else set()
    count = recipe.optimizer.gradient_accumulation_steps
    parts = {size: -(-size // count) for size in sizes}
    return set(parts.values()) | {size % part for size, part in parts.items() if size % part}


@torch.no_grad()
def _check_nonfinite(loader: MemberLoader, member: MemberModule, ids: Tensor, data: DataSplits) -> None:
    """Raise DataError if inputs with NaN or infinity give outputs with NaN or infinity."""
    assert isinstance(member.module, nn.Module)
    member.module.eval()
    outputs = member(next(loader.batches(ids[:2], 0)).x)
    member.module.train()
    if bool(outputs.isfinite().all()):
        return  # the network handles missing values
    raise DataError(
        f"{len(ids):,} training inputs of {data.name!r} contain NaN or infinity (samples "
        f"{', '.join(map(str, ids[:5].tolist()))}{', ...' if len(ids) > 5 else ''}). Expected: finite numbers. The "
        "usual cause is missing values, or a division by a standard deviation of 0: remove these samples, or replace "
        "the values"
    )


def _attempt(run: Callable[[], Result], explain: Callable[[Exception], PlateauxError]) -> Result:
    """Run code of the user; any exception that is not one of Plateaux becomes an explained one."""
    try:
        return run()
    except PlateauxError:
        raise
    except Exception as error:  # code of the user can raise anything
        raise explain(error) from error


def _cannot_build(error: Exception) -> RecipeError:
    return RecipeError(
        f"The model cannot be built: {type(error).__name__}: {first_line(error)}. Expected: a function or a class that "
        "returns a torch.nn.Module; it is called with the options of [model], and with `shape` and `classes` if it has "
        "these arguments"
    )


def _cannot_run(error: Exception, module: nn.Module, x: Inputs) -> RecipeError:
    return RecipeError(
        f"{_name(module)} cannot process two training samples, {_show(x)}: {type(error).__name__}: "
        f"{first_line(error)}. Expected: a network for inputs of this shape. The usual cause is a network that was "
        "written for another data set: build it with the argument `shape`, or change the data"
    )


def _cannot_compute_loss(error: Exception, outputs: Tensor, batch: Batch) -> RecipeError:
    return RecipeError(
        f"The loss cannot be computed from outputs {list(outputs.shape)} and labels {_show(batch.y)}: "
        f"{type(error).__name__}: {first_line(error)}. Expected: outputs [B, C] and class numbers [B]"
    )


def _name(module: nn.Module) -> str:
    return f"The model {type(module).__name__}"


def _show(x: Inputs) -> str:
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
    return ", ".join(f"{name}: {_show(values)}" for name, values in x.items())
