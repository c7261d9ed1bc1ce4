"""Write one member of a run, so that no process can delete or overwrite what another one has committed.

`members/<i>/progress.json` names the valid objects of a member. It is replaced only if it still has the content that
this writer read or wrote last. A writer reads it, lists the objects, claims the member, and then deletes what it had
listed and the progress does not name. Its own objects have names with the id of the attempt, and after each commit it
deletes what that commit no longer names. A writer that was stopped for any time can thus neither commit nor delete an
object that another one needs: its next commit fails. (Listing after the claim could delete objects of a newer writer.)

A claim ends with its writer. On a disk, the kernel's lock tells whether that writer still exists.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from plateaux.core.errors import PlateauxError, RunError, StorageError
from plateaux.core.formatting import format_duration
from plateaux.core.process_info import host_id
from plateaux.storage.digests import digest_bytes
from plateaux.storage.run import SHARED, Claim, MemberProgress, Run, encode_progress, progress_path
from plateaux.storage.store import LOCK_TIMEOUT_S, Store

if TYPE_CHECKING:
    from plateaux.core.types import TensorTree

# The objects that a writer deletes. Other files are not ours: they may be the user's, or a trap in a foreign folder.
OWN_NAME = re.compile(
    r"(resume-\d+-\d+-\w{8}\.pt|(best-\d+|weights)-\w{8}\.safetensors|log/\d+-\d+-\w{8}\.jsonl)", re.ASCII
)


@contextmanager
def write_member(run: Run, number: int, *, session: str = "", timeout: float = 0.0) -> Iterator[MemberWriter]:
    """Claim a member until the block ends. Another claim in a bucket is refused, unless it is of the same session.

    Args:
        run: The run.
        number: The member.
        session: The id of one call of `train`, which may replace the claims of its own processes that died.
        timeout: Seconds to wait for a process of this machine that is about to exit.
    """
    with run.store.lock(f"members/{number}", timeout=max(timeout, LOCK_TIMEOUT_S)):
        writer = MemberWriter(run, number, session)
        try:
            yield writer
        except StorageError as problem:  # perhaps of an object that another writer has deleted
            raise writer.taken_over() if writer.is_lost else problem from None
        finally:
            with suppress(PlateauxError):  # another writer has taken over, or the store cannot be reached
                writer.release()


class MemberWriter:
    """The only writer of one member."""

    def __init__(self, run: Run, number: int, session: str) -> None:
        self.run, self.number = run, number
        self._store: Store = run.store
        self._folder = f"members/{number}"
        self._claim = Claim(uuid4().hex[:8], session, host_id(), os.getpid(), time.time())
        self._written: dict[str, str] = {}  # digests of the objects of this attempt
        self.progress, self._content = run.stored_progress(number)
        self._check_claim()
        unnamed = unnamed_objects(self._store, number, self.progress)
        self._swap(self.progress, self._claim)
        self._store.remove_partial(self._folder)
        self._delete(unnamed)

    def commit(self, progress: MemberProgress, *, release: bool = False) -> None:
        """Replace the progress, and delete the objects that it no longer names. `release`: end the claim."""
        known = {**progress.digests, **self._written}
        names = progress.named()
        if self._store.has(SHARED):
            names.append(SHARED)
        for name in names:
            if name not in known:
                known[name] = self._written[name] = digest_bytes(self._store.get(name))
        before = {*self.progress.named(), *self._written}
        digests = {name: known[name] for name in names}
        self._swap(replace(progress, digests=digests), None if release else self._claim)
        self._written = {name: digest for name, digest in self._written.items() if name in digests}
        self._delete(before - set(names))

    def release(self) -> None:
        """End the claim, if it has not ended with a commit."""
        if self.progress.claim is not None:
            self._swap(self.progress, None)

    @property
    def is_lost(self) -> bool:
        """Whether another writer has taken over."""
        return self.run.stored_progress(self.number)[1] != self._content

    def taken_over(self) -> RunError:
        """Return the error that ends this writer."""
        return RunError(
            f"Another process has taken over {self._store.root / self._folder}, so this one stops. It has deleted "
            "nothing that the other one needs"
        )

    def put_state(self, progress: MemberProgress, state: Mapping[str, Any]) -> str:
        """Write a checkpoint and return its name."""
        name = self._name(f"resume-{progress.epoch}-{progress.step}", ".pt")
        self._written[name] = self._store.put_state(name, state)
        return name

    def put_weights(self, weights: TensorTree, *, epoch: int, best: bool = False) -> str:
        """Write the final or the best weights, and return the name of the object."""
        name = self._name(f"best-{epoch}" if best else "weights", ".safetensors")
        metadata = {"format": "pt", "plateaux": "member", "epoch": str(epoch)}
        self._written[name] = self._store.put_tensors(name, weights, metadata, record=False)
        return name

    def get_weights(self, name: str) -> TensorTree:
        """Read weights that were committed, or written in this attempt."""
        return self._store.get_tensors(name, self._written.get(name) or self.run.digest(self.number, name))

    def put_log(self, progress: MemberProgress, lines: Sequence[Mapping[str, Any]]) -> str:
        """Write one part of the log and return its name."""
        name = self._name(f"log/{progress.epoch:05d}-{progress.step:07d}", ".jsonl")
        self._written[name] = self._store.put(name, "".join(json.dumps(line) + "\n" for line in lines).encode())
        return name

    def put_shared(self, weights: TensorTree) -> None:
        """Write the frozen weights that all members share, once: every member would write the same content."""
        if weights and not self._store.has(SHARED):
            metadata = {"format": "pt", "plateaux": "shared"}
            self._written[SHARED] = self._store.put_tensors(SHARED, weights, metadata, record=False)

    def _name(self, stem: str, suffix: str) -> str:
        return f"{self._folder}/{stem}-{self._claim.attempt}{suffix}"

    def _swap(self, progress: MemberProgress, claim: Claim | None) -> None:
        content = encode_progress(self.run, self.number, progress, claim)
        if not self._store.swap(progress_path(self.number), content, self._content):
            raise self.taken_over()
        self._content, self.progress = content, replace(progress, claim=claim)

    def _delete(self, names: Iterable[str]) -> None:
        for name in sorted(names):
            if _is_own(name, self.number):
                self._store.delete(name)

    def _check_claim(self) -> None:
        claim = self.progress.claim
        if self._store.has_locks or claim is None or (claim.session and claim.session == self._claim.session):
            return
        machine = "this" if claim.host == self._claim.host else "another"
        since = f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime(claim.since))} UTC ({claim_age(claim)} ago)"
        raise RunError(
            f"{self._store.root / self._folder} is claimed by process {claim.pid} on {machine} machine since {since}. "
            "If that process has ended, or shall stop at its next checkpoint, train again with --take-over "
            "(plateaux.open_run(path).release_claims())"
        )


def drop_checkpoints(run: Run, number: int, *, keep: bool = False, session: str = "") -> None:
    """Delete the checkpoints of a member, unless they are kept, and the objects that its progress does not name."""
    with write_member(run, number, session=session) as writer:
        if not keep:
            writer.commit(replace(writer.progress, checkpoints=(), partition_checkpoint=None), release=True)


def unnamed_objects(store: Store, number: int, progress: MemberProgress) -> list[str]:
    """Return the objects of a member that its progress does not name."""
    named = set(progress.named())
    return [name for name in store.names(f"members/{number}") if name not in named and _is_own(name, number)]


def _is_own(name: str, number: int) -> bool:
    return name.startswith(f"members/{number}/") and bool(OWN_NAME.fullmatch(name.removeprefix(f"members/{number}/")))


def claim_age(claim: Claim) -> str:
    """Return how long a member has been claimed."""
    return format_duration(max(0.0, time.time() - claim.since))
