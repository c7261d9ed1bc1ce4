# A record, not run at HEAD. It ran at commit bdd1a2db898b: `git checkout bdd1a2db898b`, then `python studies/compact_results.py`.
"""Write the results of a study without rows that no page shows, so that its file stays below 2 MB.

    python studies/compact_results.py runs/sharpbalance_test studies/results/sharpbalance_test.json

Left out are the curves of training; results of one corruption at one severity (their means by corruption and by
severity stay); and, under corruption and on OOD sets, the rows of mean logits, those of the members of an ensemble, and
all but AUROC and FPR95. Every value that stays is unchanged.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plateaux.core.row_names import RowName
from plateaux.data.corruptions.corrupt import CORRUPTIONS, EXTRA
from plateaux.storage.local_store import LocalStore
from plateaux.studies.packed_results import encode_results
from plateaux.studies.results import read_results

LOGITS = "ensemble (mean logit)"
MANY_ROWS = ("ood", "accuracy under corruption", "mean corruption error (not normalized)")


def compact(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return results with fewer rows."""
    runs = {
        name: {
            **run,
            "log": {},
            "metrics": [_fewer_rows(each) for each in run["metrics"] if not _is_one_corruption(each)],
        }
        for name, run in results["runs"].items()
    }
    return {**results, "runs": runs}


def _is_one_corruption(metric: Mapping[str, Any]) -> bool:
    name, _, severity = metric["split"].rpartition(" ")
    return name in (*CORRUPTIONS, *EXTRA) and severity.isdigit()


def _fewer_rows(metric: Mapping[str, Any]) -> dict[str, Any]:
    if metric["metric"] not in MANY_ROWS:
        return dict(metric)
    rows = {RowName.parse(row): value for row, value in metric["rows"].items()}
    is_single = all(row.kind in ("member", "mean_of_members") for row in rows)  # a run of one network
    return {**metric, "rows": {str(row): value for row, value in rows.items() if _is_shown(row, is_single)}}


def _is_shown(row: RowName, is_single: bool) -> bool:
    is_main = (is_single or row.kind != "member") and not row.startswith(LOGITS)
    return is_main and not (row.part and row.part[-1].startswith("aupr"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="the folder of the study, or its results.json")
    parser.add_argument("file", type=Path, help="where to write the results")
    args = parser.parse_args()
    encoded = encode_results(compact(read_results(args.study)))
    LocalStore(args.file.parent).put(args.file.name, encoded)
    print(f"{args.file}: {len(encoded):,} bytes")


if __name__ == "__main__":
    main()
