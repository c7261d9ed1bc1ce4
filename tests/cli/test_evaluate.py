"""The commands that evaluate, calibrate, and predict with a finished run, in a terminal and in a pipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import plateaux
from plateaux.evaluation import tables
from tests.cli.test_main import SMALL, call

pytestmark = pytest.mark.xdist_group("cli_evaluate")  # one worker trains the run once


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("run")
    assert call("train", "quickstart", *SMALL, "--set", "data.validation_split=200", "--out", str(out))[0] == 0
    return str(out)


def run_json(*words: str) -> list[dict[str, Any]]:
    code, out, message = call(*words, "--json")
    assert code == 0, message
    return list(json.loads(out))


def test_a_short_table_of_four_metrics_is_the_default_also_in_a_pipe(run: str) -> None:
    assert [each["metric"] for each in run_json("evaluate", run)] == ["accuracy", "nll", "brier", "ece"]
    code, out, _ = call("evaluate", run)
    lines = out.splitlines()
    assert code == 0
    assert len(lines) <= 12
    assert max(map(len, lines[:-1])) <= 80
    assert "ensemble" in out
    assert "member 0" not in out
    assert lines[-1].startswith("every member and all metrics: plateaux evaluate")
    assert "member 0" in call("evaluate", run, "--metrics", "accuracy")[1]


def test_all_means_every_default_metric(run: str) -> None:
    found = {each["metric"]: each for each in run_json("evaluate", run, "--metrics", "all")}
    assert {each["group"] for each in found.values()} == {"performance", "uncertainty", "diversity"}
    assert {"accuracy", "macro_f1", "nll", "ece", "aurc", "disagreement", "kl", "cka"} <= set(found)
    assert not {"per_class", "reliability", "binary_f1"} & set(found)
    for each in found.values():
        assert each["definition"] or each["metric"] in ("accuracy", "nll", "brier"), each["metric"]
        assert each["hashes"].keys() == {"member 0", "member 1"}
        assert len(each["data"]["fingerprint"]) == 16


def test_metrics_are_selected_by_name_group_and_options(run: str) -> None:
    names = [each["metric"] for each in run_json("evaluate", run, "--metrics", "performance,ece(bins=5),per_class")]
    assert names[0] == "accuracy"
    assert names[-2:] == ["ece(bins=5)", "per_class"]
    assert "nll" not in names
    code, _, message = call("evaluate", run, "--metrics", "ece(bin=5)")
    assert (code, "did you mean 'bins'" in message) == (2, True)
    assert call("evaluate", run, "--metrics", "ece(5)")[0] == 2
    assert call("evaluate", run, "--metrics", "ece(bins=5")[0] == 2


def test_a_second_call_reports_cached_logits(run: str) -> None:
    call("evaluate", run)
    assert "using cached" in call("evaluate", run, "--members", "1,0")[2]
    assert call("evaluate", run, "--members", "a")[0] == 2
    assert call("evaluate", run, "--members", "7")[0] == 2


def test_markdown_has_a_table_for_each_group_of_metrics(run: str) -> None:
    text = call("evaluate", run, "--markdown", "--ensemble-sizes", "--metrics", "all,per_class,reliability")[1]
    for words in ("performance", "uncertainty", "diversity", "by size", "| class 3 |", "ensemble (mean probability)"):
        assert words in text, words


def test_ood_detection_of_the_test_samples_themselves_has_auroc_one_half(run: str) -> None:
    found = run_json("evaluate", run, "--ood", "near=digits", "far=digits", "--metrics", "none")
    assert [each["split"] for each in found] == ["digits (near)", "digits (far)"]
    assert found[0]["rows"]["members together · energy · auroc"]["value"] == 0.5
    assert "members together" in call("evaluate", run, "--ood", "near=digits", "--markdown")[1]
    both = run_json("evaluate", run, "--ood", "near=digits", "--split", "test@100")
    assert {each["metric"] for each in both} > {"accuracy", "ood"}
    assert both[0]["data"]["samples"] == 100
    assert call("evaluate", run, "--split", "test@many")[0] == 4
    assert "There is no dataset called" in call("evaluate", run, "--ood", "near=digts", "--cache-logits", "off")[2]
    assert call("evaluate", run, "--executor", "local")[0] == 2
    assert call("evaluate", run, "--set", "executor.data_parallel=2")[0] == 2
    assert call("evaluate", run, "--calibrated", "--members", "0")[0] == 2
    code, _, message = call("evaluate", run, "--ood", "near")
    assert (code, "name the datasets" in message) == (2, True)


def test_a_calibration_is_fitted_evaluated_and_used(run: str, tmp_path: Path) -> None:
    assert call("evaluate", run, "--calibrated")[0] == 4
    code, out, message = call(
        "calibrate", run, "--split", "validation", "--target-risk", "0.1", "--conformal", "raps", "--json"
    )
    assert code == 0, message
    assert json.loads(out)["samples"] == 200
    (found,) = run_json("evaluate", run, "--calibrated")
    assert any("coverage" in name for name in found["rows"])
    assert "nll before" in call("evaluate", run, "--calibrated", "--markdown")[1]
    code, _, message = call("evaluate", run, "--calibrated", "--split", "validation")
    assert (code, "--exclude-calibration-ids" in message) == (4, True)
    code, out, message = call("predict", run, "--split", "test", "-o", str(tmp_path / "answers.csv"), "--json")
    assert code == 0, message
    lines = (tmp_path / "answers.csv").read_text().splitlines()
    numbers = "probability,entropy,mutual_information,ood_score"
    assert lines[0] == f"name,label,label_name,{numbers},is_ood,prediction_set,abstain"
    assert len(lines) == 1 + json.loads(out)["predictions"]
    assert call("predict", run, "--split", "test@5", "--raw", "-o", str(tmp_path / "raw.csv"))[0] == 0
    lines = (tmp_path / "raw.csv").read_text().splitlines()
    assert lines[0].endswith(",abstain,raw_label,raw_probability,raw_entropy,raw_mutual_information,raw_ood_score")
    assert len(lines) == 6
    words = ("--allow-empty", "--ood-false-alarms", "0.1", "--ood", "near=digits", "--json")
    code, out, message = call("calibrate", run, *words)
    assert code == 0, message
    made = json.loads(out)
    assert not made["sets"][0]["never_empty"]
    assert {alarm["rate"] for alarm in made["ood_alarms"].values()} == {0.1}
    assert made["ood_aurocs"][made["ood_score"]] == max(made["ood_aurocs"].values())
    code, _, message = call("calibrate", run, "--ood", "far=digits")
    assert (code, "name its sets as near=A,B" in message) == (2, True)
    assert call("calibrate", run, "--ood-false-alarms", "0")[0] == 2
    assert call("calibrate", run, "--order", "calibrate")[0] == 0
    assert call("calibrate", run, "--order", "both")[0] == 2


def test_images_too_small_to_corrupt_are_an_error(run: str) -> None:
    code, _, message = call("evaluate", run, "--split", "corrupted:fog:3")
    assert code == 3
    assert "at least 16 pixels" in message
    assert call("evaluate", run, "--split", "corrupted:fig")[0] == 4
    assert call("evaluate", run, "--split", "corrupted:fog:6")[0] == 4


def test_a_device_that_does_not_exist_is_refused_without_a_traceback(run: str) -> None:
    code, _, message = call("evaluate", run, "--device", "junk")
    assert code == 2
    assert "There is no device 'junk': this machine has" in message


def test_the_command_evaluates_on_a_mesh(run: str) -> None:
    words = ["evaluate", run, "--metrics", "accuracy,nll", "--cache-logits", "off"]
    done = subprocess.run(
        [sys.executable, "-m", "plateaux", *words, "--executor", "mesh", "--processes", "2", "--json"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    meshed = json.loads(done.stdout)
    local = run_json(*words)
    assert meshed[0]["rows"] == local[0]["rows"]
    for row, value in local[1]["rows"].items():
        assert meshed[1]["rows"][row]["value"] == pytest.approx(value["value"], rel=1e-6)


def test_tables_fit_the_terminal_and_show_full_row_names(run: str) -> None:
    found = plateaux.evaluate(run, metrics=["all", "per_class"], ensemble_sizes=True)
    for width in (80, 120):
        console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
        for table in tables.tables(found, width):
            console.print(table)
        text = console.export_text()
        assert "…" not in text
        for words in ("ensemble (mean probability)", "members 0 and 1", "2 members", "q_statistic by size", "class 9"):
            assert words in text, words


@pytest.fixture(scope="module")
def run_with_cascade(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = str(tmp_path_factory.mktemp("run"))
    words = ["--set", "members=3", "--set", "data.validation_split=300", "--out", out]
    assert call("train", "quickstart", *SMALL, *words)[0] == 0
    code, text, message = call("calibrate", out, "--cascade", "--max-harm", "0.05", "--confidence", "0.8", "--json")
    assert code == 0, message
    cascade = json.loads(text)["cascade"]
    assert (cascade["stages"], cascade["kind"], cascade["max_harm"], cascade["confidence"]) == ([2], "harm", 0.05, 0.8)
    return out


def test_a_cascade_is_evaluated_and_used(run_with_cascade: str, tmp_path: Path) -> None:
    (found,) = run_json("evaluate", run_with_cascade, "--cascade")
    assert found["metric"] == "cascade"
    assert 2 <= found["rows"]["ensemble (cascade) · members queried"]["value"] <= 3
    own, other, detected = run_json("evaluate", run_with_cascade, "--cascade", "--ood", "near=digits")
    assert (own["data"]["guaranteed"], other["data"]["guaranteed"]) == (True, False)
    assert (other["split"], detected["metric"]) == ("digits (near)", "ood")
    assert "members queried" in call("evaluate", run_with_cascade, "--cascade", "--markdown")[1]
    code, _, message = call("evaluate", run_with_cascade, "--cascade", "--split", "validation")
    assert (code, "--exclude-calibration-ids" in message) == (4, True)
    assert call("evaluate", run_with_cascade, "--cascade", "--limit", "5")[0] == 2
    assert call("predict", run_with_cascade, "--split", "test", "-o", str(tmp_path / "answers.csv"))[0] == 0
    assert (tmp_path / "answers.csv").read_text().splitlines()[0].endswith(",abstain,members_queried")


def test_options_of_a_cascade_are_checked(run_with_cascade: str, run: str) -> None:
    code, _, message = call("calibrate", run_with_cascade, "--max-harm", "0.05")
    assert (code, "--max-harm belong to a cascade; add --cascade" in message) == (2, True)
    assert call("calibrate", run_with_cascade, "--cascade", "--stages", "two")[0] == 2
    assert call("calibrate", run_with_cascade, "--cascade", "--stages", "3")[0] == 2
    assert call("calibrate", run_with_cascade, "--cascade", "--max-harm", "2")[0] == 2
    code, _, message = call("calibrate", run_with_cascade, "--cascade", "--order", "calibrate")
    assert (code, "--order pool" in message) == (2, True)
    code, _, message = call("calibrate", run, "--cascade")  # two members
    assert (code, "saves nothing" in message) == (2, True)
    call("calibrate", run)
    assert call("evaluate", run, "--cascade")[0] == 4
    code, out, _ = call("calibrate", run_with_cascade, "--cascade", "--unlabeled", "--stages", "1,2", "--json")
    assert (code, json.loads(out)["cascade"]["kind"], json.loads(out)["cascade"]["stages"]) == (0, "differs", [1, 2])
