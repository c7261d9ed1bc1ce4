"""The data of a run: read from the run folder, if they were arrays in Python, or from the data set of the recipe."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from plateaux.config.builders.data import build_data
from plateaux.core import registry
from plateaux.core.errors import DataError, RunError, UnknownNameError
from plateaux.data.data_check import check_evaluation_data
from plateaux.data.preprocessing import NO_PREPROCESSING
from plateaux.data.sources import DataSplits
from plateaux.data.tensor_names import DATA_FILE, from_named_tensors, to_named_tensors
from plateaux.storage.remote_store import open_store
from plateaux.storage.run import Run


def store_data(run: Run, data: DataSplits) -> None:
    """Write the samples to the run folder, from which all commands read them."""
    tensors, metadata = to_named_tensors(data)
    run.store.put_tensors(DATA_FILE, tensors, metadata)


def copy_data(source: Run, target: Run) -> None:
    """Copy the samples of a run folder, if it contains them, to another run on the same data."""
    if source.store.has(DATA_FILE):
        store_data(target, _read(source))


def read_stored_data(root: str | Path) -> DataSplits | None:
    """Return the samples that are stored in a run folder; None if there are none, or no run."""
    store = open_store(root)
    if not (store.has("run.json") and store.has_recorded(DATA_FILE)):
        return None
    return _read(Run.open(root, check_recipe=False))  # which `train` writes again


def build_run_data(run: Run) -> DataSplits:
    """Return the data set of a run: what the caller passes, what the run folder contains, or what the recipe names."""
    components = run.components
    if components.data is None and run.store.has_recorded(DATA_FILE):
        return build_data(run.recipe, replace(components, data=_read(run)))
    try:
        return build_data(run.recipe, components)
    except UnknownNameError as error:
        if ":" in run.recipe.data.name:
            raise
        raise DataError(
            f"{run} was trained on data that were passed in Python ({run.recipe.data.name!r}) and are not stored in "
            f'the run folder. Use Python and pass them again, as in plateaux.open_run("{run}", '
            "data=plateaux.from_arrays(...))."
        ) from error


def check_continuable(run: Run) -> None:
    """Raise RunError if the command line cannot train this run, because its model or its data exist only in Python."""
    name = run.info.model
    if name is not None:
        short = name.replace(":", ".").rpartition(".")[2]
        function = short if short.isidentifier() else "..."
        raise RunError(
            f"The model of {run}, {name!r}, was passed in Python, so the command line cannot build it. Continue in "
            f'Python: plateaux.fit(x, y, model={function}, out="{run}"), or plateaux.train(recipe, "{run}", '
            f"model={function}, ...)."
        )
    if (
        not run.store.has(DATA_FILE)
        and run.recipe.data.name not in registry.dataset.names()
        and ":" not in run.recipe.data.name
    ):
        raise RunError(
            f"The data of {run} ({run.recipe.data.name!r}) were passed in Python and are not stored in the run folder. "
            f'Continue in Python: plateaux.fit(dataset, model={run.recipe.model.name!r}, out="{run}"), or '
            f'plateaux.train(recipe, "{run}", data=...).'
        )


def _read(run: Run) -> DataSplits:
    info = run.info.data
    tensors = run.store.get_tensors(DATA_FILE)
    samples = {name: tensor for name, tensor in tensors.items() if name not in ("mean", "std")}
    data = from_named_tensors(samples, {"classes": str(info.classes), "labels": json.dumps(info.labels)})
    data = replace(data, mean=info.mean, std=info.std, preprocessing=run.info.preprocessing or NO_PREPROCESSING)
    check_evaluation_data(data, info.shape, info.classes)
    return data
