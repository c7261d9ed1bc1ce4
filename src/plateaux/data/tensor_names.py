"""A data set as named tensors, which is how a run folder and the data set `arrays` store it.

`x_train`, `y_train`, `x_test`, `y_test`; named inputs are `x_train.input_ids` and so on. Mean and standard deviation
are `mean` and `std`; the names of classes and of the columns of a table are in the metadata of the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from plateaux.core.errors import DataError
from plateaux.core.types import Inputs, TensorTree, first_tensor
from plateaux.data.preprocessing import Preprocessing
from plateaux.data.sources import DataSplits, InMemorySource

DATA_FILE = "data.safetensors"


def to_named_tensors(data: DataSplits) -> tuple[TensorTree, dict[str, str]]:
    """Return the tensors and the metadata that describe a data set in memory."""
    tensors: TensorTree = {}
    for split, source in (("train", data.train), ("test", data.test)):
        assert isinstance(source, InMemorySource)
        inputs = {"": source.x} if isinstance(source.x, Tensor) else {f".{name}": x for name, x in source.x.items()}
        tensors |= {f"x_{split}{name}": x for name, x in inputs.items()} | {f"y_{split}": source.y}
    if data.mean:
        tensors |= {name: torch.tensor(getattr(data, name), dtype=torch.float64) for name in ("mean", "std")}
    owners: dict[int, str] = {}  # safetensors refuses shared memory, such as that of equal train and test arrays
    for name, tensor in tensors.items():
        if owners.setdefault(tensor.untyped_storage().data_ptr(), name) != name:
            tensors[name] = tensor.clone()
    columns = data.preprocessing.columns
    names = {"labels": json.dumps(data.labels), **({"columns": json.dumps(columns)} if columns else {})}
    return tensors, {"classes": str(data.classes), **names}


def inputs_by_name(tensors: Mapping[str, Tensor], prefix: str) -> Inputs:
    """Return the inputs stored as `prefix`, or as `prefix.name` for named inputs."""
    if prefix in tensors:
        return tensors[prefix]
    start = f"{prefix}."
    named = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
    if not named:
        raise DataError(f"The tensors {sorted(tensors) or 'none'} do not contain {prefix!r}, which is needed.")
    return named


def from_named_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> DataSplits:
    """Return the data set that `to_named_tensors` describes."""
    sources = []
    for split in ("train", "test"):
        x = inputs_by_name(tensors, f"x_{split}")
        if f"y_{split}" not in tensors:
            raise DataError(f"The tensors {sorted(tensors)} do not contain 'y_{split}', which is needed.")
        sources.append(InMemorySource(x, tensors[f"y_{split}"]))
    try:
        classes, labels = int(metadata["classes"]), tuple(map(str, json.loads(metadata["labels"])))
        columns = tuple(map(str, json.loads(metadata.get("columns", "[]"))))
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise DataError(
            f"The metadata of the tensors do not name the classes ({error!r}): use a file that plateaux.fit wrote."
        ) from None
    x = sources[0].x
    shape = tuple(first_tensor(x).shape[1:])
    statistics = [tensors.get(name, torch.empty(0)) for name in ("mean", "std")]
    if any(values.ndim != 1 for values in statistics):
        raise DataError("The tensors 'mean' and 'std' need one dimension, with a value for each feature or channel.")
    mean, std = (tuple(values.double().tolist()) for values in statistics)
    steps = Preprocessing(columns=columns)
    return DataSplits("arrays", sources[0], sources[1], classes, shape, mean, std, labels, preprocessing=steps)
