"""The command line. Commands print tables, and JSON with --json.

Exit codes: 0 success, 2 wrong recipe or arguments, 3 missing data, or no input could be predicted, 4 run folder or
storage unusable, 5 a loss became NaN or infinite, 6 untrusted code was refused, 75 stopped with a checkpoint (run the
same command again).
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from inspect import getdoc
from pathlib import Path
from typing import Annotated, Any

import typer

import plateaux
from plateaux.cli import evaluate, export, hub, import_weights, landscape, predict, report, serve, study, verify
from plateaux.cli.common import (
    AsJson,
    Changes,
    Download,
    Trust,
    check_address_option,
    configure_logging,
    error_console,
    handle_errors,
    metric_tables,
    output_console,
    print_result,
    torchrun,
    trusted_names,
)
from plateaux.cli.groups import GroupedCommands
from plateaux.config.builtin_recipes import builtin_recipes, recipe_file
from plateaux.core import errors, registry
from plateaux.core.formatting import format_duration, format_size
from plateaux.core.process_info import is_rank_zero
from plateaux.distributed.subprocesses import protect_children
from plateaux.studies.builtin_studies import builtin_studies

KINDS = {
    "methods": registry.method, "metrics": registry.metric, "data": registry.dataset, "models": registry.model,
    "executors": registry.executor, "probes": registry.probe,
}  # fmt: skip
FILES = {"recipes": builtin_recipes, "studies": builtin_studies}

app = typer.Typer(
    cls=GroupedCommands, help="Train, evaluate, and use deep ensembles whose members are flat and diverse.",
    no_args_is_help=True, pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing what renders Markdown takes longer than everything else in `--help`
)  # fmt: skip
recipes = typer.Typer(help="Check a recipe, or print the schema of all recipes.", no_args_is_help=True)
app.add_typer(recipes, name="recipe")
for command in (
    evaluate.evaluate, evaluate.calibrate, predict.predict, evaluate.soup, evaluate.select, export.export,
    landscape.landscape, study.study, report.report, verify.verify, serve.serve,
    hub.push, hub.pull, import_weights.import_weights,
):  # fmt: skip
    app.command()(handle_errors(command))


def main() -> None:
    """Run the command line."""
    protect_children()
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")  # searching all installed packages for them takes 0.04 s
    app()


def _print_version(is_set: bool) -> None:
    if is_set:
        typer.echo(f"plateaux {plateaux.__version__}")
        raise typer.Exit


@app.callback()
def configure(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    verbose: Annotated[int, typer.Option("--verbose", "-v", count=True, help="Also print debug messages.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings and errors.")] = False,
) -> None:
    """Train, evaluate, and use deep ensembles whose members are flat and diverse.

    Colors are off if the environment variable NO_COLOR is set.
    """
    configure_logging(verbose, quiet=quiet)


@contextmanager
def located_errors(file: Path, changes: Sequence[str]) -> Iterator[None]:
    """Add the line of the recipe, or the change that set it, to errors about a key or value."""
    from plateaux.config.recipe_errors import locate_error
    from plateaux.config.schema import ConfigKeyError

    try:
        yield
    except ConfigKeyError as problem:
        raise locate_error(problem, file.read_text(encoding="utf-8"), str(file), changes) from None


@app.command()
@handle_errors
def train(
    recipe: Annotated[
        str, typer.Argument(help="A TOML file, the name of a built-in recipe (quickstart), or a run folder to resume.")
    ],
    changes: Changes = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; by default runs/<recipe>.")] = None,
    executor: Annotated[str | None, typer.Option(help="local, mesh or ray.")] = None,
    address: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster; by default a local one is started.")
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="How the local executor runs members: loop, vmap or offload.")
    ] = None,
    processes: Annotated[int | None, typer.Option(help="Number of parallel processes.")] = None,
    devices: Annotated[str | None, typer.Option(help="Devices to use, such as 0,1.")] = None,
    min_members: Annotated[
        int | None, typer.Option(help="Partition the data without failed members if at least N remain.")
    ] = None,
    branch_from: Annotated[
        Path | None, typer.Option(help="Start from the checkpoints of this run at its first data partition.")
    ] = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Resume although the data or your code have changed.")
    ] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take over members that another process has claimed in a bucket.")
    ] = False,
    trust: Trust = None,
    download: Download = False,
    evaluate: Annotated[bool, typer.Option(help="Evaluate on the test split after training.")] = True,
    as_json: AsJson = False,
) -> None:
    """Train an ensemble; run the same command again to resume.

    In Python: `plateaux.train(plateaux.Recipe.load("recipe.toml"), out="runs/demo")`
    """
    from plateaux.cli.progress import live_progress
    from plateaux.storage.remote_store import open_store

    overrides = [*(changes or []), *_executor(executor, mode, processes, devices, address)]
    overrides += [f"run.min_members={min_members}"] if min_members is not None else []
    is_run = (Path(recipe) / "run.json").is_file()
    file = _stored_recipe(Path(recipe), out) if is_run else recipe_file(recipe)
    loaded = plateaux.Recipe.load(file, overrides)
    trusted = trusted_names(trust, loaded, overrides)
    check_address_option(address, loaded, trusted)
    root = out or (Path(recipe) if is_run else Path("runs") / Path(recipe).stem)
    if loaded.executor.name == "mesh" and "RANK" not in os.environ:
        raise typer.Exit(torchrun(loaded.executor.processes))
    if take_over and is_rank_zero() and open_store(root).has("run.json"):
        plateaux.open_run(root).release_claims()
    with located_errors(file, overrides), live_progress(error_console()) as progress:
        run = plateaux.train(
            loaded,
            root,
            trust=trusted,
            download=download,
            progress=progress,
            branch_from=branch_from,
            accept_changes=accept_changes,
        )
    if not is_rank_zero():
        return
    results = list(plateaux.evaluate(run)) if evaluate and run.info.data.test.samples else []
    if results and loaded.run.trackers:
        from plateaux.training.trackers import log_results

        log_results(run, results)
    plain = {"run": str(root), "metrics": [result.to_dict() for result in results]}
    print_result(as_json, plain, lambda: [*(metric_tables(results, short_for=root) if results else []), f"run: {root}"])


def _stored_recipe(run: Path, out: Path | None) -> Path:
    """Return the recipe of a run folder that the command line can train."""
    from plateaux.storage.stored_data import check_continuable

    if out is not None and out.resolve() != run.resolve():
        raise errors.RecipeError(
            f"{run} is a run folder, which is resumed in place: leave out --out, or start another run with its recipe: "
            f"`plateaux train {run / 'recipe.toml'} --out {out}`, and --set data.root={run} if it contains the data"
        )
    check_continuable(plateaux.open_run(run))
    return run / "recipe.toml"


@app.command()
@handle_errors
def plan(run: Path, as_json: AsJson = False) -> None:
    """List the jobs that a run still needs.

    In Python: `plateaux.pending_jobs("runs/demo")`
    """
    jobs = plateaux.pending_jobs(run)
    plain = [{"kind": j.kind, "members": list(j.members), "start": list(j.start), "stop": j.stop} for j in jobs]
    print_result(as_json, plain, lambda: [str(job) for job in jobs] or ["no jobs are pending"])


@app.command()
@handle_errors
def status(run: Path, as_json: AsJson = False) -> None:
    """Show the progress of every member of a run, and its size on disk.

    In Python: `plateaux.open_run("runs/demo").all_progress()`
    """
    from plateaux.data.warning_table import log_warnings
    from plateaux.evaluation.run_warnings import run_warnings
    from plateaux.storage.member_writer import claim_age
    from plateaux.training.job_records import latest_by_member

    opened = plateaux.open_run(run)
    rows: list[dict[str, Any]] = []
    jobs, present = latest_by_member(opened), opened.trained_members()
    for number, progress in enumerate(opened.all_progress()):
        state = "finished" if progress.finished else "training" if opened.is_locked(number) else "waiting"
        if progress.claim is not None and not opened.store.has_locks:
            state = f"claimed {claim_age(progress.claim)} ago"  # perhaps by a process that was killed
        state = state if number in present else "left out"
        rows.append(
            {
                "member": number, "state": state, "epoch": progress.epoch, "step": progress.step,
                "epochs": opened.recipe.train.epochs, "weights": progress.weights_source,
                "stop_reason": progress.stop_reason, "seconds": progress.seconds,
                "bytes": opened.store.size(f"members/{number}"),
                **({"job": jobs[number].summary(number)} if number in jobs else {}),
            }
        )  # fmt: skip
    total = opened.store.size()
    shared = opened.shared_bytes()
    held = [f"{format_size(shared)} shared by all members, stored once"] if shared else []

    def table() -> list[Any]:
        from rich.table import Table

        from plateaux.cli.progress import member_table

        shown = Table("member", "state", "epoch", "weights", "time", "on disk")
        for r in rows:
            at = f"{r['epoch']}/{r['epochs']}" + (f" + {r['step']} steps" if r["step"] else "")
            weights = f"{r['weights']} ({r['stop_reason']})" if r["stop_reason"] else r["weights"]
            shown.add_row(
                str(r["member"]), r["state"], at, weights, format_duration(r["seconds"]), format_size(r["bytes"])
            )
        active = {n: record for n, record in jobs.items() if record.outcome in ("running", "lost")}
        lost = [n for n, record in active.items() if record.outcome == "lost"]
        updates = {n: record.latest(n) for n, record in active.items() if n in record.progress}
        active_members = [member_table(updates, lost, width=output_console().width)] if updates else []
        return [shown, *active_members, *held, f"{format_size(total)} in total"]

    print_result(as_json, {"run": str(run), "members": rows, "shared_bytes": shared, "bytes": total}, table)
    log_warnings(run_warnings(opened, present))


@app.command(name="list")
@handle_errors
def list_(
    kind: Annotated[str, typer.Argument(help="methods, metrics, probes, data, models, executors, recipes or studies.")],
    as_json: AsJson = False,
) -> None:
    """List the plug-ins of one kind, the recipes, or the studies, with one sentence each.

    In Python: `plateaux.method.describe()`
    """
    if kind not in (*KINDS, *FILES):
        raise errors.RecipeError(f"There is no list of {kind!r}; {errors.suggest(kind, [*KINDS, *FILES])}")
    in_files = {} if kind in KINDS else {name: _first_line(file) for name, file in FILES[kind]().items()}
    descriptions = KINDS[kind].describe() if kind in KINDS else in_files

    def table() -> list[Any]:
        from rich.table import Table

        if not descriptions:
            return [f"no {kind} are installed; the package plateaux-papers has those of papers"]
        shown = Table("name", "description")
        for name, text in descriptions.items():
            shown.add_row(name, text)
        return [shown]

    print_result(as_json, descriptions, table)


@recipes.command()
@handle_errors
def check(
    recipe: str,
    changes: Changes = None,
    data: Annotated[
        bool, typer.Option("--data", help="Also read the data, and run a forward and a backward pass on two samples.")
    ] = False,
    trust: Trust = None,
    download: Download = False,
    as_json: AsJson = False,
) -> None:
    """Check a recipe without training: names, options, and their combination.

    In Python: `plateaux.Recipe.load("recipe.toml")`
    """
    from plateaux.config.components import Components
    from plateaux.config.experiment import Experiment
    from plateaux.core.runtime import get_device
    from plateaux.training.class_weights import balance_classes
    from plateaux.training.model_check import check_data_and_model
    from plateaux.training.recipe_rules import check as check_recipe

    file = recipe_file(recipe)
    loaded = plateaux.Recipe.load(file, changes or [])
    with located_errors(file, changes or []):
        components = Components(trust=trusted_names(trust, loaded, changes or []), download=download)
        experiment = Experiment(loaded, components)
        check_recipe(experiment)
        if data:
            experiment = balance_classes(experiment)
            check_data_and_model(experiment.recipe, experiment.training_data, components, get_device(None))
    text = f"{file} is valid: {loaded.members} members, method {loaded.method.name}"
    print_result(as_json, loaded.to_dict(), lambda: [text])


@recipes.command()
@handle_errors
def schema() -> None:
    """Print the JSON schema of recipes, for editors that complete TOML files."""
    typer.echo(json.dumps(plateaux.Recipe.model_json_schema(), indent=2))


def _executor(
    name: str | None, mode: str | None, processes: int | None, devices: str | None, address: str | None
) -> list[str]:
    listed = json.dumps([part.strip() for part in devices.split(",")]) if devices else None
    values = {"name": name, "mode": mode, "processes": processes, "devices": listed}
    values |= {"address": json.dumps(address) if address else None}
    return [f"executor.{key}={value}" for key, value in values.items() if value is not None]


def _first_line(file: Path) -> str:
    return file.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ")


def _add_commands_of_packages() -> None:
    """Add the commands of installed packages, such as plateaux-papers, that declare `plateaux.commands`."""
    own = {info.name or getattr(info.callback, "__name__", "") for info in app.registered_commands} | {"recipe"}
    for point in entry_points(group="plateaux.commands"):
        source = f"The command {point.name!r} of the package {point.dist.name if point.dist else 'unknown'}"
        if point.name in own:
            error_console().print(f"{source} is left out, because plateaux has a command of that name", style="red")
            continue
        try:
            app.command(point.name)(handle_errors(point.load()))
        except Exception as problem:  # a broken package must not stop the commands of Plateaux
            error_console().print(f"{source} could not be loaded: {problem!r}", style="red")


_add_commands_of_packages()
for info in app.registered_commands:  # shows the first line of each command in full instead of 45 characters
    info.short_help = (getdoc(info.callback) or "").split("\n", 1)[0]
