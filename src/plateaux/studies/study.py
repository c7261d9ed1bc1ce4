"""A study: a grid of recipes and the question it answers, read from a TOML file.

    question = "Does flatness cost diversity?"
    repetitions = 2
    base = "cifar10_small"                          # name or file of a recipe, or a full recipe as [base]

    [grid]
    "model.width" = [8, 16]                         # a factor: values of one key of the recipe

    [grid.method]                                   # a factor of named conditions, each a table of changes
    SAM = {method = {name = "sam"}, each = {"method.rho" = [0.0, 0.05, 0.1]}}
    SharpBalance = {method = {name = "sharpbalance", rho = 0.1}}

A study may extend another one: `extends = "lu2024_figure7"` takes its keys, and those in the file replace them.

Repetitions are paired: within a repetition all conditions have the same seed, hence the same initializations and sample
order. Conditions with the same members share one run, which is trained once.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from plateaux.config.recipe import Recipe, fingerprint
from plateaux.config.schema import ConfigSection
from plateaux.config.toml import parse_toml, read_text
from plateaux.core.errors import RecipeError, suggest
from plateaux.core.ranges import Count, Seed
from plateaux.studies.builtin_studies import study_file
from plateaux.studies.grid import apply_changes, check_size, combine, condition_label, flat_changes, grid_factors
from plateaux.studies.output_config import FiguresConfig, TableConfig

MAX_REPETITIONS = 10_000
MAX_EXTENDED = 5  # studies that extend each other


class EvaluateConfig(ConfigSection):
    """Metrics of every run and the splits they are measured on; @N takes the first N samples."""

    splits: tuple[str, ...] = ("test",)
    metrics: tuple[str, ...] = ("accuracy", "nll", "ece")
    corruptions: tuple[str, ...] = ()  # such as corrupted@1000
    corruption_metrics: tuple[str, ...] = ("accuracy",)
    ood: tuple[str, ...] = ()  # such as near=cifar100
    ood_metrics: tuple[str, ...] = ()  # metrics that need no labels, on each OOD set: unique, pds
    soup: bool = False  # also measure accuracy of the uniform soup, the mean of the members' weights
    ensemble_sizes: bool = False  # also measure ensembles of 1, 2, ... members
    corruption_cache: str | None = None  # folder for generated corrupted images


class LandscapeConfig(ConfigSection):
    """Loss-landscape probes of every member."""

    probes: tuple[str, ...] = ()
    split: str = "train"
    samples: Count | None = None
    batchnorm: Literal["eval", "train"] = "eval"
    augment: bool = False  # with the augmentation of training, where a recipe has one


class Study(ConfigSection):
    """A grid of recipes, the metrics of each run, and the question of the study."""

    name: str = "study"
    question: str = ""
    paper: str = ""  # the publication that the study repeats
    produces: tuple[str, ...] = ()  # its tables and figures, such as "Figure 7"
    seed: Seed = 0
    seeds: tuple[Seed, ...] = ()  # the recipe's seed in each repetition; default: derived from `seed`
    repetitions: int = Field(1, ge=1, le=MAX_REPETITIONS)
    keep_weights: bool = True  # False: delete weights after the evaluation
    base: dict[str, Any]
    grid: dict[str, Any] = Field(default_factory=dict)
    baseline: dict[str, Any] = Field(default_factory=dict)  # reference condition, such as {rho = 0.0}
    evaluate: EvaluateConfig = EvaluateConfig()
    landscape: LandscapeConfig = LandscapeConfig()
    tables: tuple[TableConfig, ...] = ()
    figures: FiguresConfig = FiguresConfig()

    @classmethod
    def load(cls, path: str | Path) -> Study:
        """Read a TOML file or a built-in study by name; its base recipe is a file next to it or a built-in recipe."""
        file = study_file(str(path))
        return cls.from_dict({"name": file.stem, **_read(file)}, folder=file.parent)

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any], *, folder: Path = Path()) -> Study:
        """Validate nested plain data and resolve the base recipe."""
        try:
            study = cls.model_validate({**tree, **_resolve_base(tree.get("base"), folder)})
        except ValidationError as problem:
            raise _explain(problem) from None
        if study.seeds and len(study.seeds) != study.repetitions:
            raise RecipeError(
                f"The study lists {len(study.seeds)} seeds for {study.repetitions} repetitions; give one for each"
            )
        conditions = study.conditions()  # reports invalid changes before training
        check_size(len(conditions) * study.repetitions, "runs")
        return study

    def conditions(self) -> list[tuple[dict[str, Any], Recipe]]:
        """Return every condition with its recipe, in grid order; the seed is that of the base recipe."""
        conditions: list[tuple[dict[str, Any], Recipe]] = []
        for choices in product(*grid_factors(self.grid)):
            condition, changes = combine(choices)
            try:
                conditions.append((condition, Recipe.from_dict(apply_changes(self.base, changes))))
            except RecipeError as problem:
                raise RecipeError(f"{condition_label(condition) or 'base'}: {problem}") from None
        return conditions

    def evaluation_hash(self, code: Mapping[str, str] | None = None) -> str:
        """Return a hash of everything to measure; stored results with the same hash are complete.

        `code` has the hashes of the user's metrics and probes.
        """
        evaluate, landscape = self.evaluate.model_dump(), self.landscape.model_dump()
        for tree, name in ((landscape, "augment"), (evaluate, "ood_metrics"), (evaluate, "soup")):
            if not tree[name]:  # keep the hash of studies without it
                del tree[name]
        return fingerprint({"evaluate": evaluate, "landscape": landscape, **({"code": dict(code)} if code else {})})


def _read(file: Path, depth: int = 0) -> dict[str, Any]:
    """Return the keys of a study file, with those of the study that it extends."""
    tree = parse_toml(read_text(file, "study"), str(file))
    extended = tree.pop("extends", None)
    if extended is None:
        return tree
    if not isinstance(extended, str) or depth == MAX_EXTENDED:
        raise RecipeError(f"{file}: extends = {extended!r}. Give one study; at most {MAX_EXTENDED} may form a chain")
    beside = file.parent / extended
    return _merged(_read(beside if beside.is_file() else study_file(extended), depth + 1), tree)


def _merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested tables with changes; a list is replaced as a whole.

    >>> _merged({"a": {"b": 1, "c": [1, 2]}}, {"a": {"c": [3]}})
    {'a': {'b': 1, 'c': [3]}}
    """
    merged = dict(tree)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _resolve_base(base: Any, folder: Path) -> dict[str, Any]:
    """Return the full base recipe, given by name or file, with or without changes, or in full."""
    if isinstance(base, str):
        base = {"recipe": base}
    if not isinstance(base, Mapping) or "recipe" not in base:
        return {} if base is None else {"base": base}
    file = folder / str(base["recipe"])
    recipe = Recipe.load(file if file.is_file() else str(base["recipe"]))
    changes = flat_changes({name: value for name, value in base.items() if name != "recipe"})
    return {"base": apply_changes(recipe.to_dict(), changes)}


def _explain(problem: ValidationError) -> RecipeError:
    first = problem.errors()[0]
    place = [str(part) for part in first["loc"]]
    where = ".".join(place)
    if first["type"] == "extra_forbidden":
        parts: dict[str, type[ConfigSection]] = {
            "evaluate": EvaluateConfig, "landscape": LandscapeConfig, "tables": TableConfig, "figures": FiguresConfig,
        }  # fmt: skip
        known = parts.get(place[0], Study).model_fields
        return RecipeError(f"The study has no key {where!r}; {suggest(place[-1], known)}")
    if first["type"] == "missing":
        return RecipeError(f"The study has no {where!r}. Give a recipe by name or file, or a full recipe as [base].")
    return RecipeError(f"The study's {where} = {first['input']!r}: {first['msg']}")
