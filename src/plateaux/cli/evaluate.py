"""Commands on trained runs: evaluate, calibrate, soup, select."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import plateaux
from plateaux.cli.common import (
    AsJson,
    Changes,
    Device,
    Members,
    Trust,
    metric_tables,
    parse_numbers,
    print_result,
    progress_bar,
    torchrun,
)
from plateaux.core.errors import RecipeError
from plateaux.core.formatting import split_names
from plateaux.core.process_info import is_rank_zero

if TYPE_CHECKING:
    from plateaux.evaluation.results import MetricResult

CORRUPTION_METRICS = ["accuracy", "nll", "ece"]

CacheLogits = Annotated[
    Literal["float32", "float16", "off"],
    typer.Option(help="Precision of the logits cached next to the run; off: neither read nor written."),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Use only the first N samples.")]


def evaluate(
    run: Path,
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[SUITE=DATASETS]...", help="Further suites for --ood.")
    ] = None,
    split: Annotated[
        str,
        typer.Option(
            help="test, validation, train, corrupted[:KIND[:SEVERITY]], ./FOLDER or LIST.txt of labeled images, or a "
            "data set with classes of the run, with commas; test@N: the first N."
        ),
    ] = "test",
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Names with commas, or all, none, performance, uncertainty, diversity; with options: ece(bins=10). By "
            "default accuracy, nll, brier, and ece, without single members."
        ),
    ] = None,
    ood: Annotated[
        list[str] | None,
        typer.Option(help="OOD datasets: near=cifar100,tin far=mnist; near or far alone: those of OpenOOD."),
    ] = None,
    members: Members = None,
    ensemble_sizes: Annotated[bool, typer.Option(help="Also evaluate ensembles of 1, 2, ... members.")] = False,
    calibrated: Annotated[bool, typer.Option(help="Evaluate the calibration of the run on these samples.")] = False,
    cascade: Annotated[
        bool, typer.Option(help="Evaluate the cascade of the run: members queried, accuracy lost; also with --ood.")
    ] = False,
    exclude_calibration_ids: Annotated[
        bool, typer.Option(help="Leave out the samples that the calibration was fitted on.")
    ] = False,
    limit: Limit = None,
    baseline: Annotated[
        Path | None, typer.Option(help="A JSON file with the errors of a baseline, to normalize the mCE.")
    ] = None,
    cache_logits: CacheLogits = "float32",
    corruption_cache: Annotated[
        Path | None, typer.Option(help="A folder that keeps generated corrupted images.")
    ] = None,
    executor: Annotated[
        Literal["mesh"] | None,
        typer.Option(help="Distribute the samples over processes."),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Number of processes of the mesh.")] = 2,
    changes: Changes = None,
    trust: Trust = None,
    device: Device = None,
    markdown: Annotated[bool, typer.Option(help="Print Markdown tables.")] = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a run: performance, uncertainty, diversity, robustness, OOD detection.

    In Python: `plateaux.evaluate("runs/demo")`
    """
    from plateaux.evaluation.evaluate import STANDARD
    from plateaux.evaluation.ood import parse_ood_suites
    from plateaux.evaluation.robustness import read_baseline, robustness
    from plateaux.evaluation.splits import ood_splits
    from plateaux.evaluation.tables import to_markdown

    if changes and executor is None:
        raise RecipeError("--set changes the executor of a trained run, so it needs --executor mesh")
    if (calibrated or cascade) and (executor or members or limit):
        flag = "--calibrated" if calibrated else "--cascade"
        raise RecipeError(f"{flag} does not support --executor, --members, --limit; leave them out")
    texts = [*(ood or []), *(more or [])]
    opened = plateaux.open_run(run, trust=trust or ())
    suites, skip_missing = parse_ood_suites(texts, opened.info.data.name) if texts else ({}, False)
    baseline_errors = read_baseline(baseline) if baseline else None
    for name in [] if skip_missing else [name for datasets in suites.values() for name in datasets]:
        # Fail on a wrong name before hours of work.
        ood_splits(opened.recipe, opened.info.data, name, "", opened.components)
    if executor == "mesh" and "RANK" not in os.environ:
        raise typer.Exit(torchrun(processes))
    mesh = None if executor is None else _mesh(processes, changes or [])
    chosen: dict[str, Any] = {"members": parse_numbers(members), "limit": limit, "executor": mesh}
    default = () if calibrated or cascade else STANDARD
    names = [*default] if metrics is None else [] if metrics == "none" else split_names(metrics)
    on_corrupted = CORRUPTION_METRICS if names and metrics in (None, "all") else names
    results: list[MetricResult] = []
    with progress_bar("evaluating") as progress:
        shared: dict[str, Any] = {"device": device, "cache_logits": cache_logits, "progress": progress}
        for splits, wanted in _by_kind(split_names(split), names, on_corrupted):
            results += plateaux.evaluate(
                opened,
                split=splits,
                metrics=wanted,
                ensemble_sizes=ensemble_sizes,
                corruption_cache=corruption_cache,
                **chosen,
                **shared,
            )
        results += robustness(results, baseline_errors)
        if calibrated:
            results += plateaux.evaluate_calibration(
                opened, split=split, exclude_calibration_ids=exclude_calibration_ids, **shared
            )
        if cascade:
            results += plateaux.evaluate_cascade(
                opened,
                split=split_names(split),
                suites=suites,
                skip_missing=skip_missing,
                exclude_calibration_ids=exclude_calibration_ids,
                corruption_cache=corruption_cache,
                **shared,
            )
        if suites:
            results += plateaux.detect_ood(opened, suites, skip_missing=skip_missing, **chosen, **shared)
    if not is_rank_zero():
        return
    if markdown:
        typer.echo(to_markdown(results))
        return
    short_for = run if metrics is None and names else None
    print_result(as_json, [result.to_dict() for result in results], lambda: metric_tables(results, short_for=short_for))


def calibrate(
    run: Path,
    split: Annotated[str, typer.Option(help="Held-out samples to fit on: validation or test.")] = "validation",
    fraction: Annotated[
        float, typer.Option(help="Fit on a seeded random fraction; the rest can evaluate the calibration.")
    ] = 1.0,
    alpha: Annotated[
        list[float] | None, typer.Option(help="Miscoverage of the conformal sets; by default 0.1 and 0.05.")
    ] = None,
    conformal: Annotated[Literal["lac", "aps", "raps"], typer.Option(help="The conformal score.")] = "lac",
    randomized: Annotated[
        bool, typer.Option(help="Randomize sets of aps and raps by sample id: smaller, but none for new inputs.")
    ] = True,
    allow_empty: Annotated[
        bool, typer.Option(help="The smallest sets, which need not contain the predicted label.")
    ] = False,
    ood_false_alarms: Annotated[float, typer.Option(help="The rate of false OOD alarms (is_ood).")] = 0.05,
    ood: Annotated[
        list[str] | None,
        typer.Option(help="OOD samples to choose the OOD score on: near=cifar100,./photos; near alone: of OpenOOD."),
    ] = None,
    target_risk: Annotated[
        float, typer.Option(help="The error rate allowed among samples that are not rejected.")
    ] = 0.05,
    bound: Annotated[
        Literal["none", "clopper-pearson", "hoeffding"],
        typer.Option(help="The upper confidence bound that controls the risk; none: without a guarantee."),
    ] = "clopper-pearson",
    order: Annotated[
        Literal["pool", "calibrate"], typer.Option(help="Which comes first: pool members, or calibrate each member.")
    ] = "pool",
    cascade: Annotated[
        bool,
        typer.Option(help="Query fewer members where they agree and are confident; fitted on half of the samples."),
    ] = False,
    max_harm: Annotated[
        float | None,
        typer.Option(help="Fraction of samples that only the cascade may get wrong; by default 0.005."),
    ] = None,
    confidence: Annotated[
        float | None, typer.Option(help="The probability that --max-harm holds; by default 0.9.")
    ] = None,
    unlabeled: Annotated[
        bool, typer.Option(help="Bound the fraction of samples with another prediction, which needs no labels.")
    ] = False,
    stages: Annotated[
        str | None,
        typer.Option(help="After how many members an input may stop; by default 2,3,... (all but the last)."),
    ] = None,
    trust: Trust = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Calibrate a run on held-out samples: temperatures, conformal sets, a rejection threshold, an OOD alarm.

    In Python: `plateaux.calibrate("runs/demo", split="validation")`
    """
    from plateaux.evaluation.ood import parse_ood_suites
    from plateaux.prediction.cascade_fit import describe_cascade

    opened = plateaux.open_run(run, trust=trust or ())
    suites = parse_ood_suites(ood, opened.info.data.name)[0] if ood else {}
    if wrong := set(suites) - {"near"}:
        raise RecipeError(f"--ood {min(wrong)}=...: the OOD score is chosen on one suite; name its sets as near=A,B")
    settings = _cascade_settings(max_harm, confidence, stages, unlabeled=unlabeled, cascade=cascade)
    with progress_bar("calibrating") as progress:
        calibration = plateaux.calibrate(
            opened,
            split=split,
            fraction=fraction,
            alphas=alpha or (0.1, 0.05),
            conformal={"kind": conformal, "randomized": randomized, "allow_empty": allow_empty},
            ood={"false_alarms": ood_false_alarms, **suites},
            target_risk=target_risk,
            bound=bound,
            order="pool then calibrate" if order == "pool" else "calibrate then pool",
            cascade=settings,
            device=device,
            progress=progress,
        )

    def lines() -> list[str]:
        threshold = calibration.threshold
        answered = "rejects every sample" if threshold.at is None else f"accepts {100 * threshold.coverage:.1f} %"
        confidence = f"with {100 * (1 - threshold.delta):g} % confidence"
        guarantee = "not guaranteed" if threshold.bound == "none" else confidence
        score, alarm = calibration.ood_score, calibration.ood_alarms[calibration.ood_score]
        auroc = f", chosen by AUROC {calibration.ood_aurocs[score]:.3f}" if calibration.ood_aurocs else ""
        values = [", ".join(f"{v:.3f}" for v in fitted.values) for fitted in calibration.temperatures.values()]
        return [
            f"fitted on {len(calibration.ids):,} {calibration.split} samples",
            f"temperature: {values[0]} for the ensemble; {values[1]} for each member",
            *(
                f"{100 * (1 - fitted.alpha):g} % conformal sets ({fitted.kind}): threshold {fitted.threshold:.4f}"
                for fitted in calibration.sets
            ),
            f"at a target risk of {100 * threshold.risk:g} % ({guarantee}) the ensemble {answered}",
            alarm.remark or f"OOD alarm: {score} above {alarm.threshold:.4g}{auroc}; {alarm.describe()}",
            *([] if calibration.cascade is None else [describe_cascade(calibration.cascade)]),
        ]

    print_result(as_json, calibration.to_dict(), lines)


def soup(
    run: Path,
    out: Annotated[Path, typer.Option("--out", "-o", help="The run folder to create.")],
    strategy: Annotated[
        Literal["uniform", "greedy"], typer.Option(help="Average all members, or only those that help.")
    ] = "uniform",
    split: Annotated[str, typer.Option(help="Held-out samples to select on.")] = "validation",
    members: Members = None,
    max_barrier: Annotated[
        float, typer.Option(help="The largest rise of the loss between two members, in nats.")
    ] = 0.1,
    trust: Trust = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Average the weights of members into one network (model soup).

    In Python: `plateaux.soup("runs/demo", "runs/soup", strategy="greedy")`
    """
    with progress_bar("averaging"):
        made = plateaux.soup(
            plateaux.open_run(run, trust=trust or ()),
            out,
            strategy=strategy,
            split=split,
            max_barrier=max_barrier,
            members=parse_numbers(members),
            device=device,
        )
    text = made.progress(0).weights_source
    print_result(as_json, {"run": str(out), "weights": text}, lambda: [f"{out}: {text}"])


def select(
    runs: Annotated[list[Path], typer.Argument(help="Run folders that form the pool.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The JSON file to write.")],
    size: Annotated[int, typer.Option(min=1, help="Number of selected members, counting repetitions.")] = 5,
    split: Annotated[str, typer.Option(help="Held-out samples to select on.")] = "validation",
    metric: Annotated[Literal["nll", "accuracy", "brier"], typer.Option(help="The metric to improve.")] = "nll",
    unique: Annotated[bool, typer.Option(help="Count distinct members.")] = False,
    eval_split: Annotated[str, typer.Option(help="Other samples to evaluate the selection on.")] = "test",
    trust: Trust = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Select an ensemble from the members of several runs, greedily and with replacement.

    In Python: `plateaux.select_members(["runs/a", "runs/b"], size=5).write("selection.json")`
    """
    from plateaux.prediction.selection import evaluate_selection

    opened = [plateaux.open_run(run, trust=trust or ()) for run in runs]
    with progress_bar("selecting") as progress:
        shared: dict[str, Any] = {"device": device, "progress": progress}
        chosen = plateaux.select_members(opened, size=size, split=split, metric=metric, unique=unique, **shared)
        chosen.write(out)
        scores = evaluate_selection(out, opened, split=eval_split, **shared)

    def lines() -> list[str]:
        pool = zip(chosen.members, chosen.selection.weights, strict=True)
        weights = [f"{root}, member {number}: weight {weight:.3f}" for (root, number), weight in pool if weight]
        result = f"{eval_split}: accuracy {100 * scores['accuracy']:.2f} %, nll {scores['nll']:.4f}"
        samples = f"selected on {len(chosen.selection.samples):,} {split} samples"
        return [*weights, f"{samples}; {result}", f"written to {out}"]

    print_result(as_json, {**chosen.to_dict(), eval_split: scores}, lines)


def _cascade_settings(
    max_harm: float | None, confidence: float | None, stages: str | None, *, unlabeled: bool, cascade: bool
) -> dict[str, Any] | bool:
    """Return the settings of the cascade that were given; False: no cascade."""
    values = {"--max-harm": max_harm, "--confidence": confidence, "--stages": stages, "--unlabeled": unlabeled or None}
    used = [flag for flag, value in values.items() if value is not None]
    if not cascade:
        if used:
            raise RecipeError(f"{', '.join(used)} belong to a cascade; add --cascade, or leave them out")
        return False
    numbers = None if stages is None else split_names(stages)
    if numbers is not None and not all(number.isdigit() for number in numbers):
        raise RecipeError(f"--stages {stages}: give increasing numbers of members, such as 2,3")
    settings = {
        "max_harm": max_harm,
        "confidence": confidence,
        "kind": "differs" if unlabeled else None,
        "stages": None if numbers is None else tuple(map(int, numbers)),
    }
    return {name: value for name, value in settings.items() if value is not None}


def _by_kind(splits: list[str], names: list[str], on_corrupted: list[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield splits and their metrics; there are 75 corrupted splits, which by default have three metrics."""
    for is_corrupted, wanted in ((False, names), (True, on_corrupted)):
        chosen = [split for split in splits if (split.partition("@")[0].split(":")[0] == "corrupted") is is_corrupted]
        if chosen and wanted:
            yield chosen, wanted


def _mesh(processes: int, changes: list[str]) -> dict[str, Any]:
    """Return the `[executor]` section of a recipe; by default all processes share the samples."""
    section: dict[str, Any] = {"name": "mesh", "data_parallel": processes, "processes": processes}
    for change in changes:
        key, _, value = change.partition("=")
        if not key.startswith("executor."):
            raise RecipeError(f"--set {change}: only executor.* can be changed for a trained run")
        section[key.removeprefix("executor.")] = int(value) if value.isdigit() else value
    return section
