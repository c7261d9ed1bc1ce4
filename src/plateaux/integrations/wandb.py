"""Weights & Biases: one W&B run per member and one for the ensemble, in a group per run or study.

The environment of the user decides where they go: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE, WANDB_DIR, WANDB_API_KEY.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from plateaux.core.imports import optional_import
from plateaux.core.tracker import TrackedRun

PROJECT = "plateaux"  # unless WANDB_PROJECT is set


class WandbTracker:
    """Logs with the epoch as step: W&B ignores steps that a continued run already has."""

    buffers = True  # the process of W&B ends with a killed one, and drops the numbers of the last seconds

    def __init__(self) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # reports about W&B itself, to its developers
        self._wandb = optional_import("wandb", extra="wandb")
        self._run: Any = None
        self._is_ensemble = False

    def start(self, run: TrackedRun, config: Mapping[str, Any]) -> str | None:
        self._is_ensemble = run.member is None
        member = "ensemble" if run.member is None else f"member {run.member}"
        settings = self._wandb.Settings(
            console="off", silent=True, save_code=False, disable_git=True, disable_job_creation=True,
            x_disable_meta=True, x_disable_stats=True, x_disable_machine_info=True, x_save_requirements=False,
        )  # fmt: skip
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.id or uuid4().hex[:12],
            resume="allow",
            reinit="create_new",  # members are active at the same time
            name=f"{run.name}, {member}",
            group=run.group or run.name,
            job_type=run.name if run.group else "ensemble" if run.member is None else "member",
            config={"run": run.name, "member": run.member, "group": run.group, **config},
            allow_val_change=True,
            settings=settings,
        )
        self._run.define_metric("*", step_metric="epoch")
        return str(self._run.id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({"epoch": step, **values}, step=step, commit=True)

    def close(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        if self._is_ensemble:  # W&B itself makes the summary of a member: the last numbers
            self._run.summary.update({f"summary/{name}": value for name, value in summary.items()})
        if files:
            artifact = self._wandb.Artifact(f"run-{self._run.id}", type="run")
            for file in files:
                artifact.add_file(str(file), name=file.name)
            self._run.log_artifact(artifact)
        self._run.finish(exit_code=0 if summary["status"] == "finished" else 1)
