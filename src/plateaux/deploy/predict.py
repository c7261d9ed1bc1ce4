"""`predict`: the answers of a run or a bundle for files, or of a run for a split of its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from plateaux.core.errors import RecipeError
from plateaux.core.progress import Progress, log_messages
from plateaux.deploy.batch import BatchResult, predict_files
from plateaux.deploy.bundle import Bundle
from plateaux.deploy.load_predictor import open_source
from plateaux.prediction.predictions import Predictions, check_suffix
from plateaux.prediction.predictor import AnswerOptions
from plateaux.prediction.split_predictions import predict_split
from plateaux.storage.run import RunLike

NO_SETTINGS: Mapping[str, Any] = {}


@overload
def predict(
    source: RunLike | Bundle,
    inputs: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    ood_score: str | None = None,
    alpha: float | None = None,
    raw: bool = False,
    device: str | None = None,
    batch: Mapping[str, Any] = NO_SETTINGS,
    progress: Progress = log_messages,
) -> BatchResult: ...
@overload
def predict(
    source: RunLike | Bundle,
    *,
    split: str,
    out: str | Path | None = None,
    ood_score: str | None = None,
    alpha: float | None = None,
    raw: bool = False,
    members: Sequence[int] | None = None,
    each_member: bool = False,
    device: str | None = None,
    progress: Progress = log_messages,
) -> Predictions: ...
def predict(
    source: RunLike | Bundle,
    inputs: str | Path | Sequence[str | Path] | None = None,
    out: str | Path | None = None,
    *,
    split: str | None = None,
    ood_score: str | None = None,
    alpha: float | None = None,
    raw: bool = False,
    members: Sequence[int] | None = None,
    each_member: bool = False,
    device: str | None = None,
    batch: Mapping[str, Any] = NO_SETTINGS,
    progress: Progress = log_messages,
) -> Predictions | BatchResult:
    """Predict inputs and write one row for each, or predict a split; calibrated, if the run is.

    An input that cannot be read has a row with an error. A job that was stopped continues when it is called again.
    For inputs in memory, use `load_predictor(source)(x)`.

    Args:
        source: A run, its folder, or its URL; for inputs also a bundle, its folder, or its URL.
        inputs: Image files, folders, patterns such as `photos/*.jpg`, .npy, .npz, .csv, .tsv, .parquet or .txt files,
            and URLs of any of these.
        out: A .csv, .jsonl, .parquet or .npz file; for inputs also a folder that keeps the parts as Parquet. A split
            needs none.
        split: Instead of inputs: a split of the run, or the name of another dataset; "test@100" for its first 100
            samples.
        ood_score: The OOD score to compute; see `plateaux.ensembles.ood_scores`. None: that of the calibration or of
            the bundle, by default `max_probability`.
        alpha: Which of the fitted conformal sets to return. None: the first, or that of the bundle.
        raw: Also return the answers without the calibration: `raw_probability`, `raw_entropy`, ...
        members: For a split: ids of the members that form the ensemble. None: all trained members.
        device: "cpu", "cuda", "cuda:1", ... None: the best available device.
        each_member: For a split: write labels, ids, and the logits of all members to `out`, an .npz file, instead of
            the predictions; more than 512 MB as parts in a folder of the same name without .npz.
        batch: For inputs: `columns` (of tables, or arrays of .npz files, in the order of the model's inputs),
            `processes` and `threads` (CPU threads of a process), `executor="ray"` and the `address` of the Ray
            cluster, and `part_size` (inputs of one part).
        progress: Called with progress events.
    """
    if (inputs is None) == (split is None):
        given = "Neither inputs nor a split were" if inputs is None else f"Both inputs and split = {split!r} were"
        raise RecipeError(
            f"{given} given. Give one of them: files, folders, or tables to predict, or a split of the run, such "
            'as split="test" (--split test)'
        )
    answers = AnswerOptions(ood_score, alpha, raw)
    if inputs is not None:
        if out is None:
            raise RecipeError("inputs were given without out. Give a file to write, or use load_predictor(source)(x)")
        if members is not None or each_member:
            raise RecipeError("members and each_member belong to a split, but inputs were given. Leave them out")
        return predict_files(source, inputs, Path(out), answers, device=device, settings=batch, progress=progress)
    if batch:
        raise RecipeError(f"batch ({', '.join(batch)}) belongs to inputs, but a split was given. Leave it out")
    opened = open_source(source)
    if isinstance(opened, Bundle):
        raise RecipeError(f"split = {split!r} was given with a bundle, which has no data. Give inputs, or a run")
    if out is not None:
        check_suffix(Path(out))
    elif each_member:
        raise RecipeError("each_member was given without out. Give an .npz file to write")
    predictions = predict_split(
        opened,
        split or "",
        answers,
        members=members,
        device=device,
        logits_out=Path(out) if out is not None and each_member else None,
        progress=progress,
    )
    if out is not None and not each_member:
        predictions.write(Path(out))
    return predictions
