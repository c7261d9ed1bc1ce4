"""Rules that a recipe must satisfy before training starts.

A rule is a function of a `PlannedTraining` that returns a message if the recipe violates it, else None. `check` applies
the rules in the order of the table `RULES`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from plateaux.config.builders.data import uses_shared_order
from plateaux.config.builders.model import architecture_hash
from plateaux.config.builders.training import check_plugins, loss_options, method_options
from plateaux.config.components import Components
from plateaux.config.experiment import Experiment
from plateaux.config.recipe import Recipe
from plateaux.core.errors import RecipeError
from plateaux.core.method import Method
from plateaux.loss_landscape.probe import get_probes
from plateaux.optim.sam import count_gradients
from plateaux.training.loop.validation import validation_metrics


@dataclass(frozen=True, slots=True)
class PlannedTraining:
    """A recipe with the methods of all its members."""

    experiment: Experiment

    @property
    def recipe(self) -> Recipe:
        return self.experiment.recipe

    @property
    def components(self) -> Components:
        return self.experiment.components

    @property
    def methods(self) -> list[Method]:
        return [self.experiment.method(number) for number in range(self.recipe.members)]

    @property
    def method(self) -> Method:
        """The method of the first member."""
        return self.methods[0]

    @property
    def members(self) -> str:
        """The subject of messages."""
        return f"Members of {self.recipe.method.name!r}"


@dataclass(frozen=True, slots=True)
class Rule:
    """A requirement of a recipe: an error stops, a warning is shown."""

    find_violation: Callable[[PlannedTraining], str | None]
    level: Literal["error", "warning"] = "error"


def check(experiment: Experiment) -> bool:
    """Raise RecipeError if a recipe cannot be trained; return whether its members are trained jointly."""
    check_plugins(experiment.recipe, experiment.components)
    planned = PlannedTraining(experiment)
    for rule in RULES:
        message = rule.find_violation(planned)
        if message is not None and rule.level == "error":
            raise RecipeError(message)
        if message is not None:
            warnings.warn(message, stacklevel=4)
    return planned.method.is_joint


# --- Chained methods: a member starts from the weights of the one before it


def chained_members_share_an_architecture(planned: PlannedTraining) -> str | None:
    if planned.method.member_order != "chained":
        return None
    hashes = {architecture_hash(planned.recipe, n, planned.components) for n in range(planned.recipe.members)}
    if len(hashes) == 1:
        return None
    return f"{planned.members} start from the weights of the previous member: set the same model for all of them"


def chained_members_are_not_pruned(planned: PlannedTraining) -> str | None:
    if planned.method.member_order != "chained" or not planned.recipe.model.sparsity:
        return None
    return (
        f"{planned.members} start from the weights of the previous member, but each is pruned separately; "
        "leave out model.sparsity"
    )


def chained_members_do_not_stop_early(planned: PlannedTraining) -> str | None:
    if planned.method.member_order != "chained" or planned.recipe.train.early_stopping_patience is None:
        return None
    return f"{planned.members} start where the previous member ended; leave out train.early_stopping_patience"


def chained_members_have_a_schedule(planned: PlannedTraining) -> str | None:
    if planned.method.member_order != "chained" or planned.recipe.lr_scheduler:
        return None
    return (
        f"{planned.members} are snapshots at the end of a learning-rate cycle, but this recipe has no schedule: "
        "add [[lr_scheduler]] with name = 'cosine' and interval = 'step'"
    )


# --- Joint methods: the loss of a member depends on the outputs of the others


def joint_members_request_equally_many_gradients(planned: PlannedTraining) -> str | None:
    if not planned.method.is_joint:
        return None
    counts = {count_gradients(method.update, planned.recipe.data.batch_size) for method in planned.methods}
    if len(counts) == 1:
        return None
    return (
        f"{planned.members} share one loss, so all must request the same number of gradients per step. "
        "Set rho > 0 for all members, or rho = 0 for all"
    )


def joint_members_share_loss_options(planned: PlannedTraining) -> str | None:
    recipe = planned.recipe
    if not planned.method.is_joint:
        return None
    if all(loss_options(recipe, number) == loss_options(recipe, 0) for number in range(recipe.members)):
        return None
    return f"{planned.members} share one loss: its options cannot differ between them"


def joint_members_share_method_options(planned: PlannedTraining) -> str | None:
    if not planned.method.is_joint:
        return None
    options = {repr(_options_without_rho(planned, number)) for number in range(planned.recipe.members)}
    if len(options) == 1:
        return None
    return f"{planned.members} share one loss, so only rho may differ between them"


def _options_without_rho(planned: PlannedTraining, number: int) -> dict[str, object]:
    options = method_options(planned.recipe, number, planned.components)
    return {name: value for name, value in options.items() if name != "rho"}


def unlabeled_samples_are_used(planned: PlannedTraining) -> str | None:
    if not planned.recipe.data.unlabeled or "unlabeled" in planned.method.objective.extra_inputs:
        return None
    return f"{planned.recipe.method.name!r} does not use unlabeled samples: data.unlabeled is ignored"


# --- Data partition


def partition_is_the_same_for_all_members(planned: PlannedTraining) -> str | None:
    first = planned.method.partition
    if first is None:
        return None
    others = [method.partition for method in planned.methods]
    if all(other is not None and (other.after, other.metadata) == (first.after, first.metadata) for other in others):
        return None
    return f"{planned.members} partition the samples at one epoch and by one rule, so only rho may differ between them"


def partitioned_members_do_not_stop_early(planned: PlannedTraining) -> str | None:
    if planned.method.partition is None or planned.recipe.train.early_stopping_patience is None:
        return None
    return f"{planned.members} need all members at the data partition; leave out train.early_stopping_patience"


def partition_has_several_members(planned: PlannedTraining) -> str | None:
    if planned.method.partition is None or planned.recipe.members > 1:
        return None
    return (
        f"{planned.recipe.method.name!r} with a single member: rules that compare members assign no samples to SAM, so "
        "after the data partition the member trains with plain gradients"
    )


# --- Joint methods again, and data


def joint_members_do_not_stop_early(planned: PlannedTraining) -> str | None:
    if not planned.method.is_joint or planned.recipe.train.early_stopping_patience is None:
        return None
    return f"{planned.members} are trained jointly, so none can stop early; leave out train.early_stopping_patience"


def shared_losses_are_not_fp16(planned: PlannedTraining) -> str | None:
    if planned.method.objective.gather == "none" or planned.recipe.train.precision != "fp16":
        return None
    return (
        f"{planned.members} share one loss, which cannot be scaled separately for each member in fp16. "
        "Set train.precision to 'bf16' or 'fp32'"
    )


def joint_members_share_batches(planned: PlannedTraining) -> str | None:
    if not planned.method.is_joint or planned.recipe.data.shuffle != "per_member":
        return None
    return f"{planned.members} are trained jointly on the same samples: data.shuffle must be 'shared'"


def bootstrap_needs_own_batches(planned: PlannedTraining) -> str | None:
    recipe, method = planned.recipe, planned.method
    if recipe.data.bootstrap is None or not (method.is_joint or uses_shared_order(recipe, method)):
        return None
    return (
        "data.bootstrap draws other samples for each member, but these members share their batches. Leave out "
        "data.bootstrap, or use a method without a joint loss and data.shuffle = 'per_member'"
    )


# --- Validation


def selection_needs_validation_samples(planned: PlannedTraining) -> str | None:
    if planned.recipe.train.select == "last" or planned.recipe.data.validation_split:
        return None
    return (
        f"train.select = {planned.recipe.train.select!r} needs validation samples; "
        "set data.validation_split, for example 0.1"
    )


def metrics_and_probes_exist(planned: PlannedTraining) -> str | None:
    """Raise the error of the metric or probe that is unknown or unsuitable."""
    validation_metrics(planned.recipe.train.select)
    get_probes(planned.recipe.probe.probes, trust=planned.components.trust)
    return None


def early_stopping_needs_validation_samples(planned: PlannedTraining) -> str | None:
    if planned.recipe.train.early_stopping_patience is None or planned.recipe.data.validation_split:
        return None
    return "train.early_stopping_patience needs validation samples; set data.validation_split, for example 0.1"


RULES = (
    Rule(chained_members_share_an_architecture),
    Rule(chained_members_are_not_pruned),
    Rule(chained_members_do_not_stop_early),
    Rule(chained_members_have_a_schedule, "warning"),
    Rule(joint_members_request_equally_many_gradients),
    Rule(joint_members_share_loss_options),
    Rule(joint_members_share_method_options),
    Rule(unlabeled_samples_are_used, "warning"),
    Rule(partition_is_the_same_for_all_members),
    Rule(partitioned_members_do_not_stop_early),
    Rule(partition_has_several_members, "warning"),
    Rule(joint_members_do_not_stop_early),
    Rule(shared_losses_are_not_fp16),
    Rule(joint_members_share_batches),
    Rule(bootstrap_needs_own_batches),
    Rule(selection_needs_validation_samples),
    Rule(metrics_and_probes_exist),
    Rule(early_stopping_needs_validation_samples),
)
