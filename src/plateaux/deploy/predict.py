"""`predict`: the answers of a run or a bundle for files, or of a run for a split of its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import overload

from plateaux.core.errors import RecipeError
from plateaux.core.progress import Progress, log_messages
from plateaux.deploy.batch import DEFAULT_BATCH, BatchOptions, BatchResult, predict_files
from plateaux.deploy.bundle import Bundle
from plateaux.deploy.load import open_source
from plateaux.evaluation.options import DEFAULT_OPTIONS, EvalOptions
from plateaux.prediction.predictions import Predictions, check_suffix
from plateaux.prediction.split_predictions import predict_split
from plateaux.storage.run import RunLike


@overload
def predict(
    source: RunLike | Bundle,
    inputs: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    ood_score: str | None = None,
    alpha: float | None = None,
    device: str | None = None,
    threads: int | None = None,
    batch: BatchOptions | None = None,
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
    device: str | None = None,
    options: EvalOptions | None = None,
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
    device: str | None = None,
    threads: int | None = None,
    batch: BatchOptions | None = None,
    options: EvalOptions | None = None,
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
        split: Instead of inputs: a split of the run, or the name of another dataset.
        ood_score: The OOD score to compute; see `plateaux.ensembles.ood_scores`. None: `max_probability`, or that of
            the bundle.
        alpha: Which of the fitted conformal sets to return. None: the first, or that of the bundle.
        device: "cpu", "cuda", "cuda:1", ... None: the best available device.
        threads: Only for inputs: CPU threads of a process. None: torch's setting for one process, else 1.
        batch: Only for inputs: columns of tables, number of processes, cluster, size of a part.
        options: Only for a split: members, limit, cache_logits, no_cache.
        progress: Called with progress events.
    """
    if inputs is not None and split is not None:
        raise RecipeError(f"inputs and split = {split!r} were given. Give one of them, and leave out the other")
    if inputs is not None:
        if out is None:
            raise RecipeError("inputs were given without out. Give a file to write, or use load_predictor(source)(x)")
        if options is not None:
            raise RecipeError(
                "inputs were given with options for a split: members, limit, or cache_logits. Leave them out, or give "
                "a split instead of the inputs"
            )
        return predict_files(
            source, inputs, out, ood_score, alpha, device=device, threads=threads, batch=batch or DEFAULT_BATCH,
            progress=progress,
        )  # fmt: skip
    if split is None:
        raise RecipeError(
            "Neither inputs nor a split were given. Give files, folders, or tables to predict, or a split of the run's "
            'data: split="test" (--split test)'
        )
    if batch is not None or threads is not None:
        raise RecipeError(
            f"split = {split!r} was given with options for inputs: columns, processes, executor, address, part_size, "
            "or threads. Leave them out, or give inputs instead of the split"
        )
    opened = open_source(source)
    if isinstance(opened, Bundle):
        raise RecipeError(
            f"split = {split!r} was given, but {opened.store.root} is a bundle, which has no data. Give inputs, or the "
            "run that was exported"
        )
    if out is not None:
        check_suffix(Path(out))
    options = options or DEFAULT_OPTIONS
    if device is not None:
        options = replace(options, device=device)
    predictions = predict_split(
        opened, split, ood_score=ood_score or "max_probability", alpha=alpha, options=options, progress=progress
    )
    if out is not None:
        predictions.write(Path(out))
    return predictions
