"""A run folder in a bucket: atomic objects, retries, and conditional writes instead of a file lock."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import GIVEN, distance, recipe, weights
from s3_server import Flaky, serving

import plateaux
from plateaux.core.errors import RecipeError, StorageError
from plateaux.storage import remote_fs
from plateaux.storage.local_store import LocalStore
from plateaux.storage.remote_fs import Address, RemoteFS, parse_address
from plateaux.storage.remote_store import RemoteStore, open_store
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


# --- Conditional writes


def test_swap_replaces_an_object_only_if_it_is_unchanged(server: Flaky) -> None:
    bucket = RemoteFS(Address("s3://bucket/conditions"))
    assert not bucket.swap("x", b"0", b"another")  # there is none
    assert bucket.swap("x", b"1", None)
    assert not bucket.swap("x", b"2", None)
    assert bucket.swap("x", b"3", b"1")
    assert not bucket.swap("x", b"4", b"1")
    assert bucket.read("x") == b"3"


@pytest.mark.parametrize("version", [None, b"old"])
def test_a_swap_whose_response_was_lost_is_done(
    server: Flaky, monkeypatch: pytest.MonkeyPatch, version: bytes | None, tmp_path: Path
) -> None:
    bucket = RemoteFS(Address(f"s3://bucket/{tmp_path.name}"))
    if version is not None:
        bucket.write("x", version)
    replace = bucket._replace

    def lost(*request: Any) -> None:
        replace(*request)
        monkeypatch.setattr(bucket, "_replace", replace)
        raise TimeoutError("no response")

    monkeypatch.setattr(bucket, "_replace", lost)
    assert bucket.swap("x", b"new", version)
    assert bucket.read("x") == b"new"


def test_a_store_without_conditional_writes_is_refused(tmp_path: Path) -> None:
    store = open_store(f"memory://{tmp_path}")
    with pytest.raises(StorageError, match=r"progress\.json cannot be written: this kind of store has no conditional"):
        store.swap("members/0/progress.json", b"1", None)
    assert store.names() == []


class Empty:
    """A file system that raises an error for a prefix without objects."""

    def find(self, path: str, detail: bool) -> Any:
        raise FileNotFoundError(path)


def test_a_missing_prefix_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    assert remote_fs_with(Empty(), monkeypatch).sizes("x") == {}


# --- Whole runs


def common(names: Iterable[str]) -> set[str]:
    """Return the names without the ids of the attempts."""
    return {re.sub(r"-[0-9a-f]{8}\.", ".", name) for name in names}


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
        assert common(kept) <= common(run.store.names())
        assert server.failed > 3, (server.failed, server.requests)
        assert run.log(0) == local.log(0)


def test_tensorboard_is_rejected_in_a_bucket(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="TensorBoard"):
        plateaux.train(recipe("sam", run={"trackers": ["tensorboard"]}), f"memory://{tmp_path}", **GIVEN.keywords())
