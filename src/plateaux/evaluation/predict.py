"""Answers for samples: class, probability, doubt, how far out of distribution, a set of classes, whether to abstain."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.core.callbacks import Say, Seen
from plateaux.core.errors import RecipeError, RunError
from plateaux.core.formatting import json_safe
from plateaux.core.registry import dataset
from plateaux.ensembles.log_probs import log_probabilities
from plateaux.ensembles.ood_scores import OOD_SCORES
from plateaux.evaluation.calibration import FILE, Calibration
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.prediction_cache import CacheDtype
from plateaux.evaluation.predictions import error_probability, predict_all
from plateaux.evaluation.splits import eval_split, ood_split
from plateaux.storage.atomic import write_atomic
from plateaux.storage.run import Run, RunLike


@dataclass(frozen=True, slots=True)
class Predictions:
    """What an ensemble says about samples; row by row."""

    ids: Tensor  # [N]
    classes: Tensor  # [N] the most likely class
    probability: Tensor  # [N] that it gives to it
    error_probability: Tensor  # [N] that it is wrong, as the ensemble sees it
    ood: Tensor  # [N] larger: further out of distribution
    sets: Tensor | None  # [N, C] conformal sets; None: not calibrated
    abstain: Tensor | None  # [N]
    labels: tuple[str, ...] = ()  # the classes' names
    metadata: str = ""

    def rows(self) -> list[dict[str, Any]]:
        """Return one plain dictionary a sample."""
        found = []
        for i, number in enumerate(self.classes.tolist()):
            row: dict[str, Any] = {"id": int(self.ids[i]), "class": number}
            if self.labels:
                row["label"] = self.labels[number]
            named = {"probability": self.probability, "error_probability": self.error_probability, "ood": self.ood}
            row |= {name: float(each[i]) for name, each in named.items()}
            if self.sets is not None and self.abstain is not None:
                row["set"] = torch.nonzero(self.sets[i])[:, 0].tolist()
                row["abstain"] = bool(self.abstain[i])
            found.append(row)
        return found

    def write(self, file: Path) -> None:
        """Write .csv, .jsonl or .npz, whole or not at all."""
        kinds: dict[str, Callable[[], bytes]] = {".csv": self._csv, ".jsonl": self._jsonl, ".npz": self._npz}
        if file.suffix not in kinds:
            raise RecipeError(f"{file}: answers are written as {', '.join(kinds)}; end the name in one of these")
        write_atomic(file, kinds[file.suffix]())

    def _csv(self) -> bytes:
        rows = [{**row, **({"set": " ".join(map(str, row["set"]))} if "set" in row else {})} for row in self.rows()]
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]) if rows else ["id"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()

    def _jsonl(self) -> bytes:
        return "".join(json.dumps(json_safe(row), allow_nan=False) + "\n" for row in self.rows()).encode()

    def _npz(self) -> bytes:
        named = {"ids": self.ids, "class": self.classes, "probability": self.probability,
        "error_probability": self.error_probability,
                 "ood": self.ood, "set": self.sets, "abstain": self.abstain}  # fmt: skip
        content = io.BytesIO()
        np.savez_compressed(content, **{name: t.numpy() for name, t in named.items() if t is not None})  # type: ignore[arg-type]
        return content.getvalue()


def predict(
    root: RunLike,
    *,
    split: str = "test",
    ood_score: str = "max_probability",
    alpha: float | None = None,
    members: Sequence[int] | None = None,
    limit: int | None = None,
    components: Components = NO_COMPONENTS,
    device: str | None = None,
    cache_logits: CacheDtype = "float32",
    seen: Seen = lambda *_: None,
    say: Say = lambda _: None,
) -> Predictions:
    """Answer for a run's own samples or those of another data set; calibrated, if the run is.

    `alarm` names the score of how far out of distribution a sample is, `alpha` which of the fitted sets to give.
    """
    if ood_score not in OOD_SCORES:
        raise RecipeError(f"There is no alarm called {ood_score!r}; allowed: {', '.join(OOD_SCORES)}")
    panel = Evaluator(Run.open(root), members, components=components, device=device, cache_logits=cache_logits, say=say)
    foreign = split.split(":")[0] not in ("test", "train", "validation", "corrupted") and split in dataset.names()
    target = ood_split(split, "elsewhere", components) if foreign else eval_split(panel.recipe, panel.data_info, split)
    heard = predict_all(panel, target, samples=limit, seen=seen)
    fitted = _fitted(panel, members is None, say)
    rows = log_probabilities(heard.logits.double())
    log_p = rows[-2 if len(rows) > 1 else 0] if fitted is None else fitted.log_p(heard.logits)
    sets = abstain = None
    if fitted is not None:
        sets = _chosen(fitted, alpha).sets(log_p, heard.ids)
        abstain = ~fitted.threshold.accepts(error_probability(log_p))
    best = log_p.max(-1)
    labels = panel.data_info.labels
    scores = OOD_SCORES[ood_score](heard.logits)
    return Predictions(
        heard.ids,
        best.indices,
        best.values.exp(),
        error_probability(log_p),
        scores,
        sets,
        abstain,
        labels,
        f"{split}, ood: {ood_score}",
    )


def _fitted(panel: Evaluator, everyone: bool, say: Say) -> Calibration | None:
    """Return the run's calibration where it is about these members."""
    if not panel.run.store.has(FILE):
        say("not calibrated: no sets and no abstention; `plateaux calibrate` fits them on held-out samples")
        return None
    fitted = Calibration.read(panel.run)
    if fitted.hashes != tuple(panel.hashes):
        if everyone:
            raise RunError("The run was calibrated with other weights than it has now; run `plateaux calibrate` again")
        say("the calibration is about all members together, so it is left out for some of them")
        return None
    return fitted


def _chosen(fitted: Calibration, alpha: float | None) -> Any:
    for each in fitted.sets:
        if alpha is None or each.alpha == alpha:
            return each
    have = ", ".join(f"{each.alpha:g}" for each in fitted.sets)
    raise RecipeError(f"alpha = {alpha}: the run is calibrated for {have}; choose one of these or calibrate again")
