"""Check every file of a run folder against its digest."""

from __future__ import annotations

from dataclasses import dataclass

from plateaux.core.errors import PlateauxError
from plateaux.storage.run import Run, RunLike
from plateaux.storage.store import recovery

UNCHECKED = ("tensorboard/", "tracker-")  # files that trackers append to


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of `verify`."""

    checked: int  # files that match their digest
    damaged: dict[str, str]  # the problem with each other file, and what to do
    unchecked: list[str]  # files without a digest

    @property
    def ok(self) -> bool:
        return not self.damaged


def verify(run: RunLike) -> Verification:
    """Check every file of a run that has a digest, and that every file that the run names is there.

    Args:
        run: A run, its folder, or its URL.
    """
    opened = Run.open(run)  # checks run.json and recipe.toml
    store, checked, damaged = opened.store, {"run.json", "recipe.toml"}, dict[str, str]()

    def check(name: str, digest: str | None = None) -> None:
        try:
            if digest is None and name.endswith(".json"):
                store.get_json(name)
            else:
                store.get(name, digest or store.recorded_digest(name))
            checked.add(name)
        except PlateauxError as problem:
            damaged[name] = str(problem)
        except Exception as problem:
            damaged[name] = f"{store.root / name} is damaged: {problem}. {recovery(name)}"

    for number in range(opened.recipe.members):
        try:
            progress = opened.progress(number)
        except PlateauxError as problem:
            damaged[f"members/{number}/progress.json"] = str(problem)
            continue
        for name, digest in progress.digests.items():
            check(name, digest)
    if opened.info.calibration_digest is not None:
        check("calibration.json", opened.info.calibration_digest)
    unchecked = []
    for name in store.names():
        if name in checked or name in damaged:
            continue
        # The digest of an object of a member is unknown if no progress names it.
        suffixes = ".json" if name.startswith("members/") else (".json", ".safetensors")
        if name.startswith(UNCHECKED) or not name.endswith(suffixes):
            unchecked.append(name)
        else:
            check(name)
    return Verification(len(checked), damaged, unchecked)
