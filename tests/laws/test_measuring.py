"""Evaluation on a mesh equals a single process: counts exactly, everything else to 1e-6."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from laws.meshes import mesh

from plateaux.config.recipe import Recipe
from plateaux.core.row_names import MEAN_OF_PAIRS
from plateaux.evaluation.evaluate import evaluate
from plateaux.training.train import train

COUNTS = ("accuracy", "top5", "disagreement", "unique", "oracle", "error_overlap", "q_statistic")
TEXT = """
members = 3
[data]
name = "spirals"
samples = 60
test_samples = 301
batch_size = 16
[model]
name = "mlp"
hidden_sizes = [8]
[train]
epochs = 1
[executor]
threads = 1
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    train(Recipe.parse(TEXT), out)
    return out


@pytest.mark.parametrize(("copies", "shape"), [(1, "2x1"), (2, "1x2")])
def test_evaluation_on_a_mesh_equals_a_single_process(run: Path, copies: int, shape: str) -> None:
    expected = {result.metric: result.rows for result in evaluate(run, metrics=["all"], cache_logits="off")}
    for metrics in mesh(2).run("laws.meshes:measure_here", str(run), copies):
        assert list(metrics) == list(expected)
        for name, rows in metrics.items():
            assert list(rows) == list(expected[name]), name
            for row, (number, _) in rows.items():
                truth = expected[name][row].value
                if name in COUNTS and row != MEAN_OF_PAIRS:  # which adds thirds
                    assert number == truth, (name, row)
                assert number == pytest.approx(truth, rel=1e-6, abs=1e-9, nan_ok=True), (shape, name, row)


def test_predictions_cached_by_a_mesh_are_read_by_a_single_process(run: Path, log_lines: list[str]) -> None:
    mesh(2).run("laws.meshes:measure_here", str(run), 2, "float32")
    log_lines.clear()
    results = {result.metric: result.rows for result in evaluate(run, metrics=["all"])}
    without_warnings = [line for line in log_lines if not line.endswith("]")]
    assert without_warnings == ["test: using cached float32 logits of 301 samples"]
    expected = {result.metric: result.rows for result in evaluate(run, metrics=["all"], cache_logits="off")}
    for name, rows in expected.items():
        for row, value in rows.items():
            assert results[name][row].value == pytest.approx(value.value, rel=1e-6, abs=1e-7, nan_ok=True), (name, row)
    assert len(list((run / "predictions").rglob("*-logits.safetensors"))) == 3
    assert all(json.loads(p.read_text()) for p in (run / "metrics").glob("*.json"))
