"""A lease: an object with an owner and an expiry time that locks a member in a store without file locks.

The owner renews it in a background thread. A lease is taken over once it has expired, or at once if its owner was a
process of this machine that has ended. Both need a store with conditional writes; in other stores a second writer is
rejected until the object is deleted. The clocks of all machines must agree to within a few seconds.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from threading import Event, Thread
from typing import Any
from uuid import uuid4

from plateaux.core.errors import RunError, StorageError
from plateaux.core.process_info import host_id
from plateaux.core.ranges import Finite, StoredInt
from plateaux.storage.json_shapes import parse_json, read_shape
from plateaux.storage.remote_fs import RemoteFS

LEASE_S = 30.0  # validity of a lease
CLOCK_SLACK_S = 5.0  # maximum difference between two clocks


class Lease:
    """The lease of one owner on a name."""

    def __init__(self, fs: RemoteFS, name: str) -> None:
        self._fs, self.prefix, self._object = fs, f"{name}/", f"{name}/.lease"
        self._owner = uuid4().hex
        self._valid_until = 0.0  # on the monotonic clock of this process
        self._is_lost = False
        self._done = Event()

    @contextmanager
    def hold(self, timeout: float) -> Iterator[Lease]:
        """Hold the lease, and renew it until the block ends."""
        self._acquire(time.monotonic() + timeout)
        thread = Thread(target=self._renew, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._done.set()
            thread.join()
            # An expired lease may have been taken over.
            is_ours = not self._fs.can_swap or time.monotonic() <= self._valid_until
            if is_ours and not self._is_lost:
                with suppress(StorageError):
                    self._fs.remove(self._object)

    def check(self) -> None:
        """Raise `RunError` if another process may hold the lease by now: nothing may be written then."""
        if self._is_lost or time.monotonic() > self._valid_until:
            raise RunError(
                f"{self._fs.address}/{self.prefix} may be locked by another process: this process could not "
                "renew its lease in time, so it stops writing. Run the same command again"
            )

    def _acquire(self, deadline: float) -> None:
        while True:
            start = time.monotonic()
            if self._fs.create(self._object, self._content()) or self._take_over():
                self._valid_until = start + LEASE_S
                return
            if time.monotonic() > deadline:
                raise RunError(self._refusal())
            time.sleep(min(1.0, max(0.05, deadline - time.monotonic())))

    def _take_over(self) -> bool:
        """Replace a lease whose owner has ended. Accept our own, written by a request whose response was lost."""
        try:
            etag = self._fs.etag(self._object) if self._fs.can_swap else ""
            owner = read_owner(self._fs, self._object)
        except FileNotFoundError:
            return False
        if owner is not None and owner["owner"] == self._owner:
            return True
        return self._fs.can_swap and not is_held(owner) and self._fs.swap(self._object, self._content(), etag)

    def _renew(self) -> None:
        while not self._done.wait(LEASE_S / 3):
            start = time.monotonic()
            try:
                # The ETag is read first, so that it is not newer than the content read next.
                etag = self._fs.etag(self._object) if self._fs.can_swap else ""
                owner = read_owner(self._fs, self._object)
                if owner is None or owner["owner"] != self._owner:
                    self._is_lost = True
                    return
                if not self._fs.can_swap:
                    self._fs.write(self._object, self._content())
                elif not self._fs.swap(self._object, self._content(), etag):
                    continue  # changed by another process, or by an earlier request of ours: read it again
                self._valid_until = start + LEASE_S
            except FileNotFoundError:
                self._is_lost = True
                return
            except StorageError:
                continue  # `check` raises once the lease has expired

    def _content(self) -> bytes:
        fields = {"owner": self._owner, "until": time.time() + LEASE_S, **_process_id(os.getpid())}
        return json.dumps(fields).encode()

    def _refusal(self) -> str:
        with suppress(FileNotFoundError):
            owner = read_owner(self._fs, self._object) or {}
            is_here = owner.get("host") == _process_id(0)["host"]
            process = f"pid {owner.get('pid')} on {'this' if is_here else 'another'} machine"
            advice = (
                "wait for it to finish, or stop it and retry"
                if self._fs.can_swap
                else f"if that process has ended, delete {self._fs.address}/{self._object} and run this again"
            )
            return f"{self._fs.address}/{self.prefix} is locked by another process ({process}); {advice}"
        return f"{self._fs.address}/{self.prefix} is locked by another process; run this again"


@dataclass(frozen=True, slots=True)
class LeaseOwner:
    """The content of a lease."""

    owner: str
    until: Finite  # Unix time
    host: str = ""
    pid: StoredInt = 0
    started: str = ""


def read_owner(fs: RemoteFS, name: str) -> dict[str, Any] | None:
    """Return the content of a lease, or None if it cannot be parsed."""
    content = fs.read(name)
    try:
        tree = parse_json(content, name)
        read_shape(LeaseOwner, tree, name)
        return dict(tree)
    except StorageError:
        return None


def is_held(owner: dict[str, Any] | None) -> bool:
    """Return whether a lease is valid: it has not expired, and its owner is not known to have ended."""
    if owner is None or time.time() > float(owner["until"]) + CLOCK_SLACK_S:
        return False
    local = _process_id(int(owner.get("pid", 0)))
    return bool(local["host"] != owner.get("host") or local["started"] == owner.get("started"))


def _process_id(pid: int) -> dict[str, Any]:
    """Return a unique identifier of a process: a hash of host and PID namespace, PID, and start time."""
    namespace, started = "", ""
    with suppress(OSError, IndexError):
        namespace = os.readlink("/proc/self/ns/pid")
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    host = blake2b(f"{host_id()} {namespace}".encode(), digest_size=8).hexdigest()  # not its name: runs are published
    return {"host": host, "pid": pid, "started": started}
