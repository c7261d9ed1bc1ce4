"""How a study that measures one number ends: its mean with an interval, written down as evidence for a claim."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from plateaux.studies.claims.claim import Case, Evidence, write_evidence
from plateaux.studies.claims.contrasts import mean_with_interval


def leave(claim: str, values: Sequence[float], out: Path, began: float) -> None:
    """Write the mean over what was repeated to `evidence/` in the study's folder, and print it."""
    mean = mean_with_interval(values)
    found = Evidence(
        claim=claim, seconds=round(time.monotonic() - began, 1), cases={"as stated": Case(primary=(mean,))}
    )
    print(f"mean {mean.value:.4g}; written to {write_evidence(found, out / 'evidence')}")
