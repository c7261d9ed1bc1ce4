# A record, not run at HEAD. A part of the scripts of commit 220c8143e819: `git checkout 220c8143e819`, studies/_results.py.
"""Results files of studies that are Python scripts: the numbers, and the commit whose code measured them.

    {"format": 1, "study": "joint_cifar100", "command": "...", "commit": "...", "numbers": {...}}

The tables of a results page are made from such a file alone, by `python docs/make_result_pages.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plateaux.core.errors import StorageError
from plateaux.storage.json_shapes import parse_json
from plateaux.storage.local_store import LocalStore
from plateaux.studies.claims.evidence import commit

FORMAT = 1
ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"


def write_numbers(file: Path, *, study: str, command: str, numbers: Mapping[str, Any]) -> None:
    """Write a results file with one line for each entry of `numbers`, so that changes are readable."""
    head = {"format": FORMAT, "study": study, "command": command, "commit": commit(ROOT)}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(each, allow_nan=False)}" for name, each in numbers.items())
    text = json.dumps(head).removesuffix("}") + ', "numbers": {\n' + lines + "\n}}\n"
    LocalStore(file.parent).put(file.name, text.encode())


def read_numbers(file: Path, study: str) -> dict[str, Any]:
    """Return the numbers of a results file."""
    tree = parse_json(file.read_text(encoding="utf-8"), file, "write it again with --results")
    if not isinstance(tree, dict) or (tree.get("format"), tree.get("study")) != (FORMAT, study):
        raise StorageError(f"{file} is not a results file of {study} in format {FORMAT}; write it with --results")
    return dict(tree["numbers"])
