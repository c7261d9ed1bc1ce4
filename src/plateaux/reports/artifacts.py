"""What a run folder keeps besides numbers: what members said, what they decided, and pictures of their landscape.

All of it is optional, and comes from a folder that may be damaged or a stranger's: what cannot be read is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from plateaux.config.builders.data import build_data
from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.core.errors import PlateauxError
from plateaux.core.row_names import with_member_ids
from plateaux.core.types import Batch
from plateaux.ensembles.ood_scores import OOD_SCORES
from plateaux.evaluation.metric_specs import get_metrics
from plateaux.evaluation.prediction_cache import PredictionCache
from plateaux.reports.figures.gallery import Images, SplitPredictions
from plateaux.reports.figures.partition import SamSets
from plateaux.storage.run import Run, partition_summary_path, sam_set_path
from plateaux.studies.results import ResultRow

MAX_LOGITS = 60_000_000  # numbers of kept logits that are read at once
SCORES = ("max_probability", "mutual_information")  # whose curves are drawn
LoadedPredictions = tuple[SplitPredictions, torch.Tensor]
"""What members said, as probabilities and as the logits `[M, N, C]` they are of."""
Scores = dict[str, dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]]


@contextmanager
def ignore_unreadable() -> Iterator[None]:
    """Leave out what is damaged, missing, or of another shape than it should be."""
    try:
        yield
    except (PlateauxError, OSError, KeyError, ValueError, TypeError, IndexError, AttributeError, RuntimeError):
        return


def load_predictions(run: Run) -> dict[str, LoadedPredictions]:
    """Return what members said, by the name of the samples."""
    found: dict[str, LoadedPredictions] = {}
    abouts = [name for name in run.store.names("predictions") if name.endswith("/about.json")]
    for name in abouts:
        with ignore_unreadable():
            about = run.store.get_json(name)
            members = [n for n in range(run.recipe.members) if run.weights_hash(n) in about["dtypes"]]
            shelf = PredictionCache(run.store, {key: value for key, value in about.items() if key != "dtypes"})
            said, logits = _load_split(shelf, str(about["split"]), members, [run.weights_hash(n) for n in members])
            if said.split not in found or len(said.ids) > len(found[said.split][0].ids):
                found[said.split] = said, logits
    return found


def _load_split(shelf: PredictionCache, on: str, members: Sequence[int], hashes: Sequence[str]) -> LoadedPredictions:
    known = shelf.store.get_tensors(f"{shelf.folder}/samples.safetensors")
    first = shelf.store.get_tensors(f"{shelf.folder}/{hashes[0]}-logits.safetensors")["logits"]
    if first.numel() * len(hashes) > MAX_LOGITS:
        raise ValueError("too much to draw from")
    rest = [shelf.store.get_tensors(f"{shelf.folder}/{each}-logits.safetensors")["logits"] for each in hashes[1:]]
    logits = torch.stack([first, *rest]).float()  # [M, N, C]
    probabilities = logits.softmax(-1).numpy()
    return SplitPredictions(on, members, known["ids"].numpy(), known["labels"].numpy(), probabilities), logits


def reliability_rows(said: SplitPredictions, logits: torch.Tensor, like: ResultRow) -> list[ResultRow]:
    """Return the bins of a reliability diagram, for a run that was not asked for them."""
    measure = get_metrics(["reliability"])["reliability"]
    ids = torch.from_numpy(said.ids)
    rows = measure.compute(measure.update(logits, Batch(ids, torch.from_numpy(said.labels), ids)))
    where = (like.run, like.condition, like.repetition, "reliability", said.split)
    return [
        ResultRow(*where, row, value.value, value.stderr, None, None, True)
        for row, value in with_member_ids(rows, said.members).items()
    ]


def load_ood_scores(said: Mapping[str, LoadedPredictions], strange: Sequence[str]) -> Scores:
    """Return the scores of a run's own samples and of strange ones, by set and score."""
    if "test" not in said:
        return {}
    own = {name: OOD_SCORES[name](said["test"][1]).double().numpy() for name in SCORES}
    found: Scores = {}
    for name in strange:
        with ignore_unreadable():
            other = said[name.rpartition(" (")[0]][1]
            found[name] = {score: (own[score], OOD_SCORES[score](other).double().numpy()) for score in SCORES}
    return found


def load_partitions(run: Run) -> list[SamSets]:
    """Return what members decided whenever they met."""
    found: list[SamSets] = []
    names = [name for name in run.store.names("sam_sets") if name.endswith("/summary.json")]
    for epoch in sorted(int(name.split("/")[1]) for name in names if name.split("/")[1].isdigit()):
        with ignore_unreadable():
            summary = run.store.get_json(partition_summary_path(epoch))
            numbers = [n for n in range(summary["members"]) if n not in summary.get("without", ())]
            careful = np.zeros(0, np.int64)
            for number in numbers:
                bits = np.unpackbits(run.store.get_array(sam_set_path(epoch, number))[1].view(np.uint8)).astype(
                    np.int64
                )
                careful = bits if not len(careful) else careful + bits
            counts = np.bincount(careful, minlength=len(numbers) + 1)
            counts[0] = max(0, int(summary["trained"]) - int(counts[1:].sum()))  # the rest was not trained on
            found.append(SamSets(epoch, counts.tolist(), summary["share"], summary["overlap"]))
    return found


def load_landscape_data(run: Run) -> dict[str, Mapping[str, Any]]:
    """Return the numbers of the landscape's pictures by name, of weights the run still has."""
    found: dict[str, Mapping[str, Any]] = {}
    for name in run.store.names("landscape"):
        if name.endswith(".json"):
            with ignore_unreadable():
                tree = run.store.get_json(name)
                now = {who: run.weights_hash(int(who.split()[1])) for who in tree["about"]["hashes"]}
                if now == tree["about"]["hashes"]:
                    found[name.removeprefix("landscape/").removesuffix(".json")] = tree
    return found


def load_images(run: Run, components: Components = NO_COMPONENTS) -> Images | None:
    """Return how to get pictures of a run's test samples; None, if it has no pictures or the data are not there."""
    with ignore_unreadable():
        data = build_data(run.recipe, components)
        if len(data.shape) == 3 and data.test.fingerprint() == run.info.data.test.fingerprint:
            return lambda ids: _pixels(data.test.fetch(torch.from_numpy(ids))[0])
    return None


def _pixels(x: Any) -> NDArray[Any]:
    if not isinstance(x, torch.Tensor) or x.dim() != 4:
        raise ValueError("no pictures")
    if x.dtype == torch.uint8:
        return x.numpy()
    low, high = float(x.min()), float(x.max())
    return ((x.float() - low) / max(high - low, 1e-12)).numpy()
