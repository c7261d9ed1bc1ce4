"""The stored form of results: nothing is lost, descriptions are stored once, and damaged files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plateaux.core.errors import RunError, StorageError
from plateaux.studies.packed_results import FORMAT, encode_results, pack
from plateaux.studies.result_rows import read_results, results_from_study


def metric(value: float | None, **more: Any) -> dict[str, Any]:
    kind = {"kind": "member", "members": [0], "part": []}
    rows = {"member 0": {**kind, "value": value, "stderr": None}, "x": {"value": 0.5, "stderr": 0.1, "mc_stderr": 0.2}}
    facts = {"metric": "accuracy", "split": "test", "higher_is_better": True, "percent": True, "definition": "d" * 99}
    return {**facts, "hashes": {"member 0": "ab"}, "rows": rows, **more}


def results(**more: Any) -> dict[str, Any]:
    conditions = [{"condition": {"rho": rho}, "repetition": 0, "run": run} for rho, run in ((0.1, "a"), (0.2, "b"))]
    runs = {
        "a": {"metrics": [metric(0.25), metric(0.3, split="train")], "costs": {}, "folder": "runs/a"},
        "b": {"metrics": [metric(None)], "costs": {}, "log": {"member 0": [{"epoch": 1, "train loss": 2.0}]}},
    }
    return {"conditions": conditions, "runs": runs, **more}


def test_results_are_the_same_after_they_are_stored_and_read(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_bytes(encode_results(results()))
    assert read_results(file) == {"format": FORMAT, **results()}
    old = tmp_path / "old.json"
    old.write_text(json.dumps(results(format=2)), encoding="utf-8")
    assert repr(results_from_study(old)) == repr(results_from_study(file))  # repr, because NaN is not equal to itself


def test_a_description_is_stored_once_for_all_runs() -> None:
    assert encode_results(results()).count(b"d" * 99) == 2  # of the two splits, not of three metrics
    assert pack(results())["runs"]["a"]["metrics"][0] == {
        "facts": 0,
        "hashes": 1,
        "rows": 2,
        "values": [[0.25, None], [0.5, 0.1, 0.2]],
    }


def test_a_results_file_has_a_line_for_each_run() -> None:
    lines = encode_results(results()).decode().splitlines()
    assert [line[:4] for line in lines[1:-1]] == ['"a":', '"b":']


@pytest.mark.parametrize(
    "damage",
    [
        {"facts": 99},
        {"facts": -1},
        {"facts": 2},  # the names of the rows
        {"rows": 0, "values": [[0.5, 0.1]]},
        {"values": [[0.5, 0.1]]},
        {"values": [["x", 0.1], [0.5, 0.1]]},
        {"values": None},
    ],
)
def test_a_metric_that_does_not_match_the_shared_list_is_refused(damage: dict[str, Any], tmp_path: Path) -> None:
    packed = pack(results())
    packed["runs"]["a"]["metrics"][0] |= damage
    (tmp_path / "results.json").write_text(json.dumps(packed), encoding="utf-8")
    with pytest.raises(StorageError, match=r"results\.json.*restore it"):
        read_results(tmp_path)


def test_a_small_file_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    many = results()
    many["runs"]["a"]["metrics"] = [metric(0.5, data={"x" * 10**5: 1})] * 10**4
    (tmp_path / "results.json").write_bytes(encode_results(many))
    with pytest.raises(StorageError, match=r"1,00\d,\d{3},\d{3} characters of descriptions"):
        read_results(tmp_path)


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps(results(format=4)), encoding="utf-8")
    with pytest.raises(RunError, match="format 4; this version of Plateaux reads formats 2 and 3"):
        read_results(tmp_path)
