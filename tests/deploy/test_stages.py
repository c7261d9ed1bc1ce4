"""A run with a cascade is exported as one graph per stage, which answer and stop as the members do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from digit_runs import train_digits
from hypothesis import given
from hypothesis import strategies as st

import plateaux
from plateaux.core.errors import RunError, StorageError
from plateaux.core.progress import ProgressEvent, WorkDone
from plateaux.core.registry import dataset
from plateaux.deploy.agreement import compare_answers
from plateaux.deploy.bundle import Bundle
from plateaux.deploy.export import CONVERTED
from plateaux.prediction.calibration import Calibration
from plateaux.prediction.load import ModuleBackend
from plateaux.prediction.stage_backend import CONFIDENCE, LOGITS, PREVIOUS, QUERIED, StageBackend
from plateaux.storage.digests import with_json_digest

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.xdist_group("stages")  # one worker makes the bundle once


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = train_digits(tmp_path_factory.mktemp("stages") / "run", members=4, model={"name": "mlp", "hidden_sizes": [8]})
    plateaux.calibrate(out, cascade={"max_harm": 0.02}, target_risk=0.2)
    return out


@pytest.fixture(scope="module")
def bundle(run: Path) -> Path:
    plateaux.export(run, run.parent / "bundle", ood_score="pds", intended_use="Sorting | digits <b>only</b>")
    return run.parent / "bundle"


def test_a_bundle_of_a_cascade_has_one_graph_per_stage_and_gives_the_answers_of_the_members(
    run: Path, bundle: Path
) -> None:
    files = {path.relative_to(bundle).as_posix() for path in bundle.rglob("*.*") if path.is_file()}
    assert {name for name in files if name.endswith(".onnx")} == {f"stages/{n}.onnx" for n in (1, 2, 3)}
    x, _ = dataset.get("digits")().test.fetch(torch.arange(599))
    expected, found = (plateaux.load_predictor(each, ood_score="pds")(x) for each in (run, bundle))
    assert expected.members_queried is not None
    assert set(expected.members_queried.tolist()) == {2, 3, 4}  # otherwise this test shows little
    assert found.members_queried is not None
    same = found.members_queried == expected.members_queried
    assert same.mean() > 0.99
    assert np.abs(found.probabilities - expected.probabilities)[same].max() < 1e-5
    assert np.abs(found.ood_score - expected.ood_score)[same].max() < 1e-5
    assert np.array_equal(found.label[same], expected.label[same])
    assert found.abstain is not None
    assert expected.abstain is not None
    assert np.array_equal(found.abstain[same], expected.abstain[same])
    one = plateaux.load_predictor(bundle)(x[:1])
    assert one.members_queried is not None
    assert one.members_queried[0] == found.members_queried[0]


def test_the_manifest_has_the_cascade_and_the_scores_of_the_calibration(run: Path, bundle: Path) -> None:
    manifest, calibration = Bundle.open(bundle).manifest, Calibration.read(plateaux.Run.open(run))
    assert calibration.cascade is not None
    assert manifest.cascade is not None
    assert manifest.cascade.threshold == calibration.cascade.threshold
    assert manifest.cascade.stages == calibration.cascade.stages == (2, 3)
    assert manifest.checks[0].file == "stages"
    scores = plateaux.predict(run, split="validation", ood_score="pds").ood_score
    ids = calibration.ids.tolist()
    assert manifest.calibration is not None
    alarm = manifest.calibration.alarm
    assert alarm.samples == len(ids)
    kept = scores[np.isin(np.arange(len(scores)), ids)] if len(scores) != len(ids) else scores
    assert alarm.mean == pytest.approx(float(kept.mean()), rel=0.05)
    assert alarm.std == pytest.approx(float(kept.std()), rel=0.2)
    assert alarm == calibration.ood_alarms["pds"]
    card = (bundle / "README.md").read_text()
    assert "A cascade queries" in card
    assert r"Sorting \| digits &lt;b>only&lt;/b>" in card


def test_a_cascade_that_never_stops_has_one_graph(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    plateaux.calibrate(copy, cascade={"max_harm": 1e-4})
    events: list[ProgressEvent] = []
    plateaux.export(copy, tmp_path / "bundle", progress=events.append)
    assert events == [WorkDone(percent, 100) for percent in (CONVERTED, 100)]
    assert [path.name for path in (tmp_path / "bundle" / "stages").iterdir()] == ["1.onnx"]
    x, _ = dataset.get("digits")().test.fetch(torch.arange(5))
    found = plateaux.load_predictor(tmp_path / "bundle")(x).members_queried
    assert found is not None
    assert found.tolist() == [4] * 5


def change_manifest(bundle: Path, **values: Any) -> None:
    file = bundle / "manifest.json"
    tree = json.loads(file.read_text())
    tree["cascade"].update(values)
    file.write_text(json.dumps(with_json_digest(tree), indent=2) + "\n")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stages": [3, 2]}, "not increasing"),
        ({"stages": [2, 4]}, "not increasing"),
        ({"stages": [2]}, "stages/2.onnx"),  # the second graph then returns too much
        ({"stages": [1, 2, 3]}, r"does not name stages/4\.onnx"),
        ({"threshold": 1.5}, "threshold of the cascade is 1.5"),
        ({"threshold": 0.0}, "for the golden inputs"),
    ],
)
def test_a_changed_cascade_is_refused(bundle: Path, tmp_path: Path, values: dict[str, Any], message: str) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    change_manifest(copy, **values)
    with pytest.raises(StorageError, match=message):
        plateaux.load_predictor(copy)


def fake_stage(begin: int, end: int, *, last: bool) -> Any:
    """Return a stage whose answer is its number of members, and whose confidence is in the input."""

    def run_stage(arrays: Any) -> dict[str, Any]:
        x = arrays["x"]
        if begin:
            assert arrays[PREVIOUS].shape == (len(x), begin, 1)
            assert (arrays[PREVIOUS][:, 0, 0] == x[:, 0]).all()  # the logits of the same inputs
        answers = {"label": np.full(len(x), end), "row": x[:, 0].copy()}
        if last:
            return answers
        logits = np.repeat(x[:, :1, None], end, axis=1)
        return {**answers, LOGITS: logits, CONFIDENCE: x[:, end]}

    return run_stage


@given(st.lists(st.lists(st.sampled_from([-1.0, 0.2, 0.5, 0.9]), min_size=2, max_size=2), min_size=1, max_size=9))
def test_every_input_stops_at_the_first_stage_that_is_confident(confidences: list[list[float]]) -> None:
    x = np.array([[number, 0.0, *row] for number, row in enumerate(confidences)])
    stages = [fake_stage(0, 2, last=False), fake_stage(2, 3, last=False), fake_stage(3, 5, last=True)]
    found = StageBackend(stages, (2, 3, 5), 0.5)({"x": x})
    expected = [2 if row[0] >= 0.5 else 3 if row[1] >= 0.5 else 5 for row in confidences]
    assert found[QUERIED].tolist() == expected
    assert found["label"].tolist() == expected
    assert found["row"].tolist() == list(range(len(x)))


def test_inputs_next_to_the_threshold_may_query_another_number_of_members(run: Path) -> None:
    backend = plateaux.load_predictor(run).backend
    assert isinstance(backend, ModuleBackend)
    x, _ = dataset.get("digits")().test.fetch(torch.arange(100))
    assert isinstance(x, torch.Tensor)
    arrays = {"x": x.numpy().astype(np.float32) / 255}
    assert not backend.near_stop(arrays, 0.0).all()
    assert backend.near_stop(arrays, 1.0).all()
    answers = dict(backend(arrays))
    other = {**answers, QUERIED: answers[QUERIED].copy(), "probability": answers["probability"].copy()}
    other[QUERIED][3] += 1
    other["probability"][3] = 0.123  # not compared, because other members answered
    near = np.zeros(100, dtype=bool)
    with pytest.raises(RunError, match=r"expected members_queried of sample 3"):
        compare_answers(answers, other, None, "It", near)
    near[3] = True
    found = compare_answers(answers, other, None, "It", near)
    assert (found.samples, found.near_threshold, found.max_difference) == (100, 1, 0.0)
