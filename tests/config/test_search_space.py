"""Hyperparameters sampled per member: independent of the other members, with the requested distribution."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from cases import GIVEN, distance, recipe, trained

import plateaux
from plateaux.config.experiment import Experiment
from plateaux.config.recipe import Recipe
from plateaux.config.schema import ConfigSection
from plateaux.config.search_space import Range, sample
from plateaux.core.errors import RecipeError
from plateaux.core.types import derive_seed
from plateaux.prediction.selection import select_members
from plateaux.training.loop.setup import build_train_states
from plateaux.training.recipe_rules import check
from plateaux.training.train import train

SEARCH = {"optimizer": {"lr": {"low": 0.01, "high": 1.0, "log": True}}, "method": {"rho": [0.05, 0.2]}}


def test_samples_are_uniform_over_a_range() -> None:
    values = sorted(sample(Range(low=2, high=4), derive_seed(seed)) for seed in range(400))
    assert all(2 <= number <= 4 for number in values)
    # Kolmogorov and Smirnov: the largest distance from the straight line, one in ten thousand.
    assert max(abs((number - 2) / 2 - (rank + 0.5) / 400) for rank, number in enumerate(values)) < 2.23 / 20


def test_with_log_the_logarithms_are_uniform() -> None:
    values = sorted(sample(Range(low=0.01, high=1, log=True), derive_seed(seed)) for seed in range(400))
    assert all(0.01 <= number <= 1 for number in values)
    even = [math.log10(number) / 2 + 1 for number in values]
    assert max(abs(number - (rank + 0.5) / 400) for rank, number in enumerate(even)) < 2.23 / 20


@pytest.mark.parametrize("log", [False, True])
def test_integers_range_from_low_to_high(log: bool) -> None:
    values = [sample(Range(low=1, high=3, integer=True, log=log), derive_seed(seed)) for seed in range(100)]
    assert set(values) == {1, 2, 3}
    assert all(isinstance(number, int) for number in values)


def test_choices_are_equally_likely() -> None:
    values = [sample(("a", "b"), derive_seed(seed)) for seed in range(400)]
    assert abs(values.count("a") - 200) < 4 * 10


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"low": 2, "high": 1}, "range from 2 to 1 is empty: low must be at most high"),
        ({"low": 0, "high": 1, "log": True}, "above 0"),
        ([], "empty list"),
        ({"low": 1}, r"\[search\] lacks .optimizer\.lr\..*high"),
    ],
)
def test_an_empty_range_is_rejected(space: object, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe("sam", search={"optimizer": {"lr": space}})


def test_an_unknown_hyperparameter_is_reported() -> None:
    with pytest.raises(RecipeError, match=r"\[search\] has no key 'optimiser'; did you mean 'optimizer'"):
        recipe("sam", search={"optimiser": {"lr": [1.0]}})
    with pytest.raises(RecipeError, match="lrr"):
        check(Experiment(recipe("sam", search={"optimizer": {"lrr": [1.0]}}), GIVEN))
    with pytest.raises(RecipeError, match="rhoo"):
        check(Experiment(recipe("sam", search={"method": {"rhoo": [1.0]}}), GIVEN))


def test_every_member_samples_its_own_values_independent_of_the_ensemble_size() -> None:
    small, large = recipe("sam", search=SEARCH), recipe("sam", search=SEARCH, members=9)
    rates = [large.for_member(number).optimizer.lr for number in range(9)]
    assert len(set(rates)) == 9
    assert [small.for_member(number).optimizer.lr for number in range(3)] == rates[:3]
    assert {large.for_member(number).method.options["rho"] for number in range(9)} == {0.05, 0.2}
    assert recipe("sam", search=SEARCH, seed=8).for_member(0).optimizer.lr != rates[0]


def test_without_a_search_the_recipe_of_a_member_is_the_recipe() -> None:
    row = recipe("sam")
    assert row.for_member(1) is row
    assert "search" not in row.to_dict()  # the identity of older runs does not change


def test_a_recipe_with_a_search_can_be_written_and_read() -> None:
    row = recipe("sam", search=SEARCH)
    again = Recipe.parse(row.to_toml())
    assert again == row
    assert isinstance(again.search, ConfigSection)
    changed = Recipe.parse(row.to_toml(), ["search.optimizer.lr.low=0.5"])
    assert changed.for_member(0).optimizer.lr > row.for_member(0).optimizer.lr


def test_sampled_values_train_the_same_member_as_explicit_values(tmp_path: Path) -> None:
    extra = {"loss": {"label_smoothing": {"low": 0.0, "high": 0.3}}}
    row = recipe("sam", search={**SEARCH, **extra})
    row = row.replaced(
        search={**row.to_dict()["search"], "optimizer": {**SEARCH["optimizer"], "max_grad_norm": [0.05, 0.1]}}
    )
    own = [row.for_member(number) for number in range(3)]
    explicit = recipe(
        "sam",
        optimizer={
            "lr": [config.optimizer.lr for config in own],
            "max_grad_norm": [config.optimizer.max_grad_norm for config in own],
        },
        method={"rho": [config.method.options["rho"] for config in own]},
        loss={"label_smoothing": [config.loss.options["label_smoothing"] for config in own]},
    )
    sampled = trained(row, tmp_path / "sampled")
    assert distance(sampled, trained(explicit, tmp_path / "explicit")) == 0
    assert distance(sampled[:2], trained(row.replaced(members=2), tmp_path / "two")) == 0


def test_the_train_state_has_the_sampled_learning_rate() -> None:
    from plateaux.config.builders.data import build_data
    from plateaux.data.loader import CPU
    from plateaux.distributed.executors.local import SINGLE_PROCESS

    row = recipe("sam", search=SEARCH)
    states = build_train_states(
        Experiment(row, GIVEN), build_data(row, GIVEN), range(3), SINGLE_PROCESS, device=CPU, steps=3
    )
    for number, state in enumerate(states):
        rate = row.for_member(number).optimizer.lr
        assert state.peak_lr == rate == state.optimizer.param_groups[0]["initial_lr"]


def test_a_search_can_continue_with_more_members(tmp_path: Path) -> None:
    row = recipe("sam", search=SEARCH, members=2)
    before = trained(row, tmp_path / "run")
    assert distance(trained(row.replaced(members=3), tmp_path / "run")[:2], before) == 0


def test_members_of_a_search_can_be_selected(tmp_path: Path) -> None:
    rates = {"optimizer": {"lr": {"low": 1e-4, "high": 0.3, "log": True}}}
    row = recipe("sam", members=4, samples=60, batch=20, data={"validation_split": 20}, search=rates)
    train(row.replaced(train={"epochs": 4}), tmp_path / "run", **GIVEN.keywords())
    chosen = select_members([plateaux.Run.open(each, GIVEN) for each in [tmp_path / "run"]], size=2, unique=True)
    slowest = min(range(4), key=lambda number: row.for_member(number).optimizer.lr)
    assert slowest not in chosen.selection.chosen
