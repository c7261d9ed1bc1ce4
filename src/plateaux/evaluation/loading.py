"""Load the members of a run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plateaux.config.builders.model import build_members, shared_param_names
from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.core.errors import RunError
from plateaux.core.runtime import get_device
from plateaux.data.sources import DataSplits, InMemorySource
from plateaux.ensembles.ensemble import Ensemble
from plateaux.storage.run import Run, RunLike


def load_members(run: Run, data: DataSplits, numbers: Sequence[int], components: Components) -> list[torch.nn.Module]:
    """Return some members' networks with the weights of the run folder."""
    # The weights come from the run folder, so the file they once started from need not be there any more.
    bare = run.recipe.replaced(model={"weights": None, "sparsity": 0.0})
    modules = build_members(bare, data, numbers, components)
    shared = run.shared()
    for number, module in zip(numbers, modules, strict=True):
        names = shared_param_names(bare, module)
        missing, unexpected = module.load_state_dict({**run.weights(number), **shared}, strict=False)
        if unexpected or set(missing) - names:
            raise RunError(
                f"The weights of member {number} do not fit {run.recipe.model.name!r}: "
                f"missing {sorted(missing)[:3]}, unexpected {sorted(unexpected)[:3]}"
            )
    return modules


def data_splits_info(run: Run) -> DataSplits:
    """Return what models must know of the data, without the data themselves."""
    facts = run.info.data
    empty = InMemorySource(torch.empty(0), torch.empty(0))
    return DataSplits(
        name=facts.name,
        train=empty,
        test=empty,
        classes=facts.classes,
        shape=facts.shape,
        mean=facts.mean,
        std=facts.std,
        labels=facts.labels,
    )


def load(root: RunLike, *, components: Components = NO_COMPONENTS, device: str | None = None) -> Ensemble:
    """Return a run's ensemble, ready to predict."""
    run = Run.open(root)
    modules = load_members(run, data_splits_info(run), run.trained_members(), components)
    facts = run.info.data
    ensemble = Ensemble(modules, mean=facts.mean, std=facts.std, labels=facts.labels)
    return ensemble.to(get_device(device))
