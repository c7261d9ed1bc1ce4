"""Ensemble selection: select members of several runs on held-out samples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from plateaux.core.errors import RecipeError, RunError
from plateaux.core.progress import Progress, log_messages
from plateaux.core.ranges import StoredInt
from plateaux.ensembles.combine import combine
from plateaux.ensembles.ensemble import Ensemble
from plateaux.ensembles.log_probs import log_probs
from plateaux.ensembles.selection import Selection, select
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.member_outputs import MemberOutputs, predict_all
from plateaux.evaluation.prediction_cache import CacheMode
from plateaux.evaluation.splits import eval_split
from plateaux.prediction.load import load_ensemble
from plateaux.storage.atomic import write_atomic
from plateaux.storage.json_shapes import parse_json, read_shape
from plateaux.storage.local_store import LocalStore
from plateaux.storage.run import Run, RunLike


@dataclass(frozen=True, slots=True)
class EnsembleSelection:
    """Members of several runs, their weights in the ensemble, and the samples they were selected on."""

    members: tuple[tuple[str, int], ...]  # run folder and member id, for every member of the pool
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
        """Return a selection that `write` wrote."""
        path = Path(file).absolute()
        store, name = LocalStore(path.parent), path.name
        if not store.has(name):
            raise RunError(f"{file} does not exist. Run: plateaux select RUN ... --out {file}")
        advice = f"it is not a selection of members. Run: plateaux select RUN ... --out {file}"
        stored = read_shape(_StoredSelection, parse_json(store.get(name), file, advice), file, advice)
        if len(stored.members) != len(stored.selection.weights) or not any(stored.selection.weights):
            raise RunError(f"{file} does not have one weight for every member; {advice}")
        members = tuple((member.run, member.member) for member in stored.members)
        return cls(members, stored.selection, stored.split, stored.fingerprint)

    def write(self, file: str | Path) -> None:
        """Write the selection to a JSON file."""
        write_atomic(Path(file), json.dumps(self.to_dict(), indent=2) + "\n")

    def load(self, runs: Sequence[RunLike] = (), *, device: str | None = None) -> Ensemble:
        """Return the ensemble, ready to predict; a member that was selected twice has twice the weight.

        Args:
            runs: Opened runs of the selection that need Python objects or trust; others are opened by path.
            device: "cpu", "cuda", "cuda:1", ... None: the best available device.
        """
        pool = zip(self.members, self.selection.weights, strict=True)
        used = [(root, number, weight) for (root, number), weight in pool if weight]
        opened = _by_root(runs)
        roots = dict.fromkeys(root for root, _, _ in used)
        loaded = {root: load_ensemble(opened.get(root) or Run.open(root), device=device) for root in roots}
        first = next(iter(loaded.values()))
        modules = [loaded[root].members[number] for root, number, _ in used]
        weights = [weight for _, _, weight in used]
        return Ensemble(modules, mean=first.mean, std=first.std, labels=first.labels, weights=weights)


@dataclass(frozen=True, slots=True)
class _StoredMember:
    run: str
    member: StoredInt


@dataclass(frozen=True, slots=True)
class _StoredSelection:
    """The content of a file that `EnsembleSelection.write` wrote."""

    members: tuple[_StoredMember, ...]
    selection: Selection
    split: str
    fingerprint: str


def select_members(
    runs: Sequence[RunLike],
    *,
    size: int,
    split: str = "validation",
    metric: Literal["nll", "accuracy", "brier"] = "nll",
    unique: bool = False,
    device: str | None = None,
    cache_logits: CacheMode = "float32",
    progress: Progress = log_messages,
) -> EnsembleSelection:
    """Select an ensemble from the members of several runs, greedily and with replacement, on held-out samples.

    Args:
        runs: Runs, their folders, or their URLs.
        size: The number of selected members, counting repetitions.
        split: The held-out samples to select on.
        metric: The metric to improve.
        unique: Count distinct members instead.
        device: "cpu", "cuda", "cuda:1", ... None: the best available device.
        cache_logits: Precision of the logits that are cached next to the run; "off": do not read or write them.
        progress: Called with progress events.
    """
    if not runs:
        raise RecipeError("No runs were given; give one or more run folders to select members from")
    members: list[tuple[str, int]] = []
    log_p: list[Tensor] = []
    outputs: MemberOutputs | None = None
    fingerprint = ""
    normalization: tuple[Any, Any] | None = None
    for run in runs:
        evaluator = Evaluator(run, device=device, cache_logits=cache_logits)
        root = str(evaluator.run.store.root)
        target = evaluator.held_out_split(split)
        here = predict_all(evaluator, target, progress=progress)
        first = members[0][0] if members else root
        own = (evaluator.data_info.mean, evaluator.data_info.std)
        if normalization not in (None, own):
            raise RunError(
                f"{root} normalizes its inputs differently from {first}; the members of one ensemble must share it"
            )
        if outputs is not None and (
            fingerprint != evaluator.split_fingerprint(target) or not torch.equal(outputs.ids, here.ids)
        ):
            raise RunError(
                f"{root} has other {split} samples than {first}; members must be compared on the same samples"
            )
        normalization, fingerprint = own, evaluator.split_fingerprint(target)
        outputs = outputs or here
        members += [(root, number) for number in evaluator.numbers]
        log_p.append(log_probs(here.logits.double()))
    assert outputs is not None
    selection = select(torch.cat(log_p), outputs.y, size, metric=metric, unique=unique, ids=outputs.ids)
    return EnsembleSelection(tuple(members), selection, split, fingerprint)


def evaluate_selection(
    file: str | Path,
    runs: Sequence[RunLike] = (),
    *,
    split: str = "test",
    device: str | None = None,
    cache_logits: CacheMode = "float32",
    progress: Progress = log_messages,
) -> dict[str, float]:
    """Return accuracy and NLL of a selection on samples that it was not selected on."""
    chosen, opened = EnsembleSelection.read(file), _by_root(runs)
    logits: list[Tensor] = []
    outputs: MemberOutputs | None = None
    for root in dict.fromkeys(root for root, _ in chosen.members):
        evaluator = Evaluator(opened.get(root, root), device=device, cache_logits=cache_logits)
        target = eval_split(evaluator.recipe, evaluator.data_info, split)
        before, outputs = outputs, predict_all(evaluator, target, progress=progress)
        if before is not None and not torch.equal(before.ids, outputs.ids):
            raise RunError(f"{root} has other {split} samples than the others; members must be compared on the same")
        is_same = evaluator.split_fingerprint(target) == chosen.fingerprint
        if is_same and _overlap(outputs.ids, chosen.selection.samples):
            raise RunError(
                f"The members were selected on these {split} samples, so results on them are optimistically biased. "
                "Use another split: --eval-split test"
            )
        logits.append(outputs.logits)
    assert outputs is not None
    log_p = combine(torch.cat(logits).double(), "weighted", chosen.selection.weights)
    correct = log_p.argmax(-1) == outputs.y
    nll = -log_p.gather(-1, outputs.y[:, None]).mean()
    return {"accuracy": float(correct.double().mean()), "nll": float(nll), "samples": float(len(outputs.y))}


def _by_root(runs: Sequence[RunLike]) -> dict[str, Run]:
    """Return the runs that the caller opened, by their folders."""
    opened = [Run.open(run) for run in runs]
    return {str(run.store.root): run for run in opened}


def _overlap(ids: Tensor, others: Sequence[int]) -> bool:
    return bool(torch.isin(ids, torch.tensor(list(others), dtype=ids.dtype)).any())
