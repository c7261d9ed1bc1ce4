"""Write docs/reference/licenses.md, the licenses of all packages that Plateaux installs, from importlib.metadata.

python docs/make_licenses_page.py            # write the page
python docs/make_licenses_page.py --check    # exit code 1 if the page differs from this environment

The page describes the environment in which the script runs: install every extra first (`make setup`). It contains no
versions, so that it changes only if a package or a license changes.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from _generated import ROOT, write_or_check

sys.path.insert(0, str(ROOT / ".ci"))
from dependencies import EXTRAS, Package, closure

PAGE = Path(__file__).parent / "reference" / "licenses.md"
HEAD = """\
# Licenses of dependencies

<!-- Written by docs/make_licenses_page.py from the metadata of installed packages. -->

Plateaux is licensed under Apache-2.0. It contains no code of the packages below; `pip` installs them. The table lists
the full dependency closure of `plateaux` and of its extras (without `dev`) on Linux with the CPU build of torch; the
CUDA build of torch also installs NVIDIA's libraries, which have a proprietary license. Each license is quoted from the
metadata of the package: the SPDX expression, the classifiers, or the license field. `make release` writes the same list
with versions as an SBOM.
"""


def page() -> str:
    """Return the page as Markdown."""
    packages = closure("plateaux", EXTRAS)
    counts = Counter(package.license for package in packages.values())
    summary = [
        f"| {_cell(name)} | {count} |" for name, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    ]
    rows = [
        f"| {package.name} | {_cell(package.license)} | {_installed_by(package)} |" for package in packages.values()
    ]
    parts = [
        HEAD,
        f"{len(packages)} packages:",
        "",
        "| license | packages |",
        "|---|---:|",
        *summary,
        "",
        "## Packages",
        "",
        "| package | license | installed by |",
        "|---|---|---|",
        *rows,
        "",
    ]
    return "\n".join(parts)


def _installed_by(package: Package) -> str:
    """Return `plateaux` for a package of the core, and otherwise the extras that install it."""
    if "plateaux" in package.required_by:
        return "`plateaux`"
    return ", ".join(f"`{extra}`" for extra in EXTRAS if extra in package.required_by)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(write_or_check({PAGE: page()}))
