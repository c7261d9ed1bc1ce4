"""Manifests of the service: valid for the published schemas, and consistent with the service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plateaux.serving.server import DRAIN_S

FOLDER = Path(__file__).parents[2] / "deployment"


def documents() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    return {each["kind"]: each for each in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())}


def test_manifests_match_each_other_and_the_service() -> None:
    found = documents()
    assert set(found) == {"Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget"}
    pod = found["Deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"]
    for selector in (
        found["Deployment"]["spec"]["selector"]["matchLabels"],
        found["Service"]["spec"]["selector"],
        found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    target = found["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", found["Deployment"]["metadata"]["name"])
    assert pod["spec"]["terminationGracePeriodSeconds"] > DRAIN_S
    (container,) = pod["spec"]["containers"]
    assert container["ports"][0]["containerPort"] == 8000
    assert {container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")} == {
        "/v2/health/ready",
        "/v2/health/live",
    }
    minimum = found["HorizontalPodAutoscaler"]["spec"]["minReplicas"]
    assert found["PodDisruptionBudget"]["spec"]["minAvailable"] < minimum


def test_manifests_are_valid_for_the_published_schemas() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for each in documents().values():
        validate.validate(each, "1.33", strict=True)


def test_the_image_has_two_stages_and_no_root() -> None:
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    assert sum(line.startswith("FROM ") for line in lines) == 2
    last = max(number for number, line in enumerate(lines) if line.startswith("FROM "))
    assert "USER 10001" in lines[last:]
    assert not any("apt-get" in line or "torch" in line.lower().split("#")[0] for line in lines[last:])
