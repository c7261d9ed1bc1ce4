"""A run that is stopped at any step and resumed equals an uninterrupted run, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import GIVEN, JOINT, METHODS, distance, recipe, stop_after, weights
from laws.conftest import Loop

from plateaux.config.recipe import Recipe
from plateaux.core.errors import Interrupted
from plateaux.storage.run import Run
from plateaux.training.loop import checkpointer
from plateaux.training.loop.checkpointer import load_state_dict
from plateaux.training.train import train


def train_with_interruption(row: Recipe, out: Path, steps: int) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        stop_after(steps, patch)
        with pytest.raises(Interrupted):
            train(row, out, **GIVEN.keywords())
    return train(row, out, **GIVEN.keywords())


@pytest.mark.parametrize("net", ["dropout", "conv_bn"])
@pytest.mark.parametrize("method", METHODS)
def test_resuming_after_a_signal_does_not_change_a_bit(method: str, net: str, loop: Loop, tmp_path: Path) -> None:
    steps = {"dropout": 2, "conv_bn": 4}[net]  # within the first epoch, and within the second
    run = train_with_interruption(recipe(method, net), tmp_path / "run", steps)
    assert distance(weights(run), loop(method, net)) == 0


@pytest.mark.parametrize("mode", ["vmap", "offload"])
@pytest.mark.parametrize("method", ["sam", *JOINT])
def test_resuming_any_executor_mode_in_the_loop_does_not_change_a_bit(
    method: str, mode: str, loop: Loop, tmp_path: Path
) -> None:
    size = {"samples": 40, "batch": 16}
    row = recipe(method, "wide", executor={"mode": mode}, **size)
    with pytest.MonkeyPatch.context() as patch:
        stop_after(2, patch)
        with pytest.raises(Interrupted):
            train(row, tmp_path / "run", **GIVEN.keywords())
    run = train(recipe(method, "wide", **size), tmp_path / "run", **GIVEN.keywords())
    assert distance(weights(run), loop(method, "wide", **size)) == 0


@pytest.mark.parametrize("method", ["gsam", "apart, climbing"])
def test_a_checkpoint_after_every_step_does_not_change_a_bit(method: str, loop: Loop, tmp_path: Path) -> None:
    row = recipe(method, "dropout", run={"checkpoint_every_minutes": 1e-9, "checkpoint_every_epochs": 1})
    assert distance(weights(train(row, tmp_path / "run", **GIVEN.keywords())), loop(method, "dropout")) == 0


def test_stopping_at_every_step_does_not_change_a_bit(loop: Loop, tmp_path: Path) -> None:
    row = recipe("sam", "dropout")
    stops = 0
    for _ in range(10):
        with pytest.MonkeyPatch.context() as patch:
            stop_after(1, patch)
            try:
                run = train(row, tmp_path / "run", **GIVEN.keywords())
                break
            except Interrupted:
                stops += 1
    assert stops >= 4
    assert distance(weights(run), loop("sam", "dropout")) == 0


def test_the_log_of_a_resumed_run_equals_that_of_an_uninterrupted_run(tmp_path: Path) -> None:
    row = recipe("sam", "mlp", run={"log_every": 1, "checkpoint_every_epochs": 1})
    uninterrupted = train(row, tmp_path / "uninterrupted", **GIVEN.keywords())
    resumed = train_with_interruption(row, tmp_path / "resumed", 2)
    assert [resumed.log(number) for number in range(3)] == [uninterrupted.log(number) for number in range(3)]


def test_losing_the_optimizer_state_would_be_detected(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def load_without_optimizer(state: Any, stored: dict[str, Any]) -> None:
        load_state_dict(state, {**stored, "optimizer": state.optimizer.state_dict()})

    monkeypatch.setattr(checkpointer, "load_state_dict", load_without_optimizer)
    run = train_with_interruption(recipe("sam", "mlp"), tmp_path / "run", 2)
    assert distance(weights(run), loop("sam", "mlp")) > 1e-6
