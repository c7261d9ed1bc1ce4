# A record, not run at HEAD. A part of the scripts of commit dd686b6f5a35: `git checkout dd686b6f5a35`, studies/_evidence.py.
"""Write the mean of a study that measures one number, with an interval, as evidence for a claim."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from plateaux.studies.claims.claim import Case, Evidence, write_evidence
from plateaux.studies.claims.contrasts import mean_with_interval


def write_mean(claim: str, values: Sequence[float], out: Path, start_time: float) -> None:
    """Write the mean over repetitions to `evidence/` in the study's folder, and print it."""
    mean = mean_with_interval(values)
    evidence = Evidence(
        claim=claim, seconds=round(time.monotonic() - start_time, 1), cases={"as stated": Case(primary=(mean,))}
    )
    print(f"mean {mean.value:.4g}; written to {write_evidence(evidence, out / 'evidence')}")
