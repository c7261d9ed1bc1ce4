"""Rules that a recipe must satisfy before training starts.

`check` applies the rules in the order of the table `RULES`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from plateaux.config.builders.data import uses_shared_order
from plateaux.config.builders.model import architecture_hash
from plateaux.config.builders.training import check_plugins, loss_options, method_options
from plateaux.config.experiment import Experiment
from plateaux.core.errors import RecipeError
from plateaux.core.method import Method
from plateaux.loss_landscape.probe import get_probes
from plateaux.optim.sam import count_gradients
from plateaux.training.loop.validation import validation_metrics


@dataclass(frozen=True, slots=True)
class Rule:
    """A requirement of a recipe: when it is violated, and the message then. An error stops, a warning is shown.

    In a message, `{members}` stands for the members of the method, `{method}` for its name, and `{select}` for
    train.select.
    """

    is_violated: Callable[[Experiment], bool]
    message: str
    level: Literal["error", "warning"] = "error"


def check(experiment: Experiment) -> bool:
    """Raise RecipeError if a recipe cannot be trained; return whether its members are trained jointly."""
    check_plugins(experiment.recipe, experiment.components)
    recipe = experiment.recipe
    name = repr(recipe.method.name)
    for rule in RULES:
        if not rule.is_violated(experiment):
            continue
        message = rule.message.format(members=f"Members of {name}", method=name, select=repr(recipe.train.select))
        if rule.level == "error":
            raise RecipeError(message)
        warnings.warn(message, stacklevel=4)
    validation_metrics(recipe.train.select)
    get_probes(recipe.probe.probes, trust=experiment.components.trust)
    return experiment.method().is_joint


def _is_chained(experiment: Experiment) -> bool:
    """Return whether a member starts from the weights of the one before it."""
    return experiment.method().member_order == "chained"


def _stops_early(experiment: Experiment) -> bool:
    return experiment.recipe.train.early_stopping_patience is not None


def _methods(experiment: Experiment) -> list[Method]:
    return [experiment.method(number) for number in range(experiment.recipe.members)]


def _have_several_architectures(experiment: Experiment) -> bool:
    recipe = experiment.recipe
    return len({architecture_hash(recipe, number, experiment.components) for number in range(recipe.members)}) > 1


def _request_unequal_gradients(experiment: Experiment) -> bool:
    size = experiment.recipe.data.batch_size
    return len({count_gradients(method.update, size) for method in _methods(experiment)}) > 1


def _differ_in_loss_options(experiment: Experiment) -> bool:
    recipe = experiment.recipe
    return any(loss_options(recipe, number) != loss_options(recipe, 0) for number in range(1, recipe.members))


def _differ_in_method_options(experiment: Experiment) -> bool:
    """Return whether options other than rho differ between the members."""
    recipe = experiment.recipe
    options = [method_options(recipe, number, experiment.components) for number in range(recipe.members)]
    return any({**each, "rho": None} != {**options[0], "rho": None} for each in options)


def _differ_in_partition(experiment: Experiment) -> bool:
    first, others = experiment.method().partition, [method.partition for method in _methods(experiment)]
    return first is not None and any(
        other is None or (other.after, other.metadata) != (first.after, first.metadata) for other in others
    )


RULES = (
    # Chained methods: a member starts from the weights of the one before it.
    Rule(
        lambda experiment: _is_chained(experiment) and _have_several_architectures(experiment),
        "{members} start from the weights of the previous member: set the same model for all of them",
    ),
    Rule(
        lambda experiment: _is_chained(experiment) and bool(experiment.recipe.model.sparsity),
        "{members} start from the weights of the previous member, but each is pruned separately; leave out "
        "model.sparsity",
    ),
    Rule(
        lambda experiment: _is_chained(experiment) and _stops_early(experiment),
        "{members} start where the previous member ended; leave out train.early_stopping_patience",
    ),
    Rule(
        lambda experiment: _is_chained(experiment) and not experiment.recipe.lr_scheduler,
        "{members} are snapshots at the end of a learning-rate cycle, but this recipe has no schedule: add "
        "[[lr_scheduler]] with name = 'cosine' and interval = 'step'",
        "warning",
    ),
    # Joint methods: the loss of a member depends on the outputs of the others.
    Rule(
        lambda experiment: experiment.method().is_joint and _request_unequal_gradients(experiment),
        "{members} share one loss, so all must request the same number of gradients per step. Set rho > 0 for all "
        "members, or rho = 0 for all",
    ),
    Rule(
        lambda experiment: experiment.method().is_joint and _differ_in_loss_options(experiment),
        "{members} share one loss: its options cannot differ between them",
    ),
    Rule(
        lambda experiment: experiment.method().is_joint and _differ_in_method_options(experiment),
        "{members} share one loss, so only rho may differ between them",
    ),
    Rule(
        lambda experiment: (
            bool(experiment.recipe.data.unlabeled) and "unlabeled" not in experiment.method().objective.extra_inputs
        ),
        "{method} does not use unlabeled samples: data.unlabeled is ignored",
        "warning",
    ),
    # Data partition.
    Rule(
        _differ_in_partition,
        "{members} partition the samples at one epoch and by one rule, so only rho may differ between them",
    ),
    Rule(
        lambda experiment: experiment.method().partition is not None and _stops_early(experiment),
        "{members} need all members at the data partition; leave out train.early_stopping_patience",
    ),
    Rule(
        lambda experiment: experiment.method().partition is not None and experiment.recipe.members == 1,
        "{method} with a single member: rules that compare members assign no samples to SAM, so after the data "
        "partition the member trains with plain gradients",
        "warning",
    ),
    # Joint methods again, and data.
    Rule(
        lambda experiment: experiment.method().is_joint and _stops_early(experiment),
        "{members} are trained jointly, so none can stop early; leave out train.early_stopping_patience",
    ),
    Rule(
        lambda experiment: (
            experiment.method().objective.gather != "none" and experiment.recipe.train.precision == "fp16"
        ),
        "{members} share one loss, which cannot be scaled separately for each member in fp16. Set train.precision to "
        "'bf16' or 'fp32'",
    ),
    Rule(
        lambda experiment: experiment.method().is_joint and experiment.recipe.data.shuffle == "per_member",
        "{members} are trained jointly on the same samples: data.shuffle must be 'shared'",
    ),
    Rule(
        lambda experiment: (
            experiment.recipe.data.bootstrap is not None
            and (experiment.method().is_joint or uses_shared_order(experiment.recipe, experiment.method()))
        ),
        "data.bootstrap draws other samples for each member, but these members share their batches. Leave out "
        "data.bootstrap, or use a method without a joint loss and data.shuffle = 'per_member'",
    ),
    # Validation.
    Rule(
        lambda experiment: experiment.recipe.train.select != "last" and not experiment.recipe.data.validation_split,
        "train.select = {select} needs validation samples; set data.validation_split, for example 0.1",
    ),
    Rule(
        lambda experiment: _stops_early(experiment) and not experiment.recipe.data.validation_split,
        "train.early_stopping_patience needs validation samples; set data.validation_split, for example 0.1",
    ),
)
