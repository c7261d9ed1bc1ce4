"""The run folder: recipe, progress and weights of the members, and results.

`members/<i>/progress.json` names the valid objects of a member; `member_writer.py` writes them.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.experiment import Experiment
from plateaux.config.recipe import Recipe, diff, fingerprint
from plateaux.core.errors import RunError, StorageError
from plateaux.core.ranges import Finite, FiniteSeconds, StoredInt
from plateaux.storage.digests import digest_bytes
from plateaux.storage.json_shapes import parse_json, read_shape
from plateaux.storage.remote_store import open_store
from plateaux.storage.run_info import FORMAT, AutotuneInfo, RunInfo, StoredPartition
from plateaux.storage.store import Store, encode_json, recovery

SHARED = "shared.safetensors"  # frozen weights that all members share
BEGIN_LOCK = ".begin"
BEGIN_TIMEOUT_S = 60.0
REQUIRED = ("epoch", "checkpoints", "log_parts", "digests")  # fields of progress.json

if TYPE_CHECKING:
    from plateaux.core.types import TensorTree


@dataclass(frozen=True, slots=True)
class Claim:
    """Which process writes a member."""

    attempt: str  # part of the names of the objects that it writes
    session: str  # of one call of `train`
    host: str
    pid: StoredInt
    since: Finite  # Unix time


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
    claim: Claim | None = None  # None: no process writes this member

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
        This is exclusive: of two processes with different recipes, the second one is rejected.
        """
        store = open_store(root)
        with store.lock(BEGIN_LOCK, timeout=BEGIN_TIMEOUT_S):
            while (run := cls._begin(store, root, experiment, info, accept_changes=accept_changes)) is None:
                continue  # another process has changed run.json in a bucket
            return run

    @classmethod
    def _begin(
        cls, store: Store, root: str | Path, experiment: Experiment, info: RunInfo, *, accept_changes: bool
    ) -> Run | None:
        content = store.get("run.json") if store.has("run.json") else None
        recipe = experiment.recipe.to_toml().encode()
        if content is None and not store.has("recipe.toml"):
            if not store.swap("recipe.toml", recipe, None):
                return None
        else:  # a kill may have separated the recipe from its digest; it is written again below
            stored = Recipe.parse(store.get("recipe.toml").decode(errors="replace"), where=f"{root}/recipe.toml")
            changes = diff(stored.identity(), experiment.recipe.identity())
            if changes:
                raise RunError(
                    f"{root} belongs to another recipe. Differences (stored -> given):\n  "
                    + "\n  ".join(changes)
                    + "\nChoose another --out, or restore the recipe"
                )
        if content is not None:
            old = cls.open(root, check_recipe=False)
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
        names = {str(i): run.member_name(i) for i in range(run.recipe.members)}
        tree = {**info.to_dict(), "recipe_digest": digest_bytes(recipe), "members": names}
        if not store.swap("run.json", encode_json(tree), content):
            return None
        store.put("recipe.toml", recipe)
        store.put_json("environment.json", environment())
        return run

    def update_info(self, values: Mapping[str, Any]) -> None:
        """Replace values of run.json."""
        with self.store.lock(BEGIN_LOCK, timeout=BEGIN_TIMEOUT_S):
            is_done = False
            while not is_done:
                old = self.store.get("run.json")
                tree = {**self.store.parse("run.json", old), **values}
                info = RunInfo.from_dict(tree, self.store.root / "run.json").to_dict()  # in the order of `begin`
                new = {**info, "recipe_digest": tree["recipe_digest"], "members": tree["members"]}
                is_done = self.store.swap("run.json", encode_json(new), old)

    def with_autotune(self, settings: AutotuneInfo) -> Run:
        """Record settings that were autotuned once and hold for the whole run."""
        self.update_info({"autotune": settings.to_dict()})
        return replace(self, info=replace(self.info, autotune=settings))

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
        return self.stored_progress(number)[0]

    def stored_progress(self, number: int) -> tuple[MemberProgress, bytes | None]:
        """Return the training progress of a member, and the content of its file; None: there is no file yet."""
        name = progress_path(number)
        if not self.store.has(name):
            return MemberProgress(), None
        advice = "restore it, or delete its folder to train that member again"
        content, file = self.store.get(name), self.store.root / name
        progress = read_shape(MemberProgress, self.store.parse(name, content), file, advice, required=REQUIRED)
        return _own(self, number, progress), content

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

    def is_locked(self, number: int) -> bool:
        """Return whether a process holds the lock of a member. In a bucket, the progress has its claim instead."""
        return self.store.is_locked(f"members/{number}")

    def check_weights(self) -> None:
        """Raise StorageError if the weights of a finished member are missing."""
        for progress in self.all_progress():
            if progress.finished and progress.weights and not self.store.has(progress.weights):
                raise StorageError(f"{self.store.root / progress.weights} is missing. {recovery(progress.weights)}")

    def release_claims(self) -> None:
        """Take over the members that other processes have claimed in a bucket: those stop at their next checkpoint.

        On a disk, this does nothing: the kernel's lock excludes another process as long as it exists.
        """
        for number in () if self.store.has_locks else range(self.recipe.members):
            is_released = False
            while not is_released:
                progress, content = self.stored_progress(number)
                released = encode_progress(self, number, progress, None)
                is_released = progress.claim is None or self.store.swap(progress_path(number), released, content)

    def log(self, number: int, parts: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Return the log entries of a member in order.

        Args:
            number: The member.
            parts: The names of parts of the log. None: all.
        """
        parts = self.progress(number).log_parts if parts is None else parts
        return [line for part in parts for line in self._log_lines(number, part)]

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
        """Return the digest of an object of a member, which its last commit recorded."""
        digest = self.progress(number).digests.get(name)
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


def encode_progress(run: Run, number: int, progress: MemberProgress, claim: Claim | None) -> bytes:
    """Return the content of progress.json, with the claim of a writer."""
    return encode_json(asdict(replace(progress, claim=claim, member=_member_id(run, number))))


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
    found = enumerate(run.all_progress())
    return any(each.position != (0, 0) or each.claim or run.is_locked(number) for number, each in found)


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


def progress_path(number: int) -> str:
    return f"members/{number}/progress.json"


def sharpness_path(epoch: int, member: int) -> str:
    return f"sharpness/{epoch}/{member}.safetensors"


def sam_set_path(epoch: int, member: int) -> str:
    return f"sam_sets/{epoch}/{member}.safetensors"


def partition_summary_path(epoch: int) -> str:
    return f"sam_sets/{epoch}/summary.json"
