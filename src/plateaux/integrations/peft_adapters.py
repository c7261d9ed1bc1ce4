"""LoRA adapters in the files of PEFT, `adapter_config.json` and `adapter_model.safetensors`, read and written.

    load_adapter(network, "adapter-0")        # adds the adapters to the network and loads their weights

`plateaux.storage.import_weights` writes them. The package peft is not needed. Only plain LoRA of linear layers is
supported; other variants are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from plateaux.core.errors import RecipeError, first_line
from plateaux.integrations.huggingface_files import read_json
from plateaux.models.lora import LoRALinear, add_lora

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of all names in a PEFT file
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
MAX_RANK = 1 << 14
# Keys that do not change what an adapter computes, or that are read here. Any other key that is set is refused.
KNOWN = {
    "peft_type", "task_type", "r", "lora_alpha", "target_modules", "modules_to_save", "base_model_name_or_path",
    "revision", "inference_mode", "lora_dropout", "init_lora_weights", "peft_version", "auto_mapping", "megatron_core",
    "qalora_group_size", "exclude_modules", "layers_to_transform", "layers_pattern", "bias",
}  # fmt: skip


def adapter_files(module: nn.Module, *, base_model: str = "") -> dict[str, bytes]:
    """Return the files of the adapters and the fully trained modules of one member, by name; the weights come first."""
    layers = {name: part for name, part in module.named_modules() if isinstance(part, LoRALinear)}
    if not layers:
        raise RecipeError(f"{type(module).__name__} has no LoRA adapters to save. Train it with [model.lora]")
    settings = {(layer.down.out_features, layer.scale * layer.down.out_features) for layer in layers.values()}
    assert len(settings) == 1, settings  # add_lora gives all layers the same
    ((rank, alpha),) = settings
    saved = _trained_modules(module, layers)
    tensors = {f"{PREFIX}{name}{DOWN}": layer.down.weight for name, layer in layers.items()}
    tensors |= {f"{PREFIX}{name}{UP}": layer.up.weight for name, layer in layers.items()}
    for name in saved:
        tensors |= {f"{PREFIX}{name}.{key}": value for key, value in module.get_submodule(name).state_dict().items()}
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(layers),
        "modules_to_save": saved or None,
        "base_model_name_or_path": base_model or None,
        "inference_mode": True,
    }
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return {WEIGHTS: save_tensors(plain, {"format": "pt"}), CONFIG: json.dumps(config, indent=2).encode()}


def is_adapter(folder: str | Path) -> bool:
    """Return whether a folder contains a PEFT adapter."""
    return (Path(folder) / CONFIG).is_file()


def load_adapter(module: nn.Module, folder: str | Path) -> None:
    """Load a PEFT adapter into a network: its base, to which adapters are added, or one that has the same adapters.

    Args:
        module: The network; names of its layers are those of the base model of the adapter.
        folder: A folder with adapter_config.json and adapter_model.safetensors. Pickled adapters are not read.
    """
    place = Path(folder)
    rank, alpha = _read_config(place)
    tensors = _read_tensors(place / WEIGHTS)
    targets = sorted(name.removesuffix(DOWN) for name in tensors if name.endswith(DOWN))
    others = {name: tensor for name, tensor in tensors.items() if not name.endswith((DOWN, UP))}
    if not targets or {f"{name}{UP}" for name in targets} != {name for name in tensors if name.endswith(UP)}:
        raise RecipeError(f"{place / WEIGHTS} has no complete pairs of lora_A and lora_B. Save the adapter again")
    parts = dict(module.named_modules())
    missing = [name for name in targets if not isinstance(parts.get(name), nn.Linear)]
    if missing:
        raise RecipeError(
            f"{place} has an adapter for {missing[0]!r}, which is no linear layer of {type(module).__name__}. Load it "
            "into the base model that it was trained with"
        )
    if not has_adapters(module):
        add_lora(module, rank=rank, alpha=alpha, target_modules=targets, modules_to_save=_parents(others))
    _check_layers(module, targets, rank, alpha, place)
    state = {f"{name}.down.weight": tensors[f"{name}{DOWN}"] for name in targets}
    state |= {f"{name}.up.weight": tensors[f"{name}{UP}"] for name in targets} | others
    expected = module.state_dict()
    wrong = [name for name, value in state.items() if name not in expected or expected[name].shape != value.shape]
    if wrong:
        raise RecipeError(
            f"{place / WEIGHTS}: {wrong[0]} has the shape {list(state[wrong[0]].shape)}, which does not match "
            f"{type(module).__name__}. The usual cause is another base model or another number of classes"
        )
    _check_trained(module, state, place)
    module.load_state_dict(state, strict=False)


def has_adapters(module: nn.Module) -> bool:
    """Return whether a network has layers with LoRA adapters."""
    return any(isinstance(part, LoRALinear) for part in module.modules())


def _check_trained(module: nn.Module, state: Mapping[str, Tensor], place: Path) -> None:
    """Raise an error if a member would keep a random tensor, or change one that all members share."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and name not in state:
            raise RecipeError(
                f"{place / WEIGHTS} has no {name}, which [model.lora] trains: it would stay as initialized. Save "
                'the adapter with it (PEFT: task_type="SEQ_CLS", or modules_to_save), or set lora.modules_to_save = [] '
                "if the base has it"
            )
        if not parameter.requires_grad and name in state:
            raise RecipeError(
                f"{place / WEIGHTS} has {name}, which [model.lora] does not train. Add "
                f"{name.rpartition('.')[0] or name!r} to lora.modules_to_save"
            )


def _check_layers(module: nn.Module, targets: Iterable[str], rank: int, alpha: float, place: Path) -> None:
    layers = {name: part for name, part in module.named_modules() if isinstance(part, LoRALinear)}
    found = {(layer.down.out_features, round(layer.scale * layer.down.out_features, 6)) for layer in layers.values()}
    if set(layers) != set(targets) or found != {(rank, round(alpha, 6))}:
        raise RecipeError(
            f"{place} has rank {rank}, alpha {alpha:g}, and {len(set(targets))} layers, unlike [model.lora] of the "
            f"network: {len(layers)} layers, rank and alpha {sorted(found)}. Set the same values"
        )


def _read_config(place: Path) -> tuple[int, float]:
    """Return rank and alpha, after checking that the adapter is plain LoRA."""
    config = read_json(place / CONFIG)
    unknown = [key for key, value in config.items() if value and key not in KNOWN]
    if config.get("init_lora_weights", True) not in (True, False, "gaussian"):  # others change the base, too
        unknown.append("init_lora_weights")
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or unknown:
        found = unknown[0] if unknown else f"peft_type = {config.get('peft_type')}, bias = {config.get('bias')}"
        raise RecipeError(f"{place / CONFIG} sets {found}. Only plain LoRA without biases is supported")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not 1 <= rank <= MAX_RANK or not isinstance(alpha, int | float):
        raise RecipeError(f"{place / CONFIG} has r = {rank!r} and lora_alpha = {alpha!r}. Expected: numbers")
    return rank, float(alpha)


def _read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors by their names in the network."""
    try:
        tensors = load_tensors(file.read_bytes())
    except FileNotFoundError:
        raise RecipeError(f"{file.parent} has no {file.name}; pickled adapters are not read. Save it again") from None
    except (SafetensorError, OSError) as error:
        raise RecipeError(f"{file} cannot be read ({first_line(error)}). Save the adapter again") from None
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def _trained_modules(module: nn.Module, layers: Mapping[str, LoRALinear]) -> list[str]:
    """Return the modules that are trained in full, without adapters."""
    trained = {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name.rpartition(".")[0].rpartition(".")[0] not in layers
    }
    if single := [name for name in trained if "." not in name]:
        raise RecipeError(f"PEFT saves modules, but {single[0]!r} is a tensor. Leave it out of lora.modules_to_save")
    return _parents(trained)


def _parents(names: Iterable[str]) -> list[str]:
    """Return the modules that contain tensors of these names, without those inside of another one.

    >>> _parents(["head.bias", "head.weight", "head.norm.weight"])
    ['head']
    """
    parents = sorted({name.rpartition(".")[0] for name in names})
    return [name for name in parents if not any(name.startswith(f"{other}.") for other in parents)]
