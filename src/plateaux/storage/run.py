"""The run folder: recipe, progress and weights of the members, and results.

A checkpoint becomes valid when `members/<i>/progress.json` is replaced: checkpoint and log are written first, then the
progress file that names them, then objects that it no longer names are deleted. A kill at any time loses nothing.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.experiment import Experiment
from plateaux.config.recipe import Recipe, diff, fingerprint
from plateaux.core.errors import RunError, StorageError
from plateaux.core.ranges import FiniteSeconds, StoredInt
from plateaux.storage.digests import digest_bytes
from plateaux.storage.json_shapes import parse_json, read_shape
from plateaux.storage.remote_store import open_store
from plateaux.storage.run_info import FORMAT, AutotuneInfo, RunInfo, StoredPartition
from plateaux.storage.store import LOCK_TIMEOUT_S, Store, recovery

SHARED = "shared.safetensors"  # frozen weights that all members share
BEGIN_LOCK = ".begin"
BEGIN_TIMEOUT_S = 60.0
# The files of a member that Plateaux writes and deletes, besides progress.json.
OWN_NAME = re.compile(r"resume-\d+-\d+\.pt|best-\d+\.safetensors|weights\.safetensors|log/\d+-\d+\.jsonl")
REQUIRED = ("epoch", "checkpoints", "log_parts", "digests")  # fields of progress.json

if TYPE_CHECKING:
    from plateaux.core.types import TensorTree


@dataclass(frozen=True, slots=True)
class MemberProgress:
    """The training progress of one member."""

    epoch: StoredInt = 0  # completed epochs
    step: StoredInt = 0  # completed steps of the current epoch
    finished: bool = False
    checkpoints: tuple[tuple[StoredInt, StoredInt, str], ...] = ()  # (epoch, step, object), newest last
    log_parts: tuple[str, ...] = ()  # objects with parts of the log, in order
    weights: str | None = None  # the object with the weights of the member
    weights_source: str = ""  # description of the weights
    previous_weights: str | None = None  # weights that an older checkpoint still needs
    best: float | None = None
    best_epoch: StoredInt | None = None
    epochs_since_best: StoredInt = 0  # validations without improvement
    stop_reason: str = ""  # why training ended before the last epoch
    seconds: FiniteSeconds = 0.0  # training time over all attempts; members that train in one process share it equally
    partition_checkpoint: str | None = None  # state at the first partition, from which another run can branch
    digests: Mapping[str, str] = field(default_factory=dict)  # of all objects that are named here
    member: str = ""  # the id of the run and the number of the member

    @property
    def position(self) -> tuple[int, int]:
        return self.epoch, self.step

    def named(self) -> list[str]:
        """Return the names of all objects that belong to this state of the member."""
        others = (self.weights, self.previous_weights, self.partition_checkpoint)
        names = [name for *_, name in self.checkpoints] + list(self.log_parts) + [name for name in others if name]
        return list(dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder, its recipe, the content of its run.json, and the objects that were passed in Python."""

    store: Store
    experiment: Experiment  # the recipe, and what the caller passed in Python
    info: RunInfo
    accept_changes: bool = field(default=False, compare=False)  # of code: they are recorded instead of refused
    _written: dict[str, str] = field(default_factory=dict, repr=False, compare=False)  # digests that await a commit

    @property
    def recipe(self) -> Recipe:
        return self.experiment.recipe

    @property
    def components(self) -> Components:
        return self.experiment.components

    def __str__(self) -> str:
        return str(self.store.root)

    @classmethod
    def open(cls, root: RunLike, components: Components | None = None, *, check_recipe: bool = True) -> Run:
        """Open an existing run by its folder, its URL, or a `Run` object, which is read again."""
        accept_changes = isinstance(root, Run) and root.accept_changes
        if isinstance(root, Run):
            components = root.components if components is None else components
            root = root.store.root
        store = open_store(root)
        if not store.has("run.json"):
            raise RunError(
                f"{root} is not a run folder: it has no run.json. `plateaux train RECIPE --out {root}` starts one"
            )
        tree = store.get_json("run.json", has_digest=False)
        version = tree.get("format") if isinstance(tree, dict) else None
        if version != FORMAT:
            raise RunError(
                f"{root} has format {version!r}; this version of Plateaux reads format {FORMAT}. "
                "Use the version that wrote it"
            )
        tree = store.get_json("run.json")  # formats before 3 have no digests, so the format is checked first
        digest = str(tree.get("recipe_digest")) if check_recipe else None
        recipe = Recipe.parse(store.get("recipe.toml", digest).decode(errors="replace"), where=f"{root}/recipe.toml")
        experiment = Experiment(recipe, components or NO_COMPONENTS)
        return cls(store, experiment, RunInfo.from_dict(tree, store.root / "run.json"), accept_changes)

    @classmethod
    def begin(cls, root: str | Path, experiment: Experiment, info: RunInfo, *, accept_changes: bool = False) -> Run:
        """Open the run of this recipe, or create it. A folder with another recipe, data, or model code is rejected.

        With `accept_changes`, other data and model code are accepted and recorded.
        A lock makes this exclusive: of two processes with different recipes, the second one is rejected.
        """
        store = open_store(root)
        with store.lock(BEGIN_LOCK, timeout=BEGIN_TIMEOUT_S):
            return cls._begin(store, root, experiment, info, accept_changes=accept_changes)

    @classmethod
    def _begin(
        cls, store: Store, root: str | Path, experiment: Experiment, info: RunInfo, *, accept_changes: bool
    ) -> Run:
        if store.has("run.json"):
            # A kill may have separated the recipe from its digest; both are written again below.
            old = cls.open(root, check_recipe=False)
            changes = diff(old.recipe.identity(), experiment.recipe.identity())
            if changes:
                raise RunError(
                    f"{root} belongs to another recipe. Differences (stored -> given):\n  "
                    + "\n  ".join(changes)
                    + "\nChoose another --out, or restore the recipe"
                )
            changes = old.info.changes(info)
            has_trained = bool(changes) and _has_trained(old)
            if has_trained and not accept_changes:
                raise RunError(
                    f"{root} was trained on other data or with other model code. Differences (stored -> given):\n  "
                    + "\n  ".join(changes)
                    + "\nRestore them, choose another --out, or continue anyway with --accept-changes "
                    "(accept_changes=True), which is recorded in the run"
                )
            untrained = replace(info, id=old.info.id) if changes else old.info
            info = old.info.with_changes(info) if has_trained else untrained
        else:
            info = replace(info, id=uuid4().hex)
        run = cls(store, experiment, info)
        run._write()
        return run

    def _write(self) -> None:
        digest = self.store.put("recipe.toml", self.recipe.to_toml().encode())
        self.store.put_json("environment.json", environment())
        names = {str(i): self.member_name(i) for i in range(self.recipe.members)}
        self.store.put_json("run.json", {**self.info.to_dict(), "recipe_digest": digest, "members": names})

    def update_info(self, values: Mapping[str, Any]) -> None:
        """Replace values of run.json."""
        with self.store.lock(BEGIN_LOCK, timeout=BEGIN_TIMEOUT_S):
            self.store.put_json("run.json", {**self.store.get_json("run.json"), **values})

    def with_autotune(self, settings: AutotuneInfo) -> Run:
        """Record settings that were autotuned once and hold for the whole run."""
        run = replace(self, info=replace(self.info, autotune=settings))
        run._write()
        return run

    def resolved_recipe(self) -> Recipe:
        """Return the recipe with the autotuned precision and memory format."""
        if self.info.autotune is None:
            return self.recipe
        settings = {"precision": self.info.autotune.precision, "memory_format": self.info.autotune.memory_format}
        settings = {name: value for name, value in settings.items() if value is not None}
        return self.recipe.replaced(train=settings) if settings else self.recipe

    def member_name(self, number: int) -> str:
        """Return a hash of everything that determines the weights of a member."""
        import torch  # here, so that commands that read only the progress start fast

        return fingerprint({"recipe": self.recipe.identity(), "member": number, "torch": torch.__version__})

    def progress(self, number: int) -> MemberProgress:
        """Return the training progress of a member."""
        name = f"members/{number}/progress.json"
        if not self.store.has(name):
            return MemberProgress()
        advice = "restore it, or delete its folder to train that member again"
        tree, file = self.store.get_json(name), self.store.root / name
        return _own(self, number, read_shape(MemberProgress, tree, file, advice, required=REQUIRED))

    def all_progress(self) -> list[MemberProgress]:
        return [self.progress(number) for number in range(self.recipe.members)]

    def trained_members(self) -> list[int]:
        """Return the members that belong to the ensemble: all except those that a partition excluded."""
        summaries = [name for name in self.store.names("sam_sets") if name.endswith("/summary.json")]
        excluded = {number for name in summaries for number in self.partition_summary(name).without}
        return [number for number in range(self.recipe.members) if number not in excluded]

    def partition_summary(self, name: str) -> StoredPartition:
        """Return the stored summary of a data partition."""
        return read_shape(StoredPartition, self.store.get_json(name), self.store.root / name)

    def lock(self, number: int, *, timeout: float = 0.0) -> AbstractContextManager[None]:
        """Lock a member. Wait for a process that is about to exit, and up to `timeout` seconds."""
        return self.store.lock(f"members/{number}", timeout=max(timeout, LOCK_TIMEOUT_S))

    def is_locked(self, number: int) -> bool:
        """Return whether a process holds the lock of a member."""
        return self.store.is_locked(f"members/{number}")

    def commit(self, number: int, progress: MemberProgress) -> None:
        """Write the progress of a member with the digests of its objects, then delete those it no longer names."""
        known = {**progress.digests, **self._written}
        names = [*progress.named(), *([SHARED] if self.store.has(SHARED) else [])]
        digests = {name: known.get(name) or digest_bytes(self.store.get(name)) for name in names}
        state = replace(progress, digests=digests, member=_member_id(self, number))
        self.store.put_json(f"members/{number}/progress.json", asdict(state))
        self.clear(number, progress)

    def clear(self, number: int, progress: MemberProgress) -> None:
        """Delete the objects of a member that its progress does not name."""
        keep = set(progress.named())
        for name in self.store.names(f"members/{number}"):
            # Other files are not ours: they may be the user's, or a trap in a folder from someone else.
            if name not in keep and OWN_NAME.fullmatch(name.removeprefix(f"members/{number}/")):
                self.store.delete(name)

    def put_state(self, number: int, progress: MemberProgress, state: Mapping[str, Any]) -> str:
        """Write a checkpoint and return its name."""
        name = f"members/{number}/resume-{progress.epoch}-{progress.step}.pt"
        self._written[name] = self.store.put_state(name, state)
        return name

    def put_weights(self, number: int, weights: TensorTree, *, epoch: int, best: bool = False) -> str:
        """Write the final or the best weights of a member, and return the name of the object."""
        name = f"members/{number}/" + (f"best-{epoch}.safetensors" if best else "weights.safetensors")
        metadata = {"format": "pt", "plateaux": "member", "epoch": str(epoch)}
        self._written[name] = self.store.put_tensors(name, weights, metadata)
        return name

    def put_log(self, number: int, progress: MemberProgress, lines: Sequence[Mapping[str, Any]]) -> str:
        """Write one part of the log of a member and return its name."""
        name = f"members/{number}/log/{progress.epoch:05d}-{progress.step:07d}.jsonl"
        self._written[name] = self.store.put(name, "".join(json.dumps(line) + "\n" for line in lines).encode())
        return name

    def log(self, number: int) -> list[dict[str, Any]]:
        """Return all log entries of a member, in order."""
        return [line for part in self.progress(number).log_parts for line in self._log_lines(number, part)]

    def _log_lines(self, number: int, part: str) -> Iterator[dict[str, Any]]:
        file = self.store.root / part
        for line in self.get(number, part).splitlines():
            yield read_shape(dict[str, Any], parse_json(line, file), file)

    def weights(self, number: int) -> TensorTree:
        """Return the weights of a finished member, without the shared ones."""
        name = self._weights_name(number)
        return self.store.get_tensors(name, self.digest(number, name))

    def weights_hash(self, number: int) -> str:
        """Return a hash of the weights of a member, including shared weights; loading them checks the digests."""
        names = [self._weights_name(number), *([SHARED] if self.store.has(SHARED) else [])]
        return blake2b("\n".join(self.digest(number, name) for name in names).encode(), digest_size=8).hexdigest()

    def digest(self, number: int, name: str) -> str:
        """Return the digest of an object of a member: just written, or recorded by the last commit."""
        digest = self._written.get(name) or self.progress(number).digests.get(name)
        if digest is None:
            raise StorageError(
                f"{self.store.root}/members/{number}/progress.json records no digest of {name}. {recovery(name)}"
            )
        return digest

    def get(self, number: int, name: str) -> bytes:
        """Read an object of a member, and check its digest."""
        return self.store.get(name, self.digest(number, name))

    def get_state(self, number: int, name: str) -> dict[str, Any]:
        """Read a checkpoint of a member, and check its digest."""
        return self.store.get_state(name, self.digest(number, name))

    def _weights_name(self, number: int) -> str:
        progress = self.progress(number)
        if progress.weights is None:
            raise RunError(
                f"Member {number} of {self.store.root} has no weights yet ({progress.epoch} of "
                f"{self.recipe.train.epochs} epochs done). Run the same `plateaux train` again to finish it"
            )
        return progress.weights

    def shared(self) -> TensorTree:
        """Return the frozen weights that all members share."""
        if not self.store.has(SHARED):
            if any(SHARED in progress.digests for progress in self.all_progress()):
                raise StorageError(f"{self.store.root / SHARED} is missing. {recovery(SHARED)}")
            return {}
        digests = (progress.digests.get(SHARED) for progress in self.all_progress())
        return self.store.get_tensors(SHARED, next(filter(None, digests), None))

    def shared_bytes(self) -> int:
        """Return the size of the shared weights in bytes, without the header of their file."""
        if not self.store.has("shared.safetensors"):
            return 0
        content = self.store.get("shared.safetensors")
        return max(0, len(content) - 8 - int.from_bytes(content[:8], "little"))

    def put_shared(self, weights: TensorTree) -> None:
        if weights and not self.store.has(SHARED):
            self._written[SHARED] = self.store.put_tensors(SHARED, weights, {"format": "pt", "plateaux": "shared"})


def _own(run: Run, number: int, progress: MemberProgress) -> MemberProgress:
    """Return progress that was written for this member of this run; that of another one is an error."""
    if progress.member != _member_id(run, number):
        raise RunError(
            f"{run}/members/{number} is not of member {number} of this run: the folder was copied from another "
            "one. Restore it, or delete it to train that member again"
        )
    return replace(progress, member="")


def _member_id(run: Run, number: int) -> str:
    return f"{run.info.id}/{number}" if run.info.id else ""


def _has_trained(run: Run) -> bool:
    """Return whether a member has trained, or a process is about to train one."""
    return any(run.progress(n).position != (0, 0) or run.is_locked(n) for n in range(run.recipe.members))


RunLike = Run | str | Path
"""A `Run` object, or the folder or URL of a run."""


def own_version() -> str:
    """Return the installed version of this package."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("plateaux")
    except PackageNotFoundError:
        return "not installed"


def environment() -> dict[str, Any]:
    """Return versions and hardware, which can affect the results in addition to the recipe."""
    import torch

    return {
        "plateaux": own_version(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["cpu"],
        "threads": torch.get_num_threads(),
    }


def sharpness_path(epoch: int, member: int) -> str:
    return f"sharpness/{epoch}/{member}.safetensors"


def sam_set_path(epoch: int, member: int) -> str:
    return f"sam_sets/{epoch}/{member}.safetensors"


def partition_summary_path(epoch: int) -> str:
    return f"sam_sets/{epoch}/summary.json"
