"""The trainer: validation samples, selection of weights, early stopping, and logs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import blobs, weight_files, weights_path
from safetensors import safe_open

from plateaux.config.builders.data import build_data, train_val_split
from plateaux.data.sources import InMemorySource
from plateaux.evaluation.evaluate import evaluate
from plateaux.training.train import train


@pytest.mark.parametrize("share", ["0.25", "7"])
def test_validation_samples_are_never_trained_on(tmp_path: Path, share: str) -> None:
    what = blobs(f"data.validation_split={share}", "train.epochs=2")
    data = build_data(what)
    train_ids, valid_ids = train_val_split(what, data)
    assert len(valid_ids) == (12 if share == "0.25" else 7)
    assert sorted([*train_ids.tolist(), *valid_ids.tolist()]) == list(range(48))
    used: set[tuple[str, int]] = set()
    train(what, tmp_path, data=record_samples(data, used))
    trained = {i for kind, i in used if kind == "train"}
    assert trained == set(train_ids.tolist())
    assert trained.isdisjoint(valid_ids.tolist())


def record_samples(data: Any, used: set[tuple[str, int]]) -> Any:
    """Return the data with a training source that records its samples; with gradients enabled, they are trained on."""

    class RecordingSource(InMemorySource):
        def fetch(self, ids: torch.Tensor, *, seed: int | None = None) -> Any:
            kind = "train" if torch.is_grad_enabled() else "validation"
            used.update((kind, int(i)) for i in ids)
            return super().fetch(ids)

    return replace(data, train=RecordingSource(data.train.x, data.train.y))


def test_the_best_weights_are_selected_and_described(tmp_path: Path) -> None:
    # The learning rate becomes far too large later.
    later = 'lr_scheduler=[{name="multistep", milestones=[4], gamma=1000}]'
    what = blobs("data.validation_split=16", "train.select=best:nll", "train.epochs=8", later)
    run = train(what, tmp_path)
    (result,) = evaluate(tmp_path, split="validation", metrics=["nll"])
    for number in range(2):
        lines = [line for line in run.log(number) if "validation nll" in line]
        assert len(lines) == 8
        best = min(lines, key=lambda line: line["validation nll"])
        progress = run.progress(number)
        assert (progress.best_epoch, progress.best) == (best["epoch"], best["validation nll"])
        assert progress.weights_source == f"epoch {best['epoch']}, the best nll on validation samples"
        assert result.rows[f"member {number}"].value == pytest.approx(best["validation nll"], rel=1e-6)
        with safe_open(weights_path(tmp_path, number), framework="pt") as file:
            assert file.metadata()["epoch"] == str(best["epoch"])
    assert any(run.progress(n).best_epoch < 8 for n in range(2))


def test_the_last_weights_are_described(tmp_path: Path) -> None:
    assert train(blobs(), tmp_path).progress(1).weights_source == "epoch 4, the last"


def test_early_stopping_ends_a_member_and_stores_the_reason(tmp_path: Path) -> None:
    # With lr = 0, the first validation is never improved.
    what = blobs(
        "data.validation_split=16", "train.early_stopping_patience=2", "train.epochs=9", "optimizer.lr=[0.0, 0.05]"
    )
    run = train(what, tmp_path)
    frozen, improving = run.all_progress()
    assert (frozen.epoch, frozen.stop_reason, frozen.finished) == (3, "no improvement for 2 validations", True)
    assert frozen.weights_source == "epoch 3, the last"
    assert improving.epoch > 3
    assert train(what, tmp_path).all_progress() == [frozen, improving]


def test_validation_can_run_every_few_epochs(tmp_path: Path) -> None:
    run = train(blobs("data.validation_split=16", "train.validate_every=2", "train.epochs=5"), tmp_path)
    assert [line["epoch"] for line in run.log(0) if "validation nll" in line] == [2, 4]


def test_the_log_does_not_depend_on_when_checkpoints_are_written(tmp_path: Path) -> None:
    often = train(blobs("run.checkpoint_every_minutes=1e-9", "run.log_every=2", "optimizer.lr=0.3"), tmp_path / "often")
    never = train(blobs("run.checkpoint_every_epochs=4", "run.log_every=2", "optimizer.lr=0.3"), tmp_path / "never")
    assert len(often.progress(0).log_parts) == 12
    assert len(never.progress(0).log_parts) == 1
    assert often.log(0) == never.log(0)
    assert [line["step"] for line in often.log(0) if "step" in line] == [2, 3] * 4
    assert weight_files(often) == weight_files(never)


@pytest.mark.usefixtures("rng_unchanged")
def test_training_does_not_use_the_global_generator(tmp_path: Path) -> None:
    train(blobs("method.name=sam", "data.validation_split=8"), tmp_path)


def test_deterministic_sets_the_flag_during_training(tmp_path: Path) -> None:
    flags = []
    train(
        blobs("train.deterministic=true"),
        tmp_path,
        progress=lambda _: flags.append(torch.are_deterministic_algorithms_enabled()),
    )
    assert flags
    assert all(flags)
    assert not torch.are_deterministic_algorithms_enabled()
