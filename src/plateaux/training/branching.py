"""The span before a meeting: runs that train the same until then can begin where another has come to."""

from __future__ import annotations

from typing import Any

from plateaux.config.builders.training import build_method
from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.recipe import Recipe, diff
from plateaux.config.schema import fields, member_options
from plateaux.core import registry
from plateaux.core.errors import RunError
from plateaux.storage.run import MemberProgress, Run, sharpness_path


def shared_prefix(recipe: Recipe, components: Components = NO_COMPONENTS) -> dict[str, Any]:
    """Return what decides a member's weights until its first meeting: of SAM and SharpBalance the same."""
    methods = {str(number): _epochs_before_partition(recipe, number, components) for number in range(recipe.members)}
    return {**recipe.identity(), "method": methods}


def branch_from(run: Run, other: Run, components: Components = NO_COMPONENTS) -> None:
    """Put members that have not begun where another run of the same span stood at its first meeting."""
    mine = {"recipe": shared_prefix(run.resolved_recipe(), components), "data": run.info.data.to_dict()}
    theirs = {"recipe": shared_prefix(_as_many(other, run), components), "data": other.info.data.to_dict()}
    changes = diff(theirs, mine)
    if changes:
        raise RunError(
            f"{other.store.root} does not train the same until its meeting. What differs (there -> here):\n  "
            + "\n  ".join(changes)
        )
    if run.recipe.train.select != "last":
        raise RunError(
            f"train.select = {run.recipe.train.select!r} needs the whole course; a span is shared with 'last'"
        )
    for number in range(run.recipe.members):
        if run.progress(number) == MemberProgress():
            _copy(run, other, number, components)


def _as_many(other: Run, run: Run) -> Recipe:
    if other.recipe.members < run.recipe.members:
        raise RunError(
            f"{other.store.root} has {other.recipe.members} members; this run needs {run.recipe.members} to begin from"
        )
    return other.resolved_recipe().replaced(members=run.recipe.members)


def _copy(run: Run, other: Run, number: int, components: Components) -> None:
    met = other.progress(number).partition_checkpoint
    if met is None:
        raise RunError(
            f"Member {number} of {other.store.root} has kept no state of a meeting: it has not come to one yet, or was "
            'tidied up when it finished. Train that run with run.keep_checkpoints = "last"'
        )
    state = other.store.get_state(met)
    progress = {**state["progress"], "log_parts": tuple(state["progress"]["log_parts"])}
    epoch = int(progress["epoch"])
    rendezvous = build_method(run.recipe, number, components).partition
    if rendezvous is not None and rendezvous.after[0] < epoch:
        raise RunError(
            f"{other.store.root} met after {epoch} epochs, this run is to meet after {rendezvous.after[0]} already"
        )
    for part in progress["log_parts"]:
        run.store.put(part, other.store.get(part))
    name = run.put_state(number, MemberProgress(epoch=epoch), state)
    meets_here = rendezvous is not None and rendezvous.after[0] == epoch
    theirs = build_method(other.recipe, number, components).partition
    scores = sharpness_path(epoch, number)
    if (
        meets_here
        and rendezvous is not None
        and theirs is not None
        and rendezvous.metadata.get("score") == theirs.metadata.get("score")
        and other.store.has(scores)
    ):
        run.store.put(scores, other.store.get(scores))
    run.commit(
        number,
        MemberProgress(
            **{**progress, "checkpoints": ((epoch, 0, name),), "partition_checkpoint": name if meets_here else None}
        ),
    )


def _epochs_before_partition(recipe: Recipe, number: int, components: Components) -> dict[str, Any]:
    """Return one member's method until its first meeting, defaults filled in."""
    rendezvous = build_method(recipe, number, components).partition
    if rendezvous is not None:
        name, options = (
            str(rendezvous.prefix_method["name"]),
            {k: v for k, v in rendezvous.prefix_method.items() if k != "name"},
        )
    else:
        name, options = recipe.method.name, recipe.for_member(number).method.options
    factory = registry.method.get(name, allow=components.trust)
    usual = {option: default for option, (_, default) in fields(factory).items()}
    return {"name": name, **usual, **member_options(factory, options, number, recipe.members)}
