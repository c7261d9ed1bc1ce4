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
    Allow,
    AsJson,
    Changes,
    Device,
    Members,
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

UNDER_CORRUPTION = ["accuracy", "nll", "ece"]

Keep = Annotated[
    Literal["float32", "float16", "no"], typer.Option(help="Keep logits beside the run: float32, float16 or no.")
]
Samples = Annotated[int | None, typer.Option(min=1, help="Only the first so many samples.")]


def evaluate(
    run: Path,
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[SUITE=SETS]...", help="Further suites of --ood.")
    ] = None,
    on: Annotated[
        str, typer.Option(help="test, validation, train, corrupted[:KIND[:SEVERITY]]; with commas; @N: the first N.")
    ] = "test",
    measures: Annotated[
        str, typer.Option(help="Names with commas, or all, none, good, sure, different; options: ece(bins=10).")
    ] = "all",
    ood: Annotated[
        list[str] | None, typer.Option(help="Sets to tell apart: near=cifar100,tin far=mnist; or OpenOOD's near far.")
    ] = None,
    members: Members = None,
    sizes: Annotated[bool, typer.Option(help="Curves over ensembles of 1, 2, ... members too.")] = False,
    calibrated: Annotated[bool, typer.Option(help="What the run's calibration does on these samples.")] = False,
    unseen: Annotated[bool, typer.Option(help="Leave out samples the calibration was fitted on.")] = False,
    samples: Samples = None,
    baseline: Annotated[Path | None, typer.Option(help="A JSON table of errors that mCE is divided by.")] = None,
    keep: Keep = "float32",
    fresh: Annotated[bool, typer.Option(help="Run forward passes even where logits are kept.")] = False,
    cache: Annotated[Path | None, typer.Option(help="A folder to keep generated corrupted images in.")] = None,
    executor: Annotated[
        Literal["mesh", "ray"] | None, typer.Option(help="Spread the samples over a mesh, or a Ray cluster.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes of the mesh.")] = 2,
    changes: Changes = None,
    allow: Allow = None,
    device: Device = None,
    markdown: Annotated[bool, typer.Option(help="Print Markdown tables.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure a run: how good, how sure, how different, how robust, how alarmed.

    In Python: `plateaux.evaluate("runs/demo", measures=["all"])`
    """
    if changes and executor is None:
        raise RecipeError("--set changes the executor of a finished run, so it needs --executor mesh or ray")
    if calibrated and (executor or members or samples):
        raise RecipeError("--calibrated is of all members, in one process; leave --executor, --members, --samples out")
    words = [*(ood or []), *(more or [])]
    suites, by_name = parse_ood_suites(words, Run.open(run).metadata["data"]["name"]) if words else ({}, False)
    table = read_baseline(baseline) if baseline else None
    for name in [] if by_name else [each for sets in suites.values() for each in sets]:
        ood_split(name, "", plateaux.Components(trust=tuple(allow or ())))  # before hours of measuring
    if executor == "mesh" and "RANK" not in os.environ:
        raise typer.Exit(torchrun(processes))
    given = plateaux.Components(trust=tuple(allow or ()))
    shared: dict[str, Any] = {"given": given, "device": device, "keep": keep}
    walk = {"members": parse_numbers(members), "samples": samples, "fresh": fresh, **shared}
    if executor is not None:
        walk["executor"] = _executor(executor, processes, changes or [])
    names = [] if measures == "none" or (calibrated and measures == "all") else split_names(measures)
    with progress_bar("measuring") as told:
        found: list[MetricResult] = []
        for where, wanted in _by_kind(split_names(on), names):
            found += plateaux.evaluate(
                run, split=where, metrics=wanted, ensemble_sizes=sizes, corruption_cache=cache, **walk, **told
            )
        found += robustness(found, table)
        if calibrated:
            found += evaluate_calibration(run, split=on, exclude_calibration_ids=unseen, **shared, **told)
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
    on: Annotated[str, typer.Option(help="Held-out samples to fit on: validation, or test.")] = "validation",
    part: Annotated[float, typer.Option(help="A seeded share of them; the others are left to judge by.")] = 1.0,
    alpha: Annotated[
        list[float] | None, typer.Option(help="How often a set may miss; 0.1 and 0.05 by default.")
    ] = None,
    kind: Annotated[Literal["lac", "aps", "raps"], typer.Option(help="Conformal sets.")] = "aps",
    risk: Annotated[float, typer.Option(help="How often an answer may be wrong.")] = 0.05,
    bound: Annotated[
        Literal["none", "clopper-pearson", "hoeffding"], typer.Option(help="Hold the risk by an upper bound.")
    ] = "none",
    order: Annotated[
        Literal["pool", "calibrate"], typer.Option(help="What comes first: pool, or calibrate each member.")
    ] = "pool",
    allow: Allow = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Fit doubt on held-out samples: temperatures, conformal sets, when to abstain.

    In Python: `plateaux.calibrate("runs/demo", on="validation")`
    """
    options: dict[str, Any] = {"kind": kind, "bound": bound}
    options["order"] = "pool then calibrate" if order == "pool" else "calibrate then pool"
    with progress_bar("calibrating") as told:
        made = plateaux.calibrate(
            run, split=on, fraction=part, alphas=alpha or (0.1, 0.05), target_risk=risk, device=device,
            given=plateaux.Components(trust=tuple(allow or ())), **options, **told,
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
    on: Annotated[
        str, typer.Option(help="test, validation, train, corrupted:KIND:SEVERITY, or another data set.")
    ] = "test",
    alarm: Annotated[
        str, typer.Option(help="The score of how far out of distribution a sample is.")
    ] = "max_probability",
    alpha: Annotated[float | None, typer.Option(help="Which of the fitted sets to give.")] = None,
    members: Members = None,
    samples: Samples = None,
    keep: Keep = "float32",
    allow: Allow = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Answer for samples: class, probability, doubt, OOD score, conformal set, whether to abstain.

    In Python: `plateaux.predict("runs/demo", on="test").rows()`
    """
    with progress_bar("predicting") as told:
        answers = plateaux.predict(
            run, split=on, ood_score=alarm, alpha=alpha, members=parse_numbers(members), limit=samples, cache_logits=keep,
            given=plateaux.Components(trust=tuple(allow or ())), device=device, **told,
        )  # fmt: skip
    answers.write(out)
    words = f"{out}: {len(answers.ids):,} answers"
    if answers.abstain is not None:
        words += f", {int(answers.abstain.sum()):,} of them to abstain from"
    print_result(as_json, {"file": str(out), "answers": len(answers.ids)}, lambda: [words])


def soup(
    run: Path,
    out: Annotated[Path, typer.Option("--out", "-o", help="The run folder to make.")],
    how: Annotated[Literal["uniform", "greedy"], typer.Option(help="All members, or those that help.")] = "uniform",
    on: Annotated[str, typer.Option(help="Held-out samples to judge by.")] = "validation",
    members: Members = None,
    limit: Annotated[float, typer.Option(help="Nats that the loss may rise between two members.")] = 0.1,
    allow: Allow = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Make one network of several: the mean of their weights.

    In Python: `plateaux.soup("runs/demo", "runs/soup", how="greedy")`
    """
    given = plateaux.Components(trust=tuple(allow or ()))
    with progress_bar("mixing") as told:
        made = plateaux.soup(
            run, out, strategy=how, split=on, members=parse_numbers(members), max_barrier=limit, given=given, device=device,
            say=told["say"],
        )  # fmt: skip
    words = made.progress(0).weights_source
    print_result(as_json, {"run": str(out), "weights": words}, lambda: [f"{out}: {words}"])


def select(
    runs: Annotated[list[Path], typer.Argument(help="Run folders: the pool.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The JSON file to write.")],
    size: Annotated[int, typer.Option(min=1, help="Draws; with --unique, different members.")] = 5,
    on: Annotated[str, typer.Option(help="Held-out samples to choose on.")] = "validation",
    objective: Annotated[Literal["nll", "accuracy", "brier"], typer.Option(help="What is to improve.")] = "nll",
    unique: Annotated[bool, typer.Option(help="Count different members.")] = False,
    judge_on: Annotated[str, typer.Option(help="Other samples to judge the choice by.")] = "test",
    allow: Allow = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Choose an ensemble from the members of several runs, greedily and with replacement.

    In Python: `plateaux.choose_members(["runs/a", "runs/b"], size=5).write("chosen.json")`
    """
    shared: dict[str, Any] = {"given": plateaux.Components(trust=tuple(allow or ())), "device": device}
    with progress_bar("choosing") as told:
        shared["say"] = told["say"]
        chosen = plateaux.select_members(runs, size=size, split=on, metric=objective, unique=unique, **shared)
        chosen.write(out)
        judged = evaluate_selection(out, split=judge_on, **shared)

    def words() -> list[str]:
        used = [each for each in zip(chosen.members, chosen.selection.weights, strict=True) if each[1]]
        lines = [f"{root}, member {number}: weight {weight:.3f}" for (root, number), weight in used]
        found = f"{judge_on}: accuracy {100 * judged['accuracy']:.2f} %, nll {judged['nll']:.4f}"
        return [*lines, f"chosen on {len(chosen.selection.samples):,} {on} samples; {found}", f"written to {out}"]

    print_result(as_json, {**chosen.to_dict(), judge_on: judged}, words)


def _by_kind(words: list[str], names: list[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield words and what to measure on them: under corruption `all` means three measures, for there are 75 sets."""
    for bare, wanted in ((True, names), (False, UNDER_CORRUPTION if names == ["all"] else names)):
        chosen = [word for word in words if word.startswith("corrupted") is not bare]
        if chosen and wanted:
            yield chosen, wanted


def _executor(name: str, processes: int, changes: list[str]) -> dict[str, Any]:
    """Return the executor's part of a recipe: all processes share the samples unless told otherwise."""
    found: dict[str, Any] = {"name": name} | ({"data": processes, "processes": processes} if name == "mesh" else {})
    for change in changes:
        where, _, value = change.partition("=")
        if not where.startswith("executor."):
            raise RecipeError(f"--set {change}: only executor.* can be changed of a finished run")
        found[where.removeprefix("executor.")] = int(value) if value.isdigit() else value
    return found
