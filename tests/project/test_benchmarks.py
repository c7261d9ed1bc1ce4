"""Benchmarks start, run, end with a JSON line, and judge only what they can: limits, controls, time budgets, parts."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import Script

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if not path.name.startswith("_"))
LONG = os.environ.get("PLATEAUX_LONG") == "1"
# Even in quick form these take 20 s to two minutes each, most of it to start processes and to export graphs.
# What they call has tests of its own, named here, so they run only in a long test and in `make bench`, which a release
# requires. That they start and use the library as it is now is checked for every script, here and in test_typing.py.
TESTED_ELSEWHERE = {
    "agreement": "tests/deploy/test_export.py",
    "evaluation": "tests/evaluation/test_metric_loop.py",
    "export": "tests/deploy/test_export.py",
    "member_memory": "tests/training/test_train.py",
    "pool": "tests/distributed/test_process_pool.py",
    "ray_cluster": "tests/integration/test_ray.py",
    "sample_scores": "tests/optim/test_sample_scores.py",
    "serve": "tests/serving/test_serve.py",
    "soak": "tests/serving/test_serve.py",
    "startup": "tests/cli/test_startup.py",
}
HELP = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    main, sys.argv = importlib.import_module(name).main, [name, "--help"]
    try:
        main()
    except SystemExit as end:
        assert not end.code, name
    else:
        raise AssertionError(f"{name} does not know --help")
"""


def load(name: str) -> ModuleType:
    """Import a shared module of the benchmarks, which are not a package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


common = load("_common")
history = load("_history")

# A cluster consists of a dozen processes: one at a time.
RAY = [pytest.mark.xdist_group("ray")]
CASES = [
    pytest.param(path, id=path.stem, marks=RAY if path.stem == "ray_cluster" else [])
    for path in SCRIPTS
    if LONG or path.stem not in TESTED_ELSEWHERE
]


def test_every_benchmark_starts_and_prints_its_help() -> None:
    names = [path.stem for path in SCRIPTS]
    command = [sys.executable, "-c", HELP, str(ROOT / "benchmarks"), *names]
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: ") == len(names)
    assert all(f"usage: {name} " in done.stdout for name in names)


def test_a_benchmark_that_ci_leaves_out_has_tests_of_what_it_measures() -> None:
    assert TESTED_ELSEWHERE.keys() <= {path.stem for path in SCRIPTS}
    assert [file for file in TESTED_ELSEWHERE.values() if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("file", CASES)
def test_a_benchmark_ends_with_metrics_limits_and_a_verdict(file: Path, script: Script) -> None:
    if file.stem == "ray_cluster":
        pytest.importorskip("ray", reason="Ray is not installed")
    done = script(file, "--quick", "--json", seconds=280)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert set(found["limits"]) <= set(found["figures"])
    assert set(found["controls"]) <= set(found["figures"])
    assert found["quick"] is True
    assert found["ok"] in (True, False, None)
    assert (found["ok"] is None) <= bool(found["cannot_tell"]), "null needs a reason"
    if not found["figures"]:
        pytest.skip("; ".join(found["cannot_tell"]))


def judged(capsys: pytest.CaptureFixture[str], results: Any) -> dict[str, Any]:
    results.finish()
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


@pytest.mark.parametrize(("quick", "ok"), [(True, True), (False, False)])
def test_a_quick_form_is_judged_by_its_own_limit(quick: bool, ok: bool, capsys: pytest.CaptureFixture[str]) -> None:
    results = common.Results(quick)
    results.add("engine / bare", 0.8, full=common.at_least(0.97), quick=common.at_least(0.5))
    line = judged(capsys, results)
    assert line["ok"] is ok
    assert line["limits"] == {"engine / bare": "at least 0.5" if quick else "at least 0.97"}


def test_a_quick_form_without_quick_limits_has_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    results = common.Results(quick=True)
    results.add("queue / pool, time", 0.12, full=common.at_least(1.2))
    line = judged(capsys, results)
    assert line["ok"] is None
    assert line["cannot_tell"] == ["this form judges nothing"]


@pytest.mark.parametrize(
    ("control", "value", "ok"),
    [
        (1.0, 0.98, True),
        (1.0, 0.9, False),
        (1.029, 0.98, True),
        (1.14, 0.98, None),
        (1.14, 0.8, None),
        (0.96, 2.0, None),
    ],
)
def test_a_control_off_by_more_than_three_percent_makes_the_verdict_null(
    control: float, value: float, ok: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    results = common.Results(quick=False)
    results.add("bare / bare", control, is_control=True)
    results.add("engine / bare", value, full=common.at_least(0.97), control="bare / bare")
    line = judged(capsys, results)
    assert line["ok"] is ok
    assert bool(line["cannot_tell"]) is (ok is None)


def test_a_limit_without_a_control_fails_even_if_another_has_no_verdict() -> None:
    results = common.Results(quick=False)
    results.add("bare / bare", 1.5, is_control=True)
    results.add("engine / bare", 1.0, full=common.at_least(0.97), control="bare / bare")
    assert results.verdict() is None
    results.add("difference of a weight", 1e-3, full=common.at_most(0.0))
    assert results.verdict() is False


def test_a_reason_makes_a_good_verdict_null_and_keeps_a_bad_one() -> None:
    results = common.Results(quick=False)
    results.add("megabytes", 1.0, full=common.at_most(2.0))
    results.cannot_tell("work: not finished within 570 s")
    assert results.verdict() is None
    results.add("seconds", 3.0, full=common.at_most(2.0))
    assert results.verdict() is False


def make_clock(durations: list[float]) -> Any:
    """Return a clock on which successive measurements take these durations, over and over."""
    times = itertools.chain.from_iterable((0.0, d) for d in itertools.cycle(durations))
    return lambda: next(times)


def test_an_unsteady_control_makes_a_measurement_run_longer_up_to_a_bound() -> None:
    sides = {"bare": lambda _: None, "again": lambda _: None}
    steady = common.interleaved(sides, 3, control=("bare", "again"), clock=make_clock([1.0]))
    assert {len(times) for times in steady.values()} == {3}
    # The order of the sides rotates, so the side "bare" takes 2 s in every round.
    unsteady = common.interleaved(sides, 3, control=("bare", "again"), clock=make_clock([2.0, 1.0, 1.0, 2.0]))
    assert {len(times) for times in unsteady.values()} == {3 * common.LONGER}


def test_a_measurement_takes_at_least_one_round_and_stops_within_its_budget() -> None:
    sides = {"a": lambda _: None, "b": lambda _: None}
    exhausted = common.Budget(0.0, clock=lambda: 0.0)
    assert {len(times) for times in common.interleaved(sides, 5, within=exhausted).values()} == {1}
    assert {len(times) for times in common.interleaved(sides, 5, within=common.Budget(1e6)).values()} == {5}


def test_paired_ratios_run_longer_for_a_control_and_stop_within_a_budget() -> None:
    sides = {"again": lambda _: None, "sam": lambda _: None}
    exhausted = common.Budget(0.0, clock=lambda: 0.0)
    times, found = common.paired(lambda _: sum(range(1000)), sides, 5, control="again", within=exhausted)
    assert {len(ratios) for ratios in found.values()} == {1}
    assert len(times) == 3


def test_a_budget_that_is_used_up_raises() -> None:
    now = iter([0.0, 5.0, 11.0])
    budget = common.Budget(10.0, clock=lambda: next(now))
    assert budget.require() == 5.0
    with pytest.raises(common.OutOfTime, match="not finished within 10 s"):
        budget.require()


def never_ends(send: Any) -> dict[str, float]:
    send("progress")
    time.sleep(3600)
    return {}


def test_processes_that_do_not_finish_in_time_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # the new process imports the module by its name
    alternating = load("_alternating")
    started: list[Any] = []

    def start() -> Any:
        started.append(alternating.AlternatingSide(never_ends))
        return started[-1]

    with pytest.raises(common.OutOfTime, match="not finished within 2 s"):
        alternating.alternate([start, start], common.Budget(2.0))
    assert started
    assert not any(side.process.is_alive() for side in started)


def test_one_part_can_be_selected_and_help_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    parts = ("fp32", "bf16", "lookup")
    assert common.parse_flags("about", parts, []).parts == parts
    assert common.parse_flags("about", parts, ["--part", "bf16"]).parts == ("bf16",)
    with pytest.raises(SystemExit) as stopped:
        common.parse_flags("about", parts, ["--part", "fp64"])
    assert stopped.value.code == 2
    with pytest.raises(SystemExit):
        common.parse_flags("about", parts, ["--help"])
    assert "fp32, bf16, lookup" in " ".join(capsys.readouterr().out.split())


def test_every_shared_name_has_a_use() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("*.py"))
    names = [name for name, value in vars(common).items() if getattr(value, "__module__", "") == "_common"]
    assert [name for name in names if text.count(name) < 2] == []


LINE = {"figures": {"engine / bare": 0.98, "seconds": 3.0}, "quick": True, "ok": True}


def test_the_history_stores_ratios_without_names_of_machines(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    entry = history.build_entry("overhead", LINE)
    history.append(file, entry)
    history.append(file, entry)
    assert entry["ratios"] == {"engine / bare": 0.98}
    assert set(entry) == {"date", "version", "torch", "python", "cores", "benchmark", "quick", "ok", "ratios"}
    assert history.read(file) == [entry, entry]
    assert history.read(tmp_path / "missing.jsonl") == []


@pytest.mark.parametrize(("value", "lines"), [(0.98, 0), (1.0, 0), (0.9, 1), (1.2, 1)])
def test_a_ratio_outside_the_earlier_ones_is_reported(value: float, lines: int) -> None:
    earlier = [history.build_entry("overhead", LINE)] * 2
    entry = {**earlier[0], "ratios": {"engine / bare": value, "new / old": 1.0}}
    assert len(history.compare(entry, earlier)) == lines
    assert history.compare({**entry, "cores": 10_000}, earlier) == []
    assert history.compare({**entry, "quick": False}, earlier) == []


@pytest.mark.parametrize("name", ["calibration", "cascade"])
def test_a_benchmark_without_its_data_is_skipped_with_a_reason(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLATEAUX_DATA", str(tmp_path))
    file = tmp_path / "history.jsonl"
    assert history.main(["--quick", "--file", str(file), name]) == 0
    found = capfd.readouterr()
    assert json.loads(found.out)["ok"] is None
    assert "no CIFAR-10 and no ResNets; set PLATEAUX_DATA to the folder that contains" in found.err
    assert "Traceback" not in found.err
    assert not file.exists()


def test_a_benchmark_that_fails_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_text("raise SystemExit('The disk is full')")
    (tmp_path / "b.py").write_text(f"print({json.dumps(json.dumps({**LINE, 'cannot_tell': []}))})")
    (tmp_path / "c.py").write_text("")
    monkeypatch.setattr(history, "HERE", tmp_path)
    file = tmp_path / "history.jsonl"
    assert history.main(["--quick", "--file", str(file)]) == 1
    assert [entry["benchmark"] for entry in history.read(file)] == ["b"]
    found = capfd.readouterr().err.splitlines()
    assert found == ["== a", "The disk is full", "== b", "== c", "== failed: a, c"]


def test_the_committed_history_can_be_read() -> None:
    for entry in history.read(ROOT / "benchmarks" / "history.jsonl"):
        assert (ROOT / "benchmarks" / f"{entry['benchmark']}.py").exists()
        assert all(" / " in name for name in entry["ratios"])
