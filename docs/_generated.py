"""Write a generated file of the documentation, or check that the committed one is current (`--check`)."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def write_or_check(files: dict[Path, str]) -> int:
    """Write the files and return 0. With `--check`, write nothing and return 1 if one of them is out of date."""
    script = Path(sys.argv[0]).name
    if "--check" not in sys.argv[1:]:
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
        return 0
    outdated = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in outdated:
        print(f"{path.relative_to(ROOT)} is out of date. Run: python docs/{script}", file=sys.stderr)
    return 1 if outdated else 0
