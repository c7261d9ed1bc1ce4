"""The parts of a batch prediction on disk.

    OUT.parts/plan.json          inputs, model, and settings, to refuse a resume with others
    OUT.parts/part-00007.csv     the predictions of some inputs
    OUT.parts/part-00007.json    its digest, written after it: a part without one is computed again

At the end, the parts become one file and their folder is deleted. If OUT has no suffix, it is a folder that keeps the
parts, and `manifest.json` lists them with their digests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from plateaux.config.recipe import diff
from plateaux.core.errors import RunError, StorageError
from plateaux.prediction.predictions import merge
from plateaux.storage.atomic import explain_os_error, open_atomic, write_atomic
from plateaux.storage.digests import digest_bytes

FORMAT = 1  # of plan.json and manifest.json
PLAN, MANIFEST = "plan.json", "manifest.json"


def check_plan(folder: Path, plan: Mapping[str, Any]) -> None:
    """Write the plan of a new job, or compare it with that of an interrupted one."""
    plan = {"format": FORMAT, **plan}
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        write_atomic(folder / PLAN, json.dumps(plan, indent=2))
        return
    stored = _read_json(folder / PLAN)
    if stored is None:
        raise RunError(f"{folder} exists and is not the folder of a batch prediction. Choose another output")
    changes = diff(stored, plan)
    if changes:
        raise RunError(
            f"{folder} belongs to a prediction with other inputs or settings. Differences (stored -> given):\n  "
            + "\n  ".join(changes)
            + "\nChoose another output, or delete the folder"
        )


def write_part(folder: Path, number: int, suffix: str, content: bytes, counts: Mapping[str, int]) -> None:
    """Write a part, then its digest."""
    write_atomic(folder / _name(number, suffix), content)
    write_atomic(folder / _name(number, ".json"), json.dumps({"digest": digest_bytes(content), **counts}))


def is_complete(folder: Path, number: int, suffix: str) -> bool:
    """Return whether a part is there and undamaged."""
    record = _read_json(folder / _name(number, ".json"))
    try:
        content = (folder / _name(number, suffix)).read_bytes()
    except OSError:
        return False
    return record is not None and record.get("digest") == digest_bytes(content)


def finish(out: Path, folder: Path, count: int, suffix: str) -> list[dict[str, Any]]:
    """Merge the parts into one file, or list them in the manifest of a folder; return their records."""
    files, records = [folder / _name(number, suffix) for number in range(count)], []
    for number in range(count):
        record = _read_json(folder / _name(number, ".json"))
        if record is None:
            raise RunError(f"{folder}: part {number} is missing. Run the same command again")
        records.append(record)
    if out == folder:
        listed = [{"file": file.name, **record} for file, record in zip(files, records, strict=True)]
        write_atomic(folder / MANIFEST, json.dumps({**(_read_json(folder / PLAN) or {}), "parts": listed}, indent=2))
        return records
    try:
        with open_atomic(out) as file:
            for content in merge(files, suffix):
                file.write(content)
    except OSError as problem:
        raise StorageError(f"{explain_os_error('write', out, problem)}; choose another output path") from None
    _delete_parts(folder, count, suffix)
    return records


def _delete_parts(folder: Path, count: int, suffix: str) -> None:
    """Delete what this module wrote, and the folder if nothing else is in it."""
    names = [_name(number, kind) for number in range(count) for kind in (suffix, ".json")]
    for name in [*names, PLAN]:
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def _name(number: int, suffix: str) -> str:
    return f"part-{number:05d}{suffix}"


def _read_json(file: Path) -> dict[str, Any] | None:
    """Return a JSON object, or None if the file is missing or damaged."""
    try:
        tree = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return tree if isinstance(tree, dict) else None
