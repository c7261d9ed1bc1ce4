"""Samples for runs on a cluster: every step is written down as it is taken, and may be slow, or fail for one member.

Importing this file, as every process does that looks the data set up, makes the step tell. What it tells: one line for
each member and step, so that a test can count the work that was really done, kills included.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import plateaux
from plateaux.data.datasets.toy import blobs
from plateaux.data.sources import DataSplits
from plateaux.training.loop import trainer

SETTINGS: dict[str, Any] = {"log": "", "pause": 0.0, "flaw": ""}
plain_step = trainer.step


@plateaux.dataset
def watched(*, samples: int = 40, log: str = "", pause: float = 0.0, flaw: str = "") -> DataSplits:
    """Blobs whose steps are written down; `flaw` names a file with the member that cannot read its samples."""
    SETTINGS.update(log=log, pause=pause, flaw=flaw)
    return blobs(samples=samples, test_samples=6)


def step(executor: Any, states: Any, *args: Any, **options: Any) -> Any:
    for state in states:
        if (
            SETTINGS["flaw"]
            and Path(SETTINGS["flaw"]).exists()
            and Path(SETTINGS["flaw"]).read_text() == str(state.number)
        ):
            raise KeyError("sample 7 cannot be read")
        if SETTINGS["log"]:
            handle = os.open(SETTINGS["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(handle, f"{state.number} {os.getpid()}\n".encode())
            os.close(handle)
    time.sleep(SETTINGS["pause"])
    return plain_step(executor, states, *args, **options)


trainer.step = step  # type: ignore[assignment]


def counted(log: Path) -> dict[int, int]:
    """Return how many steps each member took, those that were lost and taken again included."""
    members = [int(line.split()[0]) for line in log.read_text().splitlines()] if log.exists() else []
    return {number: members.count(number) for number in sorted(set(members))}
