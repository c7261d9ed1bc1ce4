"""Run a study: train the missing runs, evaluate them, and store the results after each run.

results.json      all results of all finished runs; this file alone is enough for reports
autotune.json     autotuned settings, once for the whole study
runs/<hash>/      run folders, named by the hash of everything that determines their members
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

from plateaux.config.builders.data import build_data
from plateaux.config.code import changed_code, code_hashes
from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.experiment import Experiment
from plateaux.config.recipe import Recipe, fingerprint
from plateaux.config.specs import user_code
from plateaux.core.errors import DivergedError, RunError
from plateaux.core.formatting import format_duration, json_safe
from plateaux.core.progress import Message, Progress, log_messages
from plateaux.distributed.subprocesses import run_torchrun
from plateaux.evaluation.evaluate import evaluate
from plateaux.evaluation.metric_specs import get_metrics
from plateaux.evaluation.ood import detect_ood, parse_ood_suites
from plateaux.evaluation.results import MetricResult
from plateaux.evaluation.robustness import robustness
from plateaux.evaluation.run_warnings import run_warnings
from plateaux.evaluation.splits import eval_split, eval_splits, ood_splits
from plateaux.loss_landscape.probe import get_probes
from plateaux.loss_landscape.run_probes import probe_landscape
from plateaux.storage.json_shapes import read_shape
from plateaux.storage.local_store import LocalStore
from plateaux.storage.member_writer import drop_checkpoints
from plateaux.storage.run import Run, environment
from plateaux.storage.run_info import AutotuneInfo, DataInfo
from plateaux.studies.declared_tables import check_columns
from plateaux.studies.packed_results import encode_results
from plateaux.studies.result_rows import RESULTS, cost_rows, read_results, to_stored
from plateaux.studies.run_locks import locked, next_free
from plateaux.studies.study import Study
from plateaux.studies.trials import RunSpec, Trial, plan_runs, plan_trials
from plateaux.studies.uniform_soup import evaluate_soup
from plateaux.training.autotune import autotune
from plateaux.training.cost import count_passes
from plateaux.training.recipe_rules import check
from plateaux.training.train import train_experiment

AUTOTUNE = "autotune.json"
LOCK_TIMEOUT_S = 600.0  # for another process of the same study that writes results or autotunes


class StudyRunner:
    """Runs a study in a folder."""

    def __init__(
        self,
        study: Study,
        root: str | Path,
        *,
        components: Components = NO_COMPONENTS,
        filter_pattern: str = "*",
        executor: Mapping[str, Any] | None = None,
        progress: Progress = log_messages,
    ) -> None:
        self.study, self.root, self.components = study, Path(root), components
        self.executor, self.progress = dict(executor or {}), progress
        self.store = LocalStore(self.root)
        self.trials = plan_trials(study, components)
        self.runs = plan_runs(self.trials, components)
        self.wanted = {each.run for each in self.trials if fnmatch(str(each), filter_pattern)}
        self.code = _code_by_run(self.trials, components)

    @cached_property
    def evaluation_hash(self) -> str:
        """A hash of everything to measure, with the code of the user's metrics and probes."""
        return _evaluation_hash(self.study, self.components.trust)

    def run(self) -> dict[str, Any]:
        """Train and evaluate the missing runs and return all results; the others continue if a run diverges."""
        self.check()
        self.write({})
        problems: list[str] = []
        pending, started, done = self.missing(), time.monotonic(), 0.0
        total = len(pending)
        while pending:
            spec, trials = pending.pop(next_free(self.store, [spec for spec, _ in pending]))
            todo = self._not_done(trials)
            if not todo:
                continue
            left = self._time_left([spec, *(other for other, _ in pending)], started, done)
            self._log(f"run {total - len(pending)} of {total}: {todo[0]}{left}")
            try:
                with locked(self.store, spec, self._log):
                    if todo := self._not_done(trials):
                        self.run_one(spec, todo)
            except DivergedError as problem:
                problems.append(f"{todo[0]}: {problem}")
                self._log(problems[-1])
            done += self.cost(spec)
        self._clean_up()  # files left by an interrupted process
        if problems:
            raise DivergedError("Some runs diverged; all others are finished:\n  " + "\n  ".join(problems))
        return self.results()

    def _log(self, text: str) -> None:
        self.progress(Message(text))

    def check(self, *, data: bool = True) -> None:
        """Check all recipes, metrics, probes, and, with `data`, splits before anything is written."""
        for spec in self.runs:
            check(Experiment(self.training_recipe(spec), self.components))
        check_columns(self.study.tables, _measured(self.study, self.components.trust))
        recipes = {fingerprint(spec.recipe.to_dict()["data"]): spec.recipe for spec in self.runs if data}
        for recipe in recipes.values():
            _check_splits(self.study, recipe, self.components)

    def missing(self) -> list[tuple[RunSpec, list[Trial]]]:
        """Return the runs with missing results and their trials, in the order of training."""
        results = self.results()
        missing = []
        for spec in self.runs:
            wanted = [trial for trial in reversed(spec.trials) if trial.run in self.wanted]
            todo = {trial.run: trial for trial in wanted if not self.is_done(trial, results)}
            if todo:
                missing.append((spec, list(todo.values())[::-1]))
        return missing

    def is_done(self, trial: Trial, results: Mapping[str, Any]) -> bool:
        """Return whether all results of a trial are stored, and come from the present code."""
        entry = results.get("runs", {}).get(trial.run, {})
        is_measured = entry.get("evaluation_hash") == self.evaluation_hash
        return is_measured and not changed_code(entry.get("code", {}), self.code[trial.run])

    def _not_done(self, trials: Sequence[Trial]) -> list[Trial]:
        """Return the trials without results. Another process may work on the same study."""
        results = self.results()
        return [trial for trial in trials if not self.is_done(trial, results)]

    def run_one(self, spec: RunSpec, todo: Sequence[Trial]) -> None:
        """Train the missing part of a run, and store the results of the trials that it serves."""
        root = self.root / "runs" / spec.folder
        _check_code(root, todo[0], self.code[todo[0].run])
        recipe = self._autotuned(self.training_recipe(spec))
        self._reset_dropped_members(root)
        self._train(recipe, root, _parent(self.root, spec))
        for trial in todo:
            results = self._evaluate(root, trial.recipe.members)
            self.write({trial.run: self._entry(root, trial, results)})
        self._clean_up()

    def training_recipe(self, spec: RunSpec) -> Recipe:
        """Return the training recipe of a run; a parent keeps its checkpoint at the data partition."""
        recipe = spec.recipe.replaced(executor=self.executor) if self.executor else spec.recipe
        if recipe.run.trackers and recipe.run.group is None:
            recipe = recipe.replaced(run={"group": self.study.name})
        return recipe.replaced(run={"keep_checkpoints": "last"}) if spec.is_parent else recipe

    def results(self) -> dict[str, Any]:
        """Return the stored results."""
        return read_results(self.root)

    def write(self, entries: Mapping[str, Any]) -> None:
        """Add entries to results.json under a lock, so that entries of other processes are kept."""
        with self.store.lock("runs", timeout=LOCK_TIMEOUT_S):
            runs = {**self.results().get("runs", {}), **entries}
            conditions = [_condition(trial, self.code[trial.run]) for trial in self.trials]
            study = {"study": self.study.model_dump(mode="json"), "evaluation_hash": self.evaluation_hash}
            self.store.put(RESULTS, encode_results({**study, "conditions": conditions, "runs": runs}))

    def _train(self, recipe: Recipe, root: Path, parent: Path | None) -> None:
        if recipe.executor.name != "mesh":
            train_experiment(Experiment(recipe, self.components), root, progress=self.progress, branch_from=parent)
            return
        name = f"recipes/{root.name}.toml"
        self.store.put(name, recipe.to_toml().encode())
        command = ["train", str(self.root / name), "--out", str(root), "--no-evaluate"]
        command += ["--branch-from", str(parent)] if parent else []
        command += [word for module in self.components.trust for word in ("--trust", module)]
        command += ["--download"] if self.components.download else []
        if code := run_torchrun(recipe.executor.processes, command, silent=True):
            raise RunError(f"Training {root} on a mesh failed with exit code {code}. Run the command again to resume.")

    def _autotuned(self, recipe: Recipe) -> Recipe:
        """Return the recipe with autotuned settings, the same for all runs that differ only in method and seed.

        Runs that are compared must have the same precision, and so must runs that share a training prefix.
        """
        if "auto" not in (recipe.train.precision, recipe.train.memory_format):
            return recipe
        shared = {name: part for name, part in recipe.identity().items() if name not in ("method", "seed")}
        name = fingerprint(shared)
        with self.store.lock("runs", timeout=LOCK_TIMEOUT_S):
            tree = self.store.get_json(AUTOTUNE) if self.store.has(AUTOTUNE) else {}
            known = read_shape(dict[str, dict[str, Any]], tree, self.root / AUTOTUNE, "delete it to measure again")
            if name not in known:
                known[name] = autotune(Experiment(recipe, self.components), self.progress)
                self.store.put_json(AUTOTUNE, known)
        tuned = AutotuneInfo.from_dict(known[name], self.root / AUTOTUNE)
        return recipe.replaced(train={"precision": tuned.precision, "memory_format": tuned.memory_format})

    def _reset_dropped_members(self, root: Path) -> None:
        """Delete members without weights, so that they are trained again for new metrics."""
        if not LocalStore(root).has("run.json"):
            return
        run = Run.open(root)
        for number, progress in enumerate(run.all_progress()):
            if progress.weights is not None and progress.finished and not run.store.has(progress.weights):
                self._log(f"member {number} of {root.name} is trained again because its weights were deleted")
                for name in run.store.names(f"members/{number}"):
                    run.store.delete(name)

    def _evaluate(self, root: Path, members: int) -> list[MetricResult]:
        evaluation, landscape = self.study.evaluate, self.study.landscape
        run, progress = Run.open(root, self.components), self.progress
        some = list(range(members)) if members < run.recipe.members else None
        results: list[MetricResult] = []
        if evaluation.metrics:
            results += evaluate(
                run,
                split=evaluation.splits,
                metrics=evaluation.metrics,
                members=some,
                ensemble_sizes=evaluation.ensemble_sizes,
                progress=progress,
            )
        if evaluation.corruptions:
            results += evaluate(
                run,
                split=evaluation.corruptions,
                metrics=evaluation.corruption_metrics,
                members=some,
                cache_logits="off",
                corruption_cache=evaluation.corruption_cache,
                progress=progress,
            )
        results += robustness(results)
        if evaluation.ood:
            suites, is_by_name = parse_ood_suites(evaluation.ood, run.info.data.name)
            results += detect_ood(
                run, suites, metrics=evaluation.ood_metrics, skip_missing=is_by_name, members=some, progress=progress
            )
        if evaluation.soup and members > 1:
            results += evaluate_soup(run, members, evaluation)
        if landscape.probes:
            results += probe_landscape(
                run,
                probes=landscape.probes,
                split=landscape.split,
                limit=landscape.samples,
                members=some,
                batchnorm=landscape.batchnorm,
                augment=landscape.augment,
                progress=progress,
            )
        return results

    def _entry(self, root: Path, trial: Trial, results: Sequence[MetricResult]) -> dict[str, Any]:
        run = Run.open(root, self.components)
        members = range(trial.recipe.members)
        found = run_warnings(run, members)
        log = {f"member {n}": [json_safe(line) for line in run.log(n) if "train loss" in line] for n in members}
        return {
            "folder": f"runs/{trial.folder}",
            "members": trial.recipe.members,
            "evaluation_hash": self.evaluation_hash,
            **({"code": dict(run.info.code)} if run.info.code else {}),
            **({"warnings": found} if found else {}),
            "recipe": run.resolved_recipe().replaced(members=trial.recipe.members).to_dict(),
            "environment": environment(),
            "metrics": [to_stored(result) for result in results],
            "costs": cost_rows(run, trial.recipe.members),
            "log": log,
        }

    def _clean_up(self) -> None:
        """Delete checkpoints that no run will branch from, and weights that are fully evaluated."""
        results = self.results()
        parents = {spec.prefix for spec in self.runs if not all(self.is_done(trial, results) for trial in spec.trials)}
        for spec in self.runs:
            root = self.root / "runs" / spec.folder
            if not LocalStore(root).has("run.json") or not all(self.is_done(trial, results) for trial in spec.trials):
                continue
            run = Run.open(root)
            if spec.is_parent and spec.folder not in parents and spec.recipe.run.keep_checkpoints == "none":
                for number in range(run.recipe.members):
                    drop_checkpoints(run, number)
            if not self.study.keep_weights:
                _delete_weights(run)

    def _time_left(self, missing: Sequence[RunSpec], started: float, done: float) -> str:
        """Return the estimated remaining time, from the time of the finished runs."""
        if not done:
            return ""
        more = sum(self.cost(spec) for spec in missing)
        return f"; about {format_duration((time.monotonic() - started) * more / done)} left"

    def cost(self, spec: RunSpec) -> float:
        experiment = Experiment(spec.recipe, self.components)
        return sum(count_passes(experiment, number) for number in range(spec.recipe.members))


def _measured(study: Study, trust: tuple[str, ...]) -> list[str]:
    """Return the names of all metrics and probes; unknown ones are errors."""
    wanted = study.evaluate
    metrics = get_metrics((*wanted.metrics, *wanted.corruption_metrics, *wanted.ood_metrics), trust=trust)
    return sorted({*metrics, *get_probes(study.landscape.probes, trust=trust)})


def _evaluation_hash(study: Study, trust: tuple[str, ...]) -> str:
    return study.evaluation_hash({name: code for name in _measured(study, trust) if (code := user_code(name, trust))})


def _condition(trial: Trial, code: Mapping[str, str]) -> dict[str, Any]:
    condition = {"condition": dict(trial.condition), "repetition": trial.repetition, "run": trial.run}
    return {**condition, "code": dict(code)} if code else condition


def _check_code(root: Path, trial: Trial, code: Mapping[str, str]) -> None:
    """Raise RunError if a run was trained with other code."""
    stored = Run.open(root).info.code if LocalStore(root).has("run.json") else {}
    if changed := changed_code(stored, code):
        raise RunError(
            f"The code of the {' and the '.join(changed)} of {trial} has changed since its training. Restore it, "
            f"delete {root} to train it again, or choose another --out"
        )


def _parent(root: Path, spec: RunSpec) -> Path | None:
    """Return the run to branch from, if it has reached its data partition and has its checkpoint."""
    root = root / "runs" / str(spec.prefix)
    if spec.prefix is None or not LocalStore(root).has("run.json"):
        return None
    return root if all(each.partition_checkpoint for each in Run.open(root).all_progress()) else None


def _code_by_run(trials: Sequence[Trial], components: Components) -> dict[str, dict[str, str]]:
    """Return the hashes of the user's code for every run; hashing takes milliseconds, so once per set of plug-ins."""
    known: dict[Any, dict[str, str]] = {}
    for recipe in (trial.recipe for trial in trials):
        if (key := _plugins(recipe)) not in known:
            known[key] = code_hashes(recipe, components)
    return {trial.run: known[_plugins(trial.recipe)] for trial in trials}


def _plugins(recipe: Recipe) -> tuple[Any, ...]:
    return recipe.model.name, recipe.method.name, recipe.data.name, recipe.train.select, recipe.members


def _check_splits(study: Study, recipe: Recipe, components: Components) -> None:
    """Raise an error for splits that a recipe's data do not have."""
    evaluation, landscape = study.evaluate, study.landscape
    info = DataInfo.from_splits(build_data(recipe, components))
    names = [*(evaluation.splits if evaluation.metrics else ()), *evaluation.corruptions]
    eval_splits(recipe, info, names, components=components)
    if landscape.probes:
        eval_split(recipe, info, landscape.split)
    suites, _ = parse_ood_suites(evaluation.ood, info.name)
    for name in dict.fromkeys(name for names in suites.values() for name in names):
        ood_splits(recipe, info, name, "", components)


def _delete_weights(run: Run) -> None:
    """Delete weights and cached predictions; keep results and logs."""
    weights = [progress.weights for progress in run.all_progress() if progress.weights]
    for name in [*weights, *run.store.names("predictions")]:
        run.store.delete(name)
