"""Module surgery: load weights, freeze and share submodules, and inspect a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from plateaux.core.errors import RecipeError, suggest
from plateaux.models.weight_files import read_weights
from plateaux.models.weight_names import compare_names, select_prefix


def load_weights(module: nn.Module, file: str | Path, prefix: str = "", *, strict: bool = True) -> None:
    """Load the weights of a safetensors file or torch checkpoint into the module.

    `prefix` selects the weights under that name. Without `strict`, the file may omit the last layer; weights of another
    shape and unexpected weights are skipped, and a warning lists them.
    """
    if not Path(file).is_file():
        raise _missing_file(module, file)
    weights = select_prefix(read_weights(Path(file)), prefix, file)
    found = compare_names(weights, module.state_dict())
    if not strict:
        omitted = found.missing
        found = replace(found, missing=[n for n in omitted if not n.startswith(last_layer(module) + ".")])
        if found.num_matching and not found.missing and (omitted or found.unexpected or found.mismatched):
            skipped = [
                *found.mismatched.values(),
                *(f"{n} (not in the file)" for n in omitted),
                *(f"{n} (not in the model)" for n in found.unexpected),
            ]
            warnings.warn(f"Not loaded from {file}: {', '.join(skipped)}", stacklevel=2)
    if found.missing or not found.num_matching or (strict and (found.unexpected or found.mismatched)):
        advice = "Use the model and prefix of the file, or strict = false for another head."
        raise RecipeError(f"{found.describe(file)} {advice}")
    usable = {n: w for n, w in weights.items() if n not in found.mismatched and n not in found.unexpected}
    module.load_state_dict(usable, strict=False)


def freeze(module: nn.Module, prefixes: Sequence[str]) -> set[str]:
    """Freeze the named submodules, parameters, or buffers, and keep submodules in evaluation mode despite `train()`.

    Returns the names of all frozen parameters and buffers.
    """
    for prefix in prefixes:
        part = get_part(module, prefix)
        if isinstance(part, nn.Module):
            part.requires_grad_(False)
            _stay_in_eval(part)  # and everything below it, except below a module whose own `train` leaves it out
            for inner in part.modules():
                if inner.training:
                    _stay_in_eval(inner)
                # A partial is copied and pickled with its module; a closure or a hook is not.
                object.__setattr__(inner, "train", partial(_stay_in_eval, inner))
        else:
            part.requires_grad_(False)
    # Submodules that occur twice in the model have two names, and both are returned.
    names = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return {name for name, _ in names if any(name == p or name.startswith(p + ".") for p in prefixes)}


def share(modules: Sequence[nn.Module], prefixes: Sequence[str]) -> None:
    """Make all modules use the named submodules of the first one, so that they are stored once; for frozen ones."""
    for prefix in prefixes:
        parts = [get_part(module, prefix) for module in modules]
        parent, _, child = prefix.rpartition(".")
        for module in modules[1:]:
            setattr(module.get_submodule(parent), child, parts[0])


def size_in_bytes(modules: Iterable[nn.Module]) -> int:
    """Return the memory of the parameters and buffers of all modules in bytes, with shared ones counted once."""
    sizes: dict[tuple[torch.device, int], int] = {}
    for tensor in chain.from_iterable(chain(m.parameters(), m.buffers()) for m in modules):
        storage = tensor.untyped_storage()
        sizes[tensor.device, storage.data_ptr() or id(tensor)] = storage.nbytes()
    return sum(sizes.values())


def batchnorm_layers(module: nn.Module) -> list[nn.Module]:
    """Return the BatchNorm layers."""
    return [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]


def dropout_layers(module: nn.Module) -> list[str]:
    """Return the names of the layers that are random in training: dropout of any kind that is not frozen."""
    return [name for name, part in module.named_modules() if _is_dropout(part) and not _is_frozen(part)]


def _missing_file(module: nn.Module, file: str | Path) -> RecipeError:
    """Return the error for a file that does not exist; a module may name where its weights are published."""
    source = getattr(module, "weights_source", None)
    if source is None:
        return RecipeError(f"There is no weights file at {str(file)!r}. Use the path of a safetensors file.")
    return RecipeError(
        f"There is no weights file at {str(file)!r}, in the current folder or below PLATEAUX_DATA: download {source} "
        "to that path, or set model.weights to its path."
    )


def last_layer(module: nn.Module) -> str:
    """Return the name of the submodule with the last parameters, usually the head."""
    names = [name.rpartition(".")[0] for name, _ in module.named_parameters()]
    return names[-1] if names else ""


def get_part(module: nn.Module, name: str) -> nn.Module | Tensor:
    """Return the submodule, parameter, or buffer with a name."""
    parts: dict[str, nn.Module | Tensor] = dict(module.named_modules(remove_duplicate=False))
    del parts[""]
    parts |= dict(module.named_parameters(remove_duplicate=False))
    parts |= dict(module.named_buffers(remove_duplicate=False))
    if name not in parts:
        children = [n for n, _ in module.named_children()]
        hint = suggest(name, parts)
        raise RecipeError(
            f"The model has no submodule or tensor {name!r}; {hint if hint[:3] == 'did' else suggest(name, children)}"
        )
    return parts[name]


def _stay_in_eval(module: nn.Module, mode: bool = False) -> nn.Module:
    """Replacement of `train()` that always switches to evaluation mode."""
    return type(module).train(module, False)


def _is_frozen(part: nn.Module) -> bool:
    return isinstance(vars(part).get("train"), partial)


def _is_dropout(part: nn.Module) -> bool:
    if isinstance(part, nn.modules.dropout._DropoutNd):
        return part.p > 0
    if isinstance(part, nn.MultiheadAttention | nn.RNNBase):
        return part.dropout > 0
    if type(part).__name__ in ("DropPath", "StochasticDepth", "DropBlock2d", "PatchDropout"):
        return any(_positive_rates(part, "drop_prob", "p", "prob"))
    return isinstance(part, nn.RReLU)


def _positive_rates(part: nn.Module, *names: str) -> Iterator[bool]:
    for name in names:
        value = getattr(part, name, None)
        yield isinstance(value, int | float) and value > 0
