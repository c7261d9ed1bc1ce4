"""The local store: atomic writes, names inside the root only, locks, and files that cannot execute code."""

from __future__ import annotations

import errno
import json
import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

from plateaux.core.errors import RunError, StorageError
from plateaux.storage.atomic import PARTIAL_PREFIX
from plateaux.storage.local_store import SCRATCH_PREFIX, LocalStore
from plateaux.storage.store import split_name


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "run")


def files(store: LocalStore) -> set[str]:
    """Return all files, including hidden ones."""
    return {path.relative_to(store.root).as_posix() for path in store.root.rglob("*") if path.is_file()}


def test_all_files_have_the_mode_that_the_umask_gives(store: LocalStore) -> None:
    store.put("a.json", b"{}")
    store.put_tensors("b.safetensors", {"w": torch.zeros(2)})
    plain = store.root / "plain"
    plain.touch()
    modes = {stat.S_IMODE((store.root / name).stat().st_mode) for name in ("a.json", "b.safetensors", "plain")}
    assert modes == {stat.S_IMODE(plain.stat().st_mode)}


def test_an_object_can_be_written_and_read(store: LocalStore) -> None:
    store.put("a/b/c.bin", b"\x00one")
    store.put("a/b/c.bin", b"two")
    assert store.get("a/b/c.bin") == b"two"
    assert store.has("a/b/c.bin")
    assert not store.has("a/b")
    assert files(store) == {"a/b/c.bin"}


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "a/../b", "", ".", "..", "//x", "./../x"])
def test_names_outside_the_folder_are_rejected(store: LocalStore, name: str) -> None:
    for touch in (store.get, store.has, store.delete, store.get_json, lambda n: store.put(n, b"")):
        with pytest.raises(StorageError, match="is not a valid object name"):
            touch(name)
    assert not list(store.root.parent.rglob("*"))


@given(st.text(alphabet="./ab\\~ \x00", max_size=12))
def test_no_name_resolves_outside_the_folder(name: str) -> None:
    try:
        path = Path("/nowhere/run").joinpath(*split_name(name))
    except StorageError:
        return
    assert os.path.normpath(path).startswith("/nowhere/run/")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_is_reported_and_the_old_object_kept(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store.put("x.json", b"old")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(StorageError, match=r"The disk is full: cannot write .*x\.json\. Free some space and run"):
        store.put("x.json", b"new")
    assert store.get("x.json") == b"old"
    assert files(store) == {"x.json"}


@pytest.mark.process
def test_a_real_full_disk_is_reported(tmp_path: Path) -> None:
    place = tmp_path / "tiny"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not permitted")
    try:
        store = LocalStore(place)
        store.put("old", b"old")
        with pytest.raises(StorageError, match="The disk is full"):
            store.put("new", bytes(100_000))
        assert files(store) == {"old"}
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_other_os_errors_are_reported_with_operation_and_path(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StorageError, match=r"Cannot read .*absent: No such file"):
        store.get("absent")
    store.put("file", b"")
    with pytest.raises(StorageError, match=r"Cannot write .*file/below: (File exists|Not a directory)"):
        store.put("file/below", b"")
    with pytest.raises(StorageError, match=r"Cannot lock .*file: (File exists|Not a directory)"), store.lock("file"):
        pass

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(StorageError, match=r"Cannot delete .*file: Permission denied"):
        store.delete("file")


def test_file_permissions_follow_the_umask(store: LocalStore) -> None:
    old = os.umask(0o022)
    try:
        store.put("x", b"")
    finally:
        os.umask(old)
    assert stat.S_IMODE((store.root / "x").stat().st_mode) == 0o644


def test_names_and_size_omit_hidden_files(store: LocalStore) -> None:
    store.put("b/2", b"22")
    store.put("a", b"1")
    store.put("b/1", b"333")
    (store.root / f"b/{PARTIAL_PREFIX}half").write_bytes(b"half")
    with store.lock("b"), store.scratch() as scratch:
        scratch.put("x", b"4444")
        assert store.names() == ["a", "b/1", "b/2"]
        assert store.names("b") == ["b/1", "b/2"]
        assert store.names("c") == []
        assert (store.size(), store.size("b")) == (6, 5)


def test_remove_partial_deletes_only_partial_files(store: LocalStore) -> None:
    partial = f"{PARTIAL_PREFIX}{'0123456789abcdef' * 2}"
    store.put("m/0/x", b"")
    store.put("m/1/x", b"")
    for place in ("m/0", "m/0/log", "m/1"):
        (store.root / place).mkdir(exist_ok=True)
        (store.root / place / partial).write_bytes(b"half")
    (store.root / "m/0" / f"{PARTIAL_PREFIX}of-mine").write_bytes(b"not written by a store")
    store.remove_partial("m/0")
    assert files(store) == {"m/0/x", "m/1/x", f"m/1/{partial}", f"m/0/{PARTIAL_PREFIX}of-mine"}
    store.remove_partial("m/9")


def test_an_object_can_be_deleted_twice(store: LocalStore) -> None:
    store.put("x", b"")
    store.delete("x")
    store.delete("x")
    assert not store.has("x")


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe"])
def test_damaged_json_is_reported(store: LocalStore, content: bytes) -> None:
    store.put("x.json", content)
    with pytest.raises(StorageError, match=r"x\.json is not valid JSON"):
        store.get_json("x.json")


def test_skip_unchanged_writes_only_changed_values(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    put = LocalStore.put
    monkeypatch.setattr(LocalStore, "put", lambda self, name, content: (written.append(name), put(self, name, content)))
    for value in ({"a": 1}, {"a": 1}, {"a": 2}):
        store.put_json("x.json", value, skip_unchanged=True)
        assert store.get_json("x.json") == value
    assert written == ["x.json"] * 2
    store.put_json("x.json", {"a": 2})
    assert written == ["x.json"] * 3
    store.put("x.json", b"{")
    store.put_json("x.json", {"a": 2}, skip_unchanged=True)
    assert store.get_json("x.json") == {"a": 2}


def test_tensors_are_read_back_exactly_and_by_other_programs(store: LocalStore) -> None:
    tensors = {
        "half": torch.randn(3).bfloat16(),
        "double": torch.randn(2, 3, dtype=torch.float64).T,
        "count": torch.tensor(7),
        "none": torch.empty(0, 4),
        "last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_(),
    }
    store.put_tensors("w.safetensors", tensors, {"format": "pt", "epoch": "3", "plateaux": "member"})
    loaded = store.get_tensors("w.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    del tensors["half"]  # numpy has no bfloat16
    store.put_tensors("w.safetensors", tensors)
    np.testing.assert_array_equal(safetensors.numpy.load(store.get("w.safetensors"))["double"], tensors["double"])


def test_equal_tensors_give_equal_files(store: LocalStore) -> None:
    about = {str(i): str(i) for i in range(9)}
    stores = [LocalStore(store.root / str(i)) for i in range(5)]
    for other in stores:
        other.put_tensors("w", {"a": torch.ones(3), "b": torch.zeros(1)}, about)
    assert len({other.get("w") for other in stores}) == 1
    with safetensors.safe_open(store.root / "0" / "w", framework="pt") as opened:
        assert opened.metadata() == about


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flip(content: bytes) -> bytes:
    return content[:2] + bytes([content[2] ^ 255]) + content[3:]


@pytest.mark.parametrize("damage", [cut, flip, lambda _: b"", lambda _: b"anything"])
def test_damaged_tensors_and_states_are_reported(store: LocalStore, damage: Callable[[bytes], bytes]) -> None:
    store.put_tensors("w", {"a": torch.ones(30)})
    store.put_state("s", {"a": torch.ones(30)})
    for name in "ws":
        store.put(name, damage(store.get(name)))
    with pytest.raises(StorageError, match=r"/w is damaged: .*\. Restore it from a backup"):
        store.get_tensors("w")
    with pytest.raises(StorageError, match=r"/s is damaged.*delete its folder to train that member again"):
        store.get_state("s")


class Hostile:
    """Runs a program when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.trace}",)


@pytest.mark.parametrize("write", ["torch", "old torch", "pickle"])
def test_a_state_with_code_is_rejected_and_not_executed(store: LocalStore, tmp_path: Path, write: str) -> None:
    trace, file = tmp_path / "executed", store.root / "s.pt"
    store.root.mkdir()
    if write == "pickle":
        file.write_bytes(pickle.dumps({"params": Hostile(trace)}, protocol=2))
    else:
        torch.save({"params": Hostile(trace)}, file, _use_new_zipfile_serialization=write == "torch")
    with pytest.raises(StorageError, match="contains other objects than tensors and plain values") as refused:
        store.get_state("s.pt")
    assert not trace.exists()
    assert "weights_only" not in str(refused.value)  # the message must not explain how to load it anyway
    torch.load(file, weights_only=False) if write != "pickle" else pickle.loads(file.read_bytes())
    assert trace.exists()  # the check is effective: unsafe loading executes it


def test_an_object_appears_only_when_its_writer_is_closed(store: LocalStore) -> None:
    with ExitStack() as stack:
        one, two = (stack.enter_context(store.open_writer(name)) for name in ("m/1", "m/2"))
        one.write(b"1")
        two.write(b"2")
        assert store.names() == []
    assert (store.get("m/1"), store.get("m/2")) == (b"1", b"2")
    assert files(store) == {"m/1", "m/2"}


@pytest.mark.parametrize("problem", [KeyError("x"), KeyboardInterrupt(), StorageError("error of another object")])
def test_a_failed_write_keeps_the_old_object(store: LocalStore, problem: BaseException) -> None:
    store.put("x", b"old")

    def fail() -> None:
        with store.open_writer("y"), store.open_writer("x") as file:
            file.write(b"new")
            raise problem

    with pytest.raises(type(problem)) as error:
        fail()
    assert error.value is problem
    assert files(store) == {"x"}
    assert store.get("x") == b"old"


ABOUT = {"fingerprint": "ab", "epoch": "3", "samples": "11", "\u00e9": '"'}


def put_array(store: LocalStore, name: str, values: np.ndarray, cuts: list[int]) -> None:
    with store.array_writer(name, values.dtype, len(values), ABOUT) as write:
        for chunk in np.split(values, cuts):
            write(chunk)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8"])
@pytest.mark.parametrize("length", [0, 1, 11])
def test_an_array_in_chunks_is_read_back_and_by_other_programs(store: LocalStore, dtype: str, length: int) -> None:
    values = np.arange(length).astype(dtype)
    put_array(store, "a", values, [length // 3, length // 2])
    metadata, array = store.get_array("a")
    assert metadata == ABOUT
    assert type(array) is np.ndarray
    assert array.dtype == values.dtype
    assert not array.flags.writeable
    np.testing.assert_array_equal(array, values)
    chunks = list(store.iter_array("a", 4))
    assert [len(chunk) for chunk in chunks] == [4] * (length // 4) + [length % 4] * (length % 4 > 0)
    assert b"".join(chunk.tobytes() for chunk in chunks) == values.tobytes()
    np.testing.assert_array_equal(safetensors.numpy.load(store.get("a"))["array"], values)
    with safetensors.safe_open(store.root / "a", framework="np") as opened:
        assert ABOUT.items() <= opened.metadata().items()
    assert int.from_bytes(store.get("a")[:8], "little") % 8 == 0


def test_an_array_without_a_digest_is_refused(store: LocalStore) -> None:
    store.put("a", safetensors.numpy.save({"own name": np.arange(5, dtype=np.float32)}))
    with pytest.raises(StorageError, match=r"/a is damaged: a\.json does not have its digest"):
        store.get_array("a")


def test_an_array_of_the_wrong_length_is_not_written(store: LocalStore) -> None:
    with (
        pytest.raises(StorageError, match=r"/a was not written: got 3 values instead of 4"),
        store.array_writer("a", np.uint8, 4) as write,
    ):
        write(np.zeros(3, np.uint8))
    assert files(store) == set()


def array_file(header: object, content: bytes = bytes(16), size: int | None = None) -> bytes:
    """Return a safetensors file with this header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text + content


def put_file(store: LocalStore, content: bytes) -> None:
    """Write a file with the right digest: anyone can write one."""
    store.put_json("a.json", {"object": "a", "content": store.put("a", content)})


GOOD = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
DAMAGED = {
    "empty": b"",
    "short": b"\x01\x00",
    "no header": array_file(b""),
    "a header longer than the file": array_file({"a": GOOD}, size=2**63),
    "a header longer than is sane": array_file(b" " * (1 << 21)),
    "not JSON": array_file(b"{nothing"),
    "not text": array_file(b"\xff\xfe\xff"),
    "too deep": array_file(b"[" * 100_000),
    "a list": array_file([1, 2]),
    "no tensor": array_file({}),
    "two tensors": array_file({"a": GOOD, "b": GOOD}),
    "an unknown kind": array_file({"a": {**GOOD, "dtype": "F4"}}),
    "a kind that is a list": array_file({"a": {**GOOD, "dtype": ["F32"]}}),
    "two axes": array_file({"a": {**GOOD, "shape": [2, 2]}}),
    "a negative length": array_file({"a": {**GOOD, "shape": [-4]}}),
    "a length that is no whole number": array_file({"a": {**GOOD, "shape": [4.0]}}),
    "a wrong offset": array_file({"a": {**GOOD, "data_offsets": [4, 20]}}),
    "too short": array_file({"a": GOOD}, bytes(15)),
    "too long": array_file({"a": GOOD}, bytes(17)),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_array_is_reported(store: LocalStore, damage: str) -> None:
    put_file(store, array_file({"a": GOOD}))
    assert len(store.get_array("a")[1]) == 4  # the other fields of the header are valid
    put_file(store, DAMAGED[damage])
    for read in (store.get_array, lambda name: next(store.iter_array(name, 2))):
        with pytest.raises(StorageError, match=r"/a is damaged: .*\. Restore it from a backup"):
            read("a")


def test_an_array_that_is_truncated_while_read_is_reported(store: LocalStore) -> None:
    put_array(store, "a", np.zeros(1 << 20), [])
    chunks = store.iter_array("a", 1 << 19)
    next(chunks)
    os.truncate(store.root / "a", 1 << 22)
    with pytest.raises(StorageError, match=r"/a is damaged: it ends early"):
        next(chunks)


def test_a_missing_array_is_reported(store: LocalStore) -> None:
    for read in (store.get_array, lambda name: next(store.iter_array(name, 2))):
        with pytest.raises(StorageError, match=r"Cannot read .*absent: No such file"):
            read("absent")


def test_nested_states_are_read_back(store: LocalStore) -> None:
    state = {"a": {"b": [torch.ones(2), 3, 0.1, None, "x", (True, -0.0)]}, 5: {"step": torch.tensor(3.0)}}
    store.put_state("s", state)
    loaded = store.get_state("s")
    assert torch.equal(loaded["a"]["b"][0], torch.ones(2))
    assert loaded["a"]["b"][1:] == state["a"]["b"][1:]  # type: ignore[index]
    assert loaded[5]["step"] == 3  # type: ignore[index]


@pytest.mark.slow
def test_a_lock_has_one_holder_at_a_time(store: LocalStore) -> None:
    other = LocalStore(store.root)
    assert not store.is_locked("members/0")
    with store.lock("members/0"):
        assert other.is_locked("members/0")
        with (
            pytest.raises(RunError, match="members/0 is locked by another process; wait"),
            other.lock("members/0"),
        ):
            pass
        with other.lock("members/1"):
            pass
    assert not other.is_locked("members/0")
    with other.lock("members/0"):
        pass


@pytest.mark.process
def test_a_lock_is_released_with_its_process_even_if_forked_children_live(store: LocalStore, tmp_path: Path) -> None:
    program = (
        "import os, sys, time\n"
        "from plateaux.storage.local_store import LocalStore\n"
        "with LocalStore(sys.argv[1]).lock('m'):\n"
        "    if os.fork() == 0:\n"
        "        print('held', flush=True)\n"  # the child has closed its copy of the lock
        "        time.sleep(30)\n"
        "        os._exit(0)\n"
        "    time.sleep(30)\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, "-c", program, str(store.root)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert store.is_locked("m")
        holder.kill()
        holder.wait()
        freed = not store.is_locked("m")
        os.killpg(holder.pid, 9)
    assert freed


def test_scratch_is_deleted_including_folders_of_killed_processes(store: LocalStore) -> None:
    left = store.root / f"{SCRATCH_PREFIX}left"
    left.mkdir(parents=True)
    (left / ".lock").touch()
    (left / "0.pt").write_bytes(b"much")
    with store.scratch() as one:
        assert not left.exists()
        one.put("x", b"1")
        with store.scratch() as two:
            assert one.get("x") == b"1"  # in use, so not deleted
            assert one.root != two.root
    assert files(store) == set()


def test_scratch_is_not_synced_to_disk(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with store.scratch() as scratch:
        scratch.put("x", b"1")
    assert not synced
    store.put("x", b"1")
    assert len(synced) == 1
