"""A member is its own: it does not change with its company, and what a list gives it is what it would have alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import JOINT, METHODS, OWN, distance, recipe, trained
from laws.conftest import Loop

from plateaux.config.recipe import Recipe
from plateaux.distributed.executors import local

ONE_VALUE = [name for name in OWN if not any(isinstance(v, list) for v in METHODS[name].method.values())]
UNMET = [name for name in ONE_VALUE if METHODS[name].method["name"] != "sharpbalance"]  # whoever met has heard others


@pytest.mark.parametrize("net", ["mlp", "conv_bn", "dropout"])
@pytest.mark.parametrize("method", UNMET)
def test_adding_a_member_changes_no_other(method: str, net: str, loop: Loop) -> None:
    assert distance(loop(method, net)[:2], loop(method, net, members=2)) == 0


@pytest.mark.parametrize("method", ["deep_ensemble", "sam"])
def test_adding_a_member_under_vmap_changes_no_other(method: str, tmp_path: Path) -> None:
    size = {"samples": 40, "batch": 16, "executor": {"mode": "vmap"}}
    two = trained(recipe(method, "wide", members=2, **size), tmp_path / "two")
    three = trained(recipe(method, "wide", members=3, **size), tmp_path / "three")
    assert distance(three[:2], two) == 0


@pytest.mark.parametrize("method", [name for name in JOINT if not METHODS[name].ordered])
def test_adding_a_member_to_a_joint_method_changes_all(method: str, loop: Loop) -> None:
    assert all(distance([a], [b]) > 0 for a, b in zip(loop(method), loop(method, members=2), strict=False))


def test_adding_a_member_that_looks_only_back_changes_no_earlier_one(loop: Loop) -> None:
    assert distance(loop("a2d, sequential")[:2], loop("a2d, sequential", members=2)) == 0


def test_members_differ_from_each_other(loop: Loop) -> None:
    first, second, third = loop("deep_ensemble")
    assert distance([first], [second]) > 0.01
    assert distance([second], [third]) > 0.01


@pytest.mark.parametrize("manner", ["loop", "vmap"])
@pytest.mark.parametrize(
    ("section", "name", "values"),
    [
        ("method", "rho", [0.0, 0.05, 0.2]),
        ("optimizer", "lr", [0.01, 0.1, 0.3]),
        ("optimizer", "weight_decay", [0.0, 0.01, 0.1]),
        ("optimizer", "max_grad_norm", [0.05, 0.1, 10.0]),
        ("loss", "label_smoothing", [0.0, 0.1, 0.5]),
    ],
)
def test_a_list_gives_each_member_what_it_would_have_alone(
    section: str, name: str, values: list[float], manner: str, tmp_path: Path
) -> None:
    size = {"samples": 32, "batch": 16, "executor": {"mode": manner}}
    together = trained(recipe("sam", "wide", **{section: {name: values}}, **size), tmp_path / "list")
    for number, value in enumerate(values):
        alone = trained(recipe("sam", "wide", **{section: {name: value}}, **size), tmp_path / str(number))
        assert distance([together[number]], [alone[number]]) == 0


@pytest.mark.parametrize("method", ["sam", "apart", "balanced, climbing"])
def test_members_of_different_architecture_are_grouped_by_kind_under_vmap(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Weights of the same shapes would not tell them apart; the kind does.
    row = recipe(method, precision="fp64").to_dict()
    row["model"] = {"name": ["mlp", "cases:bent", "mlp"]}
    stacks: list[int] = []
    stacked = local.run_vmap

    def counted(offer, views, *rest):  # type: ignore[no-untyped-def]
        stacks.append(len(views))
        return stacked(offer, views, *rest)

    monkeypatch.setattr(local, "run_vmap", counted)
    looped = trained(Recipe.from_dict(row), tmp_path / "loop")
    assert not stacks
    row["executor"]["mode"] = "vmap"
    assert distance(trained(Recipe.from_dict(row), tmp_path / "vmap"), looped) <= 1e-12
    assert set(stacks) == {2}


def test_the_global_generator_is_neither_drawn_from_nor_disturbed(tmp_path: Path) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    trained(recipe("sam", "dropout"), tmp_path / "a")
    assert torch.equal(torch.get_rng_state(), before)


def test_what_the_global_generator_holds_does_not_matter(loop: Loop, tmp_path: Path) -> None:
    torch.manual_seed(12345)
    assert distance(trained(recipe("sam", "dropout"), tmp_path / "a"), loop("sam", "dropout")) == 0
