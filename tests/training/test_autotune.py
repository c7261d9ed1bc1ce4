"""What the machine chooses: the fastest that loses nothing, once for the life of a run."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from plateaux.config.components import Components
from plateaux.config.recipe import Recipe
from plateaux.storage.run import Run
from plateaux.training.autotune import autotune, fastest
from plateaux.training.train import train

choosing: Any = import_module("plateaux.training.autotune")
training: Any = import_module("plateaux.training.train")  # the package has a function of that name
CASES = Components(trust=("cases",))
TEXT = """
members = 2
[data]
name = "cases:patches"
batch_size = 8
[model]
name = "cnn"
channels = [4]
[optimizer]
lr = 0.05
[train]
epochs = 2
precision = "auto"
memory_format = "auto"
[executor]
threads = 1
"""


def recipe(*changes: str) -> Recipe:
    return Recipe.parse(TEXT, changes)


def tried(*rows: tuple[float, float]) -> list[dict[str, Any]]:
    return [{"precision": str(i), "loss": loss, "images_per_second": rate} for i, (loss, rate) in enumerate(rows)]


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        ([(1.0, 10), (1.0, 20)], "1"),
        ([(1.0, 20), (1.0, 10)], "0"),
        ([(1.0, 10), (1.0199, 30), (1.03, 90)], "1"),
        ([(1.0, 10), (0.9801, 30), (0.97, 90)], "1"),  # a loss that is better than fp32's is as suspect
        ([(1.0, 10), (math.nan, 90)], "0"),
        ([(math.nan, 10), (1.0, 90)], "0"),  # fp32 itself diverges: nothing to compare with
        ([(0.0, 10), (0.0, 20)], "1"),
        ([(2.0, 5)], "0"),
    ],
)
def test_the_fastest_within_two_percent_of_the_first_is_taken(rows: list[tuple[float, float]], chosen: str) -> None:
    assert fastest(tried(*rows))["precision"] == chosen


def test_every_candidate_is_tried_and_told() -> None:
    told: list[str] = []
    found = autotune(recipe(), CASES, lambda event: told.append(event.text), steps=10)
    assert [(each["precision"], each["memory_format"]) for each in found["tried"]] == [
        ("fp32", "contiguous"),
        ("fp32", "channels_last"),
        ("bf16", "contiguous"),
        ("bf16", "channels_last"),
    ]
    assert all(each["images_per_second"] > 0 for each in found["tried"])
    honest = found["tried"][0]["loss"]
    best = next(e for e in found["tried"] if all(e[k] == found[k] for k in ("precision", "memory_format")))
    assert abs(best["loss"] - honest) <= 0.02 * honest
    assert len(told) == 5
    assert told[-1] == f"autotuned for this run: {found['precision']} and {found['memory_format']}"


def test_the_loss_that_is_compared_is_the_one_of_training(tmp_path: Path) -> None:
    found = autotune(recipe("train.memory_format=contiguous"), CASES, lambda _: None, steps=2)
    run = train(
        recipe("train.precision=fp32", "train.memory_format=contiguous", "run.log_every=2"),
        tmp_path,
        **CASES.keywords(),
    )
    first = next(line for line in run.log(0) if line.get("step") == 2)
    assert found["tried"][0]["loss"] == pytest.approx(first["loss"], rel=1e-6)


def test_nothing_open_means_nothing_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "_try", lambda *_: pytest.fail("nothing was left open"))
    assert autotune(recipe("train.precision=bf16", "train.memory_format=contiguous"), CASES, lambda _: None) == {}


def test_under_vmap_there_is_no_choice_of_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "_try", lambda *_: pytest.fail("there is one candidate only"))
    found = autotune(recipe("executor.mode=vmap", "train.memory_format=contiguous"), CASES, lambda _: None)
    assert found == {"precision": "fp32", "memory_format": "contiguous", "tried": []}


def test_the_choice_is_made_once_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def once(*_: Any) -> dict[str, Any]:
        made.append(1)
        return {"precision": "bf16", "memory_format": "channels_last", "tried": []}

    monkeypatch.setattr(training, "autotune", once)
    run = train(recipe(), tmp_path / "auto", **CASES.keywords())
    assert Run.open(tmp_path / "auto").info.autotune.precision == "bf16"
    train(recipe(), tmp_path / "auto", **CASES.keywords())
    train(recipe("members=3"), tmp_path / "auto", **CASES.keywords())  # a new member is trained as the others were
    assert made == [1]
    plain = train(
        recipe("train.precision=bf16", "train.memory_format=channels_last", "members=3"),
        tmp_path / "said",
        **CASES.keywords(),
    )
    for number in range(3):
        name = f"members/{number}/weights.safetensors"
        assert run.store.get(name) == plain.store.get(name)


def test_a_choice_interrupted_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training, "autotune", cut)
        with pytest.raises(KeyboardInterrupt):
            train(recipe(), tmp_path, **CASES.keywords())
    assert Run.open(tmp_path).info.autotune is None
    train(recipe("run.log_every=1"), tmp_path, **CASES.keywords())
    assert set(Run.open(tmp_path).info.autotune.to_dict()) == {"precision", "memory_format", "tried"}
