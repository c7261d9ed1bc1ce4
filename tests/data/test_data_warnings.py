"""What is probably wrong with samples is said with counts, once, and can be silenced."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import plateaux
from plateaux.cli.main import app
from plateaux.core.errors import RecipeError
from plateaux.data.data_check import check_data
from plateaux.data.sources import DataSplits
from plateaux.data.warning_table import WARNINGS

N = 200


def table(n: int = N, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :3].argmax(1)


def splits(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], classes: int = 3) -> DataSplits:
    return plateaux.from_tensors(train, test, classes=classes)


def clean() -> DataSplits:
    return splits(table(), table(60, seed=1))


def contained() -> DataSplits:
    x, y = table()
    return splits((x, y), (x[:50], y[:50]))


def repeated() -> DataSplits:
    x, y = table(40)
    x, y = x.repeat(8, 1), y.repeat(8)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    return splits((x[order[:256]], y[order[:256]]), (x[order[256:]], y[order[256:]]))


def new_class() -> DataSplits:
    x, y = table(60, seed=1)
    return splits(table(), (x, torch.where(torch.arange(60) < 2, 3, y)), classes=4)


def outlier(value: float = 1e30) -> DataSplits:
    x, y = table()
    x[7, 4] = value
    return splits((x, y), table(60, seed=1))


def label_left_in() -> DataSplits:
    (x, y), (test_x, test_y) = table(), table(60, seed=1)
    return splits(
        (torch.cat([x, 2.0 * y[:, None] + 1], 1), y), (torch.cat([test_x, 2.0 * test_y[:, None] + 1], 1), test_y)
    )


def ids_as_labels() -> DataSplits:
    x, _ = table()
    return splits((x, torch.arange(N) % 198), (x[:20] + 1, torch.arange(20)), classes=198)


CASES: list[tuple[Callable[[], DataSplits], dict[str, str]]] = [
    (clean, {}),
    (contained, {"test-in-train": "50 of 50 test samples are also in the training set"}),
    (repeated, {"repeated-rows": "216 of 256 training samples are repetitions, and 64 of 64 test samples are also in"}),
    (new_class, {"test-only-class": r"1 of 4 classes are in the test set and not in the training set \(labels 3\)"}),
    (outlier, {"outlier": "1 of 6 features have outliers, .*: 4. Remove"}),
    (label_left_in, {"label-in-features": "1 of 7 features tell the label exactly in all 200 checked .*: 6. Remove"}),
    (ids_as_labels, {"many-classes": "198 classes for 200 training samples"}),
]


@pytest.mark.parametrize(("build", "expected"), CASES, ids=[build.__name__ for build, _ in CASES])
def test_a_defect_of_the_data_is_named_with_counts(build: Callable[[], DataSplits], expected: dict[str, str]) -> None:
    found = {name: text for name, text in check_data(build()).warnings.items() if name != "unscaled-inputs"}
    assert found.keys() == expected.keys()
    for name, pattern in expected.items():
        assert re.search(pattern, found[name]), found[name]


@pytest.mark.parametrize("value", [50.0, 300.0])
def test_a_value_that_leaves_the_others_distinct_is_no_outlier(value: float) -> None:
    assert "outlier" not in check_data(outlier(value)).warnings


def test_rare_indicators_and_constant_columns_are_no_outliers() -> None:
    x, y = table()
    x[:, 4], x[:, 5] = 0.0, 3.0
    x[7, 4] = 1.0
    assert check_data(splits((x, y), table(60, seed=1))).warnings == {}


@pytest.mark.parametrize("kind", ["uint8 images", "named inputs", "float64", "odd bytes"])
def test_test_samples_in_the_training_set_are_found_in_every_kind_of_input(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (N, 3, 9, 9), generator=generator, dtype=torch.uint8)
    inputs: dict[str, Any] = {
        "uint8 images": images,
        "named inputs": {"a": images.flatten(1)[:, :9].long(), "b": images.flatten(1)[:, 9:20].long()},
        "float64": torch.randint(0, 12, (N, 12), generator=generator).double(),
        "odd bytes": images.flatten(1)[:, :5],
    }
    x, y = inputs[kind], torch.arange(N) % 2

    def take(ids: slice) -> Any:
        return ({name: part[ids] for name, part in x.items()} if isinstance(x, dict) else x[ids]), y[ids]

    assert check_data(plateaux.from_tensors(take(slice(150)), take(slice(150, N)), classes=2)).warnings == {}
    found = check_data(plateaux.from_tensors(take(slice(150)), take(slice(120, N)), classes=2)).warnings
    assert found["test-in-train"].startswith("30 of 80 test samples")


def softmax_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 3), nn.Softmax(1))


def log_softmax_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 3), nn.LogSoftmax(1))


def train(out: Path, data: DataSplits, **changes: Any) -> plateaux.Run:
    tree = {"members": 1, "data": {"name": "own"}, "model": {"name": "own"}, "train": {"epochs": 1}, **changes}
    return plateaux.train(plateaux.Recipe.from_dict(tree), out, data=data, model=softmax_net)


def test_a_softmax_inside_the_model_is_named_at_training_and_by_later_commands(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = train(tmp_path / "run", contained())
    for when in ("train", "evaluate"):
        assert "The outputs of Sequential are probabilities" in caplog.text, when
        assert "50 of 50 test samples are also in the training set, " in caplog.text, when
        caplog.clear()
        plateaux.evaluate(run)
    done = CliRunner().invoke(app, ["status", str(run), "--json"])
    assert "[probabilities]" in done.stderr
    assert "[test-in-train]" in done.stderr
    assert done.stdout.startswith("{"), "JSON is not mixed with warnings"


def test_outputs_that_are_log_probabilities_are_no_probabilities(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = plateaux.Recipe.from_dict({"members": 1, "data": {"name": "own"}, "model": {"name": "own"}})
    plateaux.train(recipe.replaced(train={"epochs": 1}), tmp_path, data=clean(), model=log_softmax_net)
    assert "probabilities" not in caplog.text


def test_a_silenced_warning_is_not_shown_and_does_not_change_the_recipe(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    silent = {
        "run": {"silence": ["probabilities", "test-in-train", "member-at-chance", "nll-above-frequencies", "high-ece"]}
    }
    plateaux.evaluate(train(tmp_path, contained(), **silent))
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []
    recipe = plateaux.Recipe.load("quickstart")
    assert "silence" not in recipe.to_dict()["run"]
    assert recipe.replaced(**silent).identity() == recipe.identity()
    with pytest.raises(RecipeError, match="there is no warning 'outliers'; did you mean 'outlier'"):
        recipe.replaced(run={"silence": ["outliers"]})


def test_the_check_of_a_recipe_shows_warnings_next_to_json(tmp_path: Path) -> None:
    (tmp_path / "few.toml").write_text('[data]\nname = "blobs"\nsamples = 20\n[model]\nname = "mlp"\n')
    done = CliRunner().invoke(app, ["recipe", "check", str(tmp_path / "few.toml"), "--data", "--json"])
    assert "[many-classes]" in done.stderr
    assert json.loads(done.stdout)["data"]["samples"] == 20


def test_the_docs_list_every_warning_with_its_limit() -> None:
    page = (Path(__file__).parents[2] / "docs/reliability.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| ([0-9.]+) \|", page, re.MULTILINE))
    assert {name: float(value) for name, value in rows.items()} == {
        name: limit for name, (limit, _) in WARNINGS.items()
    }
