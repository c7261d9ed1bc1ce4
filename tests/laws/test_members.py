"""Members are independent: other members do not change them, and per-member lists equal single values."""

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
def test_adding_a_member_does_not_change_the_others(method: str, net: str, loop: Loop) -> None:
    assert distance(loop(method, net)[:2], loop(method, net, members=2)) == 0


@pytest.mark.parametrize("method", ["deep_ensemble", "sam"])
def test_adding_a_member_under_vmap_does_not_change_the_others(method: str, tmp_path: Path) -> None:
    size = {"samples": 40, "batch": 16, "executor": {"mode": "vmap"}}
    two = trained(recipe(method, "wide", members=2, **size), tmp_path / "two")
    three = trained(recipe(method, "wide", members=3, **size), tmp_path / "three")
    assert distance(three[:2], two) == 0


@pytest.mark.parametrize("method", [name for name in JOINT if not METHODS[name].ordered])
def test_adding_a_member_to_a_joint_method_changes_all_members(method: str, loop: Loop) -> None:
    assert all(distance([a], [b]) > 0 for a, b in zip(loop(method), loop(method, members=2), strict=False))


def test_adding_a_member_to_a_sequential_method_does_not_change_earlier_members(loop: Loop) -> None:
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
def test_a_list_of_values_equals_single_values_per_member(
    section: str, name: str, values: list[float], manner: str, tmp_path: Path
) -> None:
    size = {"samples": 32, "batch": 16, "executor": {"mode": manner}}
    together = trained(recipe("sam", "wide", **{section: {name: values}}, **size), tmp_path / "list")
    for number, value in enumerate(values):
        alone = trained(recipe("sam", "wide", **{section: {name: value}}, **size), tmp_path / str(number))
        assert distance([together[number]], [alone[number]]) == 0


@pytest.mark.parametrize("method", ["sam", "apart", "balanced, climbing"])
def test_members_of_different_architectures_are_grouped_under_vmap(
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


def test_training_does_not_use_the_global_random_generator(tmp_path: Path) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    trained(recipe("sam", "dropout"), tmp_path / "a")
    assert torch.equal(torch.get_rng_state(), before)


def test_training_does_not_depend_on_the_global_random_state(loop: Loop, tmp_path: Path) -> None:
    torch.manual_seed(12345)
    assert distance(trained(recipe("sam", "dropout"), tmp_path / "a"), loop("sam", "dropout")) == 0
