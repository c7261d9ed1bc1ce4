"""A run folder in a bucket: atomic objects, retries, and a lease instead of a file lock."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread, Timer
from typing import Any

import numpy as np
import pytest
import torch
from cases import GIVEN, distance, recipe, weights
from s3_server import Flaky, serving
from waiting import wait_until

import plateaux
from plateaux.core.errors import RecipeError, RunError, StorageError
from plateaux.storage import lease, remote_fs
from plateaux.storage.local_store import LocalStore
from plateaux.storage.remote_fs import Address, RemoteFS, parse_address
from plateaux.storage.remote_store import RemoteStore, open_store
from plateaux.storage.run import Run
from plateaux.storage.store import Store

pytest.importorskip("fsspec", reason="fsspec is not installed")
pytestmark = [pytest.mark.nightly, pytest.mark.process]  # an S3 server that fails one request of twenty


@pytest.fixture(scope="module")
def server() -> Iterator[Flaky]:
    with serving() as made:
        yield made


@pytest.fixture(params=["memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "s3":
        request.getfixturevalue("server")
        return open_store(f"s3://bucket/{tmp_path.name}")
    return open_store(f"memory://{tmp_path}")


@pytest.mark.parametrize(
    ("root", "address"),
    [
        ("s3://bucket/runs/demo", "s3://bucket/runs/demo"),
        ("s3://bucket/runs/demo/", "s3://bucket/runs/demo"),
        (Path("s3://bucket/runs"), "s3://bucket/runs"),  # a Path leaves one slash
        ("memory:///tmp/x", "memory://tmp/x"),
        ("runs/demo", None),
        ("/runs/demo", None),
        ("c:/runs", None),
    ],
)
def test_urls_are_distinguished_from_paths(root: str | Path, address: str | None) -> None:
    assert parse_address(root) == address
    assert isinstance(open_store("runs/x"), LocalStore)


def test_a_slash_appends_to_an_address() -> None:
    assert Address("s3://b/run") / "members" / 3 == "s3://b/run/members/3"


def test_file_urls_are_rejected() -> None:
    with pytest.raises(RecipeError, match="give the path itself"):
        parse_address("file:///data/runs/demo")


def test_credentials_in_a_url_are_rejected_and_not_printed() -> None:
    with pytest.raises(RecipeError, match="environment") as error:
        parse_address("s3://me:secret@bucket/run")
    assert "secret" not in str(error.value)


def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_fs, "find_spec", lambda name: None if name == "s3fs" else True)
    with pytest.raises(RecipeError, match=r"needs s3fs: pip install s3fs, or \"plateaux\[cloud\]\""):
        RemoteFS(Address("s3://bucket/run"))


def test_objects_are_written_read_listed_and_deleted(store: Store) -> None:
    store.put("a/b.bin", b"one")
    store.put("a/b.bin", b"three")
    store.put("a/.hidden", b"x")
    store.put_json("c.json", {"x": 1})
    assert (store.get("a/b.bin"), store.get_json("c.json")) == (b"three", {"x": 1})
    assert store.names() == ["a/b.bin", "c.json"]
    assert store.names("a") == ["a/b.bin"]
    assert store.names("nowhere") == []
    assert store.size("a") == 5
    assert store.has("a/b.bin")
    assert not store.has("a")
    store.remove_partial("a")
    store.delete("a/b.bin")
    store.delete("a/b.bin")
    assert not store.has("a/b.bin")
    with pytest.raises(StorageError, match=r"Cannot read .*://.*a/b\.bin"):
        store.get("a/b.bin")


def test_a_failed_write_keeps_the_old_object(store: Store) -> None:
    store.put("x", b"old")

    def half(file: Any) -> None:
        file.write(b"ne")
        raise KeyError

    with pytest.raises(KeyError):
        store.put("x", half)
    assert store.get("x") == b"old"
    assert isinstance(store, RemoteStore)
    assert not list(store._folder.iterdir())


@pytest.mark.parametrize("name", ["../x", "/x", "a/../b", ""])
def test_names_outside_the_root_are_rejected(store: Store, name: str) -> None:
    for touch in (store.get, store.has, store.delete, lambda n: store.put(n, b"")):
        with pytest.raises(StorageError, match="is not a valid object name"):
            touch(name)


def test_tensors_states_and_arrays_can_be_read_back(store: Store) -> None:
    tensors = {"w": torch.randn(3, 2), "b": torch.arange(4)}
    store.put_tensors("t.safetensors", tensors, {"format": "pt"})
    assert all(torch.equal(store.get_tensors("t.safetensors")[name], tensors[name]) for name in tensors)
    store.put_state("s.pt", {"n": 3, "t": tensors["w"]})
    assert torch.equal(store.get_state("s.pt")["t"], tensors["w"])
    for round_ in range(2):  # the local copy is replaced when the object has changed
        numbers = np.arange(10, dtype=np.float32) + round_
        with store.array_writer("n.safetensors", np.float32, 10, {"metadata": "it"}) as write:
            write(numbers[:4])
            write(numbers[4:])
        metadata, mapped = store.get_array("n.safetensors")
        assert metadata == {"metadata": "it"}
        np.testing.assert_array_equal(mapped, numbers)
        np.testing.assert_array_equal(np.concatenate(list(store.iter_array("n.safetensors", 3))), numbers)
        time.sleep(0.01)
    with store.scratch() as scratch:
        scratch.put("x", b"1")
        assert scratch.get("x") == b"1"


# --- Requests that fail


class FlakyFiles:
    """A file system that fails N times before it answers."""

    def __init__(self, times: int, problem: Exception) -> None:
        self.left, self.problem = times, problem

    def cat_file(self, path: str) -> bytes:
        self.left -= 1
        if self.left >= 0:
            raise self.problem
        return b"content"


def raise_error(problem: Exception) -> None:
    raise problem


def remote_fs_with(files: Any, monkeypatch: pytest.MonkeyPatch) -> RemoteFS:
    monkeypatch.setattr(remote_fs, "FIRST_DELAY_S", 0.0)
    made = RemoteFS(Address("memory://flaky"))
    made._files = files
    return made


def test_a_failed_request_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        remote_fs_with(FlakyFiles(remote_fs.MAX_ATTEMPTS - 1, TimeoutError("slow")), monkeypatch).read("x")
        == b"content"
    )
    with pytest.raises(StorageError, match=r"Cannot read memory://flaky/x: slow"):
        remote_fs_with(FlakyFiles(remote_fs.MAX_ATTEMPTS, TimeoutError("slow")), monkeypatch).read("x")


def test_permanent_errors_are_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    files = FlakyFiles(2, PermissionError("no"))
    with pytest.raises(PermissionError):
        remote_fs_with(files, monkeypatch).read("x")
    assert files.left == 1


class ClientError(Exception):
    """The error of a client, with a status code or with the name of an object in its message."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}} if status else None


def test_a_failed_condition_is_recognized_by_its_status_and_not_by_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = FlakyFiles(2, ClientError("cannot connect to .../members/412/progress.json"))
    assert remote_fs_with(files, monkeypatch).read("members/412/progress.json") == b"content"
    with pytest.raises(FileExistsError):
        remote_fs_with(FlakyFiles(2, ClientError("no", 412)), monkeypatch).read("x")
    with pytest.raises(FileExistsError):
        remote_fs_with(FlakyFiles(2, ClientError("PreconditionFailed: no")), monkeypatch).read("x")


# --- Leases


def change_lease(store: Store, name: str, **changes: Any) -> None:
    """Change fields of a lease."""
    fields = json.loads(store.get(f"{name}/.lease"))
    store.put(f"{name}/.lease", json.dumps({**fields, **changes}).encode())


def test_a_second_writer_is_rejected_while_the_first_holds_the_lease(store: Store) -> None:
    other = open_store(str(store.root))
    with store.lock("members/0"):
        assert store.is_locked("members/0")
        with pytest.raises(RunError, match=r"members/0/ is locked by another process \(pid \d+ on"):
            other.lock("members/0", timeout=0).__enter__()
        with other.lock("members/1", timeout=0):
            other.put("members/1/x", b"1")
    assert not store.is_locked("members/0")
    assert not store.is_locked("members/7")
    with other.lock("members/0", timeout=0):
        assert store.names("members/0") == []


@pytest.mark.parametrize("gone", [{"until": 0.0}, {"started": "0"}], ids=["expired", "its process is dead"])
def test_the_lease_of_a_dead_owner_is_taken_over_if_the_store_has_conditional_writes(
    store: Store, gone: dict[str, Any]
) -> None:
    assert isinstance(store, RemoteStore)
    with store.lock("m"):
        left = store.get("m/.lease")
    store.put("m/.lease", left)
    change_lease(store, "m", **gone)
    assert not store.is_locked("m")
    if store._fs.can_swap:
        with store.lock("m", timeout=0):
            assert store.is_locked("m")
        return
    with pytest.raises(RunError, match=r"delete memory://.*/m/\.lease and run this again"):
        store.lock("m", timeout=0).__enter__()
    store.delete("m/.lease")
    with store.lock("m", timeout=0):
        assert store.is_locked("m")


def test_the_lease_of_another_machine_is_valid_until_it_expires(store: Store) -> None:
    with store.lock("m"):
        change_lease(store, "m", host="elsewhere", started="0")
        assert store.is_locked("m")
        change_lease(store, "m", host="elsewhere", until=time.time() - lease.CLOCK_SLACK_S - 1)
        assert not store.is_locked("m")
        for content in (
            b"nonsense",
            b"[]",
            b'{"owner": 1, "until": []}',
            b"[" * 100_000,
            b'{"owner": "", "until": "x"}',
        ):
            store.put("m/.lease", content)
            assert not store.is_locked("m")
        store.put("m/.lease", b"nonsense")
        assert not store.is_locked("m")


def test_nothing_is_written_after_another_process_took_the_lease(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(store, RemoteStore)
    monkeypatch.setattr(lease, "LEASE_S", 3.0)
    other = open_store(str(store.root))
    with store.lock("m"):
        (mine,) = store._leases
        first = mine._valid_until
        wait_until(lambda: mine._valid_until > first)
        change_lease(other, "m", owner="another")
        wait_until(lambda: mine._is_lost)
        with pytest.raises(RunError, match="may be locked by another process"):
            store.put("m/x", b"3")
        store.put("n/x", b"4")
    assert not store.has("m/x")
    assert store.has("m/.lease")  # it belongs to another process


def test_a_deleted_lease_is_lost(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(store, RemoteStore)
    monkeypatch.setattr(lease, "LEASE_S", 0.3)
    with store.lock("m"):
        open_store(str(store.root)).delete("m/.lease")
        wait_until(lambda: store._leases[0]._is_lost)


def test_nothing_is_written_after_the_lease_expired(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(store, RemoteStore)
    monkeypatch.setattr(lease, "LEASE_S", 0.3)
    monkeypatch.setattr(lease, "read_owner", lambda *_: raise_error(StorageError("gone")))
    with store.lock("m"):
        wait_until(lambda: time.monotonic() > store._leases[0]._valid_until)
        with pytest.raises(RunError, match="could not renew"):
            store.put("m/x", b"1")
    assert store.has("m/.lease") is store._fs.can_swap  # it may have been taken over


def test_a_failed_renewal_is_repeated(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(store, RemoteStore)
    if not store._fs.can_swap:
        pytest.skip("this store has no conditions")
    monkeypatch.setattr(lease, "LEASE_S", 3.0)
    swap, refused = store._fs.swap, list[str]()
    monkeypatch.setattr(
        store._fs,
        "swap",
        lambda *a: swap(*a) if refused else bool(refused.append(a[0])),  # type: ignore[func-returns-value]
    )
    with store.lock("m"):
        first = store._leases[0]._valid_until
        wait_until(lambda: store._leases[0]._valid_until > first)
    assert refused == ["m/.lease"]


def test_a_lease_written_by_a_request_without_response_is_held(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(store, RemoteStore)
    create = store._fs.create
    monkeypatch.setattr(store._fs, "create", lambda *a: create(*a) and False)
    with store.lock("m", timeout=0):
        assert store.is_locked("m")


def test_a_waiting_process_gets_the_lease_after_its_release(store: Store) -> None:
    other, left = open_store(str(store.root)), Event()

    def hold() -> None:
        with store.lock("m"):
            there.set()
            left.wait(60)

    there = Event()
    holding = Thread(target=hold)
    holding.start()
    assert there.wait(60)
    Timer(0.3, left.set).start()
    with other.lock("m", timeout=60):
        assert left.is_set()
    holding.join()


def test_a_lease_that_can_neither_be_created_nor_read_is_an_error(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(store, RemoteStore)
    monkeypatch.setattr(store._fs, "create", lambda *_: False)
    with pytest.raises(RunError, match="run this again"):
        store.lock("m", timeout=0).__enter__()


def test_swap_replaces_an_object_only_if_it_is_unchanged(server: Flaky) -> None:
    bucket = RemoteFS(Address("s3://bucket/conditions"))
    assert bucket.create("x", b"1")
    assert not bucket.create("x", b"2")
    tag = bucket.etag("x")
    assert bucket.swap("x", b"3", tag)
    assert not bucket.swap("x", b"4", tag)
    assert bucket.read("x") == b"3"


class Empty:
    """A file system that raises an error for a prefix without objects."""

    def find(self, path: str, detail: bool) -> Any:
        raise FileNotFoundError(path)


def test_a_missing_prefix_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    assert remote_fs_with(Empty(), monkeypatch).sizes("x") == {}


def test_create_without_conditional_writes_checks_for_an_existing_object(tmp_path: Path) -> None:
    bucket = RemoteFS(Address(f"memory://{tmp_path}"))
    bucket.can_create = False
    assert bucket.create("m/.lease", b"1")
    assert not bucket.create("m/.lease", b"2")


# --- Whole runs


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sam", "sharpbalance", "apart"])
def test_a_run_in_a_flaky_bucket_ends_at_the_same_weights(method: str, tmp_path: Path) -> None:
    row = recipe(method, run={"checkpoint_every_epochs": 1})
    local = plateaux.train(row, tmp_path / "run", **GIVEN.keywords())
    with serving(share=0.05) as server:
        run = plateaux.train(row, f"s3://bucket/{method}", **GIVEN.keywords())
        assert distance(weights(local), weights(run)) == 0
        assert plateaux.pending_jobs(plateaux.Run.open(run, GIVEN)) == []
        results = plateaux.evaluate(plateaux.Run.open(Path(f"s3://bucket/{method}"), GIVEN))
        assert [result.rows for result in results] == [
            result.rows for result in plateaux.evaluate(plateaux.Run.open(tmp_path / "run", GIVEN))
        ]
        kept = {name for name in local.store.names() if not name.startswith(("predictions/", "measures/"))}
        assert kept <= set(run.store.names())
        assert server.failed > 3, (server.failed, server.requests)
        assert run.log(0) == local.log(0)


def test_a_killed_run_in_a_bucket_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row, out = recipe("sam", run={"checkpoint_every_epochs": 1}), f"memory://{tmp_path}/run"
    with monkeypatch.context() as patch:
        patch.setattr(Run, "commit", lambda *_: raise_error(ZeroDivisionError()))
        with pytest.raises(ZeroDivisionError):
            plateaux.train(row, out, **GIVEN.keywords())
    run = plateaux.train(row, out, **GIVEN.keywords())
    assert distance(weights(plateaux.train(row, tmp_path / "local", **GIVEN.keywords())), weights(run)) == 0


def test_tensorboard_is_rejected_in_a_bucket(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="TensorBoard"):
        plateaux.train(recipe("sam", run={"trackers": ["tensorboard"]}), f"memory://{tmp_path}", **GIVEN.keywords())
