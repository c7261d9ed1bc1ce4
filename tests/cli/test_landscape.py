"""The command `plateaux landscape`: JSON, tables, plots, and exit codes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from cases import recipe
from rich.console import Console

import plateaux
from plateaux.config.components import Components
from plateaux.core import registry
from plateaux.core.types import Estimate
from plateaux.evaluation import tables
from plateaux.evaluation.results import MetricResult
from plateaux.loss_landscape import render
from plateaux.training.train import train
from tests.cli.test_main import call

GIVEN = Components(trust=("cases", "toy_probes"))
ALLOW = ["--trust", "toy_probes", "--trust", "cases"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("run")
    train(recipe("deep_ensemble", "conv_bn", members=3, samples=30), out, **GIVEN.keywords())
    return str(out)


def run_landscape(*words: str) -> dict[str, Any]:
    code, out, message = call("landscape", *words, *ALLOW, "--json")
    assert code == 0, message
    return dict(json.loads(out))


def test_json_goes_to_stdout_and_the_estimated_time_to_stderr(run: str) -> None:
    code, out, message = call(
        "landscape", run, "--probes", "toy_probes:ascent(mc_samples=2),toy_probes:loss", *ALLOW, "--json"
    )
    found = json.loads(out)
    assert code == 0
    assert [each["metric"] for each in found["metrics"]] == ["toy_probes:ascent(mc_samples=2)", "toy_probes:loss"]
    assert found["figures"] == []
    first = found["metrics"][0]
    assert first["rows"]["member 2"].keys() == {"value", "stderr", "mc_stderr", "kind", "members", "part"}
    assert first["split"] == "train"
    assert "2 probes of 3 members on train samples: about" in message


def test_options_reach_the_probes_and_are_recorded(run: str) -> None:
    words = [
        "--probes",
        "toy_probes:loss",
        "--split",
        "test",
        "--limit",
        "2",
        "--members",
        "2,0",
        "--batchnorm",
        "train",
    ]
    (found,) = run_landscape(run, *words, "--augment", "--normalize-logits")["metrics"]
    assert list(found["hashes"]) == ["member 2", "member 0"]
    wanted = {"samples": 2, "batchnorm": "train", "normalize_logits": True, "augmentation": "none"}
    assert found["split"] == "test"
    assert found["data"].items() >= wanted.items()


def test_plots_alone_run_no_probe(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        render.LandscapeFigure, "_render", lambda _, kind: kind.encode()
    )  # rendering is tested elsewhere
    monkeypatch.setattr(render, "PATH_POINTS", 3)
    monkeypatch.setattr(render, "PLANE_POINTS", 3)
    found = run_landscape(run, "--plots", "paths, plane", "--limit", "6")
    assert found["metrics"] == []
    assert [each["name"] for each in found["figures"]] == ["paths", "plane-0-1-2"]
    for file in found["figures"][0]["files"]:
        assert Path(file).stat().st_size > 0
    both = run_landscape(run, "--plots", "paths", "--probes", "toy_probes:loss", "--limit", "6")
    assert (len(both["metrics"]), len(both["figures"])) == (1, 1)


def test_all_probes_are_the_default(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import toy_probes

    registry.probe.names()
    monkeypatch.setattr(registry.probe, "_factories", {"loss": toy_probes.loss, "many": toy_probes.many})
    assert [each["metric"] for each in run_landscape(run)["metrics"]] == ["loss", "many"]
    assert json.loads(call("list", "probes", "--json")[1])["loss"] == "The mean loss, times a scale."


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--probes", "hils"], 2, "There is no probe called 'hils'"),
        (["--plots", "slice"], 2, "did you mean 'slices'"),
        (["--probes", "toy_probes:loss(scale=a)"], 2, "scale"),
        (["--members", "a"], 2, "give member ids separated by commas"),
        (["--members", "7", "--probes", "toy_probes:loss"], 2, "distinct member ids from 0 to 2"),
        (["--split", "tset", "--probes", "toy_probes:loss"], 4, "no split called 'tset'"),
        (["--plots", "plane", "--members", "0,1"], 2, "needs 3 members"),
        (["--probes", "toy_probes:stopped"], 75, "1 of 3 members"),
    ],
)
def test_an_error_gives_its_message_and_exit_code(run: str, words: list[str], code: int, text: str) -> None:
    found, _, message = call("landscape", run, *words, *ALLOW)
    assert (found, text in message) == (code, True), message


# Tables.


def test_a_table_has_a_row_per_probe_and_separates_errors_of_samples_and_draws(run: str) -> None:
    text = call("landscape", run, "--probes", "toy_probes:ascent,toy_probes:loss", "--markdown", *ALLOW)[1]
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert [part.strip() for part in lines[""].split("|")[2:-1]] == [
        "samples", "member 0", "member 1", "member 2", "mean of members",
    ]  # fmt: skip
    assert lines["toy_probes:ascent"].count(" / ") == 3  # for each member, but not for their mean
    assert lines["toy_probes:loss"].count(" ± ") == 4
    assert "± - /" not in text
    assert " / " not in lines["toy_probes:ascent · uphill"]
    assert "over samples / over Monte-Carlo samples" in text
    assert "train samples: sharpness" in text


def measured(name: str, parts: int, members: int = 2, **data: Any) -> MetricResult:
    rows = {f"member {number}": Estimate(1.0, 0.123456, 0.01) for number in range(members)}
    rows |= {f"member 0 · part {part}": Estimate(2.0) for part in range(parts)}
    facts = {"name": "hills", "samples": 1024, "batchnorm": "eval", "augmentation": "none", "normalize_logits": False}
    rows["mean of members"] = Estimate(1.5, 0.2)
    return MetricResult(name, "train", rows, False, {}, {**facts, **data}, group="sharpness")


def test_many_additional_values_are_shown_only_if_a_probe_is_the_only_one() -> None:
    (both,) = tables.result_tables([measured("spectrum", 7), measured("worst", 2)])
    assert [row[0] for row in both.text_rows()] == ["spectrum", "worst", "worst · part 0", "worst · part 1"]
    assert both.caption.endswith("7 further values are in --json")
    (alone,) = tables.result_tables([measured("spectrum", 7)])
    assert len(alone.rows) == 8
    assert alone.text_rows()[0] == ["spectrum", "1,024", *["1.000 ± 0.12 / 0.010"] * 2, "1.500 ± 0.20"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Estimate(0.0), "0"),
        (Estimate(-196.12, 181.0, 5.9), "-196.1 ± 181 / 5.9"),
        (Estimate(1.234567e-7, 2e-8), "1.235e-07 ± 2.0e-08"),
        (Estimate(123456.0, None, 99.0), "1.235e+05 ± - / 99"),
        (Estimate(float("nan"), float("inf")), "NaN ± inf"),
    ],
)
def test_values_of_any_magnitude_have_few_digits(value: Estimate, words: str) -> None:
    assert tables.format_both_errors(value) == words


def test_many_members_are_shown_by_their_mean_and_the_title_states_the_settings() -> None:
    (grid,) = tables.result_tables([measured("worst", 0, members=20, batchnorm="train", normalize_logits=True)])
    assert grid.header == ["", "samples", "mean of members"]
    assert grid.title == "hills, train samples: sharpness, BatchNorm in training mode, normalized logits"


def test_probes_and_metrics_have_separate_tables(run: str) -> None:
    found = [*plateaux.evaluate(plateaux.Run.open(run, GIVEN), metrics=["accuracy"]), measured("worst", 0)]
    assert [grid.header[1] for grid in tables.result_tables(found)] == ["samples", "accuracy %"]


def test_tables_fit_the_terminal() -> None:
    found = [measured("worst_l2(radius=0.5; steps=50)", 3, members=5)]
    for width in (80, 120):
        console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
        for table in tables.tables(found, width):
            console.print(table)
        text = console.export_text()
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= width
        assert "member 4" in text
