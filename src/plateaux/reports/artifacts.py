"""Artifacts of a run folder besides metrics: cached predictions, data partitions, and loss landscapes.

All of them are optional, and the folder may be damaged or untrusted: unreadable files are skipped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from plateaux.core.errors import PlateauxError, StorageError
from plateaux.core.row_names import with_member_ids
from plateaux.core.types import Batch
from plateaux.ensembles.ood_scores import OOD_SCORES
from plateaux.evaluation.metric_specs import get_metrics
from plateaux.evaluation.prediction_cache import PredictionCache
from plateaux.reports.figures.gallery import Images, SplitPredictions
from plateaux.reports.figures.partition import SamSets
from plateaux.storage.run import Run, partition_summary_path, sam_set_path
from plateaux.storage.stored_data import build_run_data
from plateaux.studies.result_rows import ResultRow

logger = logging.getLogger(__name__)
MAX_LOGITS = 60_000_000  # cached logits that are read at once
SCORES = ("max_probability", "mutual_information")  # with ROC curves
LoadedPredictions = tuple[SplitPredictions, torch.Tensor]
"""Predictions of a split, and the logits `[M, N, C]` that they are from."""
Scores = dict[str, dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]]


@contextmanager
def ignore_unreadable() -> Iterator[None]:
    """Skip what is damaged, missing, or of an unexpected shape. A damaged file is reported."""
    try:
        yield
    except StorageError as problem:
        logger.warning("left out of the report: %s", problem)
    except (PlateauxError, OSError, LookupError, ValueError, TypeError, AttributeError, RuntimeError, ArithmeticError):
        return


def load_predictions(run: Run) -> dict[str, LoadedPredictions]:
    """Return the cached predictions by split."""
    loaded: dict[str, LoadedPredictions] = {}
    abouts = [name for name in run.store.names("predictions") if name.endswith("/about.json")]
    for name in abouts:
        with ignore_unreadable():
            about = run.store.get_json(name)
            if "class_mask" in about:  # of some classes only: not comparable with the logits of other splits
                continue
            members = [n for n in range(run.recipe.members) if run.weights_hash(n) in about["dtypes"]]
            cache = PredictionCache(run.store, {key: value for key, value in about.items() if key != "dtypes"})
            predictions, logits = _load_split(
                cache, str(about["split"]), members, [run.weights_hash(n) for n in members]
            )
            if predictions.split not in loaded or len(predictions.ids) > len(loaded[predictions.split][0].ids):
                loaded[predictions.split] = predictions, logits
    return loaded


def _load_split(cache: PredictionCache, split: str, members: Sequence[int], hashes: Sequence[str]) -> LoadedPredictions:
    samples = cache.store.get_tensors(f"{cache.folder}/samples.safetensors")
    first = cache.store.get_tensors(f"{cache.folder}/{hashes[0]}-logits.safetensors")["logits"]
    if first.numel() * len(hashes) > MAX_LOGITS:
        raise ValueError(f"More than {MAX_LOGITS:,} logits")
    rest = [cache.store.get_tensors(f"{cache.folder}/{each}-logits.safetensors")["logits"] for each in hashes[1:]]
    logits = torch.stack([first, *rest]).float()  # [M, N, C]
    probabilities = logits.softmax(-1).numpy()
    ids, labels = samples["ids"].numpy(), samples["labels"].numpy()
    return SplitPredictions(split, members, ids, labels, probabilities), logits


def reliability_rows(predictions: SplitPredictions, logits: torch.Tensor, like: ResultRow) -> list[ResultRow]:
    """Return the bins of a reliability diagram for a run without the metric `reliability`."""
    metric = get_metrics(["reliability"])["reliability"]
    ids = torch.from_numpy(predictions.ids)
    rows = metric.compute(metric.update(logits, Batch(ids, torch.from_numpy(predictions.labels), ids)))
    where = (like.run, like.condition, like.repetition, "reliability", predictions.split)
    return [
        ResultRow(*where, row, value.value, value.stderr, None, None, True)
        for row, value in with_member_ids(rows, predictions.members).items()
    ]


def load_ood_scores(predictions: Mapping[str, LoadedPredictions], ood_splits: Sequence[str]) -> Scores:
    """Return the OOD scores of test and of out-of-distribution samples, by split and score."""
    if "test" not in predictions:
        return {}
    inside = {name: OOD_SCORES[name](predictions["test"][1]).double().numpy() for name in SCORES}
    scores: Scores = {}
    for name in ood_splits:
        with ignore_unreadable():
            logits = predictions[name.rpartition(" (")[0]][1]
            scores[name] = {score: (inside[score], OOD_SCORES[score](logits).double().numpy()) for score in SCORES}
    return scores


def load_partitions(run: Run) -> list[SamSets]:
    """Return the sharpness-aware sets of all data partitions."""
    partitions: list[SamSets] = []
    names = [name for name in run.store.names("sam_sets") if name.endswith("/summary.json")]
    for epoch in sorted(int(name.split("/")[1]) for name in names if name.split("/")[1].isdigit()):
        with ignore_unreadable():
            summary = run.partition_summary(partition_summary_path(epoch))
            numbers = [n for n in range(min(summary.members, run.recipe.members)) if n not in summary.without]
            sam_members = np.zeros(0, np.int64)  # per sample
            for number in numbers:
                bits = np.unpackbits(run.store.get_array(sam_set_path(epoch, number))[1].view(np.uint8)).astype(
                    np.int64
                )
                sam_members = bits if not len(sam_members) else sam_members + bits
            counts = np.bincount(sam_members, minlength=len(numbers) + 1)
            counts[0] = max(0, summary.trained - int(counts[1:].sum()))  # without samples that are not trained on
            partitions.append(SamSets(epoch, counts.tolist(), summary.share, summary.overlap))
    return partitions


def load_landscape_data(run: Run) -> dict[str, Mapping[str, Any]]:
    """Return the data of landscape plots by name, if they are of the current weights."""
    plots: dict[str, Mapping[str, Any]] = {}
    for name in run.store.names("landscape"):
        if name.endswith(".json"):
            with ignore_unreadable():
                tree = run.store.get_json(name)
                current = {name: run.weights_hash(int(name.split()[1])) for name in tree["about"]["hashes"]}
                if current == tree["about"]["hashes"]:
                    plots[name.removeprefix("landscape/").removesuffix(".json")] = tree
    return plots


def load_images(run: Run) -> Images | None:
    """Return a function that loads test images, or None if the samples are not images or the data are missing."""
    with ignore_unreadable():
        data = build_run_data(run)
        if len(data.shape) == 3 and data.test.fingerprint() == run.info.data.test.fingerprint:
            return lambda ids: _pixels(data.test.fetch(torch.from_numpy(ids))[0])
    return None


def _pixels(x: Any) -> NDArray[Any]:
    if not isinstance(x, torch.Tensor) or x.dim() != 4:
        raise ValueError("Not a batch of images")
    if x.dtype == torch.uint8:
        return x.numpy()
    low, high = float(x.min()), float(x.max())
    return ((x.float() - low) / max(high - low, 1e-12)).numpy()
