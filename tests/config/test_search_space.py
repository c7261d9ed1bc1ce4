"""Hyper-parameters that members draw: the same for a member whatever its company, spread as asked for."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from cases import GIVEN, distance, recipe, trained

from plateaux.config.recipe import Recipe
from plateaux.config.schema import ConfigSection
from plateaux.config.search_space import Range, sample
from plateaux.core.errors import RecipeError
from plateaux.core.types import derive_seed
from plateaux.evaluation.selection import select_members
from plateaux.training.checks import check
from plateaux.training.setup import build_train_states
from plateaux.training.train import train

SEARCH = {"optimizer": {"lr": {"low": 0.01, "high": 1.0, "log": True}}, "method": {"rho": [0.05, 0.2]}}


def test_draws_are_spread_evenly_over_a_range() -> None:
    found = sorted(sample(Range(low=2, high=4), derive_seed(each)) for each in range(400))
    assert all(2 <= number <= 4 for number in found)
    # Kolmogorov and Smirnov: the largest distance from the straight line, one in ten thousand.
    assert max(abs((number - 2) / 2 - (place + 0.5) / 400) for place, number in enumerate(found)) < 2.23 / 20


def test_with_log_the_logarithms_are_spread_evenly() -> None:
    found = sorted(sample(Range(low=0.01, high=1, log=True), derive_seed(each)) for each in range(400))
    assert all(0.01 <= number <= 1 for number in found)
    even = [math.log10(number) / 2 + 1 for number in found]
    assert max(abs(number - (place + 0.5) / 400) for place, number in enumerate(even)) < 2.23 / 20


@pytest.mark.parametrize("log", [False, True])
def test_whole_numbers_come_from_low_to_high(log: bool) -> None:
    found = [sample(Range(low=1, high=3, integer=True, log=log), derive_seed(each)) for each in range(100)]
    assert set(found) == {1, 2, 3}
    assert all(isinstance(number, int) for number in found)


def test_choices_are_equally_likely() -> None:
    found = [sample(("a", "b"), derive_seed(each)) for each in range(400)]
    assert abs(found.count("a") - 200) < 4 * 10


@pytest.mark.parametrize(
    ("what", "complaint"),
    [
        ({"low": 2, "high": 1}, "range from 2 to 1 is empty: low must be at most high"),
        ({"low": 0, "high": 1, "log": True}, "above 0"),
        ([], "empty list"),
        ({"low": 1}, r"\[search\] lacks .optimizer\.lr\..*high"),
    ],
)
def test_a_range_with_nothing_in_it_is_refused(what: object, complaint: str) -> None:
    with pytest.raises(RecipeError, match=complaint):
        recipe("sam", search={"optimizer": {"lr": what}})


def test_a_hyper_parameter_that_is_none_is_named() -> None:
    with pytest.raises(RecipeError, match=r"\[search\] has no key 'optimiser'; did you mean 'optimizer'"):
        recipe("sam", search={"optimiser": {"lr": [1.0]}})
    with pytest.raises(RecipeError, match="lrr"):
        check(recipe("sam", search={"optimizer": {"lrr": [1.0]}}), GIVEN)
    with pytest.raises(RecipeError, match="rhoo"):
        check(recipe("sam", search={"method": {"rhoo": [1.0]}}), GIVEN)


def test_members_draw_for_themselves_and_the_same_in_any_company() -> None:
    small, large = recipe("sam", search=SEARCH), recipe("sam", search=SEARCH, members=9)
    rates = [large.for_member(number).optimizer.lr for number in range(9)]
    assert len(set(rates)) == 9
    assert [small.for_member(number).optimizer.lr for number in range(3)] == rates[:3]
    assert {large.for_member(number).method.options["rho"] for number in range(9)} == {0.05, 0.2}
    assert recipe("sam", search=SEARCH, seed=8).for_member(0).optimizer.lr != rates[0]


def test_without_a_search_a_members_recipe_is_the_recipe() -> None:
    row = recipe("sam")
    assert row.for_member(1) is row
    assert "search" not in row.to_dict()  # runs from before there was one keep their names


def test_a_recipe_with_a_search_survives_being_written() -> None:
    row = recipe("sam", search=SEARCH)
    again = Recipe.parse(row.to_toml())
    assert again == row
    assert isinstance(again.search, ConfigSection)
    changed = Recipe.parse(row.to_toml(), ["search.optimizer.lr.low=0.5"])
    assert changed.for_member(0).optimizer.lr > row.for_member(0).optimizer.lr


def test_a_member_that_drew_is_the_one_that_was_told_the_same(tmp_path: Path) -> None:
    extra = {"loss": {"label_smoothing": {"low": 0.0, "high": 0.3}}}
    row = recipe("sam", search={**SEARCH, **extra})
    row = row.replaced(
        search={**row.to_dict()["search"], "optimizer": {**SEARCH["optimizer"], "max_grad_norm": [0.05, 0.1]}}
    )
    own = [row.for_member(number) for number in range(3)]
    told = recipe(
        "sam",
        optimizer={
            "lr": [each.optimizer.lr for each in own],
            "max_grad_norm": [each.optimizer.max_grad_norm for each in own],
        },
        method={"rho": [each.method.options["rho"] for each in own]},
        loss={"label_smoothing": [each.loss.options["label_smoothing"] for each in own]},
    )
    found = trained(row, tmp_path / "drawn")
    assert distance(found, trained(told, tmp_path / "told")) == 0
    assert distance(found[:2], trained(row.replaced(members=2), tmp_path / "two")) == 0


def test_a_learner_knows_the_rate_it_drew() -> None:
    from plateaux.config.builders.data import build_data
    from plateaux.data.loader import CPU
    from plateaux.distributed.executors.local import SINGLE_PROCESS

    row = recipe("sam", search=SEARCH)
    found = build_train_states(
        row, build_data(row, GIVEN), range(3), SINGLE_PROCESS, device=CPU, steps=3, components=GIVEN
    )
    for number, learner in enumerate(found):
        rate = row.for_member(number).optimizer.lr
        assert learner.peak_lr == rate == learner.optimizer.param_groups[0]["initial_lr"]


def test_a_search_can_go_on_with_more_members(tmp_path: Path) -> None:
    row = recipe("sam", search=SEARCH, members=2)
    before = trained(row, tmp_path / "run")
    assert distance(trained(row.replaced(members=3), tmp_path / "run")[:2], before) == 0


def test_what_was_searched_is_chosen_from(tmp_path: Path) -> None:
    rates = {"optimizer": {"lr": {"low": 1e-4, "high": 0.3, "log": True}}}
    row = recipe("sam", members=4, samples=60, batch=20, data={"validation_split": 20}, search=rates)
    train(row.replaced(train={"epochs": 4}), tmp_path / "run", components=GIVEN)
    chosen = select_members([tmp_path / "run"], size=2, unique=True, **GIVEN.keywords())
    slowest = min(range(4), key=lambda number: row.for_member(number).optimizer.lr)
    assert slowest not in chosen.selection.chosen
