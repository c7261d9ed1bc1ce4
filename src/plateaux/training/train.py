"""Train: plan what is missing, carry it out, plan again.

    run = train(Recipe.load("recipes/quickstart.toml"), out="runs/quickstart")

A job takes one member, or a group that steps side by side, from a checkpoint to an epoch. Whatever ends it early, the
next plan begins where its last checkpoint lies.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from plateaux.config.builders.data import on_device, shares_order
from plateaux.config.builders.model import (
    NOTHING_GIVEN,
    Given,
    check_names,
    executor_of,
    loss_options,
    method_of,
    method_options,
    network,
    training_data,
    unlabelled_facts,
)
from plateaux.config.recipe import Recipe
from plateaux.core.errors import PlateauxError, RecipeError, RunError
from plateaux.core.method import Executor, Failure, Tell
from plateaux.core.runtime import device_named, is_first, settle_in
from plateaux.evaluation.evaluator import members_of
from plateaux.loss_landscape.probe_specs import probes_named
from plateaux.optim.sam import asks_of
from plateaux.storage.feature_cache import featured, needed, prepare
from plateaux.storage.remote import address_of
from plateaux.storage.run import Run, facts_of
from plateaux.training.autotune import choose
from plateaux.training.branching import begin_from
from plateaux.training.job_records import Record, recorded
from plateaux.training.partition import decide, meetings, scoring_batch, summary_name
from plateaux.training.planning import Job, left_of, plan
from plateaux.training.sequential import check_turns
from plateaux.training.trainer import Course
from plateaux.training.validation import validation_measures

LEAVING = 60.0  # seconds that a process on a lost node may take to notice, and to let go of its member
ATTEMPTS = 3  # how often a job whose process died is tried before the run is given up


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    given: Given = NOTHING_GIVEN,
    tell: Tell = lambda _: None,
    span: str | Path | None = None,
) -> Run:
    """Train what is missing of a run and return it; the same call again does only what is left.

    With `span` members begin where those of another run stood at their first meeting, if both train the same until it.
    """
    joint = check(recipe, given)
    executor = executor_of(recipe, given)
    if joint and executor.agree(int(not executor.rows(recipe.members))):
        raise RecipeError(
            f"members of {recipe.method.name!r} meet at every step, so every process of the mesh must hold one: "
            f"use at most {recipe.members} x executor.data processes"
        )
    other = None if span is None else Run.open(span)  # before anything is written
    run = _open(recipe, out, executor, given, tell)
    if other is not None and is_first():
        begin_from(run, other, given)
    executor.agree(0)
    if recipe.model.cache_features:
        seen = featured(run.as_trained(), training_data(recipe, given), given)
        prepare(needed(recipe, seen), executor, lambda words: tell({"say": words}))
    work = Work(str(out), run.as_trained(), given)
    with closing(executor):
        lost = _carry_out(run, executor, work, given, tell)
    if lost:
        raise _sum_up(lost)
    _tidy(run, executor)
    return run


def _carry_out(run: Run, executor: Executor, work: Work, given: Given, tell: Tell) -> list[Failure]:
    """Launch what is missing until nothing is, or nothing can be done; return what failed for good."""
    attempts, lost = 1, list[Failure]()
    while True:
        jobs = missing(run, given, without={number for failure in lost for number in failure.job.members})
        executor.agree(0)  # nobody begins before everybody has planned: a decision begun would change the plan
        if not jobs:
            break
        failures = executor.launch(jobs, work, tell)
        failed = executor.agree(int(bool(failures)))  # nobody plans before everybody has written
        if failures and attempts < ATTEMPTS and any(failure.died for failure in failures):
            attempts += 1
            tell({"say": f"{sum(f.died for f in failures)} process(es) died; planning again"})
        elif failures:
            lost += failures
            if run.recipe.run.min_members is None:
                break
        elif failed:
            raise RunError(
                "Members held by another process failed; those held here are done, or kept as far as they are"
            )
    return lost


def missing(run: Run, given: Given = NOTHING_GIVEN, *, without: Collection[int] = ()) -> list[Job]:
    """Return the jobs that are missing of a run; members in `without` are given up for now."""
    method = method_of(run.recipe, 0, given)
    met = meetings(run, method.rendezvous)
    turns = {"joint": method.together, "in_turn": method.turn != "any"}
    return plan(run.recipe, run.all_progress(), **turns, meetings=met, without=without)


def check(recipe: Recipe, given: Given = NOTHING_GIVEN) -> bool:
    """Say whether the members see each other; refuse what cannot be carried out before anything is written."""
    check_names(recipe, given)
    method = method_of(recipe, 0, given)
    joint, sees = method.together, method.objective.sees != "own"
    check_turns(recipe, method, given)
    asks = {asks_of(method_of(recipe, number, given).update, recipe.data.batch) for number in range(recipe.members)}
    if joint and len(asks) > 1:
        raise RecipeError(
            f"members of {recipe.method.name!r} see each other, so they must ask for gradients equally often; "
            "a radius of zero asks once, any other twice: give every member a radius above zero, or all of them zero"
        )
    if joint and any(loss_options(recipe, n) != loss_options(recipe, 0) for n in range(recipe.members)):
        raise RecipeError(f"members of {recipe.method.name!r} share one loss: its options cannot differ between them")
    if joint and len({repr(_joint_options(recipe, n, given)) for n in range(recipe.members)}) > 1:
        raise RecipeError(f"members of {recipe.method.name!r} settle together: only rho may differ between them")
    if recipe.data.unlabelled and "unlabelled" not in method.objective.wants:
        warnings.warn(f"{recipe.method.name!r} looks at no unlabelled samples: they are not read", stacklevel=3)
    _check_meeting(recipe, given)
    if joint and recipe.train.patience is not None:
        raise RecipeError(
            f"members of {recipe.method.name!r} learn together, so none can stop early; leave out train.patience"
        )
    if sees and recipe.train.precision == "fp16":
        raise RecipeError(
            f"members of {recipe.method.name!r} share one loss, which fp16 cannot scale for each; use bf16"
        )
    if joint and recipe.data.order == "own":
        raise RecipeError(f"members of {recipe.method.name!r} meet over the same samples: data.order must be 'shared'")
    if recipe.data.bag is not None and (joint or shares_order(recipe, method)):
        raise RecipeError(
            "Members that share their batches cannot have bags of their own: leave out data.bag, or use a method whose "
            "members do not meet in every batch with data.order = 'own'"
        )
    if recipe.train.keep != "last" and not recipe.data.validation:
        raise RecipeError(
            f"train.keep = {recipe.train.keep!r} needs samples to choose on; set data.validation, such as 0.1"
        )
    validation_measures(recipe.train.keep)
    probes_named(recipe.probe.names, allow=given.allow)
    if recipe.train.patience is not None and not recipe.data.validation:
        raise RecipeError("train.patience needs samples to judge by; set data.validation, such as 0.1")
    return joint


def _joint_options(recipe: Recipe, number: int, given: Given) -> dict[str, object]:
    return {name: value for name, value in method_options(recipe, number, given).items() if name != "rho"}


def _check_meeting(recipe: Recipe, given: Given) -> None:
    """Refuse what members that meet cannot do; one alone meets nobody."""
    found = [method_of(recipe, number, given).rendezvous for number in range(recipe.members)]
    first = found[0]
    if first is None:
        return
    if any(other is None or (other.after, other.about) != (first.after, first.about) for other in found):
        raise RecipeError(
            f"members of {recipe.method.name!r} meet at one time and by one rule: only rho may differ between them"
        )
    if recipe.train.patience is not None:
        raise RecipeError(f"members of {recipe.method.name!r} meet, so none can stop early; leave out train.patience")
    if recipe.members == 1:
        warnings.warn(
            f"a single member of {recipe.method.name!r} meets nobody: after its meeting it descends plainly wherever "
            "the rule looks at others",
            stacklevel=3,
        )


@dataclass(frozen=True, slots=True)
class Work:
    """Carries out jobs of one run, in whatever process it is called."""

    root: str
    recipe: Recipe
    given: Given = NOTHING_GIVEN

    def __call__(self, job: Job, tell: Tell, *, device: str | None = None, processes: int = 1) -> None:
        """Take the members of a job from where they stand to where it stops."""
        settle_in(processes=processes, threads=self.recipe.executor.threads)
        run = replace(Run.open(self.root), recipe=self.recipe)
        executor = executor_of(self.recipe, self.given)
        with recorded(run, job, tell, wanted=executor.far and is_first()) as record:
            if job.kind == "decide":
                _decide(run, job, self.given, record.tell)
            else:
                self._train(run, job, executor, record, device)

    def _train(self, run: Run, job: Job, executor: Executor, record: Record, device: str | None) -> None:
        held = [job.members[row] for row in executor.rows(len(job.members))]
        method = method_of(self.recipe, 0, self.given)
        with ExitStack() as locks, _deterministic(self.recipe.train.deterministic):
            if executor.writes():
                for number in held:
                    locks.enter_context(run.lock(number, patience=LEAVING if executor.far else 0))
                    run.store.sweep(f"members/{number}")
            executor.agree(0)  # or one who waited for a lock would find members further on than the others did
            left = left_of(job, {number: run.progress(number) for number in job.members}, joint=method.together)
            if left is None:
                return
            record.begins(left.start)
            held = [number for number in held if number in left.members]
            place = device_named(device or executor.device)
            data = on_device(featured(self.recipe, training_data(self.recipe, self.given), self.given), place)
            follows = bool(held) and method.turn == "after"
            earlier = members_of(run, data, range(held[0]), self.given) if follows else []
            Course(run, data, left, held, executor, place, self.given, record.tell, earlier=earlier).go()


def _decide(run: Run, job: Job, given: Given, tell: Tell) -> None:
    """Take the decision of a meeting, once: the other processes of a mesh find it in the folder."""
    rendezvous = method_of(run.recipe, 0, given).rendezvous
    assert rendezvous is not None
    if is_first() and not run.store.has(summary_name(job.stop)):
        for folder in ("scores", "notes"):  # nobody writes there now: every member has left its scores
            run.store.sweep(folder)
        decide(run, rendezvous, job.stop, tell, members=job.members)


def _open(recipe: Recipe, out: str | Path, executor: Executor, given: Given, tell: Tell) -> Run:
    """Begin the run in one process; the others of a mesh find it there."""
    if recipe.run.tensorboard and address_of(out) is not None:
        raise RecipeError(f"TensorBoard's files are appended to, which {out} cannot; leave out run.tensorboard")
    if is_first():
        data = training_data(recipe, given)
        fresh = Run.begin(out, recipe, {"data": {**facts_of(data), **unlabelled_facts(data)}})
        if "chosen" not in fresh.about:
            chosen = choose(recipe, given, tell)
            if method_of(recipe, 0, given).rendezvous is not None:
                chosen["scoring_batch"] = scoring_batch(recipe, data, network(recipe, data, 0, given))
            if chosen:
                fresh.with_about(chosen=chosen)
    executor.agree(0)
    return replace(Run.open(out), recipe=recipe)


def _sum_up(failures: list[Failure]) -> PlateauxError:
    if len(failures) == 1:
        return (
            failures[0].problem
            if isinstance(failures[0].problem, PlateauxError)
            else RunError(str(failures[0].problem))
        )
    lines = [f"{failure.job}: {failure.problem}" for failure in failures]
    return RunError(
        "Some jobs failed; the others went on. Run the same command again for what is missing:\n  " + "\n  ".join(lines)
    )


def _tidy(run: Run, executor: Executor) -> None:
    """Delete the resume states of a run that is finished, unless they are wanted, and what killed writers left."""
    if is_first():
        for number, progress in enumerate(run.all_progress()):
            run.store.sweep(f"members/{number}")
            if run.recipe.run.keep_resume == "none" and (progress.states or progress.met):
                progress = replace(progress, states=(), met=None)
                run.commit(number, progress)
            run.clear(number, progress)
    executor.agree(0)


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
