"""The object that `evaluate` returns, the options it takes, and the names of its rows."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

import plateaux
from plateaux import Recipe, calibrate, evaluate, train
from plateaux.core.errors import RecipeError
from plateaux.core.row_names import MEAN_PROBABILITY, RowName, row_names, with_mean_of_members
from plateaux.core.types import Estimate
from plateaux.evaluation.evaluation import Evaluation
from plateaux.evaluation.results import MetricResult

RECIPE = {"members": 2, "data": {"name": "digits"}, "model": {"name": "mlp", "hidden_sizes": [4]}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    train(Recipe.from_dict({**RECIPE, "train": {"epochs": 1}}), root)
    return root


@pytest.fixture(scope="module")
def result(run: Path) -> Evaluation:
    return evaluate(run, metrics=["accuracy", "nll", "disagreement"])


def test_the_ensemble_and_the_members_are_read_by_name(result: Evaluation) -> None:
    accuracy = result["accuracy"]
    assert accuracy.ensemble == accuracy.rows[MEAN_PROBABILITY]
    assert accuracy.ensemble.value == accuracy.value
    assert accuracy.ensemble.stderr == accuracy.stderr is not None
    assert accuracy.members == {0: accuracy.rows["member 0"], 1: accuracy.rows["member 1"]}  # type: ignore[index]
    assert result["disagreement"].ensemble == result["disagreement"].rows["mean of pairs"]  # type: ignore[index]
    assert len(result) == 3
    assert [each.metric for each in result[1:]] == ["nll", "disagreement"]


def test_the_ensemble_of_one_member_is_that_member() -> None:
    rows = {RowName.member(4): Estimate(0.5, 0.1)}
    assert MetricResult("accuracy", "test", rows, True, {}, {}).ensemble.value == 0.5
    rows = {RowName.member(4).with_part("class 0"): Estimate(0.5)}
    with pytest.raises(KeyError, match="per_class has no value for the ensemble"):
        _ = MetricResult("per_class", "test", rows, True, {}, {}).ensemble


def test_a_wrong_name_and_an_ambiguous_one_are_explained(run: Path, result: Evaluation) -> None:
    with pytest.raises(KeyError, match="There is no result of 'acuracy'; did you mean 'accuracy'"):
        result["acuracy"]
    both = evaluate(run, split=["test", "train"], metrics="accuracy")
    with pytest.raises(KeyError, match=r"several splits \(test, train\)"):
        both["accuracy"]
    assert both.on("train")["accuracy"].split == "train"
    with pytest.raises(KeyError, match="no result on 'validation'"):
        both.on("validation")


def test_records_and_frames_hold_every_row(result: Evaluation) -> None:
    records = result.to_records()
    assert len(records) == sum(len(each.rows) for each in result)
    (pair,) = [record for record in records if record["kind"] == "pair"]
    assert (pair["metric"], pair["members"], pair["part"]) == ("disagreement", [0, 1], [])
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = result.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["value"]) == [record["value"] for record in records]


def test_without_pandas_a_frame_is_refused_with_the_command_to_run(
    result: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(RecipeError, match="pip install pandas"):
        result.to_frame()


def test_the_text_and_the_html_show_tables(result: Evaluation) -> None:
    text = repr(result)
    assert "ensemble (mean probability)" in text
    assert "accuracy %" in text
    assert max(map(len, text.splitlines())) <= 100
    hostile = MetricResult("<script>", "test", {"member 0": Estimate(1.0)}, True, {}, {"name": "x", "samples": 1})  # type: ignore[dict-item]
    html = Evaluation([hostile])._repr_html_()
    assert "&lt;script&gt;" in html
    assert "<script>" not in html
    assert result._repr_html_().count("<table>") >= 1
    assert repr(Evaluation([])) == "Evaluation([])"


@pytest.mark.parametrize(
    "name",
    [
        RowName.member(3),
        RowName.pair(1, 12),
        RowName.ordered_pair(4, 0),
        RowName.size(1),
        RowName.size(5).with_part("class 1"),
        RowName.ensemble("mean logit").with_part("bin 2", "share"),
        RowName.parse("members together"),
        RowName.parse("mean of members"),
        RowName.parse("mean of pairs"),
        RowName.parse("anything"),
    ],
)
def test_a_row_name_round_trips_through_text_and_pickle(name: RowName) -> None:
    for copy in (RowName.parse(str(name)), pickle.loads(pickle.dumps(name))):
        assert (copy, copy.kind, copy.members, copy.part) == (name, name.kind, name.members, name.part)
    assert name.base.with_part(*name.part) == name


def test_only_rows_about_members_are_renumbered() -> None:
    assert RowName.pair(0, 1).with_part("class 1").renumbered([7, 9]) == "members 7 and 9 · class 1"
    assert RowName.size(2).renumbered([7, 9]) == "2 members"
    assert [name.kind for name in row_names(4)] == ["member", "member", "ensemble", "ensemble"]


def test_the_mean_of_members_is_listed_after_the_members() -> None:
    rows = dict(zip(row_names(4), map(Estimate, (1.0, 3.0, 5.0, 7.0)), strict=True))
    with_mean = with_mean_of_members(rows)
    assert list(with_mean)[2] == "mean of members"
    assert with_mean[RowName.parse("mean of members")].value == 2.0


@pytest.mark.slow
def test_every_function_on_a_run_takes_a_run_object_and_a_path(tmp_path: Path) -> None:
    recipe = {**RECIPE, "data": {"name": "digits", "validation_split": 0.2}, "train": {"epochs": 1}}
    run = train(Recipe.from_dict(recipe), tmp_path / "run")
    functions = {
        "evaluate": lambda run: evaluate(run, metrics="accuracy").to_records(),
        "calibrate": lambda run: calibrate(run).to_dict(),
        "evaluate_calibration": lambda run: plateaux.evaluate_calibration(run).to_records(),
        "predict": lambda run: plateaux.predict(run, split="test").to_records(),
        "detect_ood": lambda run: plateaux.detect_ood(run, {"far": ["digits"]}).to_records(),
        "select_members": lambda run: plateaux.select_members([run], size=1).to_dict(),
        "probe_landscape": lambda run: [
            row.to_dict() for row in plateaux.probe_landscape(run, probes=["trace"], limit=8)
        ],
        "pending_jobs": plateaux.pending_jobs,
        "load": lambda run: len(plateaux.load_predictor(run).ensemble.members),
        "soup": lambda run: plateaux.soup(run, tmp_path / type(run).__name__, max_barrier=1e9).weights_hash(0),
    }
    for name, function in functions.items():
        assert function(run) == function(tmp_path / "run"), name


def test_repr_displays_nothing_itself_in_a_notebook(result: Evaluation, monkeypatch: pytest.MonkeyPatch) -> None:
    displayed: list[object] = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *args: displayed.append(args))
    assert "member 0" in repr(result)
    assert displayed == []
