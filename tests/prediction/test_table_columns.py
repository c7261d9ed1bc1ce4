"""A run on a table with column names: they are read by name from Python, files, a bundle, and a server."""

from __future__ import annotations

import csv
import html
import json
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import plateaux
from plateaux.core.errors import DataError
from plateaux.data.data_summary import TensorSummary
from plateaux.data.preprocessing import Preprocessing
from plateaux.deploy.load_predictor import load_predictor
from plateaux.prediction.contract import InputContract
from plateaux.prediction.inputs import prepare
from plateaux.storage.run import Run
from tests.serving.conftest import running

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("table_columns")]  # one worker trains the run once

COLUMNS = ("age", "income", "is_new")
FRAME = pd.DataFrame(
    {
        "age": np.random.default_rng(0).integers(18, 80, 80),
        "income": np.random.default_rng(1).normal(3000, 800, 80),
        "is_new": np.arange(80) % 3 == 0,
    }
)
LABELS = pd.Series(np.where(FRAME.income / 1000 + FRAME.is_new > 3, "yes", "no"))
SHUFFLED = FRAME.assign(row=range(80), label=LABELS)[["label", "is_new", "row", "income", "age"]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("table") / "run"
    plateaux.fit(FRAME, LABELS, model="mlp", members=2, epochs=3, out=out, settings={"executor": {"threads": 1}})
    return out


@pytest.fixture(scope="module")
def bundle(run: Path) -> Path:
    plateaux.export(run, run.parent / "bundle")
    return run.parent / "bundle"


@pytest.fixture(scope="module")
def expected(run: Path) -> Any:
    """The mean probabilities, of the ensemble on the array in the order of training."""
    logits = load_predictor(run).ensemble.logits(torch.tensor(FRAME.to_numpy("float32")))
    return logits.double().softmax(-1).mean(0).numpy()


def test_the_run_stores_the_column_names(run: Path) -> None:
    steps = Run.open(run).info.preprocessing
    assert steps is not None
    assert steps.columns == COLUMNS
    assert plateaux.from_arrays(FRAME, LABELS).preprocessing.columns == COLUMNS
    again = plateaux.train(
        plateaux.Recipe.from_dict(
            {
                "members": 1,
                "data": {"name": "arrays", "path": str(run / "data.safetensors")},
                "model": {"name": "mlp", "hidden_sizes": [4]},
                "train": {"epochs": 1},
            }
        ),
        run.parent / "again",
    )
    steps = Run.open(again).info.preprocessing
    assert steps is not None
    assert steps.columns == COLUMNS


@pytest.mark.parametrize("place", ["run", "bundle"])
def test_a_predictor_reads_columns_by_name(place: str, expected: Any, request: pytest.FixtureRequest) -> None:
    predictor = load_predictor(request.getfixturevalue(place), threads=1)
    inputs = {
        "frame": FRAME,
        "other order, and more columns": SHUFFLED,
        "array": FRAME.to_numpy("float32"),
        "frame without names": FRAME.set_axis(range(3), axis=1),
        "columns": {name: FRAME[name].to_numpy() for name in reversed(COLUMNS)},
        "columns of one cell per row": {name: FRAME[name].to_numpy()[:, None] for name in COLUMNS},
        "records": SHUFFLED.to_dict("records"),
    }
    for name, x in inputs.items():
        assert np.allclose(predictor(x).probabilities, expected, atol=1e-5), name
    rows = {
        "row": SHUFFLED.iloc[7],
        "row of numbers": FRAME.astype(float).iloc[7],
        "row without names": pd.Series(FRAME.iloc[7].to_list()).astype(float),
        "record": SHUFFLED.to_dict("records")[7],
    }
    for name, row in rows.items():
        assert np.allclose(predictor(row).probabilities, expected[7:8], atol=1e-5), name


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (FRAME.drop(columns="age"), r"The input lacks 'age', which the model was trained on\. .* x\.reindex\(columns="),
        (FRAME.assign(age="old"), r"The input has values that are not numbers in 1 column \('age'\)"),
        (FRAME.assign(age=[None, *range(79)]), r"The input has missing values in 1 column \('age'\)"),
        ({"age": [1, 2], "income": [1, 2]}, r"lacks the column 'is_new'\. Expected: .*\(columns 'age', 'income', 'is_"),
        ({"age": [1, 2], "income": [1, 2], "is_new": [1]}, r"The columns have \[1, 2\] values\. Expected: equal"),
        ({"age": [1], "income": ["much"], "is_new": [1]}, "has dtype"),
        ({"age": [1], "income": [[1, 2]], "is_new": [1]}, r"The columns have \[1, 2\] values"),
        ({}, "has no columns, but lacks the columns 'age', 'income', 'is_new'"),
        ({"y": [1]}, "has 'y', but lacks the columns 'age', 'income', 'is_new'.* or x: floats"),
        ({"age": [], "income": [], "is_new": []}, r"shape \[0, 3\]"),
    ],
)
def test_columns_that_do_not_fit_are_an_error(run: Path, x: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_predictor(run)(x)


@pytest.mark.parametrize("kind", [".csv", ".tsv", ".parquet"])
def test_a_file_is_read_by_name(run: Path, bundle: Path, kind: str, expected: Any, tmp_path: Path) -> None:
    table = tmp_path / f"table{kind}"
    if kind == ".parquet":
        SHUFFLED.to_parquet(table)
    else:
        SHUFFLED.to_csv(table, sep="\t" if kind == ".tsv" else ",", index=False)
    for model in (run, bundle):
        result = plateaux.predict(model, table, tmp_path / f"{model.name}.csv")
        assert (result.inputs, result.failed) == (80, 0)
        with (tmp_path / f"{model.name}.csv").open(newline="") as text:
            rows = list(csv.DictReader(text))
        assert np.allclose([float(row["probability"]) for row in rows], expected.max(1), atol=1e-5)


def test_a_file_without_a_column_names_the_option_for_it(run: Path, expected: Any, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    FRAME.astype({"is_new": int}).rename(columns={"age": "years"}).to_csv(table, index=False)
    result = plateaux.predict(run, table, tmp_path / "a.csv")
    assert result.failed == 1
    assert "it has no column 'age'; its columns are years, income, is_new. Name" in (tmp_path / "a.csv").read_text()
    FRAME[["age"]].set_axis(["a"], axis=1).to_csv(table, index=False)
    plateaux.predict(run, table, tmp_path / "c.csv")
    assert "no column 'age', 'income', 'is_new'; its columns are a. Name" in (tmp_path / "c.csv").read_text()
    FRAME.rename(columns={"age": "years"}).to_csv(table, index=False)
    columns = {"columns": ("years", "income", "is_new")}
    assert plateaux.predict(run, table, tmp_path / "b.csv", batch=columns).failed == 0


def post(url: str, inputs: Any) -> Any:
    body = json.dumps({"inputs": inputs}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def test_a_server_takes_records_and_tensors_of_columns(bundle: Path, expected: Any, tmp_path: Path) -> None:
    rows = SHUFFLED.astype({"is_new": int}).head(3)
    tensors = [
        {"name": name, "datatype": "FP32", "shape": [3], "data": [float(v) for v in rows[name]]} for name in COLUMNS
    ]
    with running(bundle, tmp_path, "--name", "table") as server:
        records = post(f"{server.url}/predict", rows.to_dict("records"))["predictions"]
        answer = post(f"{server.url}/v2/models/table/infer", tensors)
        with pytest.raises(urllib.error.HTTPError) as problem:
            post(f"{server.url}/predict", [{"age": 3}])
    assert np.allclose([max(row["probabilities"].values()) for row in records], expected[:3].max(1), atol=1e-5)
    (found,) = [each for each in answer["outputs"] if each["name"] == "probability"]
    assert np.allclose(found["data"], expected[:3].max(1), atol=1e-5)
    with problem.value as refused:
        assert refused.code == 400
        assert "lacks the columns 'income', 'is_new'" in refused.read().decode()


def test_instructions_show_the_columns(bundle: Path, tmp_path: Path) -> None:
    assert 'print(predictor({"age": 0, "income": 0, "is_new": 0}).to_records())' in (bundle / "README.md").read_text()
    with running(bundle, tmp_path) as server, urllib.request.urlopen(server.url, timeout=60) as response:
        page = html.unescape(response.read().decode())
    assert """-d '{"inputs": [{"age": 0, "income": 0, "is_new": 0}]}' http""" in page
    assert "(columns 'age', 'income', 'is_new')" in page


def test_ood_samples_are_read_by_name(run: Path) -> None:
    far = FRAME * 2
    (found,) = plateaux.detect_ood(run, {"far": {"own": far.to_numpy("float32")}})
    (by_name,) = plateaux.detect_ood(run, {"far": {"own": far.assign(label=0)[["label", *reversed(COLUMNS)]]}})
    assert by_name.rows == found.rows
    with pytest.raises(DataError, match="The OOD set 'own' lacks 'age', which the model was trained on"):
        plateaux.detect_ood(run, {"far": {"own": far.drop(columns="age")}})


def test_evaluation_data_in_another_order_are_refused(run: Path) -> None:
    data = plateaux.from_arrays(FRAME[["income", "age", "is_new"]], LABELS)
    with pytest.raises(DataError, match="Column 0 of 'arrays' is 'income', but the run was trained with 'age' there"):
        plateaux.evaluate(plateaux.open_run(run, data=data))
    assert plateaux.evaluate(plateaux.open_run(run, data=plateaux.from_arrays(FRAME, LABELS)))


def test_columns_of_a_contract_for_other_inputs_are_not_used() -> None:
    """A damaged or malicious bundle may have them."""
    summary = TensorSummary("float32", (2,), 0.0, 1.0)
    steps = Preprocessing(columns=("p", "q"))
    with pytest.raises(DataError, match="The inputs are named"):
        prepare({"p": [1], "q": [2]}, InputContract({"a": summary, "b": summary}, 2, (), preprocessing=steps))
    with pytest.raises(DataError, match="shape"):
        prepare({"p": [1], "q": [2]}, InputContract({"x": replace(summary, shape=(3,))}, 2, (), preprocessing=steps))


def test_a_series_is_a_column_of_a_model_for_one_feature() -> None:
    contract = InputContract({"x": TensorSummary("float32", (1,), 0.0, 9.0)}, 2, ())
    assert prepare(pd.Series([1, 2, 3]), contract).arrays["x"].tolist() == [[1], [2], [3]]


def test_invalid_column_names_are_not_stored() -> None:
    for names in ([0, 1, 2], ["a", "b", "a"], [("a", "x"), ("a", "y"), ("b", "x")]):
        assert plateaux.from_arrays(FRAME.set_axis(names, axis=1), LABELS).preprocessing.columns == ()
    assert plateaux.from_arrays(FRAME.to_numpy("float32"), LABELS).preprocessing.columns == ()
