"""Recipes: reading and writing TOML, changes, and errors with key, suggestion, and line number."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from plateaux.config.recipe import Recipe, diff, fingerprint
from plateaux.config.schema import member_value
from plateaux.core.errors import RecipeError

TEXT = """# a recipe
members = 4
seed = 3

[data]
name = "digits"
batch_size = 32
test = 0.3

[model]
name = ["mlp", "mlp", "cnn", "cnn"]

[optimizer]
lr = [0.1, 0.2, 0.3, 0.4]
momentum = 0.9

[[lr_scheduler]]
name = "linear"  # warm-up
epochs = 1

[[lr_scheduler]]
name = "cosine"

[train]
epochs = 5
"""


def parse_error(text: str, *changes: str) -> str:
    with pytest.raises(RecipeError) as error:
        Recipe.parse(text, changes, where="r.toml")
    return str(error.value)


def test_given_keys_are_read_and_others_have_defaults() -> None:
    recipe = Recipe.parse(TEXT)
    assert (recipe.members, recipe.seed, recipe.data.batch_size, recipe.train.epochs) == (4, 3, 32, 5)
    assert recipe.data.options == {"test": 0.3}
    assert recipe.optimizer.options == {"momentum": 0.9}
    assert [part.name for part in recipe.lr_scheduler] == ["linear", "cosine"]
    assert (recipe.method.name, recipe.executor.mode, recipe.train.precision) == ("deep_ensemble", "loop", "fp32")


def test_a_short_recipe_has_a_complete_optimizer_and_schedule_and_a_full_one_keeps_its_own() -> None:
    short = Recipe.parse(BASE)
    assert (short.optimizer.name, short.optimizer.lr, short.optimizer.options) == ("SGD", 0.1, {"momentum": 0.9})
    assert [(part.name, part.epochs) for part in short.lr_scheduler] == [("cosine", None)]
    assert short.train.epochs == 30
    assert Recipe.parse(BASE, ["optimizer.lr=0.2"]).optimizer.options == {"momentum": 0.9}
    assert Recipe.parse(BASE, ["optimizer.momentum=0.5"]).optimizer.options == {"momentum": 0.5}
    assert Recipe.parse(BASE, ["optimizer.name=AdamW"]).optimizer.options == {}
    old = Recipe.parse(BASE, ["optimizer.name=SGD", "lr_scheduler=[]", "train.epochs=10"])
    assert (old.optimizer.options, old.lr_scheduler) == ({}, ())
    for recipe in (short, old):
        assert Recipe.parse(recipe.to_toml()).identity() == recipe.identity()


def test_the_fingerprint_of_a_stored_recipe_without_momentum_and_schedule_has_not_changed() -> None:
    stored = Recipe.parse(BASE, ["optimizer.name=SGD", "lr_scheduler=[]", "train.epochs=10"])
    assert fingerprint(stored.identity()) == "3eecaacb77954ce5"


def test_a_schedule_that_is_no_list_is_refused_with_the_form() -> None:
    for change in ("lr_scheduler=cosine", "lr_scheduler={name='cosine'}"):
        assert "give a list of tables: [[lr_scheduler]] with name = 'cosine'" in parse_error(BASE, change)


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Recipe.parse(TEXT).members = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("epochs = 5", "epochz = 5", "r.toml, line 25: [train] has no key 'epochz'; did you mean 'epochs'?"),
        ("[train]", "[trian]", "r.toml, line 24: The recipe has no key 'trian'; did you mean 'train'?"),
        ("seed = 3", "sed = 3", "r.toml, line 3: The recipe has no key 'sed'; did you mean 'seed'?"),
        ("epochs = 5", "epochs = 0", "r.toml, line 25: [train] epochs = 0: Input should be greater than or equal to 1"),
        (
            "batch_size = 32",
            'batch_size = "many"',
            "r.toml, line 7: [data] batch_size = 'many': Input should be a valid integer",
        ),
        ("members = 4", "members = 0", "r.toml, line 2: members = 0: Input should be greater than or equal to 1"),
        (
            'name = "cosine"',
            'name = "cosine"\ninterval = "stp"',
            "r.toml, line 23: [lr_scheduler] interval = 'stp': Input should be",
        ),
        ('name = "linear"  # warm-up', "", "r.toml, line 17: [lr_scheduler] lacks 'name'"),
        ('name = "cosine"', "", "r.toml, line 21: [lr_scheduler] lacks 'name'"),
        ('name = "digits"', "", "r.toml, line 5: [data] lacks 'name'"),
        ("epochs = 5", "epochs = ", "r.toml is not valid TOML: Invalid value (at line 25"),
        (
            "batch_size = 32",
            "batch_size = 32\nbatch_size = 64",
            "r.toml is not valid TOML: Cannot overwrite a value (at line 8",
        ),
        (
            "members = 4",
            f"members = {2**31}",
            "r.toml, line 2: members = 2147483648: Input should be less than or equal to 10000",
        ),
        (
            "epochs = 5",
            'select = "first"',
            "r.toml, line 25: [train] select = 'first': allowed: 'last' or 'best:",
        ),
        (
            "momentum = 0.9",
            "weight_decay = nan",
            "r.toml, line 15: [optimizer] weight_decay = nan: Input should be a finite",
        ),
    ],
)
def test_an_invalid_key_or_value_is_reported_with_line_and_suggestion(old: str, new: str, message: str) -> None:
    assert TEXT.count(old) == 1
    assert parse_error(TEXT.replace(old, new)).startswith(message)


def test_data_and_model_are_required() -> None:
    assert parse_error("members = 2") == "r.toml: The recipe lacks 'data': every recipe needs data and a model"
    assert "lacks 'model'" in parse_error('[data]\nname = "x"')


@pytest.mark.parametrize(
    ("change", "path", "value"),
    [
        ("optimizer.lr=0.05", ("optimizer", "lr"), 0.05),
        (" optimizer.lr = 0.05 ", ("optimizer", "lr"), 0.05),
        ("optimizer.lr=[1e-1, 2, 3, 4]", ("optimizer", "lr"), (0.1, 2, 3, 4)),
        ("members=7", ("members",), 7),
        ("data.flip=true", ("data", "flip"), True),
        ("data.name=cifar10", ("data", "name"), "cifar10"),
        ('data.name="cifar10"', ("data", "name"), "cifar10"),
        ("model.name=timm:resnet18.a1_in1k", ("model", "name"), "timm:resnet18.a1_in1k"),
        ("train.select=best:accuracy", ("train", "select"), "best:accuracy"),
        ("run.checkpoint_every_minutes=0.5", ("run", "checkpoint_every_minutes"), 0.5),
        ("data.root=/some/where=else", ("data", "root"), "/some/where=else"),
        ("method.rho=0.1", ("method", "rho"), 0.1),
        ("executor.devices=['0', '1']", ("executor", "devices"), ("0", "1")),
    ],
)
def test_a_change_overrides_the_file(change: str, path: tuple[str, ...], value: Any) -> None:
    node: Any = Recipe.parse(TEXT, [change])
    for name in path:
        node = getattr(node, name)
    assert node == value


def test_later_changes_win_and_can_add_sections() -> None:
    recipe = Recipe.parse(TEXT, ["seed=1", "seed=2", "method.name=sam", "loss.label_smoothing=0.1"])
    assert (recipe.seed, recipe.method.name, recipe.loss.options) == (2, "sam", {"label_smoothing": 0.1})
    assert Recipe.parse(TEXT, ['lr_scheduler=[{name="step", step_size=2}]']).lr_scheduler[0].options == {"step_size": 2}


@pytest.mark.parametrize("change", ["nonsense", "=3", "", " = 3"])
def test_the_error_for_an_invalid_change_shows_the_syntax(change: str) -> None:
    assert (
        parse_error(TEXT, change) == f"--set {change!r}: write it as section.key=value, such as --set optimizer.lr=0.05"
    )


def test_a_change_below_a_value_is_rejected() -> None:
    assert parse_error(TEXT, "seed.x=3") == "--set 'seed.x=3': seed is not a section"
    assert "did you mean 'epochs'" in parse_error(TEXT, "train.epoch=3")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["train.epochs=0"], "--set 'train.epochs=0': [train] epochs = 0: Input should be greater than or equal to 1"),
        (["train.epoch=3"], "--set 'train.epoch=3': [train] has no key 'epoch'; did you mean 'epochs'?"),
        (["trian.epochs=3"], "--set 'trian.epochs=3': The recipe has no key 'trian'; did you mean 'train'?"),
        (["sed=3"], "--set 'sed=3': The recipe has no key 'sed'; did you mean 'seed'?"),
        (["seed=1", "train.epochs=0", "train.epochs=-1"], "--set 'train.epochs=-1': [train] epochs = -1: "),
        (["lr_scheduler=[{epochs=1}]"], "--set 'lr_scheduler=[{epochs=1}]': [lr_scheduler] lacks 'name'"),
        (["model.lora.rank=0"], "--set 'model.lora.rank=0': "),
        (["search.optimizer.lr=[]"], "--set 'search.optimizer.lr=[]': "),
    ],
)
def test_a_mistake_in_a_change_is_not_blamed_on_a_line_of_the_file(changes: list[str], message: str) -> None:
    assert parse_error(TEXT, *changes).startswith(message)


def test_a_mistake_in_the_file_is_not_blamed_on_a_change() -> None:
    text = TEXT.replace("epochs = 5", "epochs = 0")
    assert parse_error(text, "train.precision=bf16", "members=3").startswith("r.toml, line 25: [train] epochs = 0")


BASE = '[data]\nname = "digits"\n[model]\nname = "mlp"\n'
MANY = range(60_000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "error"),
    [
        (BASE + "[method]\n" + "".join(f"k{i} = {i}\n" for i in MANY), None),
        (BASE + "[method]\n" + "".join(f"a.k{i} = {i}\n" for i in MANY), None),
        (BASE + "[search.optimizer]\n" + "".join(f"k{i} = [1, 2]\n" for i in MANY), None),
        ("".join(f"k{i} = {i}\n" for i in MANY) + BASE, "r.toml, line 1: The recipe has no key 'k0'"),
        (BASE + "".join(f"[s{i}]\na = 1\n" for i in MANY), "r.toml, line 5: The recipe has no key 's0'"),
        (BASE + "[method]\n" + ".".join("k" for _ in MANY) + " = 1\n", "r.toml, line 6: a key has more than 100 parts"),
        (BASE + "[" + ".".join('"k"' for _ in MANY) + "]\n", "r.toml, line 5: a key has more than 100 parts"),
        (BASE + "[method]\nx = " + "[" * len(MANY) + "]" * len(MANY), "r.toml is nested too deeply"),
        (BASE + f"seed = 1{'0' * len(MANY)}\n", "r.toml is not valid TOML: "),
    ],
    ids=["options", "dotted", "search", "keys", "sections", "parts", "quoted parts", "depth", "digits"],
)
def test_sixty_thousand_keys_are_read_in_linear_time(text: str, error: str | None) -> None:
    """Quadratic time would be hours."""
    if error is None:
        assert Recipe.parse(text).model.name == "mlp"
    else:
        assert parse_error(text).startswith(error)


def test_a_change_cannot_inject_other_keys() -> None:
    recipe = Recipe.parse(TEXT, ["members=7\nseed = 9"])
    assert (recipe.members, recipe.seed) == (7, 3)


def test_a_recipe_can_be_written_and_read() -> None:
    recipe = Recipe.parse(TEXT)
    again = Recipe.parse(recipe.to_toml())
    assert again == recipe
    assert again.to_toml() == recipe.to_toml()
    assert Recipe.from_dict(recipe.to_dict()) == recipe


@pytest.mark.slow
@given(
    members=st.integers(1, 99),
    lr=st.floats(1e-9, 1e9) | st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=3),
    name=st.text(st.characters(codec="utf-8"), min_size=1, max_size=9),
    option=st.booleans() | st.integers(-(2**60), 2**60) | st.lists(st.integers(-9, 9), max_size=3),
)
def test_any_recipe_can_be_written_and_read(members: int, lr: Any, name: str, option: Any) -> None:
    tree = {"members": members, "data": {"name": name, "x": option}, "model": {"name": "m"}, "optimizer": {"lr": lr}}
    recipe = Recipe.from_dict(tree)
    assert Recipe.parse(recipe.to_toml()) == recipe


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"none\.toml"):
        Recipe.load(tmp_path / "none.toml")
    (tmp_path / "r.toml").write_text(TEXT)
    assert Recipe.load(tmp_path / "r.toml", ["seed=8"]).seed == 8


def test_a_replaced_value_keeps_all_others() -> None:
    recipe = Recipe.parse(TEXT)
    other = recipe.replaced(members=2, optimizer={"lr": 0.5}, model={"name": "mlp"})
    assert (other.members, other.optimizer.lr, other.optimizer.options) == (2, 0.5, {"momentum": 0.9})
    assert other.data == recipe.data
    assert recipe.members == 4
    with pytest.raises(RecipeError, match="has no key 'epochz'"):
        recipe.replaced(train={"epochz": 3})


def test_the_identity_excludes_members_executor_run_and_probe() -> None:
    recipe = Recipe.parse(TEXT)
    same = recipe.replaced(members=9, executor={"processes": 3}, run={"log_every": 1}, probe={"every": 2})
    assert recipe.identity() == same.identity()
    for other in ({"seed": 4}, {"train": {"epochs": 6}}, {"data": {"batch_size": 31}}, {"method": {"name": "sam"}}):
        assert recipe.replaced(**other).identity() != recipe.identity()


def test_a_fingerprint_depends_on_all_values_but_not_on_their_order() -> None:
    assert fingerprint({"a": 1, "b": {"c": [1, 2]}}) == fingerprint({"b": {"c": [1, 2]}, "a": 1})
    assert len({fingerprint(t) for t in ({"a": 1}, {"a": 2}, {"b": 1}, {"a": "1"}, {"a": [1]}, {"a": None}, {})}) == 7
    assert re.fullmatch("[0-9a-f]{16}", fingerprint({}))


def test_the_diff_has_one_line_per_value() -> None:
    old = {"a": {"x": 1, "y": [1, 2]}, "b": 3, "same": 0}
    new = {"a": {"x": 2, "y": [1, 3], "z": "new"}, "c": {"d": 1}, "same": 0}
    assert diff(old, new) == [
        "a.x: 1 -> 2",
        "a.y: [1, 2] -> [1, 3]",
        "a.z: (unset) -> 'new'",
        "b: 3 -> (unset)",
        "c: (unset) -> {'d': 1}",
    ]
    assert diff(old, old) == []


def test_a_list_has_one_value_per_member() -> None:
    assert [member_value("optimizer.lr", (0.1, 0.2), n, 2) for n in range(2)] == [0.1, 0.2]
    assert member_value("optimizer.lr", 0.1, 1, 2) == 0.1
    with pytest.raises(
        RecipeError, match=r"optimizer\.lr lists 2 values, but the ensemble has 3 members: give one value"
    ):
        member_value("optimizer.lr", [0.1, 0.2], 0, 3)
