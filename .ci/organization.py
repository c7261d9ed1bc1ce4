"""Write the GitHub organization into the URLs of the repository and of the documentation.

python .ci/organization.py NAME
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACEHOLDER = "ORGANIZATION"
FILES = ("CITATION.cff", "SECURITY.md", "mkdocs.yml", "pyproject.toml")
URL = re.compile(r"(?<=https://github\.com/)[\w-]+(?=/plateaux\b)|(?<=https://)[\w-]+(?=\.github\.io/plateaux\b)")


def read_organizations(root: Path) -> dict[str, set[str]]:
    """Return the organizations in the URLs of each file."""
    return {name: set(URL.findall((root / name).read_text(encoding="utf-8"))) for name in FILES}


def write_organization(root: Path, name: str) -> None:
    """Replace the organization in all URLs."""
    if not re.fullmatch(r"[A-Za-z0-9](-?[A-Za-z0-9]){0,38}", name):
        raise ValueError(
            f"The organization is {name!r}; GitHub allows letters, digits, and single hyphens between them"
        )
    for file in (root / each for each in FILES):
        file.write_text(URL.sub(name, file.read_text(encoding="utf-8")), encoding="utf-8")


def organization_problems(root: Path) -> list[str]:
    """Return why the URLs cannot be published."""
    found = set().union(*read_organizations(root).values())
    command = "run `make organization NAME=...` with the name of the GitHub organization"
    if PLACEHOLDER in found:
        return [f"The URLs contain the placeholder {PLACEHOLDER}: {command}"]
    return (
        [f"The URLs contain different organizations ({', '.join(sorted(found))}): {command}"] if len(found) > 1 else []
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Give the name of the GitHub organization: make organization NAME=acme")
    try:
        write_organization(ROOT, sys.argv[1])
    except ValueError as error:
        sys.exit(str(error))
