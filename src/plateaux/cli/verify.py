"""The command `plateaux verify`."""

from __future__ import annotations

from pathlib import Path

from plateaux.cli.common import AsJson, print_result
from plateaux.core.errors import StorageError


def verify(run: Path, as_json: AsJson = False) -> None:
    """Check every file of a run against its digest; exit with 4 if one is damaged or missing.

    In Python: `plateaux.storage.verify.verify("runs/demo")`
    """
    from plateaux.storage.verify import verify as verify_run  # opening runs is slow to import

    result = verify_run(run)
    plain = {
        "run": str(run), "ok": result.ok, "checked": result.checked, "damaged": result.damaged,
        "unchecked": result.unchecked,
    }  # fmt: skip
    lines = [f"{result.checked} files match their digests, {len(result.damaged)} do not"]
    lines += [f"{len(result.unchecked)} files have no digest"] if result.unchecked else []
    print_result(as_json, plain, lambda: lines)
    if not result.ok:
        raise StorageError("\n".join(result.damaged.values()))
