"""The command `plateaux export`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

import plateaux
from plateaux.cli.common import AsJson, Trust, print_result, progress_bar
from plateaux.core.formatting import format_size


def export(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A run folder or its URL.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder of the bundle; it must be empty.")],
    ood_score: Annotated[
        str | None, typer.Option(help="The OOD score to compute; by default that of the calibration.")
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="Which of the fitted conformal sets to return.")] = None,
    raw: Annotated[bool, typer.Option(help="Also compute the answers without the calibration.")] = False,
    license: Annotated[str, typer.Option(help="The license of the weights, such as CC-BY-4.0.")] = "",
    golden: Annotated[
        Literal["test", "random"], typer.Option(help="Store test samples or random inputs for the check at load.")
    ] = "test",
    intended_use: Annotated[str, typer.Option(help="What the model is meant for, for the model card.")] = "",
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """Write a run as a bundle: one ONNX graph for all answers, weights, digests, and samples to check it with.

    In Python: `plateaux.export("runs/demo", "bundle")`
    """
    with progress_bar("exporting", "percent") as progress:
        bundle = plateaux.export(
            plateaux.open_run(model, trust=trust or ()), out, ood_score=ood_score, alpha=alpha, raw=raw,
            license=license, golden=golden, intended_use=intended_use, progress=progress,
        )  # fmt: skip
    manifest = bundle.manifest
    size = sum(record.bytes for record in manifest.files.values())

    def lines() -> list[str]:
        checks = [
            f"{check.file}: probabilities differ from the members by at most {check.max_difference:.1g} at batch sizes "
            f"{', '.join(map(str, check.batch_sizes))} ({check.inputs})"
            for check in manifest.checks
        ]
        remark = [manifest.remark] if manifest.remark else []
        return [
            *checks,
            *remark,
            f"{out}: {len(manifest.files) + 1} files, {format_size(size)}, sha256 {bundle.sha256}",
        ]

    checks = {check.file: check.max_difference for check in manifest.checks}
    print_result(as_json, {"bundle": str(out), "bytes": size, "max_difference": checks, "sha256": bundle.sha256}, lines)
