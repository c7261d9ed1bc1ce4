# A record, not run at HEAD. It ran at commit 1cddc3da2a08: `git checkout 1cddc3da2a08`, then `python studies/lora_mrpc.py`.
"""Do flat members and SharpBalance help an ensemble of text adapters? Five rank-4 adapters each, on MRPC.

    python studies/lora_mrpc.py runs/lora            # twenty minutes on one core; again to continue
    python studies/lora_mrpc.py runs/lora --table    # the table of the results so far
    python studies/lora_mrpc.py studies/results/lora_mrpc.json --table   # the table of a results file

The grid is studies/lora_mrpc.toml, so `plateaux study studies/lora_mrpc.toml --out runs/lora` trains the same runs.
Its results.json is the results file. Needs MRPC and the weights of MiniLM under PLATEAUX_DATA, and the extra `text`.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import plateaux
from plateaux.core.progress import Message, ProgressEvent
from plateaux.core.row_names import MEAN_OF_MEMBERS, MEAN_OF_PAIRS, MEAN_PROBABILITY
from plateaux.studies.results import ResultRow, results_from_study
from plateaux.studies.runner import StudyRunner
from plateaux.studies.study import Study

FILE = Path(__file__).with_suffix(".toml")
QUICK = {"members": 2, "data": {"limit": 32, "test_limit": 32, "length": 16}}
COLUMNS = {
    "members: accuracy": ("accuracy", MEAN_OF_MEMBERS),
    "ensemble: accuracy": ("accuracy", MEAN_PROBABILITY),
    "members: F1": ("binary_f1", MEAN_OF_MEMBERS),
    "ensemble: F1": ("binary_f1", MEAN_PROBABILITY),
    "members: NLL": ("nll", MEAN_OF_MEMBERS),
    "ensemble: NLL": ("nll", MEAN_PROBABILITY),
    "disagreement": ("disagreement", MEAN_OF_PAIRS),
}


def study(*, quick: bool) -> Study:
    """Return the study of the file, or a very small one of the same shape."""
    whole = Study.load(FILE)
    if not quick:
        return whole
    base = {**whole.base, "members": QUICK["members"], "data": {**whole.base["data"], **QUICK["data"]}}
    return Study.from_dict({**whole.model_dump(), "base": base})


def table(found: list[ResultRow]) -> list[str]:
    """Return a row for each method, in Markdown."""
    lines = [f"| trained by | {' | '.join(COLUMNS)} |", f"|---|{'---:|' * len(COLUMNS)}"]
    for name in dict.fromkeys(each.condition["method"] for each in found):
        cells = [cell(found, name, *wanted) for wanted in COLUMNS.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def cell(found: list[ResultRow], method: str, measure: str, row: str) -> str:
    for each in found:
        if (each.condition["method"], each.metric, each.row) == (method, measure, row):
            factor, digits = (100, 2) if each.percent else (1, 3)
            error = "" if each.stderr is None else f" ± {factor * each.stderr:.{digits}f}"
            return f"{factor * each.value:.{digits}f}{error}"
    return ""


def held(study_root: Path) -> str:
    """Return what the members of one run take in memory, in words."""
    root = next(path for path in (study_root / "runs").iterdir() if path.is_dir())
    ensemble, run = plateaux.load(root), plateaux.Run.open(root)
    base = sum(t.numel() * t.element_size() for t in run.shared().values())
    own = sum(t.numel() * t.element_size() for t in run.weights(0).values())
    whole = ensemble.bytes()
    return (
        f"{len(ensemble)} members hold {whole['held']:,} bytes: a base of {base:,} once, and {own:,} each. "
        f"With nothing shared they would hold {whole['unshared']:,}."
    )


def print_messages(event: ProgressEvent) -> None:
    """Print the messages of a study at once."""
    if isinstance(event, Message):
        print(event.text, flush=True)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("root", type=Path, help="the study folder, or a results file with --table")
    words.add_argument("--table", action="store_true", help="only print the results so far")
    words.add_argument("--quick", action="store_true", help="a very small one, to see that it runs")
    args = words.parse_args()
    warnings.filterwarnings("ignore", message="Not loaded from")  # the head is new
    if not args.table:
        StudyRunner(study(quick=args.quick), args.root, progress=print_messages).run()
    print("\n".join(table(results_from_study(args.root))))
    if not args.root.is_file():
        print(f"\n{held(args.root)}")


if __name__ == "__main__":
    main()
