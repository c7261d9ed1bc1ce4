"""What a recipe means, made real: data, networks, method, optimiser, schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.recipe import ModelConfig, Recipe, fingerprint, member_value
from plateaux.config.schema import accepts, check, options_for_member
from plateaux.core import registry
from plateaux.core.errors import RecipeError
from plateaux.core.runtime import fork_rng, param_dtype
from plateaux.core.types import TensorTree, derive_seed
from plateaux.data.files import weights_file
from plateaux.data.sources import DataSplits
from plateaux.models.backbone import Backbone, BackboneWithHead, build_head, own_head
from plateaux.models.lora import add_lora, base_names, share_base
from plateaux.models.surgery import freeze, load_weights, prune, share


def architecture_hash(recipe: Recipe, number: int, components: Components = NO_COMPONENTS) -> str:
    """Return a hash that two members share when their networks are alike."""
    name = member_value("model.name", recipe.model.name, number, recipe.members)
    factory = components.model or registry.model.get(name, allow=components.trust)
    options = options_for_member(factory, recipe.model.options, number, recipe.members)
    width = {} if recipe.model.head != "mlp" else {"head": head_width(recipe, number)}
    return fingerprint({"name": name, "options": options, "adapters": lora_config(recipe, number), **width})


def lora_config(recipe: Recipe, number: int) -> dict[str, Any]:
    """Return the options of one member's adapters; empty: it has none."""
    part = recipe.model.lora
    if part is None:
        return {}
    mine = {
        name: member_value(f"adapters.{name}", getattr(part, name), number, recipe.members)
        for name in ("rank", "alpha")
    }
    return {**mine, "target_modules": part.target_modules, "modules_to_save": part.modules_to_save}


def build_member(
    recipe: Recipe,
    data: DataSplits,
    number: int,
    components: Components = NO_COMPONENTS,
    *,
    start: int | None = None,
    backbone: Backbone | None = None,
) -> nn.Module:
    """Return one member's network as it is before its first step.

    `start` replaces the key of its initialisation; a `trunk` that is there already is not built again.
    """
    part = recipe.model
    if part.backbone is None:
        module = _build_whole(recipe, data, number, components, start)
    else:
        module = _build_with_head(
            recipe, data, number, components, backbone or build_backbone(recipe, data, components)
        )
    if part.sparsity:
        prune(module, part.sparsity, keep=() if part.backbone is None else ("backbone",))
    if adapters := lora_config(recipe, number):
        with fork_rng(derive_seed(recipe.seed, "adapters", number), torch.device("cpu")):
            add_lora(module, **adapters)
    return module.to(param_dtype(recipe.train.precision))


def build_backbone(recipe: Recipe, data: DataSplits, components: Components = NO_COMPONENTS) -> Backbone:
    """Return the trunk that all members share."""
    part = recipe.model
    assert part.backbone is not None
    # It must not depend on which members happen to be built here, so it has a start of its own.
    whole = _build_whole(recipe, data, 0, components, derive_seed(recipe.seed, "shared"))
    return Backbone(whole, part.backbone, shape=data.shape, image_size=part.image_size, pool=part.head != "own")


def head_width(recipe: Recipe, number: int) -> int:
    """Return the width of one member's head."""
    return int(member_value("model.head_width", recipe.model.head_width, number, recipe.members))


def _build_with_head(
    recipe: Recipe, data: DataSplits, number: int, components: Components, trunk: Backbone
) -> nn.Module:
    part = recipe.model
    if part.head == "own":
        assert part.backbone is not None
        return BackboneWithHead(
            trunk,
            own_head(
                _build_whole(recipe, data, number, components, None),
                part.backbone,
                data.shape,
                image_size=part.image_size,
            ),
        )
    with fork_rng(derive_seed(recipe.seed, "init", number), torch.device("cpu")):
        return BackboneWithHead(
            trunk, build_head(part.head, trunk.shape, classes=data.classes, width=head_width(recipe, number))
        )


def _build_whole(recipe: Recipe, data: DataSplits, number: int, components: Components, start: int | None) -> nn.Module:
    """Return a network as its model makes it, with the weights it starts from."""
    part = recipe.model
    name = member_value("model.name", part.name, number, recipe.members)
    factory = components.model or registry.model.get(name, allow=components.trust)
    options = check(
        "model",
        factory,
        options_for_member(factory, part.options, number, recipe.members),
        also=ModelConfig.model_fields,
    )
    for fact in ("shape", "classes"):
        if accepts(factory, fact):
            options[fact] = getattr(data, fact)
    with fork_rng(derive_seed(recipe.seed, "init", number) if start is None else start, torch.device("cpu")):
        module = factory(**options)
    if not isinstance(module, nn.Module):
        raise RecipeError(f"model {name!r} returned {type(module).__name__}; it must return a torch.nn.Module")
    if part.weights:
        load_weights(
            module,
            weights_file(part.weights),
            member_value("model.weights_prefix", part.weights_prefix, number, recipe.members),
            strict=part.strict,
        )
    return module


def build_members(
    recipe: Recipe, data: DataSplits, numbers: Sequence[int], components: Components = NO_COMPONENTS
) -> list[nn.Module]:
    """Return the networks of some members; what is frozen is one object that all of them use."""
    prefixes = _frozen(recipe)
    trunk = build_backbone(recipe, data, components) if recipe.model.backbone else None
    adapted = recipe.model.lora is not None
    # What is shared must not depend on which members happen to be built here, so it has a start of its own.
    alone = bool(recipe.model.freeze) or adapted
    first = build_member(recipe, data, 0, components, start=derive_seed(recipe.seed, "shared")) if alone else None
    modules = []
    for number in numbers:
        module = build_member(recipe, data, number, components, backbone=trunk)
        if first is not None and adapted:
            share_base(first, module, shared_param_names(recipe, module))
        elif first is not None:
            share([first, module], prefixes)
        freeze(module, prefixes)
        modules.append(module)
    return modules


def _frozen(recipe: Recipe) -> tuple[str, ...]:
    return recipe.model.freeze if recipe.model.backbone is None else ("backbone",)


def shared_param_names(recipe: Recipe, module: nn.Module) -> set[str]:
    """Return the names of the weights and buffers that members share."""
    if recipe.model.lora is not None:
        return base_names(module, recipe.model.lora.modules_to_save)
    prefixes = _frozen(recipe)
    return freeze(module, prefixes) if prefixes else set()


def member_state_dict(module: nn.Module, shared: set[str]) -> TensorTree:
    """Return what a member's weights file holds: all of the state that is its own."""
    return {name: tensor for name, tensor in module.state_dict().items() if name not in shared}
