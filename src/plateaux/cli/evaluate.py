"""The commands that ask finished runs, and make new ones of them: measure, calibrate, predict, soup, select."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

import plateaux
from plateaux.cli.common import (
    AsJson,
    Changes,
    Device,
    Members,
    Trust,
    parse_numbers,
    print_result,
    progress_bar,
    torchrun,
)
from plateaux.config.specs import split_names
from plateaux.core.errors import RecipeError
from plateaux.core.runtime import is_rank_zero
from plateaux.evaluation.calibration import evaluate_calibration
from plateaux.evaluation.ood import detect_ood, parse_ood_suites
from plateaux.evaluation.results import MetricResult
from plateaux.evaluation.robustness import read_baseline, robustness
from plateaux.evaluation.selection import evaluate_selection
from plateaux.evaluation.splits import ood_split
from plateaux.evaluation.tables import tables, to_markdown
from plateaux.storage.run import Run

CORRUPTION_METRICS = ["accuracy", "nll", "ece"]

CacheLogits = Annotated[
    Literal["float32", "float16", "no"], typer.Option(help="Keep logits beside the run: float32, float16 or no.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first so many samples.")]


def evaluate(
    run: Path,
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[SUITE=SETS]...", help="Further suites of --ood.")
    ] = None,
    split: Annotated[
        str, typer.Option(help="test, validation, train, corrupted[:KIND[:SEVERITY]]; with commas; @N: the first N.")
    ] = "test",
    metrics: Annotated[
        str,
        typer.Option(
            help="Names with commas, or all, none, performance, uncertainty, diversity; options: ece(bins=10)."
        ),
    ] = "all",
    ood: Annotated[
        list[str] | None, typer.Option(help="Sets to tell apart: near=cifar100,tin far=mnist; or OpenOOD's near far.")
    ] = None,
    members: Members = None,
    ensemble_sizes: Annotated[bool, typer.Option(help="Curves over ensembles of 1, 2, ... members too.")] = False,
    calibrated: Annotated[bool, typer.Option(help="What the run's calibration does on these samples.")] = False,
    exclude_calibration_ids: Annotated[
        bool, typer.Option(help="Leave out samples the calibration was fitted on.")
    ] = False,
    limit: Limit = None,
    baseline: Annotated[Path | None, typer.Option(help="A JSON table of errors that mCE is divided by.")] = None,
    cache_logits: CacheLogits = "float32",
    no_cache: Annotated[bool, typer.Option(help="Run forward passes even where logits are kept.")] = False,
    corruption_cache: Annotated[
        Path | None, typer.Option(help="A folder to keep generated corrupted images in.")
    ] = None,
    executor: Annotated[
        Literal["mesh", "ray"] | None, typer.Option(help="Spread the samples over a mesh, or a Ray cluster.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes of the mesh.")] = 2,
    changes: Changes = None,
    trust: Trust = None,
    device: Device = None,
    markdown: Annotated[bool, typer.Option(help="Print Markdown tables.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure a run: how good, how sure, how different, how robust, how alarmed.

    In Python: `plateaux.evaluate("runs/demo", metrics=["all"])`
    """
    if changes and executor is None:
        raise RecipeError("--set changes the executor of a finished run, so it needs --executor mesh or ray")
    if calibrated and (executor or members or limit):
        raise RecipeError("--calibrated is of all members, in one process; leave --executor, --members, --limit out")
    words = [*(ood or []), *(more or [])]
    suites, by_name = parse_ood_suites(words, Run.open(run).info.data.name) if words else ({}, False)
    table = read_baseline(baseline) if baseline else None
    for name in [] if by_name else [each for sets in suites.values() for each in sets]:
        ood_split(name, "", plateaux.Components(trust=tuple(trust or ())))  # before hours of measuring
    if executor == "mesh" and "RANK" not in os.environ:
        raise typer.Exit(torchrun(processes))
    components = plateaux.Components(trust=tuple(trust or ()))
    shared: dict[str, Any] = {"components": components, "device": device, "cache_logits": cache_logits}
    walk = {"members": parse_numbers(members), "limit": limit, "no_cache": no_cache, **shared}
    if executor is not None:
        walk["executor"] = _executor(executor, processes, changes or [])
    names = [] if metrics == "none" or (calibrated and metrics == "all") else split_names(metrics)
    with progress_bar("measuring") as told:
        found: list[MetricResult] = []
        for where, wanted in _by_kind(split_names(split), names):
            found += plateaux.evaluate(
                run,
                split=where,
                metrics=wanted,
                ensemble_sizes=ensemble_sizes,
                corruption_cache=corruption_cache,
                **walk,
                **told,
            )
        found += robustness(found, table)
        if calibrated:
            found += evaluate_calibration(
                run, split=split, exclude_calibration_ids=exclude_calibration_ids, **shared, **told
            )
        if suites:
            found += detect_ood(run, suites, skip_missing=by_name, **walk, **told)
    if not is_rank_zero():
        return
    if markdown:
        typer.echo(to_markdown(found))
        return
    print_result(as_json, [each.to_dict() for each in found], lambda: tables(found, Console().width))


def calibrate(
    run: Path,
    split: Annotated[str, typer.Option(help="Held-out samples to fit on: validation, or test.")] = "validation",
    fraction: Annotated[float, typer.Option(help="A seeded share of them; the others are left to judge by.")] = 1.0,
    alpha: Annotated[
        list[float] | None, typer.Option(help="How often a set may miss; 0.1 and 0.05 by default.")
    ] = None,
    conformal: Annotated[Literal["lac", "aps", "raps"], typer.Option(help="Conformal sets.")] = "aps",
    target_risk: Annotated[float, typer.Option(help="How often an answer may be wrong.")] = 0.05,
    bound: Annotated[
        Literal["none", "clopper-pearson", "hoeffding"], typer.Option(help="Hold the risk by an upper bound.")
    ] = "none",
    order: Annotated[
        Literal["pool", "calibrate"], typer.Option(help="What comes first: pool, or calibrate each member.")
    ] = "pool",
    trust: Trust = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Fit doubt on held-out samples: temperatures, conformal sets, when to abstain.

    In Python: `plateaux.calibrate("runs/demo", split="validation")`
    """
    options: dict[str, Any] = {"conformal": conformal, "bound": bound}
    options["order"] = "pool then calibrate" if order == "pool" else "calibrate then pool"
    with progress_bar("calibrating") as told:
        made = plateaux.calibrate(
            run, split=split, fraction=fraction, alphas=alpha or (0.1, 0.05), target_risk=target_risk, device=device,
            components=plateaux.Components(trust=tuple(trust or ())), **options, **told,
        )  # fmt: skip

    def words() -> list[str]:
        threshold = made.threshold
        answers = "abstains always" if threshold.at is None else f"answers {100 * threshold.coverage:.1f} %"
        values = [", ".join(f"{v:.3f}" for v in each.values) for each in made.temperatures.values()]
        return [
            f"fitted on {len(made.ids):,} {made.split} samples",
            f"temperature: {values[0]} for the ensemble; {values[1]} for each member",
            *(f"{100 * (1 - each.alpha):g} % sets ({each.kind}): threshold {each.threshold:.4f}" for each in made.sets),
            f"for a risk of {100 * threshold.risk:g} % it {answers}",
        ]

    print_result(as_json, made.to_dict(), words)


def predict(
    run: Path,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write: .csv, .jsonl or .npz.")],
    split: Annotated[
        str, typer.Option(help="test, validation, train, corrupted:KIND:SEVERITY, or another data set.")
    ] = "test",
    ood_score: Annotated[
        str, typer.Option(help="The score of how far out of distribution a sample is.")
    ] = "max_probability",
    alpha: Annotated[float | None, typer.Option(help="Which of the fitted sets to give.")] = None,
    members: Members = None,
    limit: Limit = None,
    cache_logits: CacheLogits = "float32",
    trust: Trust = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Answer for samples: class, probability, doubt, OOD score, conformal set, whether to abstain.

    In Python: `plateaux.predict("runs/demo", split="test").rows()`
    """
    with progress_bar("predicting") as told:
        answers = plateaux.predict(
            run, split=split, ood_score=ood_score, alpha=alpha, members=parse_numbers(members), limit=limit,
            cache_logits=cache_logits,
            components=plateaux.Components(trust=tuple(trust or ())), device=device, **told,
        )  # fmt: skip
    answers.write(out)
    words = f"{out}: {len(answers.ids):,} answers"
    if answers.abstain is not None:
        words += f", {int(answers.abstain.sum()):,} of them to abstain from"
    print_result(as_json, {"file": str(out), "answers": len(answers.ids)}, lambda: [words])


def soup(
    run: Path,
    out: Annotated[Path, typer.Option("--out", "-o", help="The run folder to make.")],
    strategy: Annotated[
        Literal["uniform", "greedy"], typer.Option(help="All members, or those that help.")
    ] = "uniform",
    split: Annotated[str, typer.Option(help="Held-out samples to judge by.")] = "validation",
    members: Members = None,
    max_barrier: Annotated[float, typer.Option(help="Nats that the loss may rise between two members.")] = 0.1,
    trust: Trust = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Make one network of several: the mean of their weights.

    In Python: `plateaux.soup("runs/demo", "runs/soup", strategy="greedy")`
    """
    components = plateaux.Components(trust=tuple(trust or ()))
    with progress_bar("mixing") as told:
        made = plateaux.soup(
            run, out, strategy=strategy, split=split, members=parse_numbers(members), max_barrier=max_barrier,
            components=components, device=device,
            say=told["say"],
        )  # fmt: skip
    words = made.progress(0).weights_source
    print_result(as_json, {"run": str(out), "weights": words}, lambda: [f"{out}: {words}"])


def select(
    runs: Annotated[list[Path], typer.Argument(help="Run folders: the pool.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The JSON file to write.")],
    size: Annotated[int, typer.Option(min=1, help="Draws; with --unique, different members.")] = 5,
    split: Annotated[str, typer.Option(help="Held-out samples to choose on.")] = "validation",
    metric: Annotated[Literal["nll", "accuracy", "brier"], typer.Option(help="What is to improve.")] = "nll",
    unique: Annotated[bool, typer.Option(help="Count different members.")] = False,
    eval_split: Annotated[str, typer.Option(help="Other samples to judge the choice by.")] = "test",
    trust: Trust = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Choose an ensemble from the members of several runs, greedily and with replacement.

    In Python: `plateaux.select_members(["runs/a", "runs/b"], size=5).write("chosen.json")`
    """
    shared: dict[str, Any] = {"components": plateaux.Components(trust=tuple(trust or ())), "device": device}
    with progress_bar("choosing") as told:
        shared["say"] = told["say"]
        chosen = plateaux.select_members(runs, size=size, split=split, metric=metric, unique=unique, **shared)
        chosen.write(out)
        judged = evaluate_selection(out, split=eval_split, **shared)

    def words() -> list[str]:
        used = [each for each in zip(chosen.members, chosen.selection.weights, strict=True) if each[1]]
        lines = [f"{root}, member {number}: weight {weight:.3f}" for (root, number), weight in used]
        found = f"{eval_split}: accuracy {100 * judged['accuracy']:.2f} %, nll {judged['nll']:.4f}"
        return [*lines, f"chosen on {len(chosen.selection.samples):,} {split} samples; {found}", f"written to {out}"]

    print_result(as_json, {**chosen.to_dict(), eval_split: judged}, words)


def _by_kind(words: list[str], names: list[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield words and what to measure on them: under corruption `all` means three measures, for there are 75 sets."""
    for bare, wanted in ((True, names), (False, CORRUPTION_METRICS if names == ["all"] else names)):
        chosen = [word for word in words if word.startswith("corrupted") is not bare]
        if chosen and wanted:
            yield chosen, wanted


def _executor(name: str, processes: int, changes: list[str]) -> dict[str, Any]:
    """Return the executor's part of a recipe: all processes share the samples unless told otherwise."""
    mesh = {"data_parallel": processes, "processes": processes}
    found: dict[str, Any] = {"name": name} | (mesh if name == "mesh" else {})
    for change in changes:
        where, _, value = change.partition("=")
        if not where.startswith("executor."):
            raise RecipeError(f"--set {change}: only executor.* can be changed of a finished run")
        found[where.removeprefix("executor.")] = int(value) if value.isdigit() else value
    return found
