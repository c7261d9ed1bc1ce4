"""Hugging Face: the weights and the class names in a folder that `save_pretrained` wrote, read as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from plateaux.core.errors import RecipeError
from plateaux.integrations.huggingface_files import read_json
from plateaux.models.weight_files import read_weights

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
ADAPTER = "adapter_config.json"


def is_model_folder(folder: Path) -> bool:
    """Return whether a folder contains a model, or an adapter, of Hugging Face."""
    return any((folder / name).is_file() for name in (CONFIG, ADAPTER))


def read_folder_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights in a folder: one file, or the parts that its index names; safetensors come first."""
    for name in WEIGHTS:
        if (folder / name).is_file():
            return read_weights(folder / name)
        index = folder / f"{name}.index.json"
        if index.is_file():
            parts = [read_weights(folder / part) for part in _part_names(index)]
            return {key: tensor for part in parts for key, tensor in part.items()}
    if (folder / ADAPTER).is_file():
        raise RecipeError(
            f"{str(folder)!r} contains a PEFT adapter without its base model: save the complete model with "
            "model.merge_and_unload().save_pretrained(...), or add [model.lora] with the values of the adapter to the "
            "recipe."
        )
    raise RecipeError(f"{str(folder)!r} has neither {' nor '.join(WEIGHTS)}: save the model with save_pretrained(...).")


def class_names(folder: Path) -> tuple[str, ...]:
    """Return the class names in config.json in the order of the outputs; empty if there are only numbered ones."""
    names = read_json(folder / CONFIG).get("id2label") if (folder / CONFIG).is_file() else None
    if not isinstance(names, Mapping) or not all(str(number).isdigit() for number in names):
        return ()
    ordered = tuple(str(names[number]) for number in sorted(names, key=lambda number: int(number)))
    is_numbered = all(name == f"LABEL_{number}" for number, name in enumerate(ordered))
    return () if is_numbered else ordered


def check_class_order(folder: Path, labels: Sequence[str]) -> None:
    """Raise RecipeError if a model has the classes of the data in another order."""
    names = class_names(folder)
    if names and labels and sorted(names) == sorted(labels) and tuple(labels) != names:
        raise RecipeError(
            f"{str(folder)!r} has the classes of the data in another order ({', '.join(names[:5])}; the data: "
            f"{', '.join(labels[:5])}), so its predictions would be wrong: number the labels of the data as in its "
            f"{CONFIG}."
        )


def _part_names(index: Path) -> list[str]:
    """Return the names of the files that an index lists, all in its folder."""
    listed = read_json(index).get("weight_map")
    names = sorted({str(name) for name in listed.values()}) if isinstance(listed, Mapping) else []
    suffix = Path(index.name.removesuffix(".index.json")).suffix
    if not names or any(Path(name).name != name or not name.endswith(suffix) for name in names):
        raise RecipeError(f"{str(index)!r} names no {suffix} files of its folder: save the model again.")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise RecipeError(f"{str(index)!r} names {missing[0]!r}, which is not in the folder: copy the complete folder.")
    return names
