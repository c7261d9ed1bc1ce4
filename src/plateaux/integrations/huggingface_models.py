"""Classifiers of transformers as `hf:PATH_OR_ID`, from a local folder or a repository of the Hugging Face hub.

The network is the class of transformers itself, so its weights have their usual names. Two hooks adapt it: inputs that
it does not take are dropped, and the output is its logits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from plateaux.core.errors import PlateauxError, RecipeError, first_line
from plateaux.core.imports import optional_import
from plateaux.core.registry import HUB_PREFIX, NO_HUB_ACCESS, HubAccess, model
from plateaux.integrations.huggingface_files import EXTRA, find_folder, is_plain_name, offline, read_json

Attention = Literal["plain", "fused"]
IMPLEMENTATIONS = {"plain": "eager", "fused": "sdpa"}
TASKS = {1: "AutoModelForSequenceClassification", 3: "AutoModelForImageClassification"}  # by dimensions of an input
READS_MASK = ("canine", "esm", "eurobert", "longformer")  # types that use the mask of tokens outside of attention, too
ADAPTER = "adapter_config.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
# Keys of a configuration that set what comes from the data, that change the output, or that describe code.
IGNORED = (
    "num_labels", "id2label", "label2id", "problem_type", "auto_map", "dtype", "torch_dtype",
    "_attn_implementation", "attn_implementation", "_name_or_path", "return_dict", "use_return_dict",
    "output_hidden_states", "output_attentions",
)  # fmt: skip
TIMM_TYPES = ("timm_wrapper", "timm_backbone")
# Keys of a configuration, or of a part of it, that name another network or code, or that change its weights.
REFUSED = (
    "quantization_config", "use_pretrained_backbone", "use_timm_backbone", "backbone", "architecture", "auto_map",
)  # fmt: skip


@model(prefix="hf:")
def hf_model(
    name: str,
    *,
    shape: tuple[int, ...],
    classes: int,
    pretrained: bool = True,
    attention: Attention = "plain",
    hub_access: HubAccess = NO_HUB_ACCESS,
) -> nn.Module:
    """A classifier of Hugging Face transformers, for texts or images, from a local folder or a hub id.

    The last layer has one output per class of the data. If the folder has another one, or none, it is new, and every
    member initializes its own. `pretrained = false` uses the configuration only, with random weights. Plain attention
    supports vmap and second derivatives; the fused kernel saves memory on long sequences.
    """
    if hub_access.config is not None:  # of a run, which has the weights itself
        network = build_from_config(hub_access.config, shape, classes, attention=attention, where=f"{HUB_PREFIX}{name}")
        return adapt(network)
    folder = find_folder(name, "model", download=hub_access.download)
    tree = read_model_config(folder)
    if not pretrained:
        return adapt(build_from_config(tree, shape, classes, attention=attention, where=str(folder)))
    return adapt(_load(folder, tree, shape, classes, attention))


def model_configs(names: Any, *, download: bool) -> dict[str, dict[str, Any]] | None:
    """Return the config.json of every Hugging Face model by its name; None if there are none."""
    names = [names] if isinstance(names, str) else list(names)
    wanted = [name for name in dict.fromkeys(names) if name.startswith(HUB_PREFIX)]
    found = {
        name: dict(read_model_config(find_folder(name.removeprefix(HUB_PREFIX), "model", download=download)))
        for name in wanted
    }
    return found or None


def read_model_config(folder: Path) -> Mapping[str, Any]:
    """Return the configuration of a model, without what it says about classes and code."""
    if (folder / ADAPTER).exists():
        raise RecipeError(
            f"{folder} contains a PEFT adapter ({ADAPTER}). Expected: the folder of its base model, with [model.lora]. "
            "plateaux.integrations.peft_adapters reads the adapter"
        )
    return {key: value for key, value in read_json(folder / "config.json").items() if key not in IGNORED}


def build_from_config(
    tree: Mapping[str, Any], shape: tuple[int, ...], classes: int, *, attention: Attention = "plain", where: str = ""
) -> Any:
    """Return a network of transformers with random weights."""
    library, config = _library(), _config(tree, classes, where)
    _check_shape(config, shape, where)
    auto = _auto_class(library, config, shape, where)
    try:
        with offline():
            return auto.from_config(config, attn_implementation=IMPLEMENTATIONS[attention], dtype=torch.float32)
    except Exception as error:  # an untrusted configuration may be wrong in any way
        raise _cannot_build(where, error) from error


def adapt(network: Any) -> nn.Module:
    """Make a network of transformers drop unknown inputs, compute its own mask, and return its logits."""
    accepted = set(signature(network.forward).parameters)
    if getattr(network.config, "type_vocab_size", 2) < 2:
        accepted.discard("token_type_ids")
    hook = partial(_adapt_inputs, accepted=frozenset(accepted), has_mask=_takes_prepared_mask(network))
    network.register_forward_pre_hook(hook, with_kwargs=True)
    network.register_forward_hook(_return_logits)
    network.train()  # from_pretrained returns a network in evaluation mode
    module: nn.Module = network
    return module


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to the scores of attention `[B, 1, 1, T]` for a mask of tokens `[B, T]`.

    transformers branches on the values of the mask, which vmap does not support.
    """
    return (1.0 - mask[:, None, None].to(dtype)) * torch.finfo(dtype).min


def _adapt_inputs(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, accepted: frozenset[str], has_mask: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    kwargs = {name: value for name, value in kwargs.items() if name in accepted}
    mask = kwargs.get("attention_mask")
    if has_mask and mask is not None and mask.ndim == 2:
        kwargs["attention_mask"] = additive_mask(mask, module.dtype)
    return args, kwargs


def _return_logits(_: nn.Module, __: Any, output: Any) -> Any:
    return output.logits


def _takes_prepared_mask(network: Any) -> bool:
    """Return whether an additive mask [B, 1, 1, T] means the same to the network as a mask of tokens [B, T]."""
    names = vars(sys.modules[type(network).__module__])
    is_windowed = any("sliding" in name for name in names if name.startswith("create_"))
    config = network.config
    # An additive mask would replace the causal one. GPT-2 has one, and no is_decoder in its configuration.
    is_decoder = getattr(config, "is_decoder", "create_causal_mask" in names) or config.is_encoder_decoder
    is_special = is_windowed or is_decoder or config.model_type in READS_MASK
    return "create_bidirectional_mask" in names and not is_special


def _load(folder: Path, tree: Mapping[str, Any], shape: tuple[int, ...], classes: int, attention: Attention) -> Any:
    library, config = _library(), _config(tree, classes, str(folder))
    _check_shape(config, shape, str(folder))
    _check_weights(folder)
    auto = _auto_class(library, config, shape, str(folder))
    try:
        with _quiet(library), offline():
            network, info = auto.from_pretrained(
                str(folder),
                config=config,
                attn_implementation=IMPLEMENTATIONS[attention],
                dtype=torch.float32,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # untrusted files may be wrong in any way
        raise _cannot_build(str(folder), error) from error
    _check_loaded(network, info, folder)
    return network


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """Hide the progress and the report of transformers: what is missing in the file is judged here."""
    logs = library.utils.logging
    verbosity, has_bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(verbosity)
        if has_bars:
            logs.enable_progress_bar()


def _check_weights(folder: Path) -> None:
    single, index = (folder / name for name in WEIGHTS)
    if single.is_file():
        return
    if not index.is_file():
        raise RecipeError(
            f"{folder} has no {WEIGHTS[0]}; pickled weights are not read. Save the model with "
            "save_pretrained(..., safe_serialization=True), or set model.pretrained = false for random weights"
        )
    shards = read_json(index).get("weight_map")
    names = set(map(str, shards.values())) if isinstance(shards, dict) else {""}
    if not all(is_plain_name(name) and name.endswith(".safetensors") for name in names):
        raise RecipeError(f"{index} names files that are no safetensors files of its folder. Save the model again")


def _check_loaded(network: Any, info: Mapping[str, Any], folder: Path) -> None:
    """Raise an error if weights below the classifier are missing or have another shape."""
    names = [*info["missing_keys"], *(key if isinstance(key, str) else key[0] for key in info["mismatched_keys"])]
    base = sorted(name for name in names if _is_base(network, name) and ".pooler." not in name)
    if base:
        raise RecipeError(
            f"{folder} does not have all weights of {type(network).__name__}: {len(base)} are missing or have another "
            f"shape, such as {base[0]}. Expected: the weights of the architecture in config.json. Save the model again"
        )


def _is_base(network: Any, name: str) -> bool:
    """Return whether a weight is one below the classifier."""
    prefix = network.base_model_prefix
    if prefix in dict(network.named_children()):
        return name.startswith(f"{prefix}.")
    last = [each for each, _ in network.named_parameters()][-1].rpartition(".")[0]  # as in CLIP, which has no such part
    return not name.startswith(f"{last}.")


def _config(tree: Mapping[str, Any], classes: int, where: str) -> Any:
    library = _library()
    kind = tree.get("model_type")
    if not isinstance(kind, str) or kind not in library.CONFIG_MAPPING:
        raise RecipeError(
            f"{where}: transformers {library.__version__} has no model of the type {kind!r}. Code of a repository is "
            "never executed, so only models that are part of transformers can be used"
        )
    try:
        for part in _parts(tree):
            _check_part(library, part, where)
        with offline():
            return library.CONFIG_MAPPING[kind].from_dict({"architectures": [], **tree, "num_labels": classes})
    except Exception as error:  # an untrusted configuration may be wrong in any way
        raise _cannot_build(where, error) from error


def _parts(tree: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Return a configuration and all configurations inside of it."""
    rest: list[Any] = [tree]
    while rest:
        value = rest.pop()
        if isinstance(value, Mapping):
            yield value
            rest += value.values()
        elif isinstance(value, list | tuple):
            rest += value


def _check_part(library: Any, part: Mapping[str, Any], where: str) -> None:
    """Raise an error if a configuration names another network, which transformers or timm would fetch."""
    kind = part.get("model_type")
    if kind in TIMM_TYPES:
        raise RecipeError(
            f"{where}: config.json has the type {kind!r}, which names a network of timm. It is not supported here: set "
            'model.name = "timm:NAME", and model.weights for its weights'
        )
    for key in REFUSED:
        if part.get(key):
            raise RecipeError(f"{where}: config.json sets {key}, which is not supported. Save the model without it")
    is_known = isinstance(kind, str) and kind in library.CONFIG_MAPPING
    if is_known and "backbone_config" in library.CONFIG_MAPPING[kind].sub_configs:
        raise RecipeError(f"{where}: config.json has the type {kind!r}, which names a backbone. Use another model")


def _auto_class(library: Any, config: Any, shape: tuple[int, ...], where: str) -> Any:
    auto = getattr(library, TASKS[len(shape)])
    if type(config) not in auto._model_mapping:
        raise RecipeError(
            f"{where}: transformers has no {config.model_type!r} for {TASKS[len(shape)].removeprefix('AutoModelFor')}, "
            f"which inputs of shape {list(shape)} need. Use another model, or data of its kind"
        )
    return auto


def _check_shape(config: Any, shape: tuple[int, ...], where: str) -> None:
    if len(shape) not in TASKS:
        raise RecipeError(f"{where}: inputs have shape {list(shape)}. Expected: tokens [T], or images [C, H, W]")
    if len(shape) == 1:
        positions = getattr(config, "max_position_embeddings", None)
        if isinstance(positions, int) and 0 < positions < shape[0]:
            raise RecipeError(f"{where}: inputs have {shape[0]} tokens. Set data.length to at most {positions}")
        return
    channels = getattr(config, "num_channels", None)
    sizes = _image_sizes(config, shape, where)
    is_fixed = not hasattr(config, "depths")  # networks of stages take any size
    if is_fixed and sizes != tuple(shape[1:]):
        raise RecipeError(
            f"{where}: the model is for images of {sizes[1]} x {sizes[0]} pixels, but the inputs have shape "
            f"{list(shape)}. Set model.image_size = {sizes[0]}, which resizes them before the network"
        )
    if channels is not None and channels != shape[0]:
        raise RecipeError(f"{where}: the model is for images of {channels} channels, not {shape[0]}. Convert them")


def _image_sizes(config: Any, shape: tuple[int, ...], where: str) -> tuple[int, ...]:
    """Return the height and the width of the images of a model; those of the data if it does not say."""
    size = getattr(config, "image_size", None) or shape[1:]
    sizes = (size, size) if isinstance(size, int) else size
    if not isinstance(sizes, list | tuple) or len(sizes) != 2 or not all(isinstance(each, int) for each in sizes):
        raise RecipeError(f"{where}: config.json sets image_size = {size!r}. Expected: one number of pixels, or two")
    return tuple(sizes)


def _cannot_build(where: str, error: Exception) -> PlateauxError:
    if isinstance(error, PlateauxError):
        return error
    return RecipeError(f"{where}: transformers cannot build the model: {type(error).__name__}: {first_line(error)}")


def _library() -> Any:
    return optional_import("transformers", extra=EXTRA)
