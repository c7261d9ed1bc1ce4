"""Prepare a release in dist/: check tree and version, build and check wheel and sdist, write SBOM and checksums.

python .ci/release.py [--out FOLDER] [--allow-dirty]

Nothing is uploaded and no tag is created: docs/contributing/release.md lists these steps. `--allow-dirty` builds from
uncommitted changes and from an unreleased changelog, to try the target; the result must not be published.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from datetime import date
from email.parser import Parser
from pathlib import Path
from typing import Any

from dependencies import EXTRAS, PROJECT, Package, closure, missing
from organization import organization_problems
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
SBOM, SUMS = "plateaux.cdx.json", "SHA256SUMS"
REQUIRED_FIELDS = ("Name", "Version", "Summary", "License-Expression", "Requires-Python", "Description-Content-Type")
# What may be at the top level of the archives, so that caches, data and virtual environments are not published.
IN_SDIST = {".ci", ".github", "benchmarks", "deployment", "docs", "recipes", "src", "tests"}


def version_problems(root: Path, tags: Sequence[str] = (), tags_here: Sequence[str] = ()) -> list[str]:
    """Return why the version of the sources cannot be released; `tags_here` are the tags of this commit."""
    version = read_version(root)
    heading = re.search(r"^## \[([^\]]+)\](.*)$", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    problems = []
    if heading is None or heading[1] != version:
        found = heading[0] if heading else "no section"
        problems.append(f"CHANGELOG.md starts with '{found}'; expected '## [{version}] - YYYY-MM-DD'")
    elif not _is_date(heading[2].removeprefix(" - ").strip()):
        problems.append(f"CHANGELOG.md: '{heading[0]}' has no date; expected '## [{version}] - YYYY-MM-DD'")
    if f"\nversion: {version}\n" not in (root / "CITATION.cff").read_text(encoding="utf-8"):
        problems.append(f"CITATION.cff does not contain 'version: {version}'")
    if f"v{version}" in set(tags) - set(tags_here):
        problems.append(
            f"The tag v{version} exists on another commit. Increase __version__ in src/plateaux/__init__.py"
        )
    problems += [
        f"This commit has the tag {tag}, but its version is {version}. Delete the tag, or change __version__"
        for tag in tags_here
        if tag.startswith("v") and tag != f"v{version}"
    ]
    return problems


def read_version(root: Path) -> str:
    text = (root / "src" / "plateaux" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    assert found, "src/plateaux/__init__.py has no __version__"
    return found[1]


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def wheel_problems(wheel: Path, version: str) -> list[str]:
    """Return what is wrong with the metadata or the contents of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = f"plateaux-{version}.dist-info"
        if f"{info}/METADATA" not in names:
            return [f"{wheel.name} has no {info}/METADATA"]
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    problems = [f"{wheel.name}: the field {name} is missing" for name in REQUIRED_FIELDS if not metadata.get(name)]
    if metadata["Version"] != version:
        problems.append(f"{wheel.name}: Version is {metadata['Version']}, expected {version}")
    if len(metadata.get_payload()) < 1000:
        problems.append(f"{wheel.name}: the description is not the README")
    needed = [f"{info}/licenses/LICENSE", "plateaux/py.typed", "plateaux/recipes/quickstart.toml"]
    problems += [f"{wheel.name}: {name} is missing" for name in needed if name not in names]
    strange = sorted({name.split("/")[0] for name in names} - {"plateaux", info})
    return problems + [f"{wheel.name}: unexpected top-level entry {name}" for name in strange]


def sdist_problems(sdist: Path, version: str) -> list[str]:
    """Return what is wrong with the contents of a source archive."""
    prefix = f"plateaux-{version}/"
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    outside = [name for name in names if not name.startswith(prefix) and name != prefix.rstrip("/")]
    inside = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    folders = {name.split("/")[0] for name in inside if "/" in name}
    problems = [f"{sdist.name}: {name} is outside {prefix}" for name in outside]
    problems += [f"{sdist.name}: unexpected folder {name}" for name in sorted(folders - IN_SDIST)]
    needed = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "PKG-INFO")
    return problems + [f"{sdist.name}: {name} is missing" for name in needed if name not in inside]


def sbom(version: str, packages: Mapping[str, Package]) -> dict[str, Any]:
    """Return a software bill of materials in CycloneDX 1.6: Plateaux and the closure of its dependencies."""
    root = f"pkg:pypi/plateaux@{version}"
    purls = {name: f"pkg:pypi/{name}@{package.version}" for name, package in packages.items()}
    direct = sorted(purls[name] for name in _direct() & set(purls))
    edges = {purls[name]: sorted(purls[n] for n in each.requires & set(purls)) for name, each in packages.items()}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library", "bom-ref": root, "name": "plateaux", "version": version, "purl": root,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            }
        },
        "components": [
            {
                "type": "library", "bom-ref": purls[name], "name": each.name, "version": each.version,
                "purl": purls[name], "licenses": [{"license": {"name": each.license}}],
                "properties": [{"name": "plateaux:required-by", "value": ", ".join(sorted(each.required_by))}],
            }
            for name, each in packages.items()
        ],
        "dependencies": [
            {"ref": root, "dependsOn": direct}, *({"ref": ref, "dependsOn": on} for ref, on in edges.items())
        ],
    }  # fmt: skip


def _direct() -> set[str]:
    """Return the canonical names of the direct dependencies, with all extras, which may contain other extras."""
    extras = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *(line for extra in EXTRAS for line in extras[extra])]
    return {canonicalize_name(re.split(r"[\[<>=!~; ]", line)[0]) for line in lines} - {"plateaux"}


def checksums(files: Sequence[Path]) -> str:
    """Return SHA-256 sums in the format of `sha256sum --check`."""
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(files))


def git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def stop(problems: Sequence[str]) -> None:
    if problems:
        sys.exit("\n".join(["Not released:", *(f"- {problem}" for problem in problems)]))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="an empty or new folder (default: dist)")
    parser.add_argument("--allow-dirty", action="store_true", help="try the target on an unreleased version")
    args = parser.parse_args(argv)
    version = read_version(ROOT)
    problems = [f"uncommitted change: {line}" for line in git("status", "--porcelain")]
    problems += version_problems(ROOT, git("tag", "--list"), git("tag", "--points-at", "HEAD"))
    problems += organization_problems(ROOT)
    if args.allow_dirty:
        print("\n".join(["For a trial only:", *(f"- {problem}" for problem in problems)]), flush=True)
    else:
        stop(problems)
    stop([f"{args.out} is not empty: delete it or pass --out"] if args.out.exists() and any(args.out.iterdir()) else [])
    stop([f"{name} is not installed: the SBOM needs every extra (make setup)" for name in missing("plateaux", EXTRAS)])
    build = [sys.executable, "-m", "build", "-q", "--no-isolation", "--outdir", str(args.out), "."]
    subprocess.run(build, cwd=ROOT, check=True)
    (wheel,), (sdist,) = list(args.out.glob("*.whl")), list(args.out.glob("*.tar.gz"))
    stop([*wheel_problems(wheel, version), *sdist_problems(sdist, version)])
    packages = closure("plateaux", EXTRAS)
    bill = json.dumps(sbom(version, packages), indent=1) + "\n"
    (args.out / SBOM).write_text(bill, encoding="utf-8")
    (args.out / SUMS).write_text(checksums([wheel, sdist, args.out / SBOM]), encoding="utf-8")
    for file in sorted(args.out.iterdir()):
        print(f"{file.stat().st_size:>10,} bytes  {file.name}")
    print(f"{len(packages)} packages in the SBOM. Next: docs/contributing/release.md")


if __name__ == "__main__":
    main()
