"""Autotune: the fastest precision and memory format without a change of the loss, found once per run."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from cases import weight_files

from plateaux.config.components import Components
from plateaux.config.experiment import Experiment
from plateaux.config.recipe import Recipe
from plateaux.storage.run import Run
from plateaux.training.autotune import _measure, autotune, fastest
from plateaux.training.train import train

autotune_module: Any = import_module("plateaux.training.autotune")
train_module: Any = import_module("plateaux.training.train")  # the package has a function of that name
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
name = "SGD"
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


def results(*rows: tuple[float, float]) -> list[dict[str, Any]]:
    return [{"precision": str(i), "loss": loss, "images_per_second": rate} for i, (loss, rate) in enumerate(rows)]


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        ([(1.0, 10), (1.0, 20)], "1"),
        ([(1.0, 20), (1.0, 10)], "0"),
        ([(1.0, 10), (1.0199, 30), (1.03, 90)], "1"),
        ([(1.0, 10), (0.9801, 30), (0.97, 90)], "1"),  # a lower loss than that of fp32 is just as suspicious
        ([(1.0, 10), (math.nan, 90)], "0"),
        ([(math.nan, 10), (1.0, 90)], "0"),  # fp32 itself diverges: nothing to compare with
        ([(0.0, 10), (0.0, 20)], "1"),
        ([(2.0, 5)], "0"),
    ],
)
def test_the_fastest_setting_with_a_loss_within_two_percent_of_the_first_is_selected(
    rows: list[tuple[float, float]], best: str
) -> None:
    assert fastest(results(*rows))["precision"] == best


def test_every_candidate_is_tried_and_logged() -> None:
    messages: list[str] = []
    tuned = autotune(Experiment(recipe(), CASES), lambda event: messages.append(event.text), steps=10)
    assert [(result["precision"], result["memory_format"]) for result in tuned["tried"]] == [
        ("fp32", "contiguous"),
        ("fp32", "channels_last"),
        ("bf16", "contiguous"),
        ("bf16", "channels_last"),
    ]
    assert all(result["images_per_second"] > 0 for result in tuned["tried"])
    reference = tuned["tried"][0]["loss"]
    best = next(e for e in tuned["tried"] if all(e[k] == tuned[k] for k in ("precision", "memory_format")))
    assert abs(best["loss"] - reference) <= 0.02 * reference
    assert len(messages) == 5
    assert messages[-1] == f"autotuned for this run: {tuned['precision']} and {tuned['memory_format']}"


def test_the_compared_loss_is_the_training_loss(tmp_path: Path) -> None:
    tuned = autotune(Experiment(recipe("train.memory_format=contiguous"), CASES), lambda _: None, steps=2)
    run = train(
        recipe("train.precision=fp32", "train.memory_format=contiguous", "run.log_every=2"),
        tmp_path,
        **CASES.keywords(),
    )
    first = next(line for line in run.log(0) if line.get("step") == 2)
    assert tuned["tried"][0]["loss"] == pytest.approx(first["loss"], rel=1e-6)


def test_without_auto_no_settings_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune_module, "_measure", lambda *_: pytest.fail("nothing is auto"))
    assert (
        autotune(Experiment(recipe("train.precision=bf16", "train.memory_format=contiguous"), CASES), lambda _: None)
        == {}
    )


def test_vmap_supports_one_precision_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune_module, "_measure", lambda *_: pytest.fail("there is only one candidate"))
    tuned = autotune(Experiment(recipe("executor.mode=vmap", "train.memory_format=contiguous"), CASES), lambda _: None)
    assert tuned == {"precision": "fp32", "memory_format": "contiguous", "tried": []}


def test_autotuning_happens_once_and_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fake_autotune(*_: Any) -> dict[str, Any]:
        calls.append(1)
        return {"precision": "bf16", "memory_format": "channels_last", "tried": []}

    monkeypatch.setattr(train_module, "autotune", fake_autotune)
    train(recipe(), tmp_path / "auto", **CASES.keywords())
    assert Run.open(tmp_path / "auto").info.autotune.precision == "bf16"
    train(recipe(), tmp_path / "auto", **CASES.keywords())
    train(recipe("members=3"), tmp_path / "auto", **CASES.keywords())  # a new member uses the same settings
    assert calls == [1]
    explicit = train(
        recipe("train.precision=bf16", "train.memory_format=channels_last", "members=3"),
        tmp_path / "explicit",
        **CASES.keywords(),
    )
    assert weight_files(Run.open(tmp_path / "auto")) == weight_files(explicit)


def test_interrupted_autotuning_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train_module, "autotune", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(recipe(), tmp_path, **CASES.keywords())
    assert Run.open(tmp_path).info.autotune is None
    train(recipe("run.log_every=1"), tmp_path, **CASES.keywords())
    assert set(Run.open(tmp_path).info.autotune.to_dict()) == {"precision", "memory_format", "tried"}


def test_throughput_is_the_number_of_images_of_the_second_half_over_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(100))  # one second between two looks at the clock, that is, for each step
    monkeypatch.setattr(autotune_module.time, "perf_counter", lambda: float(next(clock)))
    plain = recipe("train.precision=fp32", "train.memory_format=contiguous", "data.drop_last=true")
    assert _measure(Experiment(plain, CASES), 6)[1] == pytest.approx(8.0)  # batches of 8 images
    assert next(clock) == 6 + 1
