"""Measure a run: load its members once, walk once over the data, write one object per measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from plateaux import registry
from plateaux.assess import assess
from plateaux.build import NOTHING_GIVEN, Given, data_of, networks, shared_names
from plateaux.ensemble import Ensemble
from plateaux.errors import RunError
from plateaux.exchange import View
from plateaux.executors.local import Local
from plateaux.learning import split_of
from plateaux.loader import evaluation
from plateaux.machine import FORMATS, autocast, device_named, dtype_of, settle_in
from plateaux.recipe import Recipe, fingerprint
from plateaux.run import Run
from plateaux.samples import Data, Resident
from plateaux.types import Value

STANDARD = ("accuracy", "nll", "brier", "ece")
MEMBERS_MEAN = "mean of members"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measure's numbers about one run on one set of samples."""

    measure: str
    on: str
    rows: Mapping[str, Value]
    better: str
    weights: Mapping[str, str]  # which weights each member's numbers are from
    data: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return {
            "measure": self.measure,
            "on": self.on,
            "better": self.better,
            "rows": {name: {"value": v.number, "error": v.error} for name, v in self.rows.items()},
            "weights": dict(self.weights),
            "data": dict(self.data),
        }


def load(root: str | Path, *, given: Given = NOTHING_GIVEN, device: str | None = None) -> Ensemble:
    """Return a run's ensemble, ready to predict."""
    run = Run.open(root)
    modules = _members(run, _data_facts(run, given), list(range(run.recipe.members)), given)
    facts = run.about["data"]
    ensemble = Ensemble(modules, mean=facts["mean"], std=facts["std"], labels=facts["labels"])
    return ensemble.to(device_named(device))


def evaluate(
    root: str | Path,
    *,
    on: str = "test",
    measures: Sequence[str] = STANDARD,
    given: Given = NOTHING_GIVEN,
    device: str | None = None,
    seen: Callable[[int, int], None] = lambda *_: None,
) -> list[Measurement]:
    """Measure every member and the ensemble on `test`, `validation` or `train` samples; keep the numbers in the run."""
    run = Run.open(root)
    recipe = run.as_trained()
    settle_in(threads=recipe.executor.threads)
    data = data_of(recipe, given)
    chosen = {name: registry.measure.get(name, allow=given.allow)() for name in measures}
    place = device_named(device)
    modules = [module.to(place).eval() for module in _members(run, data, list(range(recipe.members)), given)]
    views = [View(module, forward=lambda: autocast(recipe.train.precision, place)) for module in modules]
    source, ids = _samples(recipe, data, on)
    batches = evaluation(
        source,
        ids,
        batch=max(recipe.data.batch, 256),
        mean=data.mean,
        std=data.std,
        device=place,
        dtype=dtype_of(recipe.train.precision),
        memory_format=FORMATS[recipe.train.memory_format],
        workers=recipe.data.workers,
    )
    done = 0

    def count(samples: int) -> None:
        nonlocal done
        done += samples
        seen(done, len(ids))

    results = assess(Local("loop", 1, (), "error"), views, batches, chosen, seen=count)
    origin = {f"member {i}": run.progress(i).weights_from for i in range(recipe.members)}
    about = {"name": data.name, "samples": len(ids), "fingerprint": source.fingerprint()}
    found = [
        Measurement(name, on, _with_mean(rows), chosen[name].better, origin, about) for name, rows in results.items()
    ]
    for each in found:
        name = fingerprint({"measure": each.measure, "on": on, "data": about, "weights": origin})
        run.store.put_json(f"measures/{each.measure}-{name}.json", each.to_dict())
    return found


def _members(run: Run, data: Data, numbers: Sequence[int], given: Given) -> list[torch.nn.Module]:
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


def _data_facts(run: Run, given: Given) -> Data:
    """Return what models must know of the data, without the data themselves."""
    facts = run.about["data"]
    nothing = Resident(torch.empty(0), torch.empty(0))
    return Data(
        name=facts["name"],
        train=nothing,
        test=nothing,
        classes=facts["classes"],
        shape=tuple(facts["shape"]),
        mean=tuple(facts["mean"]),
        std=tuple(facts["std"]),
        labels=tuple(facts["labels"]),
    )


def _samples(recipe: Recipe, data: Data, on: str) -> tuple[Any, torch.Tensor]:
    if on == "test":
        return data.test, torch.arange(len(data.test))
    train, validation = split_of(recipe, data)
    if on == "train":
        return data.train, train
    if on == "validation" and len(validation):
        return data.train, validation
    raise RunError(
        f"There are no samples called {on!r}; allowed: test, train" + (", validation" if len(validation) else "")
    )


def _with_mean(rows: Mapping[str, Value]) -> dict[str, Value]:
    members = [value.number for name, value in rows.items() if name.startswith("member ")]
    if not members:
        return dict(rows)
    mean = sum(members) / len(members)
    spread = (
        (sum((v - mean) ** 2 for v in members) / (len(members) - 1) / len(members)) ** 0.5 if len(members) > 1 else None
    )
    found = dict(rows)
    return {**{n: v for n, v in found.items() if n.startswith("member ")}, MEMBERS_MEAN: Value(mean, spread),
            **{n: v for n, v in found.items() if not n.startswith("member ")}}  # fmt: skip
