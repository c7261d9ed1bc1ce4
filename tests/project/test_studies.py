"""Small versions of all studies run, from training to the table."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from conftest import Script
from scipy import stats

from plateaux.reports.export import to_markdown
from plateaux.reports.report import report
from plateaux.studies.claims.claim import read_evidence
from plateaux.studies.claims.contrasts import build_evidence
from plateaux.studies.results import FORMAT, results_from_study
from tests.studies.claims.test_claim import CLAIMS

ROOT = Path(__file__).resolve().parents[2]
WITH_CIFAR = pytest.mark.skipif(
    not (Path(os.environ.get("PLATEAUX_DATA", "data")) / "cifar-10-batches-bin").is_dir(),
    reason="CIFAR-10 is not here: set PLATEAUX_DATA",
)


@pytest.mark.parametrize("study", ["flat_and_diverse", "six_controls"])
def test_the_page_of_a_study_matches_its_results(study: str) -> None:
    made, name = report([ROOT / "studies" / "results" / f"{study}.json"], max_runs=0), study.replace("_", "-")
    page = (ROOT / "docs" / "results" / f"{name}.md").read_text(encoding="utf-8")
    assert to_markdown(made, f"../images/{name}") == page, "make it again, as docs/guides/compare.md says"


@pytest.mark.parametrize(
    ("study", "number"),
    [*(("flat_and_diverse", number) for number in (1, 2, 4, 5, 7)), *(("six_controls", number) for number in (11, 12))],
)
def test_the_evidence_of_a_study_matches_its_results(study: str, number: int) -> None:
    claim = CLAIMS[number]
    found = read_evidence(claim, ROOT / "claims" / "evidence")
    assert found is not None
    assert claim.compare is not None
    numbers = results_from_study(ROOT / "studies" / "results" / f"{study}.json")
    again = build_evidence(claim, claim.compare, numbers)
    assert (again.cases, again.precondition) == (found.cases, found.precondition)


def test_the_sharpbalance_tables_in_the_docs_match_the_study(script: Script) -> None:
    numbers = ROOT / "studies" / "results" / "sharpbalance_cifar10"
    done = script(ROOT / "studies" / "sharpbalance_cifar10.py", str(numbers), "--table")
    assert done.returncode == 0, done.stderr
    rho, tables = done.stdout.strip().split("\n\n", 1)
    assert rho == "rho chosen on validation images: 0.05"
    assert tables.count("(3) |") == 13, "three repetitions of four methods and five comparisons"
    assert tables in (ROOT / "docs" / "results" / "sharpbalance-cifar10.md").read_text(encoding="utf-8")


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
    (tmp_path / "results.json").write_text(json.dumps({"format": FORMAT, "conditions": conditions, "runs": runs}))
    printed = script(ROOT / "studies" / "choose_settings.py", str(tmp_path)).stdout
    assert "| SAM | 0.1 | 51.00 | 50.00, 52.00 |" in printed
    assert "| SAM | 0.2 | **53.00** | 56.00, 50.00 |" in printed
    assert "| paper | 0.1 | **40.00** |" in printed


@pytest.mark.slow
@WITH_CIFAR
def test_the_sharpbalance_study_runs_resumes_and_prints_its_table(tmp_path: Path, script: Script) -> None:
    done = script("studies/sharpbalance_cifar10.py", str(tmp_path / "study"), "--quick")
    assert done.returncode == 0, done.stderr
    for words in (
        "rho chosen on validation images",
        "SharpBalance, paper (1) | ensemble",
        "| less that of |",
        "careful share",
    ):
        assert words in done.stdout, words
    again = script(*done.args[1:], "--table")
    assert again.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]


@pytest.mark.slow
@WITH_CIFAR
def test_our_apgd_is_at_least_as_good_as_the_released_one_on_images(script: Script) -> None:
    done = script("studies/apgd_against_released.py", "--quick", "--norm", "l2", "--m", "8", "--steps", "10")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 | l2 | yes | 0.5" in done.stdout
    assert done.stdout.splitlines()[-1] == "ours finds at least as much"


@pytest.mark.slow
@WITH_CIFAR
def test_the_landscape_study_runs_resumes_and_prints_its_table(tmp_path: Path, script: Script) -> None:
    done = script("studies/landscape_cifar10.py", str(tmp_path / "study"), "--quick")
    assert done.returncode == 0, done.stderr
    assert "| `fisher_rao` | " in done.stdout
    assert "right in the last epoch: deep_ensemble " in done.stdout
    again = script(*done.args[1:], "--table")
    assert again.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]


@pytest.mark.slow
@WITH_CIFAR
def test_the_ranking_study_writes_valid_evidence(tmp_path: Path, script: Script) -> None:
    done = script("studies/sample_ranks.py", str(tmp_path), "--quick")
    assert done.returncode == 0, done.stderr
    found = read_evidence(CLAIMS[13], tmp_path / "evidence")
    assert found is not None
    ranks = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("network")]
    assert found.cases["as stated"].primary[0].value == pytest.approx(sum(ranks) / 3, abs=1e-3)


@pytest.mark.slow
@WITH_CIFAR
def test_the_joint_training_study_runs_resumes_and_prints_its_tables(tmp_path: Path, script: Script) -> None:
    if find_spec("timm") is None:  # not imported here: the script knows what torchvision beside it may lack
        pytest.skip("timm is not installed")
    done = script("studies/joint_cifar100.py", str(tmp_path / "study"), "--quick")
    assert done.returncode == 0, done.stderr
    for words in ("train: 300 samples, 300 went through the trunk", "SED 10 #0", "(Table 3)", "not testable here"):
        assert words in done.stdout, words
    again = script(*done.args[1:], "--table")
    assert again.stdout.splitlines() == done.stdout.splitlines()[-len(again.stdout.splitlines()) :]
    told = script(*done.args[1:], "--json")
    assert set(json.loads(told.stdout)) == {"numbers", "claims"}
