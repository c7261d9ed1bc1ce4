"""The command that predicts: new inputs, or a split of the data that a run was trained on."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import plateaux
from plateaux.cli.common import AsJson, Device, Members, Trust, parse_numbers, print_result, progress_bar
from plateaux.cli.evaluate import CacheLogits
from plateaux.core.errors import RecipeError
from plateaux.core.formatting import split_names
from plateaux.evaluation.options import EvalOptions
from plateaux.storage.run import RunLike

BATCH_OPTIONS = ("--columns", "--processes", "--executor", "--address", "--threads")


def predict(
    model: Annotated[Path, typer.Argument(help="A run folder, a bundle, or the URL of one.")],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="A .csv, .jsonl, .parquet or .npz file; with inputs also a folder."),
    ],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INPUT",
            help="Image files, folders, patterns, .npy, .npz, .csv, .tsv, .parquet, .txt files, or URLs of these.",
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="Instead of inputs: test, validation, train, corrupted:KIND:SEVERITY, or another dataset."),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="Columns of tables, or arrays of .npz files, with the inputs, with commas.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Number of processes that predict.")] = 1,
    executor: Annotated[Literal["ray"] | None, typer.Option(help="Predict on a Ray cluster.")] = None,
    address: Annotated[str | None, typer.Option(help="Address of the Ray cluster; by default a new one here.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of a process.")] = None,
    ood_score: Annotated[
        str | None, typer.Option(help="The OOD score to compute; by default max_probability, or that of the bundle.")
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="Which of the fitted conformal sets to write.")] = None,
    members: Members = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N samples of a split.")] = None,
    cache_logits: CacheLogits = "float32",
    trust: Trust = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Predict new inputs, or a split: class, probability, uncertainty, OOD score, conformal set, whether to abstain.

    A job that was stopped continues when the same command is run again.

    In Python: `plateaux.predict_files("runs/demo", "photos/", "answers.csv")`
    """
    from plateaux.deploy.load import is_bundle

    shared: dict[str, Any] = {"alpha": alpha}
    source = model if is_bundle(model) else plateaux.open_run(model, trust=trust or ())
    shared |= {"ood_score": ood_score} if ood_score else {}
    if not inputs:
        is_set = (columns, processes > 1, executor, address, threads)
        unused = [name for name, value in zip(BATCH_OPTIONS, is_set, strict=True) if value]
        if unused:
            raise RecipeError(f"{', '.join(unused)}: only with inputs, not with a split of the run's own data")
        options = EvalOptions(members=parse_numbers(members), limit=limit, device=device, cache_logits=cache_logits)
        _predict_split(source, split or "test", out, options, shared, as_json=as_json)
        return
    if split is not None or members is not None or limit is not None:
        raise RecipeError("--split, --members, --limit: only without inputs, for the run's own data")
    batch = plateaux.BatchOptions(
        columns=split_names(columns or ""), processes=processes, executor=executor, address=address
    )
    with progress_bar("predicting", "inputs") as progress:
        result = plateaux.predict_files(
            source, inputs, out, batch=batch, device=device, threads=threads, progress=progress, **shared
        )
    plain = {
        "out": str(out),
        "inputs": result.inputs,
        "failed": result.failed,
        "abstained": result.abstained,
        "reused": result.reused,
    }
    lines = [f"{out}: {result.inputs:,} inputs, {result.abstained:,} of them rejected (abstain)"]
    if result.reused:
        lines.append(f"{result.reused:,} inputs had been predicted before")
    if result.failed:
        lines.append(f"{result.failed:,} inputs could not be read: see the column error")
    print_result(as_json, plain, lambda: lines)


def _predict_split(
    model: RunLike, split: str, out: Path, options: EvalOptions, shared: dict[str, Any], *, as_json: bool
) -> None:
    from plateaux.prediction.predictions import check_suffix

    check_suffix(out)
    with progress_bar("predicting") as progress:
        predictions = plateaux.predict(model, split=split, options=options, progress=progress, **shared)
    predictions.write(out)
    text = f"{out}: {len(predictions):,} predictions"
    if predictions.abstain is not None:
        text += f", {int(predictions.abstain.sum()):,} of them rejected (abstain)"
    if predictions.members_queried is not None:
        text += f", {predictions.members_queried.mean():.2f} members queried on average"
    print_result(as_json, {"file": str(out), "predictions": len(predictions)}, lambda: [text])
