"""Workflows run only make targets, with few permissions; hooks have the versions of the extra `dev`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
MAY_WRITE = {("docs.yml", "deploy"): {"pages", "id-token"}, ("release.yml", "publish"): {"id-token"}}


def read(path: Path) -> dict[str, Any]:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(workflow, dict)
    return workflow


def commands(workflow: dict[str, Any]) -> Iterator[str]:
    """Yield the command of every step, once per entry of `matrix.targets` if it runs these."""
    for job in workflow["jobs"].values():
        for command in (step["run"] for step in job["steps"] if "run" in step):
            entries = job.get("strategy", {}).get("matrix", {}).get("targets", [""])
            yield from (command.replace("$TARGETS", entry) for entry in entries)


def test_workflows_check_document_and_release() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "docs.yml", "nightly.yml", "release.yml"]
    nightly = set(" ".join(commands(read(ROOT / ".github" / "workflows" / "nightly.yml"))).split())
    assert nightly >= {"check", "check-oldest", "check-newest", "docs"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_step_of_a_workflow_runs_existing_make_targets(path: Path) -> None:
    found = list(commands(read(path)))
    assert found
    for command in found:
        program, *targets = command.split()
        assert program == "make"
        assert targets
        assert set(targets) <= TARGETS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_reads_only_and_has_a_time_limit(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert "concurrency" in workflow
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] > 0
        permissions = job.get("permissions", {})
        assert set(permissions) == MAY_WRITE.get((path.name, name), set())
        checkouts = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")]
        assert all(step["with"]["persist-credentials"] is False for step in checkouts)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_referenced_by_release_tag(path: Path) -> None:
    jobs = read(path)["jobs"].values()
    actions = [step["uses"] for job in jobs for step in job["steps"] if "uses" in step]
    assert [action for action in actions if not re.fullmatch(r"(actions|pypa)/[\w-]+@v\d+(\.\d+)*", action)] == []


def test_hooks_have_the_versions_of_the_extra_dev() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = dict(line.split("==") for line in project["optional-dependencies"]["dev"] if "==" in line)
    hooks = read(ROOT / ".pre-commit-config.yaml")["repos"]
    revisions = {
        Path(hook["repo"]).name.removesuffix("-pre-commit"): hook.get("rev", "").removeprefix("v") for hook in hooks
    }
    assert set(pins) >= {"check-jsonschema", "ruff", "zizmor"}
    assert {name: revisions[name] for name in pins} == pins
