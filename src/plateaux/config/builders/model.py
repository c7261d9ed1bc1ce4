"""Build the networks of the members of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.recipe import ModelConfig, Recipe, fingerprint
from plateaux.config.schema import accepts, check, member_options, member_value
from plateaux.core import registry
from plateaux.core.errors import RecipeError
from plateaux.core.registry import HubAccess
from plateaux.core.runtime import fork_rng, param_dtype
from plateaux.core.types import TensorTree, derive_seed
from plateaux.data.files import weights_file
from plateaux.data.sources import DataSplits
from plateaux.models.backbone import Backbone, BackboneWithHead, build_head, own_head
from plateaux.models.lora import add_lora, base_names, share_base
from plateaux.models.pruning import end_layers, prune
from plateaux.models.resizing import resize_inputs, resized_shape
from plateaux.models.surgery import freeze, load_weights, share


def architecture_hash(recipe: Recipe, number: int, components: Components = NO_COMPONENTS) -> str:
    """Return a hash that is equal for members with the same architecture."""
    name = member_value("model.name", recipe.model.name, number, recipe.members)
    factory = components.model or registry.model.get(name, allow=components.trust)
    options = member_options(factory, recipe.model.options, number, recipe.members)
    width = {} if recipe.model.head != "mlp" else {"head": head_width(recipe, number)}
    return fingerprint({"name": name, "options": options, "adapters": lora_config(recipe, number), **width})


def lora_config(recipe: Recipe, number: int) -> dict[str, Any]:
    """Return the LoRA options of one member. Without LoRA the dictionary is empty."""
    lora = recipe.model.lora
    if lora is None:
        return {}
    values = {
        name: member_value(f"model.lora.{name}", getattr(lora, name), number, recipe.members)
        for name in ("rank", "alpha")
    }
    return {**values, "target_modules": lora.target_modules, "modules_to_save": lora.modules_to_save}


def build_member(
    recipe: Recipe,
    data: DataSplits,
    number: int,
    components: Components = NO_COMPONENTS,
    *,
    init_seed: int | None = None,
    backbone: Backbone | None = None,
) -> nn.Module:
    """Return the network of one member before its first training step.

    `init_seed` replaces the seed of its initialization. An existing `backbone` is not built again.
    """
    config = recipe.model
    if config.backbone is None:
        module = _build_network(recipe, data, number, components, init_seed)
        if config.image_size is not None:
            resize_inputs(module, config.image_size, config.image_interpolation or "bilinear")
    else:
        module = _build_with_head(
            recipe, data, number, components, backbone or build_backbone(recipe, data, components)
        )
    if config.sparsity:
        backbone_name = () if config.backbone is None else ("backbone",)
        prune(module, config.sparsity, keep=(*end_layers(module), *backbone_name))
    if lora := lora_config(recipe, number):
        with fork_rng(derive_seed(recipe.seed, "adapters", number), torch.device("cpu")):
            add_lora(module, **lora)
    return module.to(param_dtype(recipe.train.precision))


def build_backbone(recipe: Recipe, data: DataSplits, components: Components = NO_COMPONENTS) -> Backbone:
    """Return the backbone that all members share."""
    config = recipe.model
    assert config.backbone is not None
    # The backbone must not depend on which members are built in this process, so it has its own seed.
    network = _build_network(recipe, data, 0, components, derive_seed(recipe.seed, "shared"))
    return Backbone(
        network,
        config.backbone,
        shape=data.shape,
        image_size=config.image_size,
        interpolation=config.image_interpolation or "bilinear",
        pool=config.head != "own",
    )


def head_width(recipe: Recipe, number: int) -> int:
    """Return the number of hidden units of one member's head."""
    return int(member_value("model.head_width", recipe.model.head_width, number, recipe.members))


def _build_with_head(
    recipe: Recipe, data: DataSplits, number: int, components: Components, backbone: Backbone
) -> nn.Module:
    config = recipe.model
    if config.head == "own":
        assert config.backbone is not None
        return BackboneWithHead(
            backbone,
            own_head(
                _build_network(recipe, data, number, components, None),
                config.backbone,
                data.shape,
                image_size=config.image_size,
            ),
        )
    with fork_rng(derive_seed(recipe.seed, "init", number), torch.device("cpu")):
        return BackboneWithHead(
            backbone, build_head(config.head, backbone.shape, classes=data.classes, width=head_width(recipe, number))
        )


def _build_network(
    recipe: Recipe, data: DataSplits, number: int, components: Components, init_seed: int | None
) -> nn.Module:
    """Return the complete network of the model, with its initial weights."""
    config = recipe.model
    model_name = member_value("model.name", config.name, number, recipe.members)
    factory = components.model or registry.model.get(model_name, allow=components.trust)
    options = check(
        "model",
        factory,
        member_options(factory, config.options, number, recipe.members),
        also=ModelConfig.model_fields,
    )
    configs = components.model_configs
    access = HubAccess(
        download=components.download, config=(configs or {}).get(model_name), has_weights=configs is not None
    )
    provided = {
        "shape": resized_shape(data.shape, config.image_size),
        "classes": data.classes,
        "hub_access": access,
    }
    options |= {name: value for name, value in provided.items() if accepts(factory, name)}
    with fork_rng(derive_seed(recipe.seed, "init", number) if init_seed is None else init_seed, torch.device("cpu")):
        module = factory(**options)
    if not isinstance(module, nn.Module):
        raise RecipeError(f"model {model_name!r} returned {type(module).__name__}; it must return a torch.nn.Module")
    if config.weights:
        load_weights(
            module,
            weights_file(config.weights),
            member_value("model.weights_prefix", config.weights_prefix, number, recipe.members),
            strict=config.strict,
        )
    return module


def build_members(
    recipe: Recipe,
    data: DataSplits,
    numbers: Sequence[int],
    components: Components = NO_COMPONENTS,
    *,
    backbone: Backbone | None = None,
) -> list[nn.Module]:
    """Return the networks of some members. Frozen parts are one module that all of them share.

    An existing `backbone` is not built again.
    """
    prefixes = _frozen_prefixes(recipe)
    if backbone is None and recipe.model.backbone:
        backbone = build_backbone(recipe, data, components)
    has_lora = recipe.model.lora is not None
    # Shared weights must not depend on which members are built in this process, so they have their own seed.
    has_shared = bool(recipe.model.freeze) or has_lora
    first = (
        build_member(recipe, data, 0, components, init_seed=derive_seed(recipe.seed, "shared")) if has_shared else None
    )
    modules = []
    for number in numbers:
        module = build_member(recipe, data, number, components, backbone=backbone)
        if first is not None and has_lora:
            share_base(first, module, shared_param_names(recipe, module))
        elif first is not None:
            share([first, module], prefixes)
        freeze(module, prefixes)
        modules.append(module)
    return modules


def _frozen_prefixes(recipe: Recipe) -> tuple[str, ...]:
    return recipe.model.freeze if recipe.model.backbone is None else ("backbone",)


def shared_param_names(recipe: Recipe, module: nn.Module) -> set[str]:
    """Return the names of the weights and buffers that members share."""
    if recipe.model.lora is not None:
        return base_names(module, recipe.model.lora.modules_to_save)
    prefixes = _frozen_prefixes(recipe)
    return freeze(module, prefixes) if prefixes else set()


def member_state_dict(module: nn.Module, shared: set[str]) -> TensorTree:
    """Return the content of a member's weights file: its state dict without the shared entries."""
    return {name: tensor for name, tensor in module.state_dict().items() if name not in shared}
