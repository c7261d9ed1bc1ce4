"""The dependency closure of an installed package: names, versions, licenses, and what requires what.

python .ci/dependencies.py    # print the closure of Plateaux with all extras as pinned requirements

Everything comes from the metadata of the installed packages, so the closure is that of this environment: markers for
other platforms and Python versions are evaluated here.
"""

from __future__ import annotations

import tomllib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# The extras of `all`, which is the only list of them.
EXTRAS = tuple(sorted(Requirement(PROJECT["optional-dependencies"]["all"][0]).extras))
CLASSIFIER = "License :: OSI Approved :: "


@dataclass
class Package:
    """An installed package of the closure."""

    name: str
    version: str
    license: str
    requires: set[str] = field(default_factory=set)  # canonical names of installed packages
    required_by: set[str] = field(default_factory=set)  # "plateaux", or the extras through which it is installed


def closure(root: str, extras: tuple[str, ...] = ()) -> dict[str, Package]:
    """Return all packages that the root needs, by canonical name; packages that are not installed are left out."""
    found: dict[str, Package] = {}
    for extra in ("", *extras):
        _collect(root, extra, found)
    found.pop(canonicalize_name(root), None)
    return dict(sorted(found.items()))


def missing(root: str, extras: tuple[str, ...] = ()) -> list[str]:
    """Return the direct requirements of the root that are not installed."""
    needed = [each.name for extra in ("", *extras) for each in _requirements(distribution(root), extra)]
    return sorted({name for name in needed if _installed(name) is None})


def read_license(package: Distribution) -> str:
    """Return the license: the SPDX expression, else the classifiers, else the first line of the license field."""
    metadata = package.metadata
    if expression := metadata.get("License-Expression"):
        return str(expression)
    classifiers = [
        line.removeprefix(CLASSIFIER) for line in metadata.get_all("Classifier") or [] if line.startswith(CLASSIFIER)
    ]
    if classifiers:
        return " AND ".join(classifiers)
    first = next(iter((metadata.get("License") or "").strip().splitlines()), "")
    return first if 0 < len(first) <= 60 else "not stated in the metadata"


def _collect(root: str, extra: str, found: dict[str, Package]) -> None:
    """Add what the root requires through one extra, or without one, breadth first."""
    source = extra or canonicalize_name(root)
    queue: deque[tuple[str, frozenset[str]]] = deque([(root, frozenset([extra]))])
    visited: set[tuple[str, frozenset[str]]] = set()
    while queue:
        name, wanted = queue.popleft()
        package = _installed(name)
        if package is None or (name, wanted) in visited:
            continue
        visited.add((name, wanted))
        key = canonicalize_name(name)
        entry = found.setdefault(key, Package(package.metadata["Name"], package.version, read_license(package)))
        entry.required_by.add(source)
        for each in {str(line): line for option in wanted for line in _requirements(package, option)}.values():
            if _installed(each.name) is not None:
                entry.requires.add(canonicalize_name(each.name))
                queue.append((each.name, frozenset(each.extras) or frozenset([""])))


def _requirements(package: Distribution, extra: str) -> Iterator[Requirement]:
    """Yield the requirements of a package with one extra, or without ("")."""
    for line in package.requires or []:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def _installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    for name, package in closure("plateaux", EXTRAS).items():
        print(f"{name}=={package.version.split('+')[0]}")  # the index has no local versions such as 2.13.0+cpu
