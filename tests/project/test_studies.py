"""Small versions of all studies run, from training to the table."""

from __future__ import annotations

import importlib
import json
import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from conftest import Script
from scipy import stats

from plateaux.studies.claims.claim import read_evidence
from plateaux.studies.claims.contrasts import build_evidence
from plateaux.studies.packed_results import UNPACKED_FORMAT
from plateaux.studies.results import results_from_study
from tests.studies.claims.test_claim import CLAIMS

ROOT = Path(__file__).resolve().parents[2]
WITH_CIFAR = pytest.mark.skipif(
    not (Path(os.environ.get("PLATEAUX_DATA", "data")) / "cifar-10-batches-bin").is_dir(),
    reason="CIFAR-10 is not here: set PLATEAUX_DATA",
)


def test_the_tables_of_the_results_pages_match_the_results_files(script: Script) -> None:
    done = script(ROOT / "docs" / "make_result_pages.py", "--check")
    assert done.returncode == 0, done.stderr


def test_results_files_are_json_of_at_most_2_mb() -> None:
    files = [path for path in (ROOT / "studies" / "results").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json"}, "results are numbers: no weights, no pictures"
    assert {path.name: path.stat().st_size for path in files if path.stat().st_size > 2_000_000} == {}


@pytest.mark.parametrize(
    ("study", "number"),
    [
        ("flat_and_diverse", 1),
        *(("sharpbalance_test", number) for number in (4, 5, 7)),
        ("more_members", 6),
        *(("narrower_and_sparser", number) for number in (2, 3)),
        *(("six_controls", number) for number in (11, 12)),
    ],
)
def test_the_evidence_of_a_study_matches_its_results(study: str, number: int) -> None:
    claim = CLAIMS[number]
    found = read_evidence(claim, ROOT / "claims" / "evidence")
    assert found is not None
    assert claim.compare is not None
    numbers = results_from_study(ROOT / "studies" / "results" / f"{study}.json")
    again = build_evidence(claim, claim.compare, numbers)
    assert (again.cases, again.precondition) == (found.cases, found.precondition)


def test_the_evidence_of_the_joint_study_matches_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "studies")
    joint, files = importlib.import_module("_joint_results"), importlib.import_module("_results")
    numbers = joint.Found(files.read_numbers(ROOT / "studies" / "results" / "joint_cifar100.json", "joint_cifar100"))
    found = read_evidence(CLAIMS[9], ROOT / "claims" / "evidence")
    assert found is not None
    assert joint.evidence(numbers).cases == found.cases
    assert not set(joint.choose(numbers)) & set(joint.USE_UNLABELED)


def test_a_table_with_another_number_or_without_marks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    made = importlib.import_module("make_result_pages")
    page = (ROOT / "docs" / "results" / "sharpbalance-cifar10.md").read_text(encoding="utf-8")
    tables = made.sharpbalance(ROOT / "studies" / "results" / "sharpbalance_cifar10" / "results.json")
    assert tables["tables"].count("(3) |") == 13, "three repetitions of four methods and five comparisons"
    assert made.with_tables(page.replace("79.65", "79.66"), tables) == page
    with pytest.raises(SystemExit, match="lacks its marks"):
        made.with_tables(page.replace("begin tables", "begin"), tables)


def test_the_power_calculation_agrees_with_a_simulation(script: Script) -> None:
    done = script(ROOT / "studies" / "power.py", "--effect", "1", "--sd", "0.7")
    number = int(done.stdout.splitlines()[-1].split("|")[2])
    rng = np.random.default_rng(0)
    power = {}
    for count in (number - 1, number):
        drawn = rng.normal(1.0, 0.7, (40_000, count))
        half = stats.t.ppf(0.975, count - 1) * drawn.std(1, ddof=1) / count**0.5
        power[count] = np.mean(np.abs(drawn.mean(1)) > half)
    assert power[number - 1] < 0.9 - 0.005 < 0.9 <= power[number] + 0.005  # three standard errors of the simulation


def test_settings_are_chosen_by_their_mean_on_held_out_images(tmp_path: Path, script: Script) -> None:
    accuracies = {("SAM", 0.1): (0.50, 0.52), ("SAM", 0.2): (0.56, 0.50), ("paper", 0.1): (0.4, 0.4)}
    runs, conditions = {}, []
    for (method, rho), values in accuracies.items():
        for repetition, value in enumerate(values):
            name = f"{method}-{rho}-{repetition}"
            rows = {"ensemble (mean probability)": {"value": value, "stderr": None}}
            held_out = {"metric": "accuracy", "split": "validation", "rows": rows, "higher_is_better": True}
            runs[name] = {"metrics": [held_out, {**held_out, "split": "test"}], "costs": {}}
            conditions.append({"run": name, "condition": {"method": method, "rho": rho}, "repetition": repetition})
    (tmp_path / "results.json").write_text(
        json.dumps({"format": UNPACKED_FORMAT, "conditions": conditions, "runs": runs})
    )
    printed = script(ROOT / "studies" / "choose_settings.py", str(tmp_path)).stdout
    assert "| SAM | 0.1 | 51.00 | 50.00, 52.00 |" in printed
    assert "| SAM | 0.2 | **53.00** | 56.00, 50.00 |" in printed
    assert "| paper | 0.1 | **40.00** |" in printed


@pytest.mark.nightly
@WITH_CIFAR
def test_the_sharpbalance_study_runs_resumes_and_prints_its_table(tmp_path: Path, script: Script) -> None:
    done = script("studies/sharpbalance_cifar10.py", str(tmp_path / "study"), "--quick")
    assert done.returncode == 0, done.stderr
    for words in (
        "rho chosen on validation images",
        "SharpBalance, paper (1) | ensemble",
        "| less that of |",
        "SAM share",
    ):
        assert words in done.stdout, words
    again = script(*done.args[1:], "--table")
    assert again.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]


@pytest.mark.nightly
@WITH_CIFAR
def test_our_apgd_is_at_least_as_good_as_the_released_one_on_images(script: Script) -> None:
    done = script("studies/apgd_against_released.py", "--quick", "--norm", "l2", "--m", "8", "--steps", "10")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 | l2 | yes | 0.5" in done.stdout
    assert done.stdout.splitlines()[-1] == "ours finds at least as much"


@pytest.mark.nightly
@WITH_CIFAR
def test_the_landscape_study_runs_resumes_and_prints_its_table(tmp_path: Path, script: Script) -> None:
    done = script("studies/landscape_cifar10.py", str(tmp_path / "study"), "--quick")
    assert done.returncode == 0, done.stderr
    assert "| `fisher_rao` | " in done.stdout
    assert "in the last epoch: deep_ensemble " in done.stdout
    again = script(*done.args[1:], "--table")
    assert again.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]
    script(*done.args[1:], "--results", str(tmp_path / "results.json"))
    elsewhere = script(done.args[1], str(tmp_path / "elsewhere"), "--quick", "--known", str(tmp_path / "results.json"))
    assert elsewhere.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]
    assert not (tmp_path / "elsewhere").exists(), "what is known is neither trained nor measured again"


@pytest.mark.nightly
@WITH_CIFAR
def test_the_ranking_study_writes_valid_evidence(tmp_path: Path, script: Script) -> None:
    done = script("studies/sample_ranks.py", str(tmp_path), "--quick")
    assert done.returncode == 0, done.stderr
    found = read_evidence(CLAIMS[13], tmp_path / "evidence")
    assert found is not None
    ranks = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("network")]
    assert found.cases["as stated"].primary[0].value == pytest.approx(sum(ranks) / 3, abs=1e-3)


@pytest.mark.nightly
@WITH_CIFAR
def test_the_joint_training_study_runs_resumes_and_prints_its_tables(tmp_path: Path, script: Script) -> None:
    if find_spec("timm") is None:
        pytest.skip("timm is not installed")
    done = script("studies/joint_cifar100.py", str(tmp_path / "study"), "--quick")
    assert done.returncode == 0, done.stderr
    for words in ("train: 300 samples, 300 passed through the backbone", "SED 10 #0", "(Table 3)", "not testable here"):
        assert words in done.stdout, words
    again = script(*done.args[1:], "--table")
    assert again.stdout.splitlines() == done.stdout.splitlines()[-len(again.stdout.splitlines()) :]
    told = script(*done.args[1:], "--json")
    assert set(json.loads(told.stdout)) == {"numbers", "comparisons"}
