"""The release target: version checks, contents of archives, SBOM, checksums; versions that the docs state."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def load(name: str) -> ModuleType:
    """Import a script of .ci, which is not a package."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


dependencies = load("dependencies")
organization = load("organization")
release = load("release")


def sources(folder: Path, version: str, heading: str, citation: str) -> Path:
    (folder / "src" / "plateaux").mkdir(parents=True)
    (folder / "src" / "plateaux" / "__init__.py").write_text(
        f'"""P."""\n\n__version__ = "{version}"\n', encoding="utf-8"
    )
    (folder / "CHANGELOG.md").write_text(
        f"# Changelog\n\n{heading}\n\n- x\n\n## [0.1.0] - 2026-01-01\n", encoding="utf-8"
    )
    (folder / "CITATION.cff").write_text(f"title: P\nversion: {citation}\nlicense: Apache-2.0\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("tag", "here", "problem"),
    [
        ("v0.2.0", ["v0.2.0"], ""),
        ("v0.2.0", [], "The tag v0.2.0 exists on another commit"),
        ("v0.3.0", ["v0.3.0"], "has the tag v0.3.0, but its version is 0.2.0"),
        ("v0.3.0", [], ""),
        ("reviewed", ["reviewed"], ""),
    ],
)
def test_the_tag_of_the_released_commit_is_its_version(tmp_path: Path, tag: str, here: list[str], problem: str) -> None:
    found = release.version_problems(sources(tmp_path, "0.2.0", "## [0.2.0] - 2026-12-01", "0.2.0"), [tag], here)
    assert len(found) == bool(problem), found
    assert problem in "".join(found)


@pytest.mark.parametrize(
    ("version", "heading", "citation", "tags", "problems"),
    [
        ("0.2.0", "## [0.2.0] - 2026-12-01", "0.2.0", ["v0.1.0"], 0),
        ("0.2.0", "## [Unreleased] - 0.2.0", "0.2.0", [], 1),
        ("0.2.0", "## [0.2.0]", "0.2.0", [], 1),
        ("0.2.0", "## [0.2.0] - soon", "0.2.0", [], 1),
        ("0.2.0", "## [0.3.0] - 2026-12-01", "0.2.0", [], 1),
        ("0.2.0", "## [0.2.0] - 2026-12-01", "0.1.0", [], 1),
        ("0.2.0", "## [0.2.0] - 2026-12-01", "0.2.0", ["v0.2.0"], 1),
        ("0.2.0", "", "0.1.0", ["v0.2.0"], 3),
    ],
)
def test_a_release_needs_one_version_everywhere_and_a_date(
    tmp_path: Path, version: str, heading: str, citation: str, tags: list[str], problems: int
) -> None:
    found = release.version_problems(sources(tmp_path, version, heading, citation), tags)
    assert len(found) == problems, found


def copy_urls(folder: Path) -> Path:
    for name in organization.FILES:
        (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


def test_all_files_name_one_organization() -> None:
    found = organization.read_organizations(ROOT)
    assert len(set().union(*found.values())) == 1
    assert all(found.values()), "organization.FILES lists a file without a URL"


def test_no_other_file_names_the_organization() -> None:
    (name,) = set().union(*organization.read_organizations(ROOT).values())
    urls = (f"github.com/{name}/plateaux", f"{name}.github.io/plateaux")
    suffixes = {".cff", ".ipynb", ".md", ".py", ".toml", ".yaml", ".yml"}
    folders = (ROOT / name for name in (".ci", ".github", "deployment", "docs", "recipes", "src", "studies"))
    files = [*ROOT.glob("*"), *(path for folder in folders for path in folder.rglob("*"))]
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files if path.suffix in suffixes}
    assert {path for path, text in texts.items() if any(url in text for url in urls)} == set(organization.FILES)


def test_a_release_needs_an_organization_and_one_command_writes_it_everywhere(tmp_path: Path) -> None:
    copy_urls(tmp_path)
    organization.write_organization(tmp_path, organization.PLACEHOLDER)
    (problem,) = organization.organization_problems(tmp_path)
    assert "make organization NAME=" in problem
    for name in ("acme", "acme-labs"):
        organization.write_organization(tmp_path, name)
        assert organization.read_organizations(tmp_path) == {file: {name} for file in organization.FILES}
        assert organization.organization_problems(tmp_path) == []
    (tmp_path / "SECURITY.md").write_text("https://github.com/other/plateaux", encoding="utf-8")
    assert "different organizations (acme-labs, other)" in "".join(organization.organization_problems(tmp_path))


@pytest.mark.parametrize("name", ["", "a b", "-a", "a--b", "a/b", "a" * 40])
def test_a_name_that_github_does_not_allow_changes_no_file(tmp_path: Path, name: str) -> None:
    before = organization.read_organizations(copy_urls(tmp_path))
    with pytest.raises(ValueError, match="GitHub allows letters"):
        organization.write_organization(tmp_path, name)
    assert organization.read_organizations(tmp_path) == before


METADATA = "\n".join(
    [
        "Metadata-Version: 2.4", "Name: plateaux", "Version: 0.2.0", "Summary: s", "License-Expression: Apache-2.0",
        "Requires-Python: >=3.11", "Description-Content-Type: text/markdown", "", "text " * 300,
    ]
)  # fmt: skip
INFO = "plateaux-0.2.0.dist-info"
IN_WHEEL = (f"{INFO}/licenses/LICENSE", "plateaux/py.typed", "plateaux/recipes/quickstart.toml")


@pytest.mark.parametrize(
    ("names", "metadata", "word"),
    [
        (IN_WHEEL, METADATA, ""),
        (IN_WHEEL[1:], METADATA, "LICENSE is missing"),
        ((*IN_WHEEL, ".venv/bin/python"), METADATA, "unexpected top-level entry .venv"),
        (IN_WHEEL, METADATA.replace("Version: 0.2.0", "Version: 0.1.0"), "expected 0.2.0"),
        (IN_WHEEL, METADATA.replace("Summary: s\n", ""), "Summary is missing"),
        (IN_WHEEL, METADATA.replace("text ", ""), "not the README"),
    ],
)
def test_the_contents_of_a_wheel_are_checked(tmp_path: Path, names: tuple[str, ...], metadata: str, word: str) -> None:
    wheel = tmp_path / "plateaux-0.2.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{INFO}/METADATA", metadata)
        for name in names:
            archive.writestr(name, "x")
    found = release.wheel_problems(wheel, "0.2.0")
    assert len(found) == bool(word), found
    assert word in "".join(found)


@pytest.mark.parametrize(("extra", "problems"), [("src/a.py", 0), ("runs/a", 1), (".venv/a", 1), ("../a", 1)])
def test_the_contents_of_an_sdist_are_checked(tmp_path: Path, extra: str, problems: int) -> None:
    file = tmp_path / "x"
    file.write_text("x", encoding="utf-8")
    sdist = tmp_path / "plateaux-0.2.0.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "PKG-INFO"):
            archive.add(file, f"plateaux-0.2.0/{name}")
        archive.add(file, f"plateaux-0.2.0/{extra}" if ".." not in extra else "elsewhere/a")
    assert len(release.sdist_problems(sdist, "0.2.0")) == problems


def test_checksums_are_in_the_format_of_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"2")
    (tmp_path / "a").write_bytes(b"1")
    text = release.checksums([tmp_path / "b", tmp_path / "a"])
    assert text == f"{hashlib.sha256(b'1').hexdigest()}  a\n{hashlib.sha256(b'2').hexdigest()}  b\n"


def test_the_closure_follows_requirements_of_requirements() -> None:
    found = dependencies.closure("pytest")
    assert {"pluggy", "packaging", "iniconfig"} <= set(found)
    assert "pytest" not in found
    assert all(package.version and package.license for package in found.values())
    assert found["pluggy"].required_by == {"pytest"}


def test_the_sbom_names_every_package_once_and_resolves_all_references() -> None:
    packages = dependencies.closure("plateaux", ("report",))
    bill = release.sbom("0.2.0", packages)
    references = [each["bom-ref"] for each in bill["components"]]
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert len(set(references)) == len(references) == len(packages)
    known = {*references, bill["metadata"]["component"]["bom-ref"]}
    assert {each["ref"] for each in bill["dependencies"]} == known
    assert {name for each in bill["dependencies"] for name in each["dependsOn"]} <= known
    assert any(reference.startswith("pkg:pypi/torch@") for reference in bill["dependencies"][0]["dependsOn"])


def test_the_folders_that_may_be_in_an_sdist_are_those_that_hatch_includes() -> None:
    include = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    folders = {name.strip("/") for name in include["sdist"]["include"]}
    assert {name for name in folders if (ROOT / name).is_dir()} == release.IN_SDIST


def test_the_versioning_page_states_the_formats_of_the_sources() -> None:
    from plateaux.storage import run_info
    from plateaux.studies import result_rows

    page = (ROOT / "docs" / "reference" / "versioning.md").read_text(encoding="utf-8")
    assert re.search(rf"^\| run folder \|[^|]*\| {run_info.FORMAT} \|", page, re.MULTILINE)
    assert re.search(rf"^\| results of a study \|[^|]*\| {result_rows.FORMAT} \|", page, re.MULTILINE)


def test_classifiers_name_the_python_versions_that_the_versioning_page_lists() -> None:
    page = (ROOT / "docs" / "reference" / "versioning.md").read_text(encoding="utf-8")
    row = re.search(r"^\| Python \| ([^|]+)\|", page, re.MULTILINE)
    assert row is not None
    named = [line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert named == re.findall(r"3\.\d+(?= )", row[1].replace(",", " ").replace("(", " "))


def test_both_ends_of_the_range_of_torch_are_checked() -> None:
    (torch,) = [line for line in PROJECT["dependencies"] if re.match(r"torch\b", line)]
    oldest = re.fullmatch(r"torch>=(\d+\.\d+),<\d+", torch)
    assert oldest is not None
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f'.ci/check_torch "torch=={oldest[1]}.*"' in makefile
    assert f'.ci/check_torch "{torch}"' in makefile


def test_check_gpu_reports_a_missing_device() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = subprocess.run([sys.executable, ROOT / ".ci" / "check_gpu.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "nothing was measured" in done.stderr


def test_templates_and_code_of_conduct_exist() -> None:
    templates = sorted(path.name for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md"))
    assert templates == ["bug_report.md", "feature_request.md", "gpu_results.md", "wrong_result.md"]
    for name in templates:
        text = (ROOT / ".github" / "ISSUE_TEMPLATE" / name).read_text(encoding="utf-8")
        assert re.match(r"---\nname: .+\nabout: .+\n", text)
    assert (ROOT / ".github" / "PULL_REQUEST_TEMPLATE.md").exists()
    assert (ROOT / "CODE_OF_CONDUCT.md").exists()
