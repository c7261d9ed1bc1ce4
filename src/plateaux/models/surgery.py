"""What can be done to a model once it is built: load weights, freeze and share parts, prune, and ask what is inside."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from plateaux.core.errors import RecipeError, suggest

NESTS = ("state_dict", "model_state_dict", "model", "net")  # where checkpoints keep the weights
WRAPPERS = ("module.", "_orig_mod.")  # what data parallelism and compilation put before every name


def load_weights(module: nn.Module, file: str | Path, prefix: str = "", *, strict: bool = True) -> None:
    """Load the weights of a safetensors file or torch checkpoint into the module.

    `prefix` takes only the weights under that name. Without `strict` the file may lack the last layer, weights
    of another shape are skipped, weights too many are left, and a warning names them.
    """
    weights = _under(_read(Path(file)), prefix, file)
    own = module.state_dict()
    # Files often leave out BatchNorm's counter; torch then starts it anew.
    missing = [name for name in own if name not in weights and not name.endswith("num_batches_tracked")]
    unexpected = [name for name in weights if name not in own]
    other = [name for name in weights if name in own and weights[name].shape != own[name].shape]
    shapes = [f"{name} ({_shape(weights[name])} in the file, {_shape(own[name])} in the model)" for name in other]
    fits = len(weights) - len(unexpected) - len(other)
    if not strict:
        left, missing = missing, [name for name in missing if not name.startswith(last_layer(module) + ".")]
        if fits and not missing and (left or unexpected or other):
            skipped = [*shapes, *(f"{n} (not in the file)" for n in left), *(f"{n} (no place)" for n in unexpected)]
            warnings.warn(f"Not loaded from {file}: {', '.join(skipped)}", stacklevel=2)
    if missing or not fits or (strict and (unexpected or other)):
        raise RecipeError(_misfit(file, missing, unexpected, shapes, own))
    module.load_state_dict({n: w for n, w in weights.items() if n in own and n not in other}, strict=False)


def freeze(module: nn.Module, prefixes: Sequence[str]) -> set[str]:
    """Stop training the named parts, and keep them in evaluation mode whatever `train()` says.

    A part is a submodule, a parameter or a buffer. Returns the names of all parameters and buffers in the parts.
    """
    for prefix in prefixes:
        part = _part(module, prefix)
        if isinstance(part, nn.Module):
            part.requires_grad_(False)
            for inner in part.modules():
                _stay_in_eval(inner)
                # A partial is copied and pickled with its module, which a closure or a hook would not be.
                object.__setattr__(inner, "train", partial(_stay_in_eval, inner))
        else:
            part.requires_grad_(False)
    # Parts that occur twice in the model have two names, and both are frozen.
    names = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return {name for name, _ in names if any(name == p or name.startswith(p + ".") for p in prefixes)}


def share(modules: Sequence[nn.Module], prefixes: Sequence[str]) -> None:
    """Make all modules use the first one's named parts, so that these are held once. Meant for frozen parts."""
    for prefix in prefixes:
        parts = [_part(module, prefix) for module in modules]
        parent, _, child = prefix.rpartition(".")
        for module in modules[1:]:
            setattr(module.get_submodule(parent), child, parts[0])


def prune(
    module: nn.Module, sparsity: float, *, scope: Literal["global", "layer"] = "global", keep: Sequence[str] = ()
) -> None:
    """Set the smallest weights to zero, and leave a mask beside each weight.

    Exactly `round(sparsity * count)` weights fall, of all layers together or of each; of equal ones the first. Weights
    are parameters called `...weight` of two or more dimensions, outside the submodules named in `keep`. The masks are
    buffers `<name>_mask`, true where a weight lives, and no part of the state dict.
    """
    if not 0 <= sparsity < 1:
        raise RecipeError(f"A sparsity is the share of weights set to zero, at least 0 and below 1; got {sparsity}")
    for name in keep:
        _part(module, name)
    weights = {
        name: weight
        for name, weight in module.named_parameters()
        if weight.ndim >= 2 and name.endswith("weight") and not any(name.startswith(k + ".") or name == k for k in keep)
    }
    groups = [list(weights)] if scope == "global" else [[name] for name in weights]
    for names in filter(None, groups):
        sizes = [weights[name].numel() for name in names]
        alive = _largest(torch.cat([weights[name].detach().abs().flatten() for name in names]), sparsity)
        for name, mask in zip(names, torch.split(alive, sizes), strict=True):
            _put_mask(module, name, mask.view_as(weights[name]).clone())


def size_in_bytes(modules: Iterable[nn.Module]) -> int:
    """Return how many bytes the parameters and buffers of all modules hold, shared ones counted once."""
    held: dict[tuple[torch.device, int], int] = {}
    for tensor in chain.from_iterable(chain(m.parameters(), m.buffers()) for m in modules):
        storage = tensor.untyped_storage()
        held[tensor.device, storage.data_ptr() or id(tensor)] = storage.nbytes()
    return sum(held.values())


def batchnorm_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers that normalise by statistics of the batch."""
    return [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]


def dropout_layers(module: nn.Module) -> list[str]:
    """Return the names of the layers that draw random numbers in training: dropout of any kind that is not frozen."""
    return [name for name, part in module.named_modules() if _drops(part) and not _frozen(part)]


def _read(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name, without executing anything in it."""
    if not file.is_file():
        raise RecipeError(f"There is no file of weights at {str(file)!r}; give the path of a safetensors file")
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, EOFError, RuntimeError) as error:
        raise RecipeError(
            f"{str(file)!r} cannot be read as weights: it is damaged, or holds more than tensors. "
            "Save the model's state_dict() alone, best as a safetensors file"
        ) from error
    while nest := next(
        (n for n in NESTS if isinstance(content, Mapping) and isinstance(content.get(n), Mapping)), None
    ):
        content = content[nest]
    if not isinstance(content, Mapping):
        raise RecipeError(f"{str(file)!r} holds a {type(content).__name__}, not weights by name; save a state_dict()")
    return {name: tensor for name, tensor in content.items() if isinstance(tensor, Tensor)}


def _under(weights: dict[str, Tensor], prefix: str, file: str | Path) -> dict[str, Tensor]:
    for wrapper in WRAPPERS:
        if weights and all(name.startswith(wrapper) for name in weights):
            weights = {name.removeprefix(wrapper): tensor for name, tensor in weights.items()}
    if not prefix:
        return weights
    start = prefix.removesuffix(".") + "."
    found = {name.removeprefix(start): tensor for name, tensor in weights.items() if name.startswith(start)}
    if not found:
        roots = {".".join(name.split(".")[: start.count(".")]) for name in weights}
        raise RecipeError(f"{str(file)!r} has no weights under {prefix!r}; {suggest(prefix.removesuffix('.'), roots)}")
    return found


def _misfit(
    file: str | Path, missing: list[str], unexpected: list[str], shapes: list[str], own: Mapping[str, Any]
) -> str:
    lines = [f"{str(file)!r} does not fit the model."]
    if missing:
        lines.append(f"{len(missing)} weights are missing: {_few(missing)}.")
    if unexpected:
        near = suggest(unexpected[0], missing or own)
        hint = f" ({unexpected[0]}: {near})" if near.startswith("did") else ""
        lines.append(f"{len(unexpected)} have no place in the model: {_few(unexpected)}{hint}.")
    if shapes:
        lines.append(f"{len(shapes)} have another shape: {_few(shapes)}.")
    return " ".join([*lines, "Choose the model and prefix the file was made with, or strict = false for another head."])


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "one number"


def last_layer(module: nn.Module) -> str:
    """Return the name of the part that holds the last parameters: where a network has a head, the head."""
    names = [name.rpartition(".")[0] for name, _ in module.named_parameters()]
    return names[-1] if names else ""


def _part(module: nn.Module, name: str) -> nn.Module | Tensor:
    parts: dict[str, nn.Module | Tensor] = dict(module.named_modules(remove_duplicate=False))
    del parts[""]
    parts |= dict(module.named_parameters(remove_duplicate=False))
    parts |= dict(module.named_buffers(remove_duplicate=False))
    if name not in parts:
        children = [n for n, _ in module.named_children()]
        near = suggest(name, parts)
        raise RecipeError(f"The model has no part {name!r}; {near if near[:3] == 'did' else suggest(name, children)}")
    return parts[name]


def _stay_in_eval(module: nn.Module, mode: bool = False) -> nn.Module:
    """Do what `eval()` does, whatever mode is asked for."""
    return type(module).train(module, False)


def _frozen(part: nn.Module) -> bool:
    return isinstance(vars(part).get("train"), partial)


def _drops(part: nn.Module) -> bool:
    if isinstance(part, nn.modules.dropout._DropoutNd):
        return part.p > 0
    if isinstance(part, nn.MultiheadAttention | nn.RNNBase):
        return part.dropout > 0
    if type(part).__name__ in ("DropPath", "StochasticDepth", "DropBlock2d", "PatchDropout"):
        return any(_numbers(part, "drop_prob", "p", "prob"))
    return isinstance(part, nn.RReLU)


def _numbers(part: nn.Module, *names: str) -> Iterator[bool]:
    for name in names:
        value = getattr(part, name, None)
        yield isinstance(value, int | float) and value > 0


def _largest(size: Tensor, sparsity: float) -> Tensor:
    """Return which entries stay when exactly `round(sparsity * n)` of the smallest fall, the first of equals first."""
    fall = round(sparsity * len(size))
    alive = torch.ones_like(size, dtype=torch.bool)
    if fall:
        edge = size.kthvalue(fall).values
        below, ties = size < edge, (size == edge).nonzero().flatten()
        alive[below] = False
        alive[ties[: fall - int(below.sum())]] = False
    return alive


def _put_mask(module: nn.Module, name: str, mask: Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    owner = module.get_submodule(parent)
    with torch.no_grad():
        getattr(owner, leaf).mul_(mask)
    owner.register_buffer(f"{leaf}_mask", mask, persistent=False)
