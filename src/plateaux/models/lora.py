"""LoRA, low-rank adapters: one frozen base for all members, plus two low-rank matrices per adapted layer and member.

A layer with the weight W computes `x W' + b` and, with an adapter, `x W' + b + (alpha / rank) x A' B'` with A of `rank`
rows and B of `rank` columns (Hu et al., arXiv:2106.09685). B is initialized to zero, so that a network starts as its
base. The weights of an adapted layer keep their names, `weight` and `bias`: the tensors of the base, and the merged
tensors, have the names of the network without adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plateaux.core.errors import RecipeError, suggest
from plateaux.core.types import TensorTree
from plateaux.models.surgery import freeze, last_layer

# Their fast paths use the weights of inner layers without calling them, so an adapter would have no effect.
BYPASS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class LoRALinear(nn.Linear):
    """A linear layer with a low-rank adapter.

    >>> layer = LoRALinear(nn.Linear(8, 3), rank=2, alpha=4.0)
    >>> [name for name, _ in layer.named_parameters()]
    ['weight', 'bias', 'down.weight', 'up.weight']
    """

    def __init__(self, layer: nn.Linear, *, rank: int, alpha: float) -> None:
        nn.Module.__init__(self)  # reuses the weights of `layer`
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = layer.weight
        self.register_parameter("bias", layer.bias)
        options = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        self.down = nn.Linear(layer.in_features, rank, bias=False, **options)  # A, with torch's default initialization
        self.up = nn.Linear(rank, layer.out_features, bias=False, **options)  # B
        nn.init.zeros_(self.up.weight)
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        low_rank: Tensor = self.up(self.down(x))
        return F.linear(x, self.weight, self.bias) + self.scale * low_rank

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """Return the equivalent single weight W + (alpha / rank) B A."""
        merged = self.weight.double() + self.scale * (self.up.weight.double() @ self.down.weight.double())
        return merged.to(self.weight.dtype)


def add_lora(
    module: nn.Module,
    *,
    rank: int,
    alpha: float,
    target_modules: Sequence[str],
    modules_to_save: Sequence[str] | None = None,
) -> None:
    """Add LoRA adapters to the linear layers whose names match, and freeze everything else.

    `target_modules` are names with wildcards. `modules_to_save` are submodules that are fully trained without an
    adapter; default: the last layer. BatchNorm of the base stays in evaluation mode, because members share its
    statistics.
    """
    saved = _saved_modules(module, modules_to_save)
    targets = _target_layers(module, target_modules, saved)
    adapters: dict[int, LoRALinear] = {}  # a layer that occurs twice gets one adapter
    for name, layer in targets.items():
        parent, _, child = name.rpartition(".")
        adapter = adapters.setdefault(id(layer), LoRALinear(layer, rank=rank, alpha=alpha))
        setattr(module.get_submodule(parent), child, adapter)
    base = base_names(module, modules_to_save)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in base:
            parameter.requires_grad_(False)
    norms = [n for n, p in module.named_modules() if isinstance(p, nn.modules.batchnorm._NormBase)]
    freeze(module, [name for name in norms if not _is_inside(name, saved)])


def base_names(module: nn.Module, modules_to_save: Sequence[str] | None = None) -> set[str]:
    """Return the names of all parameters and buffers that belong to neither an adapter nor a fully trained module."""
    member_parts = [
        *_saved_modules(module, modules_to_save),
        *(f"{name}.{part}" for name, _ in _lora_layers(module) for part in ("down", "up")),
    ]
    return {name for name, _ in _tensors(module) if not _is_inside(name, member_parts)}


def share_base(base: nn.Module, module: nn.Module, names: Iterable[str]) -> None:
    """Make the module use the named parameters and buffers of `base`, so that they are stored once."""
    tensors = dict(_tensors(base))
    for name in names:
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, tensors[name])


def merge_lora(module: nn.Module) -> TensorTree:
    """Return the state dict of the equivalent network without adapters: each adapter is added to its layer's weight.

    >>> net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    >>> add_lora(net, rank=2, alpha=4.0, target_modules=["0"])
    >>> sorted(merge_lora(net))
    ['0.bias', '0.weight', '1.bias', '1.weight']
    """
    tree: TensorTree = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    for name, layer in _lora_layers(module):
        start = f"{name}." if name else ""
        tree[f"{start}weight"] = layer.merged_weight()
        del tree[f"{start}down.weight"], tree[f"{start}up.weight"]
    return tree


def _lora_layers(module: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    parts = module.named_modules(remove_duplicate=False)
    return ((name, part) for name, part in parts if isinstance(part, LoRALinear))


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))


def _saved_modules(module: nn.Module, modules_to_save: Sequence[str] | None) -> list[str]:
    """Return the names of the submodules that are fully trained."""
    if modules_to_save is None:
        return [last_layer(module)]
    parts = [name for name, _ in chain(module.named_modules(), _tensors(module)) if name]
    for name in modules_to_save:
        if name not in parts:
            raise RecipeError(
                f"lora.modules_to_save: the model has no submodule or tensor {name!r}; {suggest(name, parts)}"
            )
    return list(modules_to_save)


def _is_inside(name: str, parts: Iterable[str]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def _target_layers(module: nn.Module, patterns: Sequence[str], saved: Sequence[str]) -> dict[str, nn.Linear]:
    """Return the layers to adapt by name; every pattern must match at least one."""
    parts = dict(module.named_modules(remove_duplicate=False))
    linear = {n: p for n, p in parts.items() if n and isinstance(p, nn.Linear) and not _is_inside(n, saved)}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in linear):
            raise RecipeError(
                f"lora.target_modules: {pattern!r} matches no linear layer outside modules_to_save "
                f"({', '.join(saved) or 'none'}). Linear layers: {', '.join(linear) or 'none'}."
            )
    layers = {name: part for name, part in linear.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}
    for name, layer in layers.items():
        _check_called(name, layer, parts[name.rpartition(".")[0]])
    return layers


def _check_called(name: str, layer: nn.Linear, parent: nn.Module) -> None:
    """Raise an error for layers whose weights are used without calling nn.Linear.forward."""
    reason = ""
    if isinstance(parent, BYPASS):
        reason = f"{type(parent).__name__} uses its weight without calling it"
    elif type(layer).forward is not nn.Linear.forward:
        reason = f"{type(layer).__name__} overrides forward"
    if reason:
        raise RecipeError(f"lora.target_modules: {name!r} cannot have an adapter because {reason}. Use other layers.")
