"""Carry out a study: train what is missing, measure it, and write it down run by run.

results.json      every number of every finished run: this file alone carries them to another machine
autotune.json     autotuned settings, the same for the whole study
runs/<hash>/      run folders, named by all that determines their members
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from plateaux.config.builders.data import build_data
from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.recipe import Recipe, fingerprint
from plateaux.core.errors import DivergedError, RunError
from plateaux.core.formatting import format_duration, json_safe
from plateaux.core.progress import Message, Progress, log_messages
from plateaux.evaluation.evaluate import evaluate
from plateaux.evaluation.metric_specs import get_metrics
from plateaux.evaluation.ood import detect_ood, parse_ood_suites
from plateaux.evaluation.results import MetricResult
from plateaux.evaluation.robustness import robustness
from plateaux.evaluation.splits import eval_split, eval_splits, ood_split
from plateaux.loss_landscape.probe import get_probes
from plateaux.loss_landscape.run_probes import probe_landscape
from plateaux.loss_landscape.session import ProbeOptions
from plateaux.storage.local_store import LocalStore
from plateaux.storage.run import Run, environment
from plateaux.storage.run_info import DataInfo
from plateaux.studies.planning import RunSpec, Trial, plan_runs, plan_trials
from plateaux.studies.results import FORMAT, RESULTS, cost_rows, read_results, to_stored
from plateaux.studies.study import Study
from plateaux.training.autotune import autotune
from plateaux.training.checks import check
from plateaux.training.cost import count_passes
from plateaux.training.train import train

AUTOTUNE = "autotune.json"
LOCK_TIMEOUT_S = 600.0  # seconds to wait for another process at the same study, which writes or chooses


class StudyRunner:
    """A study and the folder it is carried out in."""

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

    def run(self) -> dict[str, Any]:
        """Train and measure what is missing and return all results; a run that diverges does not hold up the others."""
        self.check()
        self.write({})
        problems: list[str] = []
        missing, begun, done = self.missing(), time.monotonic(), 0.0
        for place, (task, asked) in enumerate(missing, start=1):
            results = self.results()
            todo = [plan for plan in asked if not self.done(plan, results)]  # others may be at the same study
            if not todo:
                continue
            self._log(f"run {place} of {len(missing)}: {todo[0]}{self._left(missing[place - 1 :], begun, done)}")
            try:
                self.run_one(task, todo)
            except DivergedError as problem:
                problems.append(f"{todo[0]}: {problem}")
                self._log(problems[-1])
            done += self._weight(task)
        self._tidy()  # what a kill has left
        if problems:
            raise DivergedError("Some runs diverged; the others are finished:\n  " + "\n  ".join(problems))
        return self.results()

    def _log(self, text: str) -> None:
        self.progress(Message(text))

    def check(self) -> None:
        """Refuse what cannot be carried out before anything is written."""
        for task in self.runs:
            check(self.trained(task), self.components)
        wanted = (*self.study.evaluate.metrics, *self.study.evaluate.corruption_metrics)
        get_metrics(wanted, trust=self.components.trust)
        get_probes(self.study.landscape.probes, trust=self.components.trust)
        for recipe in {fingerprint(task.recipe.to_dict()["data"]): task.recipe for task in self.runs}.values():
            self._check_samples(recipe)

    def _check_samples(self, recipe: Recipe) -> None:
        asked, looked = self.study.evaluate, self.study.landscape
        facts = DataInfo.from_splits(build_data(recipe, self.components))
        eval_splits(recipe, facts, [*(asked.splits if asked.metrics else ()), *asked.corruptions])
        if looked.probes:
            eval_split(recipe, facts, looked.split)
        suites, _ = parse_ood_suites(asked.ood, facts.name)
        for name in dict.fromkeys(name for names in suites.values() for name in names):
            ood_split(name, "", self.components)

    def missing(self) -> list[tuple[RunSpec, list[Trial]]]:
        """Return the runs that have numbers to give that are not there yet, in the order they are to be made."""
        results = self.results()
        found = []
        for task in self.runs:
            todo = {p.run: p for p in reversed(task.trials) if p.run in self.wanted and not self.done(p, results)}
            if todo:
                found.append((task, list(todo.values())[::-1]))
        return found

    def done(self, plan: Trial, results: Mapping[str, Any]) -> bool:
        """Say whether everything that is asked of a condition is written down."""
        entry = results.get("runs", {}).get(plan.run)
        return entry is not None and entry["evaluation_hash"] == self.study.evaluation_hash()

    def run_one(self, task: RunSpec, todo: Sequence[Trial]) -> None:
        """Train one run as far as it is missing, and write down the numbers of the conditions it serves."""
        root = self.root / "runs" / task.folder
        recipe = self._chosen(self.trained(task))
        self._begin_again(root)
        self._train(recipe, root, self._parent(task))
        for plan in todo:
            found = self._evaluate(root, plan.recipe.members)
            self.write({plan.run: self._entry(root, plan, found)})
        self._tidy()

    def trained(self, task: RunSpec) -> Recipe:
        """Return the recipe a run is trained by: a lender keeps its state at the meeting."""
        recipe = task.recipe.replaced(executor=self.executor) if self.executor else task.recipe
        return recipe.replaced(run={"keep_checkpoints": "last"}) if task.is_parent else recipe

    def results(self) -> dict[str, Any]:
        """Return what is written down so far."""
        return read_results(self.root)

    def write(self, entries: Mapping[str, Any]) -> None:
        """Add runs to what is written down; nobody else's are lost."""
        with self.store.lock("runs", timeout=LOCK_TIMEOUT_S):
            runs = {**self.results().get("runs", {}), **entries}
            conditions = [
                {"condition": dict(p.condition), "repetition": p.repetition, "run": p.run} for p in self.trials
            ]
            whole = {
                "format": FORMAT,
                "study": self.study.model_dump(mode="json"),
                "evaluation_hash": self.study.evaluation_hash(),
            }
            whole |= {"conditions": conditions, "runs": runs}
            self.store.put(RESULTS, (json.dumps(whole, allow_nan=False) + "\n").encode())

    def _train(self, recipe: Recipe, root: Path, span: Path | None) -> None:
        if recipe.executor.name != "mesh":
            train(recipe, root, components=self.components, progress=self.progress, branch_from=span)
            return
        name = f"recipes/{root.name}.toml"
        self.store.put(name, recipe.to_toml().encode())
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        words += [str(recipe.executor.processes), "-m", "plateaux", "train", str(self.root / name), "--out", str(root)]
        words += ["--no-evaluate", *(["--branch-from", str(span)] if span else [])]
        words += [word for module in self.components.trust for word in ("--trust", module)]
        if code := subprocess.call(words, stdout=subprocess.DEVNULL):
            raise RunError(f"The mesh that trained {root} ended with exit code {code}; run the same command again")

    def _chosen(self, recipe: Recipe) -> Recipe:
        """Return the recipe with what the machine chose: once for all runs that differ only in method and seed.

        Runs that are compared must not differ in precision, and those that share a span cannot.
        """
        if "auto" not in (recipe.train.precision, recipe.train.memory_format):
            return recipe
        alike = {name: part for name, part in recipe.identity().items() if name not in ("method", "seed")}
        name = fingerprint(alike)
        with self.store.lock("runs", timeout=LOCK_TIMEOUT_S):
            known = self.store.get_json(AUTOTUNE) if self.store.has(AUTOTUNE) else {}
            if name not in known:
                known[name] = autotune(recipe, self.components, self.progress)
                self.store.put_json(AUTOTUNE, known)
        return recipe.replaced(train={part: known[name][part] for part in ("precision", "memory_format")})

    def _parent(self, task: RunSpec) -> Path | None:
        """Return the run to begin from, where it has come to its meeting and its state is kept."""
        root = self.root / "runs" / str(task.prefix)
        if task.prefix is None or not LocalStore(root).has("run.json"):
            return None
        other = Run.open(root)
        return root if all(each.partition_checkpoint for each in other.all_progress()) else None

    def _begin_again(self, root: Path) -> None:
        """Forget members whose weights were dropped: something is asked of them that was not asked before."""
        if not LocalStore(root).has("run.json"):
            return
        run = Run.open(root)
        for number, progress in enumerate(run.all_progress()):
            if progress.weights is not None and progress.finished and not run.store.has(progress.weights):
                self._log(f"member {number} of {root.name} is trained again: its weights were dropped")
                for name in run.store.names(f"members/{number}"):
                    run.store.delete(name)

    def _evaluate(self, root: Path, members: int) -> list[MetricResult]:
        asked, looked = self.study.evaluate, self.study.landscape
        some = list(range(members)) if members < Run.open(root).recipe.members else None
        walk: dict[str, Any] = {"members": some, "components": self.components, "say": self._log}
        found = (
            evaluate(root, split=asked.splits, metrics=asked.metrics, ensemble_sizes=asked.ensemble_sizes, **walk)
            if asked.metrics
            else []
        )
        if asked.corruptions:
            options = {
                "metrics": asked.corruption_metrics,
                "corruption_cache": asked.corruption_cache,
                "cache_logits": "no",
                **walk,
            }
            found += evaluate(root, split=asked.corruptions, **options)
        found += robustness(found)
        if asked.ood:
            suites, by_name = parse_ood_suites(asked.ood, Run.open(root).info.data.name)
            found += detect_ood(root, suites, skip_missing=by_name, **walk)
        if looked.probes:
            found += probe_landscape(
                root,
                probes=looked.probes,
                split=looked.split,
                limit=looked.samples,
                members=some,
                options=ProbeOptions(batchnorm=looked.batchnorm),
                data=self.components.data,
                model=self.components.model,
                loss=self.components.loss,
                trust=self.components.trust,
            )
        return found

    def _entry(self, root: Path, plan: Trial, found: Sequence[MetricResult]) -> dict[str, Any]:
        run = Run.open(root)
        members = range(plan.recipe.members)
        course = {f"member {n}": [json_safe(line) for line in run.log(n) if "train loss" in line] for n in members}
        return {
            "folder": f"runs/{plan.folder}",
            "members": plan.recipe.members,
            "evaluation_hash": self.study.evaluation_hash(),
            "recipe": run.resolved_recipe().replaced(members=plan.recipe.members).to_dict(),
            "environment": environment(),
            "metrics": [to_stored(each) for each in found],
            "costs": cost_rows(run, plan.recipe.members, self.components),
            "log": course,
        }

    def _tidy(self) -> None:
        """Delete states that no run will begin from any more, and weights that nothing more is asked of."""
        results = self.results()
        left = {task.prefix for task in self.runs if not all(self.done(p, results) for p in task.trials)}
        for task in self.runs:
            root = self.root / "runs" / task.folder
            if not LocalStore(root).has("run.json") or not all(self.done(p, results) for p in task.trials):
                continue
            run = Run.open(root)
            if task.is_parent and task.folder not in left and task.recipe.run.keep_checkpoints == "none":
                for number, progress in enumerate(run.all_progress()):
                    run.commit(number, replace(progress, checkpoints=(), partition_checkpoint=None))
            if not self.study.keep_weights:
                _drop(run)

    def _left(self, missing: Sequence[tuple[RunSpec, Any]], begun: float, done: float) -> str:
        """Return how long what is left will take, by how long went into what is done."""
        if not done:
            return ""
        more = sum(self._weight(task) for task, _ in missing)
        return f"; about {format_duration((time.monotonic() - begun) * more / done)} left"

    def _weight(self, task: RunSpec) -> float:
        return sum(
            count_passes(task.recipe, number, components=self.components) for number in range(task.recipe.members)
        )


def _drop(run: Run) -> None:
    """Delete what takes room, and leave what was measured and how training went."""
    weights = [progress.weights for progress in run.all_progress() if progress.weights]
    for name in [*weights, *run.store.names("predictions")]:
        run.store.delete(name)
