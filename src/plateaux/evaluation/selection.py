"""Ensemble selection: choose members of several runs on held-out samples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.core.callbacks import Say
from plateaux.core.errors import RecipeError, RunError
from plateaux.ensembles.combine import combine
from plateaux.ensembles.ensemble import Ensemble
from plateaux.ensembles.log_probs import log_probs
from plateaux.ensembles.selection import Selection, select
from plateaux.evaluation.evaluator import Evaluator, _held_out
from plateaux.evaluation.loading import load
from plateaux.evaluation.predictions import MemberOutputs, predict_all
from plateaux.evaluation.splits import eval_split
from plateaux.storage.atomic import write_atomic
from plateaux.storage.local_store import LocalStore
from plateaux.storage.run import Run, RunLike


@dataclass(frozen=True, slots=True)
class EnsembleSelection:
    """Members of several runs, how much each counts, and the samples they were chosen on."""

    members: tuple[tuple[str, int], ...]  # run folder and number, for every member of the pool
    selection: Selection
    split: str
    fingerprint: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "members": [{"run": run, "member": number} for run, number in self.members],
            "selection": self.selection.to_dict(),
            "split": self.split,
            "fingerprint": self.fingerprint,
        }

    @classmethod
    def read(cls, file: str | Path) -> EnsembleSelection:
        """Return what `choose_members` wrote."""
        path = Path(file).absolute()
        store, name = LocalStore(path.parent), path.name
        if not store.has(name):
            raise RunError(f"{file} is not there; `plateaux select RUN ... -o {file}` makes it")
        tree = store.get_json(name)
        try:
            members = tuple((str(each["run"]), int(each["member"])) for each in tree["members"])
            return cls(members, Selection.from_dict(tree["selection"]), str(tree["split"]), str(tree["fingerprint"]))
        except (KeyError, TypeError, ValueError):
            raise RunError(f"{file} is no selection of members; `plateaux select` makes one") from None

    def write(self, file: str | Path) -> None:
        write_atomic(Path(file), json.dumps(self.to_dict(), indent=2) + "\n")


def select_members(
    roots: Sequence[RunLike],
    *,
    size: int,
    split: str = "validation",
    metric: Literal["nll", "accuracy", "brier"] = "nll",
    unique: bool = False,
    components: Components = NO_COMPONENTS,
    device: str | None = None,
    say: Say = lambda _: None,
) -> EnsembleSelection:
    """Choose an ensemble from the members of several runs, greedily and with replacement, on held-out samples."""
    members: list[tuple[str, int]] = []
    tables: list[Tensor] = []
    first: tuple[str, MemberOutputs] | None = None
    looks: tuple[Any, Any] | None = None
    for root in roots:
        panel = Evaluator(Run.open(root), components=components, device=device, say=say)
        target = _held_out(panel, split)
        said, fingerprint = predict_all(panel, target), panel.known(target)["fingerprint"]
        looks = looks or (panel.data_info.mean, panel.data_info.std)
        if looks != (panel.data_info.mean, panel.data_info.std):
            raise RunError(f"{root} normalises its inputs otherwise than {roots[0]}: one ensemble cannot do both")
        if first is not None and (first[0] != fingerprint or not torch.equal(first[1].ids, said.ids)):
            raise RunError(f"{root} has other {split} samples than {roots[0]}: all must be judged on the same ones")
        first = first or (fingerprint, said)
        members += [(str(root), number) for number in panel.numbers]
        tables.append(log_probs(said.logits.double()))
    if first is None:
        raise RecipeError("No runs were given to choose members from; give one or more run folders")
    fingerprint, said = first
    found = select(torch.cat(tables), said.y, size, metric=metric, unique=unique, ids=said.ids)
    return EnsembleSelection(tuple(members), found, split, fingerprint)


def load_selection(file: str | Path, *, components: Components = NO_COMPONENTS, device: str | None = None) -> Ensemble:
    """Return the ensemble of a selection, ready to predict: its members count as often as they were drawn."""
    chosen = EnsembleSelection.read(file)
    used = [(each, weight) for each, weight in zip(chosen.members, chosen.selection.weights, strict=True) if weight]
    runs = {
        root: load(root, components=components, device=device) for root in dict.fromkeys(root for (root, _), _ in used)
    }
    whole = next(iter(runs.values()))
    modules = [runs[root].members[number] for (root, number), _ in used]
    weights = [weight for _, weight in used]
    return Ensemble(modules, mean=whole.mean, std=whole.std, labels=whole.labels, weights=weights)


def evaluate_selection(
    file: str | Path, *, split: str = "test", components: Components = NO_COMPONENTS, device: str | None = None,
    say: Say = lambda _: None,
) -> dict[str, float]:  # fmt: skip
    """Return accuracy and NLL of a selection on samples it was not chosen on."""
    chosen = EnsembleSelection.read(file)
    roots = dict.fromkeys(root for root, _ in chosen.members)
    tables: list[Tensor] = []
    said: MemberOutputs | None = None
    for root in roots:
        panel = Evaluator(Run.open(root), components=components, device=device, say=say)
        target = eval_split(panel.recipe, panel.data_info, split)
        before, said = said, predict_all(panel, target)
        if before is not None and not torch.equal(before.ids, said.ids):
            raise RunError(f"{root} has other {split} samples than the others: all must be judged on the same ones")
        if panel.known(target)["fingerprint"] == chosen.fingerprint and _overlap(said.ids, chosen.selection.samples):
            raise RunError(f"The members were chosen on these {split} samples; numbers on them would flatter")
        tables.append(said.logits)
    assert said is not None
    log_p = combine(torch.cat(tables).double(), "weighted", chosen.selection.weights)
    right = log_p.argmax(-1) == said.y
    nll = -log_p.gather(-1, said.y[:, None]).mean()
    return {"accuracy": float(right.double().mean()), "nll": float(nll), "samples": float(len(said.y))}


def _overlap(ids: Tensor, others: Sequence[int]) -> bool:
    return bool(torch.isin(ids, torch.tensor(list(others), dtype=ids.dtype)).any())
