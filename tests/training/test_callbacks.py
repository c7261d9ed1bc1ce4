"""Callbacks of training: what they get, where they run, and what happens if one raises."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cases import blobs

import plateaux
from plateaux.core.errors import RecipeError, RunError
from plateaux.storage.run import Run, partition_summary_path
from plateaux.storage.run_info import StoredPartition

CHANGES = ("data.validation_split=12", "train.epochs=3", "run.checkpoint_every_epochs=2")


class Collecting(plateaux.Callback):
    """Collects its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def on_epoch_end(self, run: Run, member: int, epoch: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(("epoch", member, epoch, dict(metrics), os.getpid()))

    def on_checkpoint(self, run: Run, member: int, epoch: int, step: int) -> None:
        assert (epoch, step) in [known[:2] for known in run.progress(member).checkpoints] or epoch == 3
        self.calls.append(("checkpoint", member, epoch, step))

    def on_partition(self, run: Run, epoch: int, partition: StoredPartition) -> None:
        self.calls.append(("partition", epoch, partition))


class Failing(plateaux.Callback):
    """Raises after the second epoch of member 0."""

    def on_epoch_end(self, run: Run, member: int, epoch: int, metrics: Mapping[str, float]) -> None:
        if (member, epoch) == (0, 2):
            raise LookupError("the metric is not there")


@pytest.mark.process
@pytest.mark.parametrize("processes", [1, 2])
def test_callbacks_run_in_this_process_after_epochs_and_checkpoints(tmp_path: Path, processes: int) -> None:
    collecting = Collecting()
    recipe = blobs(*CHANGES, f"executor.processes={processes}")
    run = plateaux.train(recipe, tmp_path / "run", callbacks=[collecting])
    for member in (0, 1):
        lines = [line for line in run.log(member) if "train loss" in line]
        calls = [call for call in collecting.calls if call[1] == member]
        epochs = [call for call in calls if call[0] == "epoch"]
        assert [{"epoch": call[2], **call[3]} for call in epochs] == lines
        assert {call[4] for call in epochs} == {os.getpid()}
        assert [call[2:] for call in calls if call[0] == "checkpoint"] == [(2, 0), (3, 0)]
    plateaux.train(recipe, tmp_path / "run", callbacks=[again := Collecting()])
    assert again.calls == []


def test_a_callback_gets_the_summary_of_a_data_partition(tmp_path: Path) -> None:
    collecting = Collecting()
    recipe = blobs(*CHANGES, "method.name=sharpbalance", "run.checkpoint_every_epochs=1")
    run = plateaux.train(recipe, tmp_path / "run", callbacks=[collecting])
    ((_, epoch, partition),) = [call for call in collecting.calls if call[0] == "partition"]
    assert partition == run.partition_summary(partition_summary_path(epoch))
    position = [call[0] for call in collecting.calls].index("partition")
    assert {call[2] for call in collecting.calls[:position] if call[0] == "epoch"} == set(range(1, epoch + 1))


@pytest.mark.process
@pytest.mark.parametrize("processes", [1, 2])
def test_an_exception_of_a_callback_stops_training_and_is_named(tmp_path: Path, processes: int) -> None:
    recipe = blobs(*CHANGES, f"executor.processes={processes}", "run.checkpoint_every_epochs=1")
    with pytest.raises(
        RunError, match=r"the callback Failing\.on_epoch_end raised LookupError: the metric is not there\. Fix the"
    ) as error:
        plateaux.train(recipe, tmp_path / "run", callbacks=[Failing()])
    assert isinstance(error.value.__cause__, LookupError)
    first, second = Run.open(tmp_path / "run").all_progress()
    assert not first.finished
    if processes == 1:
        assert first.epoch == 1
        assert second.epoch == 1  # other members are not trained on
    run = plateaux.train(recipe, tmp_path / "run")
    assert run.log(0) == plateaux.train(recipe, tmp_path / "whole").log(0)


@pytest.mark.parametrize(("given", "name"), [(Failing, "the class Failing"), (print, "a builtin_function_or_method")])
def test_an_object_without_callback_methods_is_rejected_before_anything_is_written(
    given: Any, name: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=f"callbacks= contains {name}. Expected: objects"):
        plateaux.train(blobs(*CHANGES), tmp_path / "run", callbacks=[given])
    assert not (tmp_path / "run").exists()
