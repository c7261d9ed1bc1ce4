"""Load the members of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from plateaux.config.builders.model import build_members, shared_param_names
from plateaux.core.errors import RunError
from plateaux.core.runtime import get_device
from plateaux.data.sources import DataSplits, InMemorySource
from plateaux.ensembles.ensemble import Ensemble
from plateaux.storage.open_run import check_code
from plateaux.storage.run import Run, RunLike


def load_members(run: Run, numbers: Sequence[int]) -> list[torch.nn.Module]:
    """Return the networks of some members with the weights of the run folder."""
    components = run.components
    if run.info.model is not None and components.model is None:
        name = run.info.model.replace(":", ".").rpartition(".")[2]
        raise RunError(
            f"{run} was trained with {run.info.model!r}, a model that was passed in Python. Pass it again, as in "
            f"plateaux.open_run(path, model={name if name.isidentifier() else '...'})"
        )
    # The weights come from the run folder, so the file of pretrained weights may be gone.
    recipe = run.recipe.replaced(model={"weights": None, "sparsity": 0.0})
    components = replace(components, model_configs=run.info.model_configs or {})
    data = components.data or data_splits_info(run)
    modules = build_members(recipe, data, numbers, components)
    check_code(run, modules)
    shared = run.shared()
    for number, module in zip(numbers, modules, strict=True):
        names = shared_param_names(recipe, module)
        missing, unexpected = module.load_state_dict({**run.weights(number), **shared}, strict=False)
        if unexpected or set(missing) - names:
            raise RunError(
                f"The weights of member {number} do not match the model {run.recipe.model.name!r}: "
                f"missing {sorted(missing)[:3]}, unexpected {sorted(unexpected)[:3]}. Pass the model that the run was "
                "trained with: plateaux.open_run(path, model=...)"
            )
    return modules


def data_splits_info(run: Run) -> DataSplits:
    """Return the classes, shape, and normalization of the run's data, without samples."""
    info = run.info.data
    empty = InMemorySource(torch.empty(0), torch.empty(0))
    return DataSplits(
        name=info.name,
        train=empty,
        test=empty,
        classes=info.classes,
        shape=info.shape,
        mean=info.mean,
        std=info.std,
        labels=info.labels,
    )


def load(
    run: RunLike,
    *,
    device: str | None = None,
) -> Ensemble:
    """Return the ensemble of a run as an `nn.Module`, ready to predict.

    Args:
        run: A run, its folder, or its URL.
        device: "cpu", "cuda", "cuda:1", ... None: the best available device.
    """
    opened = Run.open(run)
    modules = load_members(opened, opened.trained_members())
    info = opened.info.data
    ensemble = Ensemble(modules, mean=info.mean, std=info.std, labels=info.labels)
    return ensemble.to(get_device(device))
