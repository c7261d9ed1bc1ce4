"""Writers of one member: claims, names of their own, commits, and what a writer that was stopped can still do."""

from __future__ import annotations

import os
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import NO_DATA, blobs, weight_files, weights_path
from reference.commit_protocol import Rules, explore
from typer.testing import CliRunner

from plateaux.cli.main import app
from plateaux.config.experiment import Experiment
from plateaux.core.errors import RunError, StorageError
from plateaux.storage.local_store import LocalStore
from plateaux.storage.member_writer import write_member
from plateaux.storage.run import MemberProgress, Run
from plateaux.training.train import train

SMALL = blobs("members=1", "data.samples=30", "data.test_samples=9", "model.hidden_sizes=[4]", "train.epochs=2")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A new run in a folder that has no locks, as a bucket."""
    monkeypatch.setattr(LocalStore, "has_locks", False)
    monkeypatch.setattr(LocalStore, "lock", lambda *_, **__: nullcontext())
    return Run.begin(tmp_path, Experiment(SMALL), NO_DATA)


def test_no_interleaving_of_writers_loses_an_object() -> None:
    for writers, commits in ((2, 3), (3, 2)):
        states, lost = explore(writers, commits)
        assert states > 900
        assert lost is None


@pytest.mark.parametrize(
    "rules",
    [Rules(lists_before_claim=False), Rules(unique_names=False, conditional_commit=False, claims=False)],
    ids=["listing after the claim", "common names without conditions"],
)
def test_other_protocols_lose_an_object(rules: Rules) -> None:
    assert explore(3, 2, rules)[1] is not None


def test_a_writer_that_was_stopped_can_neither_commit_nor_delete(run: Run) -> None:
    with write_member(run, 0) as first:
        old = first.put_weights({"w": torch.zeros(1)}, epoch=1)
        first.commit(MemberProgress(epoch=1, weights=old))
        late = first.put_weights({"w": torch.ones(1)}, epoch=2, best=True)
        run.release_claims()
        with write_member(run, 0) as second:
            assert second.progress.weights == old
            assert not run.store.has(late)  # no progress names it
            new = second.put_weights({"w": torch.full((1,), 2.0)}, epoch=2)
            second.commit(MemberProgress(epoch=2, finished=True, weights=new), release=True)
        before = run.store.get("members/0/progress.json")
        with pytest.raises(RunError, match=r"Another process has taken over .*members/0, so this one stops"):
            first.commit(MemberProgress(epoch=2, weights=first.put_weights({"w": torch.ones(1)}, epoch=2)))
    assert run.store.get("members/0/progress.json") == before
    assert float(run.weights(0)["w"]) == 2
    assert run.progress(0).claim is None


def test_a_claim_is_refused_with_its_process_and_age_until_it_is_taken_over(run: Run) -> None:
    with write_member(run, 0, session="one"):
        with pytest.raises(RunError) as error, write_member(run, 0, session="two"):
            pass
        assert re.search(
            rf"members/0 is claimed by process {os.getpid()} on this machine since 20\d\d-.* UTC \(\d s ago\)\. .*"
            r"--take-over \(plateaux\.open_run\(path\)\.release_claims\(\)\)",
            str(error.value),
        )
        run.release_claims()
        with write_member(run, 0, session="two"):
            pass


def test_a_claim_of_the_same_training_is_replaced(run: Run) -> None:
    with write_member(run, 0, session="one") as lost, write_member(run, 0, session="one") as retry:
        assert run.progress(0).claim == retry.progress.claim
        with pytest.raises(RunError, match="has taken over"):
            lost.commit(MemberProgress(epoch=1))


def test_training_refuses_a_claimed_member_and_continues_once_it_is_taken_over(run: Run, tmp_path: Path) -> None:
    out = Path(str(run)) / "run"
    with write_member(train(SMALL, out), 0) as stopped:
        stopped.commit(replace(MemberProgress(), seconds=1.0))
        with pytest.raises(RunError, match="is claimed by process"):
            train(SMALL, out)
        Run.open(out).release_claims()
        finished = train(SMALL, out)
    assert finished.progress(0).finished
    assert weight_files(finished) == weight_files(train(SMALL, tmp_path / "whole"))


def test_the_command_line_shows_claims_and_takes_them_over(run: Run, tmp_path: Path) -> None:
    recipe, out = tmp_path / "recipe.txt", tmp_path / "run"
    recipe.write_text(SMALL.to_toml())
    command = ["train", str(recipe), "--out", str(out), "--no-evaluate"]
    with write_member(Run.begin(out, Experiment(SMALL), NO_DATA), 0):
        assert re.search(r"claimed \d s ago", CliRunner().invoke(app, ["status", str(out)]).stdout)
        refused = CliRunner().invoke(app, [*command, "--accept-changes"])
        assert (refused.exit_code, "--take-over" in refused.stderr) == (4, True)
        assert CliRunner().invoke(app, [*command, "--accept-changes", "--take-over"]).exit_code == 0
    assert "finished" in CliRunner().invoke(app, ["status", str(out)]).stdout
    assert CliRunner().invoke(app, [*command, "--take-over"]).exit_code == 0


def test_a_claim_that_a_dead_process_left_on_a_disk_is_replaced(tmp_path: Path) -> None:
    run = Run.begin(tmp_path, Experiment(SMALL), NO_DATA)
    writer = write_member(run, 0)
    claim = writer.__enter__().progress.claim
    left = run.store.get("members/0/progress.json")
    writer.__exit__(None, None, None)
    run.store.put("members/0/progress.json", left)
    with write_member(run, 0) as other:
        assert claim is not None
        assert other.progress.claim not in (None, claim)


def test_only_objects_of_the_member_are_deleted_whatever_its_progress_names(run: Run) -> None:
    names = ("recipe.toml", "members/1/weights-0123abcd.safetensors", "members/0/notes.txt")
    for name in names[1:]:
        run.store.put(name, b"precious")
    with write_member(run, 0) as writer:
        digests = dict.fromkeys(names, "sha256:0:0")
        writer.commit(MemberProgress(log_parts=names, digests=digests))
        writer.commit(MemberProgress())
    assert all(run.store.has(name) for name in names)


def test_training_refuses_a_run_whose_finished_weights_are_missing(tmp_path: Path) -> None:
    run = train(SMALL, tmp_path)
    weights_path(tmp_path, 0).unlink()
    with pytest.raises(
        StorageError, match=r"weights-\w+\.safetensors is missing\. .*delete members/0 and run the same"
    ):
        train(SMALL, tmp_path)
    for name in run.store.names("members/0"):
        run.store.delete(name)
    assert train(SMALL, tmp_path).progress(0).finished


@pytest.mark.process
def test_stores_without_conditional_writes_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    with pytest.raises(StorageError, match=r"has no conditional writes, .* Train and calibrate on a disk or in s3://"):
        train(SMALL, f"memory://{tmp_path}/run")
