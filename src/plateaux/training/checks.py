"""Rules that a recipe must satisfy before training."""

from __future__ import annotations

import warnings

from plateaux.config.builders.data import uses_shared_order
from plateaux.config.builders.model import architecture_hash
from plateaux.config.builders.training import build_method, check_plugins, loss_options, method_options
from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.recipe import Recipe
from plateaux.core.errors import RecipeError
from plateaux.core.method import Method
from plateaux.loss_landscape.probe import get_probes
from plateaux.optim.sam import count_gradients
from plateaux.training.validation import validation_metrics


def check(recipe: Recipe, components: Components = NO_COMPONENTS) -> bool:
    """Say whether the members see each other; refuse what cannot be carried out before anything is written."""
    check_plugins(recipe, components)
    method = build_method(recipe, 0, components)
    joint, sees = method.is_joint, method.objective.gather != "none"
    check_member_order(recipe, method, components)
    asks = {
        count_gradients(build_method(recipe, number, components).update, recipe.data.batch_size)
        for number in range(recipe.members)
    }
    if joint and len(asks) > 1:
        raise RecipeError(
            f"members of {recipe.method.name!r} see each other, so they must ask for gradients equally often; "
            "a radius of zero asks once, any other twice: give every member a radius above zero, or all of them zero"
        )
    if joint and any(loss_options(recipe, n) != loss_options(recipe, 0) for n in range(recipe.members)):
        raise RecipeError(f"members of {recipe.method.name!r} share one loss: its options cannot differ between them")
    if joint and len({repr(_joint_options(recipe, n, components)) for n in range(recipe.members)}) > 1:
        raise RecipeError(f"members of {recipe.method.name!r} settle together: only rho may differ between them")
    if recipe.data.unlabeled and "unlabeled" not in method.objective.extra_inputs:
        warnings.warn(f"{recipe.method.name!r} looks at no unlabelled samples: they are not read", stacklevel=3)
    _check_partition(recipe, components)
    if joint and recipe.train.early_stopping_patience is not None:
        raise RecipeError(
            f"members of {recipe.method.name!r} learn together, so none can stop early; leave out "
            "train.early_stopping_patience"
        )
    if sees and recipe.train.precision == "fp16":
        raise RecipeError(
            f"members of {recipe.method.name!r} share one loss, which fp16 cannot scale for each; use bf16"
        )
    if joint and recipe.data.shuffle == "per_member":
        raise RecipeError(
            f"members of {recipe.method.name!r} meet over the same samples: data.shuffle must be 'shared'"
        )
    if recipe.data.bootstrap is not None and (joint or uses_shared_order(recipe, method)):
        raise RecipeError(
            "Members that share their batches cannot have bags of their own: leave out data.bootstrap, or use a "
            "method whose "
            "members do not meet in every batch with data.shuffle = 'own'"
        )
    if recipe.train.select != "last" and not recipe.data.validation_split:
        raise RecipeError(
            f"train.select = {recipe.train.select!r} needs samples to choose on; set data.validation_split, such as 0.1"
        )
    validation_metrics(recipe.train.select)
    get_probes(recipe.probe.probes, trust=components.trust)
    if recipe.train.early_stopping_patience is not None and not recipe.data.validation_split:
        raise RecipeError(
            "train.early_stopping_patience needs samples to judge by; set data.validation_split, such as 0.1"
        )
    return joint


def _joint_options(recipe: Recipe, number: int, components: Components) -> dict[str, object]:
    return {name: value for name, value in method_options(recipe, number, components).items() if name != "rho"}


def _check_partition(recipe: Recipe, components: Components) -> None:
    """Refuse what members that meet cannot do; one alone meets nobody."""
    found = [build_method(recipe, number, components).partition for number in range(recipe.members)]
    first = found[0]
    if first is None:
        return
    if any(other is None or (other.after, other.metadata) != (first.after, first.metadata) for other in found):
        raise RecipeError(
            f"members of {recipe.method.name!r} meet at one time and by one rule: only rho may differ between them"
        )
    if recipe.train.early_stopping_patience is not None:
        raise RecipeError(
            f"members of {recipe.method.name!r} meet, so none can stop early; leave out train.early_stopping_patience"
        )
    if recipe.members == 1:
        warnings.warn(
            f"a single member of {recipe.method.name!r} meets nobody: after its meeting it descends plainly wherever "
            "the rule looks at others",
            stacklevel=3,
        )


def check_member_order(recipe: Recipe, method: Method, components: Components) -> None:
    """Refuse what members that go on from each other cannot do."""
    if method.member_order != "chained":
        return
    name = recipe.method.name
    if len({architecture_hash(recipe, number, components) for number in range(recipe.members)}) > 1:
        raise RecipeError(f"members of {name!r} are places on one course: give all of them the same model")
    if recipe.model.sparsity:
        raise RecipeError(f"members of {name!r} are places on one course, but are pruned apart; leave out sparsity")
    if recipe.train.early_stopping_patience is not None:
        raise RecipeError(
            f"members of {name!r} go on where the last one ended: leave out train.early_stopping_patience"
        )
    if not recipe.lr_scheduler:
        warnings.warn(
            f"members of {name!r} end cycles of the learning rate, and this recipe has none: add [[lr_scheduler]] with "
            "name = 'cosine' and per = 'step'",
            stacklevel=4,
        )
