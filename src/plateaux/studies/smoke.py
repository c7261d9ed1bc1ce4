"""A smoke test of a study: the whole study end to end at a tiny size, on generated files in the published layouts.

One repetition; every level of every factor at least once; the same metrics, tables, and figures. Networks are narrow,
training takes two epochs, and the numbers mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from plateaux.config.builders.data import build_data
from plateaux.config.builders.model import build_member
from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.recipe import Recipe
from plateaux.config.schema import fields
from plateaux.core import registry
from plateaux.storage.generated_files import WRITERS
from plateaux.storage.local_store import LocalStore
from plateaux.studies.grid import apply_changes, flat_changes
from plateaux.studies.study import Study

EPOCHS = 2
BATCH_SIZE = 10
SAMPLES = 10  # of landscape probes
MAX_MEMBERS = 5
NARROWER = 8  # networks are this many times narrower
Condition = tuple[dict[str, Any], Recipe]


class SmokeStudy(Study):
    """A study whose conditions are few and tiny."""

    data_root: str = Field(default="")

    def conditions(self) -> list[Condition]:
        """Return the conditions that cover all levels, with tiny recipes."""
        return [(condition, self._tiny(recipe)) for condition, recipe in cover(super().conditions())]

    def _tiny(self, recipe: Recipe) -> Recipe:
        root = Path(self.data_root)
        tree = apply_changes(shrink(recipe).to_dict(), flat_changes(self.smoke))
        if recipe.data.name in WRITERS:
            tree["data"]["root"] = str(root)
        if recipe.model.weights is not None:
            tree["model"]["weights"] = str(root / "weights" / f"{_file_name(tree['model'])}.safetensors")
        return Recipe.from_dict(tree)


def smoke_study(study: Study, folder: Path, components: Components = NO_COMPONENTS) -> SmokeStudy:
    """Return the smoke test of a study, and write the files that it needs to a folder."""
    landscape = study.landscape.model_dump() | {"samples": SAMPLES}
    question = f"Smoke test on generated files, not a result: {study.question}"
    tree = {
        **study.model_dump(),
        "question": question,
        "repetitions": 1,
        "seeds": study.seeds[:1],
        "landscape": landscape,
    }
    small = SmokeStudy.model_validate({**tree, "data_root": str(folder.absolute())})
    recipes = [recipe for _, recipe in small.conditions()]
    for name, recipe in {recipe.data.name: recipe for recipe in recipes}.items():
        if name in WRITERS:
            WRITERS[name](folder, recipe.data.options)
    for recipe in recipes:
        if recipe.model.weights is not None and not Path(recipe.model.weights).exists():
            _write_weights(recipe, components)
    return small


def cover(conditions: Sequence[Condition]) -> list[Condition]:
    """Return few conditions that have every level of every factor.

    >>> grid = [({"a": a, "b": b}, None) for a in (1, 2) for b in (1, 2, 3)]
    >>> [condition for condition, _ in cover(grid)]
    [{'a': 1, 'b': 1}, {'a': 2, 'b': 2}, {'a': 1, 'b': 3}]
    """
    left = {level for condition, _ in conditions for level in _levels(condition)}
    chosen = []
    while left:
        best = max(conditions, key=lambda each: len(left.intersection(_levels(each[0]))))
        left -= _levels(best[0])
        chosen.append(best)
    return chosen or list(conditions[:1])


def shrink(recipe: Recipe) -> Recipe:
    """Return a recipe of the same kind that trains in seconds."""
    tree = recipe.to_dict()
    tree["members"] = recipe.members if recipe.members <= MAX_MEMBERS else 2
    tree["train"] |= {"epochs": EPOCHS, "precision": "fp32"}
    tree["data"]["batch_size"] = min(recipe.data.batch_size, BATCH_SIZE)
    tree["data"]["num_workers"] = 0
    if recipe.data.validation_split >= 1:
        tree["data"]["validation_split"] = 0.25
    if recipe.train.swa_start is not None:
        tree["train"]["swa_start"] = 1
    if "partition_epoch" in tree["method"]:
        tree["method"]["partition_epoch"] = 1
    for scheduler in tree["lr_scheduler"]:
        scheduler |= {"milestones": [1]} if "milestones" in scheduler else {}
        scheduler |= {"epochs": 0.5} if scheduler.get("epochs") else {}
    if (width := _width(recipe)) is not None:
        tree["model"]["width"] = max(1, width // NARROWER)
    return Recipe.from_dict(tree)


def _levels(condition: Mapping[str, Any]) -> set[tuple[str, str]]:
    return {(name, str(value)) for name, value in condition.items()}


def _width(recipe: Recipe) -> int | None:
    """Return the width of a network that has such an option."""
    if not isinstance(recipe.model.name, str) or ":" in recipe.model.name:
        return None
    known = fields(registry.model.get(recipe.model.name))
    value = recipe.model.options.get("width", known["width"][1] if "width" in known else None)
    return value if isinstance(value, int) else None


def _file_name(model: Mapping[str, Any]) -> str:
    return str(model["name"]).replace(":", "_")


def _write_weights(recipe: Recipe, components: Components) -> None:
    """Write the weights of a network as initialized, in place of a pretrained one."""
    file = Path(str(recipe.model.weights))
    plain = recipe.replaced(model={"weights": None, "backbone": None, "head": "own", "cache_features": False})
    module = build_member(plain, build_data(plain, components), 0, components)
    weights = {name: value.contiguous().clone() for name, value in module.state_dict().items()}
    LocalStore(file.parent).put_tensors(file.name, weights)
