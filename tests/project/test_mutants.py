"""The list of mutants is large enough, and still applies to the code; `tests/mutation/run.py` runs it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from mutation.mutants import MUTANTS, TESTS

ROOT = Path(__file__).resolve().parents[2]
AREAS = {  # that must be covered, by folder of the package
    "losses and updates": ("optim/", "methods/"),
    "metrics": ("evaluation/metrics/",),
    "probes": ("loss_landscape/",),
    "partition": ("data/partition/", "training/partition.py"),
    "pruning": ("models/pruning.py",),
    "calibration": ("ensembles/", "evaluation/calibration.py"),
    "executors": ("distributed/",),
}


def test_almost_all_mutants_apply_to_the_code() -> None:
    """A few may be outdated by a change of the code; then replace them."""
    texts = {file: (ROOT / "src" / "plateaux" / file).read_text(encoding="utf-8") for file in {m.file for m in MUTANTS}}
    outdated = [m for m in MUTANTS if texts[m.file].count(m.old) != 1]
    assert len(outdated) <= 0.05 * len(MUTANTS), outdated
    assert len(MUTANTS) - len(outdated) >= 150


def test_mutants_cover_every_area_of_the_numerics() -> None:
    files = Counter(mutant.file for mutant in MUTANTS)
    for area, places in AREAS.items():
        assert sum(count for file, count in files.items() if file.startswith(places)) >= 8, area


def test_mutants_are_distinct_changes_with_existing_tests() -> None:
    assert len({(m.file, m.old, m.new) for m in MUTANTS}) == len(MUTANTS)
    assert all(m.old != m.new for m in MUTANTS)
    assert all((ROOT / "tests" / name.partition("::")[0]).is_file() for names in TESTS.values() for name in names)
