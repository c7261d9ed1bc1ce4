"""Branch a run from another one that trains the same way up to its first data partition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plateaux.config.experiment import Experiment
from plateaux.config.recipe import Recipe, diff
from plateaux.config.schema import fields, member_options
from plateaux.core import registry
from plateaux.core.errors import RunError
from plateaux.core.method import DataPartition
from plateaux.storage.member_writer import MemberWriter, write_member
from plateaux.storage.open_run import resolved
from plateaux.storage.run import MemberProgress, Run, sharpness_path
from plateaux.storage.store import record_name


def shared_prefix(experiment: Experiment) -> dict[str, Any]:
    """Return everything that determines the weights up to the first data partition: equal for SAM and SharpBalance."""
    members = range(experiment.recipe.members)
    methods = {str(number): _method_before_partition(experiment, number) for number in members}
    return {**experiment.recipe.identity(), "method": methods}


def branch_from(run: Run, parent: Run, *, session: str) -> None:
    """Copy the checkpoints that a parent run wrote at its first data partition to members that have not started."""
    mine = {"recipe": shared_prefix(resolved(run)), "data": run.info.data.to_dict()}
    theirs = {
        "recipe": shared_prefix(Experiment(_parent_recipe(parent, run), run.components)),
        "data": parent.info.data.to_dict(),
    }
    changes = diff(theirs, mine)
    if changes:
        raise RunError(
            f"{parent.store.root} does not train the same way up to its data partition. Differences "
            "(parent -> this run):\n  " + "\n  ".join(changes)
        )
    if run.recipe.train.select != "last":
        raise RunError(
            f"train.select = {run.recipe.train.select!r} needs all epochs, but a branch starts later. "
            "Set train.select = 'last', or train without --branch-from"
        )
    for number in range(run.recipe.members):
        with write_member(run, number, session=session) as writer:
            if replace(writer.progress, claim=None) == MemberProgress():
                _copy_checkpoint(run, parent, number, writer)


def _parent_recipe(parent: Run, run: Run) -> Recipe:
    """Return the recipe of the parent with the number of members of the run."""
    if parent.recipe.members < run.recipe.members:
        raise RunError(
            f"{parent.store.root} has {parent.recipe.members} members, but this run needs {run.recipe.members}. "
            "Branch from a run with at least as many members"
        )
    return parent.resolved_recipe().replaced(members=run.recipe.members)


def _copy_checkpoint(run: Run, parent: Run, number: int, writer: MemberWriter) -> None:
    checkpoint = parent.progress(number).partition_checkpoint
    if checkpoint is None:
        raise RunError(
            f"Member {number} of {parent.store.root} has no checkpoint of a data partition: it has not reached one, or "
            'its checkpoints were deleted when it finished. Train that run with run.keep_checkpoints = "last"'
        )
    state = parent.get_state(number, checkpoint)
    epoch = int(state["progress"]["epoch"])
    partition = run.experiment.method(number).partition
    if partition is not None and partition.after[0] < epoch:
        raise RunError(
            f"{parent.store.root} partitions the samples after {epoch} epochs, but this run does after "
            f"{partition.after[0]}. Branch from a run that does so at the same time or earlier"
        )
    start = MemberProgress(epoch=epoch)
    lines = parent.log(number, state["progress"]["log_parts"])
    log_parts = (writer.put_log(start, lines),) if lines else ()
    progress = {**state["progress"], "log_parts": log_parts}
    name = writer.put_state(start, {**state, "progress": progress})
    partitions_here = partition is not None and partition.after[0] == epoch
    if partition is not None and partitions_here:
        _copy_scores(run, parent, number, epoch, partition)
    changes = {"checkpoints": ((epoch, 0, name),), "partition_checkpoint": name if partitions_here else None}
    writer.commit(MemberProgress(**{**progress, **changes}), release=True)


def _copy_scores(run: Run, parent: Run, number: int, epoch: int, partition: DataPartition) -> None:
    """Copy the sharpness of the samples if both runs compute the same score."""
    other = Experiment(parent.recipe, run.components).method(number).partition
    path = sharpness_path(epoch, number)
    if other is None or partition.metadata.get("score") != other.metadata.get("score"):
        return
    if parent.store.has_recorded(path):
        for name in (path, record_name(path)):  # the digest last
            run.store.put(name, parent.store.get(name))


def _method_before_partition(experiment: Experiment, number: int) -> dict[str, Any]:
    """Return name and options, with defaults, of the method that one member uses up to its first data partition."""
    recipe, partition = experiment.recipe, experiment.method(number).partition
    if partition is not None:
        name = str(partition.prefix_method["name"])
        options = {option: value for option, value in partition.prefix_method.items() if option != "name"}
    else:
        name, options = recipe.method.name, recipe.for_member(number).method.options
    factory = registry.method.get(name, allow=experiment.components.trust)
    defaults = {option: default for option, (_, default) in fields(factory).items()}
    return {"name": name, **defaults, **member_options(factory, options, number, recipe.members)}
