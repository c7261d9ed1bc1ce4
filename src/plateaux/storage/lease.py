"""A lease: an object with an owner and an expiry that keeps a second writer off a member, where no kernel can.

Its owner renews it in a thread of its own. One whose owner is gone is taken over once it has expired, or at once where
the owner was a process of this machine that lives no more. Both need a store that can replace an object on a condition;
elsewhere a second writer is refused until the object is deleted. Machines' clocks must agree to within a few seconds.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any
from uuid import uuid4

from plateaux.core.errors import RunError, StorageError
from plateaux.storage.remote import RemoteFS

LEASE_S = 30.0  # seconds that a lease is good for
CLOCK_SLACK_S = 5.0  # seconds by which clocks may differ


class Lease:
    """One owner's lease on a name."""

    def __init__(self, bucket: RemoteFS, name: str) -> None:
        self._bucket, self.prefix, self._object = bucket, f"{name}/", f"{name}/.lease"
        self._owner = uuid4().hex
        self._good_until = 0.0  # by this process's own clock
        self._lost = False
        self._done = Event()

    @contextmanager
    def held(self, patience: float) -> Iterator[Lease]:
        """Hold the lease, renewed until the end."""
        self._take(time.monotonic() + patience)
        renewing = Thread(target=self._renew, daemon=True)
        renewing.start()
        try:
            yield self
        finally:
            self._done.set()
            renewing.join()
            ours = not self._bucket.swaps or time.monotonic() <= self._good_until  # else another may have taken it over
            if ours and not self._lost:
                with suppress(StorageError):
                    self._bucket.remove(self._object)

    def check(self) -> None:
        """Raise, should another have it by now: nothing may be written any more."""
        if self._lost or time.monotonic() > self._good_until:
            raise RunError(
                f"{self._bucket.address}/{self.prefix} may be in the hands of another process: this one could not "
                "renew its lease in time. Nothing more is written; run the same command again"
            )

    def _take(self, until: float) -> None:
        while True:
            begun = time.monotonic()
            if self._bucket.create(self._object, self._words()) or self._take_over():
                self._good_until = begun + LEASE_S
                return
            if time.monotonic() > until:
                raise RunError(self._refusal())
            time.sleep(min(1.0, max(0.05, until - time.monotonic())))

    def _take_over(self) -> bool:
        """Replace a lease whose owner is gone; one of our own, put by a request whose answer was lost, is ours."""
        try:
            tag = self._bucket.tag(self._object) if self._bucket.swaps else ""
            found = read_owner(self._bucket, self._object)
        except FileNotFoundError:
            return False
        if found is not None and found["owner"] == self._owner:
            return True
        return self._bucket.swaps and not is_held(found) and self._bucket.swap(self._object, self._words(), tag)

    def _renew(self) -> None:
        while not self._done.wait(LEASE_S / 3):
            begun = time.monotonic()
            try:
                tag = self._bucket.tag(self._object) if self._bucket.swaps else ""  # first: it is of what is read next
                found = read_owner(self._bucket, self._object)
                if found is None or found["owner"] != self._owner:
                    self._lost = True
                    return
                if not self._bucket.swaps:
                    self._bucket.write(self._object, self._words())
                elif not self._bucket.swap(self._object, self._words(), tag):
                    continue  # somebody was faster, or our own request was answered late: look again
                self._good_until = begun + LEASE_S
            except FileNotFoundError:
                self._lost = True
                return
            except StorageError:
                continue  # until it is too late, which `check` knows

    def _words(self) -> bytes:
        facts = {"owner": self._owner, "until": time.time() + LEASE_S, **_process(os.getpid())}
        return json.dumps(facts).encode()

    def _refusal(self) -> str:
        with suppress(FileNotFoundError):
            found = read_owner(self._bucket, self._object) or {}
            who = f"process {found.get('pid')} on {found.get('host')}"
            rest = (
                "wait for it, or stop it and run this again"
                if self._bucket.swaps
                else f"if it lives no more, delete {self._bucket.address}/{self._object} and run this again"
            )
            return f"{self._bucket.address}/{self.prefix} is in the hands of another process ({who}); {rest}"
        return f"{self._bucket.address}/{self.prefix} is in the hands of another process; run this again"


def read_owner(bucket: RemoteFS, name: str) -> dict[str, Any] | None:
    """Return what a lease says; None: nothing that can be understood."""
    try:
        found = json.loads(bucket.read(name))
        return found if {"owner", "until"} <= found.keys() else None
    except (ValueError, AttributeError):
        return None


def is_held(found: dict[str, Any] | None) -> bool:
    """Say whether a lease is good: not expired, and its owner not known to be dead."""
    if found is None or time.time() > float(found["until"]) + CLOCK_SLACK_S:
        return False
    here = _process(int(found.get("pid", 0)))
    return bool(here["host"] != found.get("host") or here["started"] == found.get("started"))


def _process(pid: int) -> dict[str, Any]:
    """Return what tells a process from all others: its machine and process space, number, and when it was started."""
    space, started = "", ""
    with suppress(OSError, IndexError):
        space = os.readlink("/proc/self/ns/pid")
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return {"host": f"{platform.node()} {space}".strip(), "pid": pid, "started": started}
