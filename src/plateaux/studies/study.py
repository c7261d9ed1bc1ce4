"""A study: a grid of recipes and the question it answers, as frozen data from a TOML file.

    question = "Does flatness cost diversity?"
    repetitions = 2
    base = "cifar10_small"                          # a recipe's name or file, or a whole recipe as [base]

    [grid]
    "model.width" = [8, 16]                         # a factor: values of one key of the recipe

    [grid.method]                                   # a factor of named conditions, each a table of changes
    SAM = {method = {name = "sam"}, each = {"method.rho" = [0.0, 0.05, 0.1]}}
    SharpBalance = {method = {name = "sharpbalance", rho = 0.1}}

Repetitions are paired: in each of them every condition has the same seed, so the same initialisations and order of
samples. What determines the same members is one run, and is trained once.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, Literal

import tomlkit
from pydantic import Field, ValidationError

from plateaux.config.recipe import Recipe, fingerprint
from plateaux.config.schema import ConfigSection
from plateaux.core.errors import RecipeError, suggest
from plateaux.studies.grid import _together, apply_changes, condition_label, flat_changes, grid_factors


class EvaluateConfig(ConfigSection):
    """What is measured of every run, and on which samples; @N takes the first N."""

    splits: tuple[str, ...] = ("test",)
    metrics: tuple[str, ...] = ("accuracy", "nll", "ece")
    corruptions: tuple[str, ...] = ()  # such as corrupted@1000
    corruption_metrics: tuple[str, ...] = ("accuracy",)
    ood: tuple[str, ...] = ()  # such as near=cifar100
    ensemble_sizes: bool = False  # curves over ensembles of 1, 2, ... members too
    corruption_cache: str | None = None  # a folder to keep generated corrupted images in


class LandscapeConfig(ConfigSection):
    """Which probes are asked of every member."""

    probes: tuple[str, ...] = ()
    split: str = "train"
    samples: int | None = Field(None, ge=1)
    batchnorm: Literal["eval", "train"] = "eval"


class Study(ConfigSection):
    """A grid of recipes, what is measured of each, and the question all of it answers."""

    name: str = "study"
    question: str = ""
    seed: int = 0
    repetitions: int = Field(1, ge=1)
    keep_weights: bool = True  # or drop them once everything is measured
    base: dict[str, Any]
    grid: dict[str, Any] = Field(default_factory=dict)
    baseline: dict[str, Any] = Field(
        default_factory=dict
    )  # the condition that others are compared with, such as {rho = 0.0}
    evaluate: EvaluateConfig = EvaluateConfig()
    landscape: LandscapeConfig = LandscapeConfig()
    figures: dict[str, Any] = Field(default_factory=dict)  # what the report draws

    @classmethod
    def load(cls, path: str | Path) -> Study:
        """Read a TOML file; the recipe it names is looked for beside it, then among those that come along."""
        file = Path(path)
        try:
            tree = tomlkit.parse(file.read_text(encoding="utf-8")).unwrap()
        except OSError as problem:
            raise RecipeError(f"Cannot read the study {str(path)!r}: {problem.strerror}") from None
        except tomlkit.exceptions.TOMLKitError as problem:
            raise RecipeError(f"{path}: {problem}") from None
        return cls.from_dict({"name": file.stem, **tree}, beside=file.parent)

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any], *, beside: Path = Path()) -> Study:
        """Validate nested plain data, the base recipe put in whole."""
        try:
            study = cls.model_validate({**tree, **_base(tree.get("base"), beside)})
        except ValidationError as problem:
            raise _explained(problem) from None
        study.conditions()  # a wrong change is told before anything is trained
        return study

    def conditions(self) -> list[tuple[dict[str, Any], Recipe]]:
        """Return every condition with its recipe, in the order of the grid; the seed is still that of the base."""
        found: list[tuple[dict[str, Any], Recipe]] = []
        for choices in product(*grid_factors(self.grid)):
            condition, changes = _together(choices)
            try:
                found.append((condition, Recipe.from_dict(apply_changes(self.base, changes))))
            except RecipeError as problem:
                raise RecipeError(f"{condition_label(condition) or 'base'}: {problem}") from None
        return found

    def evaluation_hash(self) -> str:
        """Return a hash of all that is to be measured: a run is done when it has answered this."""
        return fingerprint({"evaluate": self.evaluate.model_dump(), "landscape": self.landscape.model_dump()})


def _base(given: Any, beside: Path) -> dict[str, Any]:
    """Return the base recipe whole: by name or file, with changes, or as it stands."""
    if isinstance(given, str):
        given = {"recipe": given}
    if not isinstance(given, Mapping) or "recipe" not in given:
        return {} if given is None else {"base": given}
    file = beside / str(given["recipe"])
    recipe = Recipe.load(file if file.is_file() else str(given["recipe"]))
    return {
        "base": apply_changes(
            recipe.to_dict(), flat_changes({name: v for name, v in given.items() if name != "recipe"})
        )
    }


def _explained(problem: ValidationError) -> RecipeError:
    first = problem.errors()[0]
    place = [str(part) for part in first["loc"]]
    where = ".".join(place)
    if first["type"] == "extra_forbidden":
        parts: dict[str, type[ConfigSection]] = {"evaluate": EvaluateConfig, "landscape": LandscapeConfig}
        known = parts.get(place[0], Study).model_fields
        return RecipeError(f"The study has no key {where!r}; {suggest(place[-1], known)}")
    if first["type"] == "missing":
        return RecipeError(f"The study lacks {where!r}: a recipe by name or file, or a whole one as [base]")
    return RecipeError(f"The study's {where} = {first['input']!r}: {first['msg']}")
