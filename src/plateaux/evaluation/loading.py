"""Load the members of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from plateaux.config.builders.model import networks, shared_names
from plateaux.config.components import NOTHING_GIVEN, Given
from plateaux.core.errors import RunError
from plateaux.core.runtime import get_device
from plateaux.data.sources import DataSplits, InMemorySource
from plateaux.ensembles.ensemble import Ensemble
from plateaux.storage.run import Run


def members_of(run: Run, data: DataSplits, numbers: Sequence[int], given: Given) -> list[torch.nn.Module]:
    """Return some members' networks with the weights of the run folder."""
    # The weights come from the run folder, so the file they once started from need not be there any more.
    bare = run.recipe.changed(model={"weights": None, "sparsity": 0.0})
    modules = networks(bare, data, numbers, given)
    shared = run.shared()
    for number, module in zip(numbers, modules, strict=True):
        names = shared_names(bare, module)
        missing, unexpected = module.load_state_dict({**run.weights(number), **shared}, strict=False)
        if unexpected or set(missing) - names:
            raise RunError(
                f"The weights of member {number} do not fit {run.recipe.model.name!r}: "
                f"missing {sorted(missing)[:3]}, unexpected {sorted(unexpected)[:3]}"
            )
    return modules


def data_facts(run: Run) -> DataSplits:
    """Return what models must know of the data, without the data themselves."""
    facts = run.about["data"]
    empty = InMemorySource(torch.empty(0), torch.empty(0))
    return DataSplits(
        name=facts["name"],
        train=empty,
        test=empty,
        classes=facts["classes"],
        shape=tuple(facts["shape"]),
        mean=tuple(facts["mean"]),
        std=tuple(facts["std"]),
        labels=tuple(facts["labels"]),
    )


def load(root: str | Path, *, given: Given = NOTHING_GIVEN, device: str | None = None) -> Ensemble:
    """Return a run's ensemble, ready to predict."""
    run = Run.open(root)
    modules = members_of(run, data_facts(run), run.present(), given)
    facts = run.about["data"]
    ensemble = Ensemble(modules, mean=facts["mean"], std=facts["std"], labels=facts["labels"])
    return ensemble.to(get_device(device))
