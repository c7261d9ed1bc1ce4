"""The command that predicts: new inputs, or a split of the data that a run was trained on."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import plateaux
from plateaux.cli.common import AsJson, Device, Members, Sha256, Trust, parse_numbers, print_result, progress_bar
from plateaux.core.errors import DataError
from plateaux.core.formatting import split_names

if TYPE_CHECKING:
    from plateaux.deploy.batch import BatchResult


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
        typer.Option(
            help="Instead of inputs: test, validation, train, corrupted:KIND:SEVERITY, or another dataset; test@N: the "
            "first N."
        ),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="Columns of tables, or arrays of .npz files, with the inputs, with commas.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Number of processes that predict.")] = 1,
    executor: Annotated[Literal["ray"] | None, typer.Option(help="Predict on a Ray cluster.")] = None,
    address: Annotated[str | None, typer.Option(help="Address of the Ray cluster; by default a new one here.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of a process.")] = None,
    ood_score: Annotated[
        str | None, typer.Option(help="The OOD score to compute; by default that of the calibration or the bundle.")
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="Which of the fitted conformal sets to write.")] = None,
    raw: Annotated[bool, typer.Option(help="Also write the answers without the calibration.")] = False,
    members: Members = None,
    sha256: Sha256 = None,
    each_member: Annotated[
        bool,
        typer.Option("--each-member", help="For a split: write labels, ids, and the logits of all members (.npz)."),
    ] = False,
    trust: Trust = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Predict new inputs, or a split: class, probability, uncertainty, OOD score, conformal set, whether to abstain.

    A job that was stopped continues when the same command is run again.

    In Python: `plateaux.predict("runs/demo", "photos/", "answers.csv")`
    """
    from plateaux.deploy.bundle import Bundle
    from plateaux.deploy.load_predictor import is_bundle

    settings = {
        "columns": split_names(columns or ""),
        "threads": threads,
        "processes": processes if processes > 1 else None,
        "executor": executor,
        "address": address,
    }
    is_pinned = sha256 is not None  # a run has no digest of its own, so it is refused as it is no bundle
    source = (
        Bundle.open(model, sha256=sha256)
        if is_pinned or is_bundle(model)
        else plateaux.open_run(model, trust=trust or ())
    )
    run: Callable[..., BatchResult | plateaux.Predictions] = plateaux.predict
    with progress_bar("predicting", "inputs" if inputs else "samples") as progress:
        found = run(
            source,
            inputs or None,
            out,
            split=split,
            ood_score=ood_score,
            alpha=alpha,
            raw=raw,
            members=parse_numbers(members),
            device=device,
            each_member=each_member,
            batch={name: value for name, value in settings.items() if value},
            progress=progress,
        )
    if isinstance(found, plateaux.Predictions):
        text = f"{out}: {len(found):,} predictions"
        if found.abstain is not None:
            text += f", {int(found.abstain.sum()):,} of them rejected (abstain)"
        if found.is_ood is not None:
            text += f", {int(found.is_ood.sum()):,} out of distribution (is_ood)"
        if found.members_queried is not None:
            text += f", {found.members_queried.mean():.2f} members queried on average"
        print_result(as_json, {"file": str(out), "predictions": len(found)}, lambda: [text])
        return
    lines = [f"{out}: {found.inputs:,} inputs, {found.abstained:,} of them rejected (abstain)"]
    if found.reused:
        lines.append(f"{found.reused:,} inputs had been predicted before")
    if found.failed:
        lines.append(f"{found.failed:,} inputs could not be read: see the column error")
    print_result(as_json, {**asdict(found), "out": str(out)}, lambda: lines)
    if found.failed == found.inputs:
        raise DataError(f"No input could be predicted; the column error of {out} has the reason of each")
