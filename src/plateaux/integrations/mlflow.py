"""MLflow: one MLflow run for the ensemble, and nested runs for its members.

The environment of the user decides where they go: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME. Without an experiment,
it is that of the study, or "plateaux".
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plateaux.core.imports import optional_import
from plateaux.core.tracker import TrackedRun

EXPERIMENT = "plateaux"
STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
MAX_PARAMS = 100  # per request
MAX_PARAM_LENGTH = 6000


class MlflowTracker:
    """Logs through a client, because the functions of the module have one active run per process."""

    def __init__(self) -> None:
        # MLflow reports its use to its developers, unless told otherwise.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # no warning where git is missing
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # which has the results as JSON
        self._mlflow = optional_import("mlflow", extra="mlflow")
        self._client = self._mlflow.MlflowClient()
        self._id = ""
        self._is_ensemble = False

    def start(self, run: TrackedRun, config: Mapping[str, Any]) -> str | None:
        self._is_ensemble = run.member is None
        if run.id is None or not self._continue(run.id):
            self._id = self._create(run, config)
        return self._id

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._log_metrics(values, step)

    def close(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        if self._is_ensemble:
            numbers = {name: value for name, value in summary.items() if isinstance(value, int | float)}
            self._log_metrics({f"summary/{name}": v for name, v in numbers.items()}, int(numbers.get("epoch", 0)))
        self._client.set_tag(self._id, "plateaux.status", str(summary["status"]))
        for file in files:
            self._client.log_artifact(self._id, str(file))
        self._client.set_terminated(self._id, STATUS[str(summary["status"])])

    def _continue(self, run_id: str) -> bool:
        """Open the run of an earlier process; return whether it still exists."""
        try:
            found = self._client.get_run(run_id)
        except self._mlflow.exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        if found.info.lifecycle_stage != "active":
            return False
        self._client.update_run(run_id, status="RUNNING")
        self._id = run_id
        return True

    def _create(self, run: TrackedRun, config: Mapping[str, Any]) -> str:
        tags = {"plateaux.run": run.name, "plateaux.member": "ensemble" if run.member is None else str(run.member)}
        tags |= {"mlflow.parentRunId": run.parent} if run.parent is not None else {}
        tags |= {"plateaux.group": run.group} if run.group is not None else {}
        name = run.name if run.member is None else f"{run.name}, member {run.member}"
        created = self._client.create_run(self._experiment(run.group), tags=tags, run_name=name)
        params = [
            self._mlflow.entities.Param(_name(key), str(value)[:MAX_PARAM_LENGTH]) for key, value in config.items()
        ]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(created.info.run_id, params=params[start : start + MAX_PARAMS])
        return str(created.info.run_id)

    def _experiment(self, group: str | None) -> str:
        """Return the id of the experiment, which is created by the first process that needs it."""
        if known := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return known
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or group or EXPERIMENT
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except self._mlflow.exceptions.MlflowException:  # another process was faster
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _log_metrics(self, values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [self._mlflow.entities.Metric(_name(key), value, now, step) for key, value in values.items()]
        if metrics:
            self._client.log_batch(self._id, metrics=metrics)


def _name(name: str) -> str:
    """Return a name with the characters that MLflow allows, such as for `probe/worst_l2(steps=10)`."""
    return re.sub(r"[^\w\-. /]", "_", name)
