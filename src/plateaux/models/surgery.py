"""Module surgery: load weights, freeze and share submodules, and inspect a model."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from plateaux.core.errors import RecipeError, suggest

STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "net")  # under which checkpoints store the weights
WRAPPERS = ("module.", "_orig_mod.")  # prefixes added by DataParallel and torch.compile


def load_weights(module: nn.Module, file: str | Path, prefix: str = "", *, strict: bool = True) -> None:
    """Load the weights of a safetensors file or torch checkpoint into the module.

    `prefix` selects the weights under that name. Without `strict`, the file may omit the last layer; weights of another
    shape and unexpected weights are skipped, and a warning lists them.
    """
    if not Path(file).is_file():
        raise _missing_file(module, file)
    weights = _select_prefix(_read_weights(Path(file)), prefix, file)
    state = module.state_dict()
    # Files often omit the batch counter of BatchNorm; torch then resets it.
    missing = [name for name in state if name not in weights and not name.endswith("num_batches_tracked")]
    unexpected = [name for name in weights if name not in state]
    mismatched = [name for name in weights if name in state and weights[name].shape != state[name].shape]
    shapes = [
        f"{name} ({_format_shape(weights[name])} in the file, {_format_shape(state[name])} in the model)"
        for name in mismatched
    ]
    num_matching = len(weights) - len(unexpected) - len(mismatched)
    if not strict:
        omitted, missing = missing, [name for name in missing if not name.startswith(last_layer(module) + ".")]
        if num_matching and not missing and (omitted or unexpected or mismatched):
            skipped = [
                *shapes,
                *(f"{n} (not in the file)" for n in omitted),
                *(f"{n} (not in the model)" for n in unexpected),
            ]
            warnings.warn(f"Not loaded from {file}: {', '.join(skipped)}", stacklevel=2)
    if missing or not num_matching or (strict and (unexpected or mismatched)):
        raise RecipeError(_mismatch_message(file, missing, unexpected, shapes, state))
    module.load_state_dict({n: w for n, w in weights.items() if n in state and n not in mismatched}, strict=False)


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


def _read_weights(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name, without executing code in it."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, EOFError, RuntimeError) as error:
        raise RecipeError(
            f"{str(file)!r} cannot be read as weights: it is damaged, or contains more than tensors. "
            "Save only the model's state_dict(), preferably as a safetensors file."
        ) from error
    while key := next(
        (k for k in STATE_DICT_KEYS if isinstance(content, Mapping) and isinstance(content.get(k), Mapping)), None
    ):
        content = content[key]
    if not isinstance(content, Mapping):
        raise RecipeError(f"{str(file)!r} contains a {type(content).__name__}, not a state dict. Save a state_dict().")
    return {name: tensor for name, tensor in content.items() if isinstance(tensor, Tensor)}


def _select_prefix(weights: dict[str, Tensor], prefix: str, file: str | Path) -> dict[str, Tensor]:
    for wrapper in WRAPPERS:
        if weights and all(name.startswith(wrapper) for name in weights):
            weights = {name.removeprefix(wrapper): tensor for name, tensor in weights.items()}
    if not prefix:
        return weights
    start = prefix.removesuffix(".") + "."
    selected = {name.removeprefix(start): tensor for name, tensor in weights.items() if name.startswith(start)}
    if not selected:
        roots = {".".join(name.split(".")[: start.count(".")]) for name in weights}
        raise RecipeError(f"{str(file)!r} has no weights under {prefix!r}; {suggest(prefix.removesuffix('.'), roots)}")
    return selected


def _mismatch_message(
    file: str | Path, missing: list[str], unexpected: list[str], shapes: list[str], state: Mapping[str, Any]
) -> str:
    lines = [f"{str(file)!r} does not match the model."]
    if missing:
        lines.append(f"{len(missing)} weights are missing: {_first_three(missing)}.")
    if unexpected:
        suggestion = suggest(unexpected[0], missing or state)
        hint = f" ({unexpected[0]}: {suggestion})" if suggestion.startswith("did") else ""
        lines.append(f"{len(unexpected)} are not in the model: {_first_three(unexpected)}{hint}.")
    if shapes:
        lines.append(f"{len(shapes)} have another shape: {_first_three(shapes)}.")
    return " ".join([*lines, "Use the model and prefix of the file, or strict = false for another head."])


def _first_three(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _format_shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "scalar"


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
