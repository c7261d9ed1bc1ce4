"""Training survives failures: divergence, a full disk, damaged files, signals, and interruptions."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import blobs, weight_files, weights_path

from plateaux.config.builders.data import build_training_data
from plateaux.config.components import Components
from plateaux.config.experiment import Experiment
from plateaux.config.recipe import Recipe
from plateaux.core.errors import DataError, DivergedError, Interrupted, RecipeError, RunError, StorageError
from plateaux.core.progress import MemberUpdate, Progress, ProgressEvent
from plateaux.storage.local_store import SCRATCH_PREFIX
from plateaux.storage.member_writer import MemberWriter
from plateaux.storage.run import MemberProgress, Run
from plateaux.storage.run_info import DataInfo, RunInfo
from plateaux.storage.store import Store
from plateaux.training.loop import trainer
from plateaux.training.loop.offload import offload_to_disk
from plateaux.training.loop.state import TrainState
from plateaux.training.recipe_rules import check
from plateaux.training.train import train

CASES = Components(trust=("cases",))


def stop_after(epoch: int, number: signal.Signals = signal.SIGTERM) -> Progress:
    """Return a progress callback that sends a signal to this process after an epoch."""

    def stop(event: ProgressEvent) -> None:
        if isinstance(event, MemberUpdate) and event.completed_epoch == epoch:
            os.kill(os.getpid(), number)

    return stop


def train_interrupted(what: Recipe, out: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Train with a stop in the middle of an epoch, requested while a checkpoint is written; then resume."""
    real_fsync, calls = os.fsync, []

    def sync(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 22:
            os.kill(os.getpid(), signal.SIGTERM)
        real_fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", sync)
        with pytest.raises(Interrupted):
            train(what.replaced(run={"checkpoint_every_minutes": 1e-9}), out, **CASES.keywords())
    assert Run.open(out).progress(0).step > 0
    return train(what, out, **CASES.keywords())


OPTIMIZERS = [
    'optimizer={name="SGD", lr=0.1, momentum=0.9, nesterov=true}',
    'optimizer={name="Adam", lr=0.01, amsgrad=true}',
    'optimizer={name="AdamW", lr=0.01, weight_decay=0.1, betas=[0.8, 0.9]}',
    'optimizer={name="RMSprop", lr=0.01, momentum=0.5, centered=true}',
    'optimizer={name="Adagrad", lr=0.1}',
    'optimizer={name="NAdam", lr=0.01}',
    'optimizer={name="Rprop", lr=0.01}',
    'optimizer={name="ASGD", lr=0.01}',
    'optimizer={name="Adadelta", lr=1.0}',
    'optimizer={name="Adamax", lr=0.01}',
    'optimizer={name="RAdam", lr=0.01}',
    'optimizer={name="SGD", lr=[0.1, 0.2], momentum=0.9, max_grad_norm=0.5, decay_filter="matrices", weight_decay=0.1}',
]
SCHEDULES = [
    'lr_scheduler=[{name="cosine", interval="step"}]',
    'lr_scheduler=[{name="multistep", milestones=[1, 3]}]',
    'lr_scheduler=[{name="linear", epochs=1.5, start_factor=0.1, interval="step"}, {name="cosine", interval="step"}]',
    'lr_scheduler=[{name="OneCycleLR", interval="step", max_lr=0.3, total_steps=13}]',
    'lr_scheduler=[{name="CosineAnnealingWarmRestarts", T_0=1, T_mult=2}]',
    'lr_scheduler=[{name="exponential", gamma=0.5}]',
    'lr_scheduler=[{name="CyclicLR", base_lr=0.01, max_lr=0.1, interval="step", step_size_up=2}]',
]
MORE = [
    "method.name=gsam",
    "train.precision=bf16",
    "train.precision=fp64",
    "executor.mode=vmap",
    "executor.mode=offload",
    "data.shuffle=shared",
    "optimizer.gradient_accumulation_steps=3",
    'model={name="mlp", hidden_sizes=[6, 6], sparsity=0.5}',
    'model={name="cases:dropping", width=6}',
    'method={name="cases:apart", rho=0.1}',
]


@pytest.mark.parametrize("change", [*OPTIMIZERS, *SCHEDULES, *MORE])
def test_a_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    what = blobs("optimizer.momentum=0.9", change)
    full = train(what, tmp_path / "full", **CASES.keywords())
    again = train_interrupted(what, tmp_path / "again", monkeypatch)
    assert weight_files(again) == weight_files(full)
    assert [again.log(n) for n in range(2)] == [full.log(n) for n in range(2)]


def test_the_message_of_a_stop_states_the_epoch_and_how_to_resume(tmp_path: Path) -> None:
    with pytest.raises(
        Interrupted, match=r"Stopped at epoch 2, step 0, with a checkpoint\. Run the same command again to"
    ):
        train(blobs(), tmp_path, progress=stop_after(2))
    assert [p.position for p in Run.open(tmp_path).all_progress()] == [(2, 0)] * 2


def test_an_epoch_of_one_step_can_be_stopped(tmp_path: Path) -> None:
    what = blobs("data.batch_size=48", "train.epochs=30", "run.checkpoint_every_epochs=1000")
    with pytest.raises(Interrupted, match="Stopped at epoch 2, step 0, with a checkpoint"):
        train(what, tmp_path / "again", progress=stop_after(2))
    assert [p.position for p in Run.open(tmp_path / "again").all_progress()] == [(2, 0)] * 2
    assert weight_files(train(what, tmp_path / "again")) == weight_files(train(what, tmp_path / "full"))


def test_a_stop_before_the_first_checkpoint_does_not_claim_that_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the processes of a pool start: no member has trained a step."""

    def stop(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("plateaux.distributed.process_pool._assign_job", stop)
    message = r"^Stopped\. Run the same command again to resume\. These members have no checkpoint yet .*: 0, 1$"
    with pytest.raises(Interrupted, match=message):
        train(blobs("executor.processes=2"), tmp_path / "run")


def test_epochs_of_one_step_are_also_checkpointed_by_time(tmp_path: Path) -> None:
    what = blobs(
        "data.batch_size=48", "run.checkpoint_every_epochs=1000", "run.checkpoint_every_minutes=1e-9", "train.epochs=3"
    )
    assert len(train(what, tmp_path).progress(0).log_parts) == 3


def test_after_a_stop_in_the_last_epoch_no_other_job_starts(tmp_path: Path) -> None:
    what = blobs("executor.mode=offload", "train.epochs=2")
    with pytest.raises(Interrupted, match="Run the same command again to resume"):
        train(what, tmp_path, progress=stop_after(2))
    assert [p.finished for p in Run.open(tmp_path).all_progress()] == [True, False]
    assert [p.finished for p in train(what, tmp_path).all_progress()] == [True, True]


def test_signal_handlers_are_restored(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    train(blobs("train.epochs=1"), tmp_path)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize("mode", ["loop", "offload", "vmap"])
def test_a_member_that_diverges_is_named_and_the_others_continue(tmp_path: Path, mode: str) -> None:
    what = blobs("members=3", "optimizer.lr=[0.1, 1e30, 0.1]", f"executor.mode={mode}")
    with pytest.raises(DivergedError, match=r"Loss of member 1 became NaN or infinite at epoch 0, step \d") as error:
        train(what, tmp_path / "run")
    assert "Lower optimizer.lr" in str(error.value)
    run = Run.open(tmp_path / "run")
    assert [p.finished for p in run.all_progress()] == [True, False, True]
    stable = train(blobs("members=3", f"executor.mode={mode}"), tmp_path / "stable")
    assert [weight_files(stable)[n] for n in (0, 2)] == [weights_path(tmp_path / "run", n).read_bytes() for n in (0, 2)]


def test_after_divergence_the_last_checkpoint_can_be_loaded(tmp_path: Path) -> None:
    # The learning rate explodes in the third epoch.
    what = blobs("members=1", 'lr_scheduler=[{name="multistep", milestones=[2], gamma=1e30}]')
    with pytest.raises(DivergedError, match=r"at epoch 2, step \d\. Its checkpoint of epoch 2, step 0 is intact"):
        train(what, tmp_path)
    run = Run.open(tmp_path)
    assert run.progress(0).position == (2, 0)
    state = run.store.get_state(run.progress(0).checkpoints[-1][2])
    assert all(torch.isfinite(tensor).all() for tensor in state["params"].values())
    with pytest.raises(DivergedError):
        train(what, tmp_path)


def test_weights_with_nan_or_infinity_are_never_written(tmp_path: Path) -> None:
    # A single step: its loss is finite, but the weights after it are not.
    what = blobs(
        "members=1", "data.batch_size=48", "train.epochs=1", "optimizer.lr=1e30", "run.checkpoint_every_minutes=1e-9"
    )
    with pytest.raises(DivergedError, match="It has no checkpoint"):
        train(what, tmp_path)
    assert not Run.open(tmp_path).progress(0).finished
    assert Run.open(tmp_path).store.names("members") == ["members/0/progress.json"]


def test_joint_members_diverge_together(tmp_path: Path) -> None:
    what = blobs("optimizer.lr=[0.1, 1e30]", 'method={name="cases:apart"}')
    with pytest.raises(DivergedError, match="Loss of member"):
        train(what, tmp_path, **CASES.keywords())
    assert [p.finished for p in Run.open(tmp_path).all_progress()] == [False, False]


@pytest.mark.parametrize("call", [5, 11, 17, 23])
def test_a_full_disk_is_reported_and_the_run_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    real_fsync, calls = os.fsync, []

    def failing_fsync(handle: int) -> None:
        calls.append(handle)
        if len(calls) >= call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_fsync(handle)

    monkeypatch.setattr(os, "fsync", failing_fsync)
    with pytest.raises(
        StorageError, match=r"The disk is full: cannot write .*Free some space and run the same command"
    ):
        train(blobs(), tmp_path / "again")
    monkeypatch.setattr(os, "fsync", real_fsync)
    for progress in Run.open(tmp_path / "again").all_progress():
        for *_, name in progress.checkpoints:
            Run.open(tmp_path / "again").store.get_state(name)
    assert weight_files(train(blobs(), tmp_path / "again")) == weight_files(train(blobs(), tmp_path / "full"))


def test_a_damaged_checkpoint_is_named_and_its_folder_may_be_deleted(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(blobs(), tmp_path / "again", progress=stop_after(2))
    run = Run.open(tmp_path / "again")
    name = run.progress(1).checkpoints[-1][2]
    run.store.put(name, run.store.get(name)[:100])
    with pytest.raises(
        StorageError, match=r"members/1/resume-2-0-\w+\.pt is damaged.*delete members/1 and run the same"
    ):
        train(blobs(), tmp_path / "again")
    for name in run.store.names("members/1"):
        run.store.delete(name)
    assert weight_files(train(blobs(), tmp_path / "again")) == weight_files(train(blobs(), tmp_path / "full"))


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(blobs(), tmp_path, progress=stop_after(1))
    run = Run.open(tmp_path)
    run.store.delete(run.progress(0).checkpoints[-1][2])
    with pytest.raises(StorageError, match=r"Cannot read .*resume-1-0-\w+\.pt: No such file"):
        train(blobs(), tmp_path)


@pytest.mark.slow
def test_a_locked_member_is_skipped_and_the_others_are_trained(tmp_path: Path) -> None:
    what = blobs("executor.mode=offload")
    run = Run.begin(tmp_path, Experiment(what), RunInfo(DataInfo.from_splits(build_training_data(what))))
    with run.store.lock("members/0"), pytest.raises(RunError, match="members/0 is locked by another process"):
        train(what, tmp_path)
    assert [p.finished for p in Run.open(tmp_path).all_progress()] == [False, True]


def test_several_failures_are_reported_together(tmp_path: Path) -> None:
    what = blobs("executor.mode=offload", "optimizer.lr=1e30")
    with pytest.raises(RunError) as error:
        train(what, tmp_path)
    first, *lines = str(error.value).splitlines()
    assert (
        first == "Some jobs failed, and the others are finished. Run the same command again to resume the failed ones:"
    )
    assert [line.split(":")[0].strip() for line in lines] == [
        "train member 0 from epoch 0 to epoch 4",
        "train member 1 from epoch 0 to epoch 4",
    ]


def test_offloaded_joint_members_are_resident_when_their_weights_are_written(tmp_path: Path) -> None:
    what = blobs('method={name="cases:apart"}', "optimizer.momentum=0.9")
    loop = train(what, tmp_path / "loop", **CASES.keywords())
    offloaded = train(what.replaced(executor={"mode": "offload"}), tmp_path / "offload", **CASES.keywords())
    assert weight_files(offloaded) == weight_files(loop)
    assert not list((tmp_path / "offload").glob(f"{SCRATCH_PREFIX}*"))


def test_offloaded_joint_members_are_in_memory_one_at_a_time_in_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: set[int] = set()
    most = 0

    def counted(scratch: Store) -> Any:
        load = offload_to_disk(scratch)

        @contextmanager
        def resident(state: TrainState) -> Iterator[None]:
            nonlocal most
            with load(state):
                numbers.add(state.number)
                most = max(most, len(numbers))
                yield
                numbers.discard(state.number)

        return resident

    monkeypatch.setattr(trainer, "offload_to_disk", counted)
    what = blobs('method={name="cases:apart"}', "train.epochs=1", 'executor.mode="offload"')
    train(what, tmp_path / "run", **CASES.keywords())
    assert most == 1


def test_joint_members_fall_back_by_at_most_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from plateaux.training.planning import plan

    what = blobs('method={name="cases:apart"}', "optimizer.momentum=0.9")
    full = train(what, tmp_path / "full", **CASES.keywords())
    real_commit, commits = MemberWriter.commit, 0

    def commit(writer: MemberWriter, progress: MemberProgress, **options: bool) -> None:
        nonlocal commits
        commits += 1
        if commits == 4:  # two members: after the second checkpoint of the first member
            raise KeyboardInterrupt
        real_commit(writer, progress, **options)

    monkeypatch.setattr(MemberWriter, "commit", commit)
    starts = []
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            train(what, tmp_path / "again", **CASES.keywords())
        starts += [job.start for job in plan(what, Run.open(tmp_path / "again").all_progress(), is_joint=True)]
        commits = 2  # the next attempt is interrupted at its first checkpoint, between its members
    assert starts == [(1, 0)] * 3
    monkeypatch.setattr(MemberWriter, "commit", real_commit)
    assert weight_files(train(what, tmp_path / "again", **CASES.keywords())) == weight_files(full)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["train.select=best:expected_entropy", "data.validation_split=0.1"],
            "neither high nor low values of expected_entropy are better",
        ),
        (["train.select=best:oracle", "data.validation_split=0.1"], "oracle is not defined for a single member"),
        (["train.select=best:accuracy"], "needs validation samples; set data.validation_split"),
        (["train.early_stopping_patience=2"], "needs validation samples; set data.validation_split"),
        (
            ["train.select=best:acuracy", "data.validation_split=0.1"],
            "There is no metric called 'acuracy'; did you mean 'accuracy'",
        ),
        (["optimizer.lr=[0.1, 0.2, 0.3]"], "optimizer.lr lists 3 values, but the ensemble has 2 members"),
        (["optimizer.name=SDG"], "no optimizer 'SDG'"),
        (["optimizer.name=Rprop", "optimizer.weight_decay=0.1"], "Rprop has no weight_decay; remove it"),
        (["method.name=sma"], "There is no method called 'sma'; did you mean"),
        (["model.hiden_sizes=[3]"], "has no key 'hiden_sizes'; did you mean 'hidden_sizes'"),
        (['lr_scheduler=[{name="cosine", interval="step"}, {name="linear"}]'], "lr_scheduler"),
        (["loss.name=mse"], "regression"),
    ],
)
def test_invalid_recipes_are_rejected_before_anything_is_written(
    tmp_path: Path, changes: list[str], message: str
) -> None:
    with pytest.raises(RecipeError, match=message.replace(".", r"\.")):
        train(blobs(*changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["train.early_stopping_patience=2", "data.validation_split=0.1"], "none can stop early"),
        (["train.precision=fp16"], "share one loss, which cannot be scaled"),
        (["data.shuffle=per_member"], "data.shuffle must be 'shared'"),
        (["loss.label_smoothing=[0.0, 0.1]"], "its options cannot differ"),
    ],
)
def test_invalid_recipes_of_joint_members_are_rejected(changes: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check(Experiment(blobs('method={name="cases:apart"}', *changes), CASES))


def test_check_returns_whether_members_are_trained_jointly() -> None:
    assert check(Experiment(blobs())) is False
    assert check(Experiment(blobs('method={name="cases:apart"}'), CASES)) is True


def test_missing_data_are_reported_before_anything_is_written(tmp_path: Path) -> None:
    what = blobs(f'data={{name="arrays", path="none.npz", root="{tmp_path}"}}')
    with pytest.raises(DataError, match="was not found"):
        train(what, tmp_path / "run")
    assert not (tmp_path / "run").exists()
