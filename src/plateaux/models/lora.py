"""Low-rank adapters: one frozen base for all members, and beside chosen linear layers two thin matrices of one's own.

A layer with the weight W computes `x W' + b` and, once adapted, `x W' + b + (alpha / rank) x A' B'` with A of `rank`
rows and B of `rank` columns (Hu et al., arXiv:2106.09685). B begins at zero, so that a network begins as its base. The
weights of an adapted layer keep their names, `weight` and `bias`: the base's tensors are those of the plain network,
and so are the merged ones.
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

# Their fast paths take the weights of the layers inside without calling them: an adapter would do nothing.
BYPASS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class LoRALinear(nn.Linear):
    """A linear layer with a low-rank path beside it.

    >>> layer = LoRALinear(nn.Linear(8, 3), rank=2, alpha=4.0)
    >>> [name for name, _ in layer.named_parameters()]
    ['weight', 'bias', 'down.weight', 'up.weight']
    """

    def __init__(self, layer: nn.Linear, *, rank: int, alpha: float) -> None:
        nn.Module.__init__(self)  # the weights are taken over, not made
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = layer.weight
        self.register_parameter("bias", layer.bias)
        like = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        self.down = nn.Linear(layer.in_features, rank, bias=False, **like)  # A: begins as torch begins a linear layer
        self.up = nn.Linear(rank, layer.out_features, bias=False, **like)  # B
        nn.init.zeros_(self.up.weight)
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        beside: Tensor = self.up(self.down(x))
        return F.linear(x, self.weight, self.bias) + self.scale * beside

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """Return the one weight that does the same: W + (alpha / rank) B A."""
        wide = self.weight.double() + self.scale * (self.up.weight.double() @ self.down.weight.double())
        return wide.to(self.weight.dtype)


def add_lora(
    module: nn.Module,
    *,
    rank: int,
    alpha: float,
    target_modules: Sequence[str],
    modules_to_save: Sequence[str] | None = None,
) -> None:
    """Put adapters on the linear layers whose names match, and stop training everything else.

    `layers` are names with wildcards. `train` names parts that are trained whole and need no adapter; the last layer if
    it is None. BatchNorm of the base stays in evaluation mode, for its statistics are everybody's.
    """
    whole = _whole(module, modules_to_save)
    chosen = _chosen(module, target_modules, whole)
    made: dict[int, LoRALinear] = {}  # a layer that occurs twice gets one adapter
    for name, layer in chosen.items():
        parent, _, child = name.rpartition(".")
        adapted = made.setdefault(id(layer), LoRALinear(layer, rank=rank, alpha=alpha))
        setattr(module.get_submodule(parent), child, adapted)
    base = base_names(module, modules_to_save)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in base:
            parameter.requires_grad_(False)
    norms = [n for n, p in module.named_modules() if isinstance(p, nn.modules.batchnorm._NormBase)]
    freeze(module, [name for name in norms if not _under(name, whole)])


def base_names(module: nn.Module, modules_to_save: Sequence[str] | None = None) -> set[str]:
    """Return the names of all weights and buffers that are neither an adapter's nor trained whole."""
    own = [
        *_whole(module, modules_to_save),
        *(f"{name}.{part}" for name, _ in _lora_layers(module) for part in ("down", "up")),
    ]
    return {name for name, _ in _tensors(module) if not _under(name, own)}


def share_base(base: nn.Module, module: nn.Module, names: Iterable[str]) -> None:
    """Make the module use the named weights and buffers of `base`, so that they are held once."""
    theirs = dict(_tensors(base))
    for name in names:
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, theirs[name])


def merge_lora(module: nn.Module) -> TensorTree:
    """Return the state dict of the plain network that computes the same: every adapter added into its layer's weight.

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


def _whole(module: nn.Module, modules_to_save: Sequence[str] | None) -> list[str]:
    """Return the parts that are trained whole."""
    if modules_to_save is None:
        return [last_layer(module)]
    parts = [name for name, _ in chain(module.named_modules(), _tensors(module)) if name]
    for name in modules_to_save:
        if name not in parts:
            raise RecipeError(f"lora.modules_to_save: the model has no part {name!r}; {suggest(name, parts)}")
    return list(modules_to_save)


def _under(name: str, parts: Iterable[str]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def _chosen(module: nn.Module, patterns: Sequence[str], whole: Sequence[str]) -> dict[str, nn.Linear]:
    """Return the layers to adapt by name; every pattern must find one."""
    parts = dict(module.named_modules(remove_duplicate=False))
    linear = {n: p for n, p in parts.items() if n and isinstance(p, nn.Linear) and not _under(n, whole)}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in linear):
            raise RecipeError(
                f"lora.target_modules: no linear layer is called {pattern!r}, beside those trained whole "
                f"({', '.join(whole) or 'none'}). There are: {', '.join(linear) or 'none'}"
            )
    found = {name: part for name, part in linear.items() if any(fnmatchcase(name, each) for each in patterns)}
    for name, part in found.items():
        _check_called(name, part, parts[name.rpartition(".")[0]])
    return found


def _check_called(name: str, layer: nn.Linear, parent: nn.Module) -> None:
    """Refuse layers whose weights are used in some other way than by calling a linear layer."""
    why = ""
    if isinstance(parent, BYPASS):
        why = f"{type(parent).__name__} uses its weight without calling it"
    elif type(layer).forward is not nn.Linear.forward:
        why = f"{type(layer).__name__} has a forward of its own"
    if why:
        raise RecipeError(f"lora.target_modules: {name!r} cannot have an adapter, for {why}; choose other layers")
