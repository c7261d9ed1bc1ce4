"""Exported graphs give the answers of the members at any batch size, and a graph that does not is refused."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import plateaux
from plateaux.core.errors import RecipeError, RunError, StorageError
from plateaux.core.progress import ProgressEvent, WorkDone
from plateaux.core.registry import dataset
from plateaux.deploy.agreement import Agreement, compare_answers
from plateaux.deploy.bundle import Bundle
from plateaux.deploy.export import CONVERTED, EXPORTED, compare_backends, export_program, to_onnx
from plateaux.deploy.graph import AnswerGraph, BatchedLinear
from plateaux.deploy.manifest import CalibrationRecord, SetRule
from plateaux.deploy.onnx_backend import OnnxBackend
from plateaux.ensembles.answers import AnswerSettings
from plateaux.ensembles.conformal import Conformal
from plateaux.ensembles.ensemble import Ensemble
from plateaux.ensembles.ood_alarm import OodAlarm
from plateaux.ensembles.temperature import Temperatures
from plateaux.models.architectures.resnet import resnet
from plateaux.models.architectures.small import mlp
from plateaux.models.backbone import Backbone, BackboneWithHead, build_head
from plateaux.prediction.calibration import Calibration
from plateaux.prediction.load import ModuleBackend
from plateaux.serving.protocol import output_names

pytest.importorskip("onnxruntime")

SHAPE = (3, 16, 16)
POOLED = AnswerSettings(
    "pds", Temperatures("pool then calibrate", 6, (1.3,)), Conformal("lac", 0.1, 0.8, 50), 0.6, None, 1.05, raw=True
)


@cache
def mlp_backend() -> OnnxBackend:
    return make_backend(ensemble("mlp"), SETTINGS["mlp"], samples())


def make_backend(ensemble: Ensemble, settings: AnswerSettings, x: np.ndarray[Any, Any]) -> OnnxBackend:
    program = export_program(AnswerGraph(ensemble, settings, ["x"]), {"x": x})
    return OnnxBackend(to_onnx(program, ["x"], settings.outputs), ["x"], settings.outputs, threads=1)


def samples(shape: tuple[int, ...] = SHAPE) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).random((72, *shape), dtype=np.float32)


def heads(kind: Any, count: int, backbone: Backbone) -> list[nn.Module]:
    return [BackboneWithHead(backbone, build_head(kind, backbone.shape, classes=5, width=6)) for _ in range(count)]


def ensemble(name: str) -> Ensemble:
    torch.manual_seed(0)
    if name == "mlp":
        members: list[nn.Module] = [mlp(shape=SHAPE, classes=5, hidden_sizes=(8,)) for _ in range(3)]
        return Ensemble(members, mean=(0.5,) * 3, std=(0.2,) * 3)
    backbone = Backbone(resnet(depth=8, shape=SHAPE, classes=5, width=4), "features", shape=SHAPE)
    if name == "different heads":
        return Ensemble([*heads("mlp", 2, backbone), *heads("linear", 1, backbone)])
    return Ensemble(heads(name.split()[0], 6, backbone), mean=(0.5,) * 3, std=(0.2,) * 3)


SETTINGS = {
    "mlp": replace(POOLED, temperatures=Temperatures("calibrate then pool", 3, (1.2, 0.8, 1.0))),
    "mlp heads": replace(POOLED, ood_score="energy", conformal=Conformal("aps", 0.1, 0.7, 50, randomized=False)),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_graph_gives_the_answers_of_the_members_at_every_batch_size(name: str) -> None:
    members, settings, x = ensemble(name), SETTINGS[name], samples()
    graph = mlp_backend() if name == "mlp" else make_backend(members, settings, x)
    agreement = compare_backends(ModuleBackend(members, settings), graph, {"x": x}, None, "")
    assert agreement.samples == 72
    assert agreement.max_difference < 1e-5
    assert agreement.near_threshold == 0


@pytest.mark.parametrize("kind", ["linear", "mlp heads"])
def test_heads_of_equal_shape_are_batched_and_the_backbone_runs_once(kind: str) -> None:
    graph = AnswerGraph(members := ensemble(kind), AnswerSettings(), ["x"])
    batched = [part for part in graph.modules() if isinstance(part, BatchedLinear)]
    assert len(batched) == {"linear": 1, "mlp heads": 2}[kind]
    x = torch.from_numpy(samples())
    normalized = (x - 0.5) / 0.2
    assert torch.allclose(graph.members(normalized), members.logits(x), atol=1e-6)
    program = export_program(graph, {"x": samples()})
    convolutions = [node for node in program.graph.nodes if "conv2d" in str(node.target)]
    alone = [part for part in members.members[0].modules() if isinstance(part, nn.Conv2d)]
    assert len(convolutions) == len(alone)


def test_heads_of_different_shapes_are_looped() -> None:
    graph = AnswerGraph(members := ensemble("different heads"), AnswerSettings(), ["x"])
    assert not [part for part in graph.modules() if isinstance(part, BatchedLinear)]
    x = torch.from_numpy(samples())
    assert torch.allclose(graph.members(x), members.logits(x), atol=1e-6)


class FixedBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(3, 4))  # type: ignore[no-any-return]


def test_a_model_with_a_fixed_batch_size_is_refused() -> None:
    with pytest.raises(RunError, match=r"cannot export the model with a variable batch size"):
        make_backend(Ensemble([FixedBatch()]), AnswerSettings(), samples((4,)))


def test_a_graph_with_different_answers_is_refused() -> None:
    members, x = ensemble("mlp"), samples()
    graph, expected = mlp_backend(), ModuleBackend(members, SETTINGS["mlp"])
    with torch.no_grad():
        next(members.members[0].parameters()).mul_(1.001)
    with pytest.raises(
        RunError, match=r"The graph at batch size 1 differs from the expected probabilit.* at most 1e-05"
    ):
        compare_backends(expected, graph, {"x": x}, None, "The graph")


def answers(p: list[float], **others: Any) -> dict[str, Any]:
    row = np.array([p])
    numbers = {name: np.zeros(1) for name in ("entropy", "mutual_information", "ood_score")}
    return {"label": row.argmax(1), "probability": row.max(1), "probabilities": row, **numbers, **others}


RULE = SetRule("lac", 0.1, 0.6, 5, 0.01, False, 100)
ALARM = OodAlarm(0.05, 0.3, 0.01, 0.1, 0.2, 0.1, 100)
FITTED = CalibrationRecord("pool then calibrate", (1.0,), "validation", 100, RULE, 0.5, ALARM)
ABSTAIN = {"abstain": np.array([True])}
SET = {"prediction_set": np.array([[True, True, False]])}
OOD, NO_OOD = ({"ood_score": np.array([0.3]), "is_ood": np.array([value])} for value in (True, False))
CLOSE = [
    ([0.4, 0.4, 0.2], {}, [0.4 - 4e-6, 0.4 + 4e-6, 0.2], {}, 1),
    ([0.500004, 0.3, 0.199996], {"abstain": np.array([False])}, [0.499999, 0.3, 0.200001], ABSTAIN, 1),
    ([0.55, 0.4, 0.05], SET, [0.55, 0.399995, 0.050005], {"prediction_set": np.array([[True, False, False]])}, 1),
    ([0.7, 0.2, 0.1], {}, [0.7, 0.2, 0.1], {}, 0),
    ([0.7, 0.2, 0.1], OOD, [0.7, 0.2, 0.1], NO_OOD | {"ood_score": np.array([0.30005])}, 1),
]
FAR: list[Any] = [
    ([0.7, 0.2, 0.1], {}, [0.69, 0.21, 0.1], {}, "differs from the expected probability by 0.01"),
    ([0.7, 0.2, 0.1], {}, [0.70002, 0.2, 0.09998], {}, "differs from the expected probability by 2e-05"),
    ([0.7, 0.2, 0.1], {}, [0.7, 0.2, np.nan], {}, "by nan"),
    ([0.50002, 0.3, 0.19998], {"abstain": np.array([False])}, [0.50002, 0.3, 0.19998], ABSTAIN, "expected abstain"),
    ([0.7, 0.2, 0.1], {}, [0.7, 0.2, 0.1], {"label": np.array([1])}, "expected label of sample 0"),
    ([0.7, 0.2, 0.1], {"abstain": np.array([False])}, [0.7, 0.2, 0.1], ABSTAIN, "expected abstain"),
    ([0.7, 0.2, 0.1], {"prediction_set": ~SET["prediction_set"]}, [0.7, 0.2, 0.1], SET, "expected prediction_set"),
    ([0.7, 0.2, 0.1], {}, [0.7, 0.2, 0.1], {"ood_score": np.array([1.0])}, "expected ood_score by 1"),
    (
        [0.7, 0.2, 0.1],
        OOD | {"ood_score": np.array([0.4])},
        [0.7, 0.2, 0.1],
        NO_OOD | {"ood_score": np.array([0.4])},
        "expected is_ood",
    ),
    (
        [0.7, 0.2, 0.1],
        {"raw_entropy": np.array([1.0])},
        [0.7, 0.2, 0.1],
        {"raw_entropy": np.array([0.9])},
        "expected raw_entropy by 0.1",
    ),
    ([0.7, 0.2, 0.1], {}, [0.7, 0.2, 0.1], ABSTAIN, "has the outputs"),
    ([0.7, 0.2, 0.1], {}, [0.7, 0.3], {}, "of shape"),
]


@pytest.mark.parametrize(("p", "more", "other", "others", "count"), CLOSE)
def test_decisions_may_differ_next_to_a_threshold_and_are_counted(
    p: list[float], more: Any, other: list[float], others: Any, count: int
) -> None:
    found = compare_answers(answers(p, **more), answers(other, **others), FITTED, "It")
    assert (found.samples, found.near_threshold) == (1, count)
    total = found + Agreement(3, 1e-6, 2)
    assert (total.samples, total.near_threshold) == (4, count + 2)
    assert total.max_difference == max(1e-6, found.max_difference)


@pytest.mark.parametrize(("p", "more", "other", "others", "message"), FAR)
def test_differences_that_no_threshold_explains_are_errors(
    p: list[float], more: Any, other: list[float], others: Any, message: str
) -> None:
    with pytest.raises(RunError, match=message):
        compare_answers(answers(p, **more), answers(other, **others), FITTED, "It")


@pytest.mark.parametrize(("kind", "penalty"), [("aps", 0.0), ("raps", 0.1)])
def test_classes_next_to_the_threshold_of_cumulative_sets_may_differ(kind: Any, penalty: float) -> None:
    rule = replace(RULE, kind=kind, threshold=0.75 + penalty, k_reg=1, penalty=penalty, never_empty=True)
    fitted = replace(FITTED, sets=rule)
    p = [0.5, 0.25, 0.15, 0.1]  # cumulative 0.5, 0.75, 0.9, 1.0
    two, one = np.array([[True, True, False, False]]), np.array([[True, False, False, False]])
    assert (
        compare_answers(answers(p, prediction_set=two), answers(p, prediction_set=one), fitted, "").near_threshold == 1
    )
    three = np.array([[True, True, True, False]])
    with pytest.raises(RunError, match="prediction_set"):
        compare_answers(answers(p, prediction_set=two), answers(p, prediction_set=three), fitted, "It")
    infinite = replace(FITTED, sets=replace(rule, threshold=None))
    with pytest.raises(RunError, match="prediction_set"):
        compare_answers(answers(p, prediction_set=two), answers(p, prediction_set=one), infinite, "It")


OWN = """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, x):
        return self.layer(x.tanh())
"""
ANSWER = """
import sys
import numpy as np
import plateaux
predictor = plateaux.load_predictor(sys.argv[1], threads=1)
np.save(sys.argv[2], predictor(np.load(sys.argv[2])).probabilities)
loaded = [name for name in ("torch", "own_net", "transformers", "onnxscript") if name in sys.modules]
assert not loaded, loaded
"""


def test_a_bundle_answers_without_the_code_of_the_model_and_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "own_net.py"
    source.write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_net  # type: ignore[import-not-found]

    x = torch.randn(120, 4, generator=torch.Generator().manual_seed(0))
    data = plateaux.from_tensors((x, x.argmax(1) % 3), (x[:30], x[:30].argmax(1) % 3), classes=3)
    recipe = plateaux.Recipe.from_dict(
        {"members": 2, "train": {"epochs": 1}, "data": {"name": "own", "batch_size": 32}, "model": {"name": "net"}}
    )
    run = plateaux.train(recipe, tmp_path / "run", data=data, model=own_net.Net)
    expected = plateaux.load_predictor(plateaux.open_run(run, model=own_net.Net))(x[:9]).probabilities
    bundle = plateaux.export(plateaux.open_run(run, data=data, model=own_net.Net), tmp_path / "bundle")
    assert bundle.manifest.golden == "samples of the test split of tensors"
    source.unlink()
    monkeypatch.delitem(sys.modules, "own_net")
    np.save(tmp_path / "x.npy", x[:9].numpy())
    words = [sys.executable, "-c", ANSWER, str(tmp_path / "bundle"), str(tmp_path / "x.npy")]
    env = {**os.environ, "PYTHONPATH": str(Path(plateaux.__file__).parents[1])}
    subprocess.run(words, check=True, env=env, cwd=tmp_path)
    assert np.allclose(np.load(tmp_path / "x.npy"), expected, atol=1e-6)
    assert len(expected) == 9


def test_without_its_data_a_run_is_compared_on_random_inputs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.rand(40, 4, generator=torch.Generator().manual_seed(0))
    data = plateaux.from_tensors((x, x.argmax(1) % 3), (x, x.argmax(1) % 3), classes=3)
    recipe = plateaux.Recipe.from_dict(
        {
            "members": 1, "train": {"epochs": 1}, "data": {"name": "own", "batch_size": 20},
            "model": {"name": "mlp", "hidden_sizes": [3]},
        }
    )  # fmt: skip
    plateaux.train(recipe, tmp_path / "run", data=data)
    with caplog.at_level(logging.WARNING):
        bundle = plateaux.export(tmp_path / "run", tmp_path / "bundle")
    assert bundle.manifest.golden == bundle.manifest.checks[0].inputs == "random inputs of seed 0"
    assert "are not available" in caplog.text
    assert "not calibrated" in plateaux.load_predictor(tmp_path / "bundle")(x[:2]).remark
    assert bundle.manifest.calibration is None


def test_named_inputs_are_inputs_of_the_graph(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    generator = torch.Generator().manual_seed(0)
    names = ("input_ids", "attention_mask", "token_type_ids")
    x = {
        name: torch.randint(0, high, (80, 12), generator=generator)
        for name, high in zip(names, (50, 2, 2), strict=True)
    }
    y = x["input_ids"][:, 0] % 2
    data = plateaux.from_tensors((x, y), ({name: values[:40] for name, values in x.items()}, y[:40]), classes=2)
    small = {"vocabulary": 50, "width": 16, "depth": 1, "heads": 2, "hidden": 16, "positions": 16}
    lora = {"rank": 2, "target_modules": ["*query"], "modules_to_save": ["head"]}
    recipe = plateaux.Recipe.from_dict(
        {
            "members": 2, "train": {"epochs": 1}, "data": {"name": "own", "batch_size": 40},
            "model": {"name": "minilm", **small, "lora": lora},
        }
    )  # fmt: skip
    run = plateaux.train(recipe, tmp_path / "run", data=data)
    events: list[ProgressEvent] = []
    bundle = plateaux.export(plateaux.open_run(run, data=data), tmp_path / "bundle", progress=events.append)
    assert events == [WorkDone(percent, 100) for percent in (EXPORTED, CONVERTED, 100)]
    assert set(bundle.manifest.files) >= {"shared.safetensors", "members/0.safetensors", "members/1.safetensors"}
    expected = plateaux.load_predictor(run)(x)
    found = plateaux.load_predictor(tmp_path / "bundle")(x)
    assert np.abs(found.probabilities - expected.probabilities).max() < 1e-5
    assert found.label.tolist() == expected.label.tolist()


@pytest.mark.xdist_group("bundle")
def test_a_bundle_has_the_alarm_of_its_run_and_raw_answers_on_request(calibrated_run: Path, tmp_path: Path) -> None:
    bundle = plateaux.export(calibrated_run, tmp_path / "bundle", raw=True)
    calibration = Calibration.read(plateaux.open_run(calibrated_run))
    assert bundle.manifest.calibration is not None
    assert bundle.manifest.calibration.alarm == calibration.ood_alarms[calibration.ood_score]
    x = dataset.get("digits")().test.fetch(torch.arange(599))[0]
    expected, found = (plateaux.load_predictor(each, raw=True)(x) for each in (calibrated_run, bundle))
    assert expected.is_ood is not None
    assert 0 < expected.is_ood.sum() < 599
    assert found.is_ood is not None
    assert (found.is_ood != expected.is_ood).sum() <= 1
    assert found.raw.keys() == expected.raw.keys() > {"raw_probability", "raw_entropy", "raw_label"}
    for name, values in expected.raw.items():
        assert np.allclose(found.raw[name], values, atol=1e-5), name
    served = output_names([each.name for each in bundle.manifest.outputs])
    assert served[7:] == ("is_ood", "prediction_set", "abstain", *expected.raw)
    card = (tmp_path / "bundle" / "README.md").read_text()
    assert "The OOD alarm has at most 5 % false alarms (95 % interval" in card
    manifest = tmp_path / "bundle" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 2', '"format": 1'))
    with pytest.raises(StorageError, match="has format '1'; this version of Plateaux reads format 2"):
        plateaux.load_predictor(tmp_path / "bundle")


@pytest.mark.xdist_group("bundle")
def test_options_fixed_at_export_cannot_be_changed_at_load(exported: Path, calibrated_run: Path) -> None:
    for options, message in (
        ({"ood_score": "pds"}, "computes 'max_probability'. Export it again with --ood-score pds"),
        ({"alpha": 0.2}, r"has the sets of alpha = 0\.1"),
        ({"raw": True}, "has no answers without the calibration. Export it again with --raw"),
        ({"device": "cuda"}, "runs on the CPU"),
        ({"threads": 0}, "threads = 0"),
    ):
        with pytest.raises(RecipeError, match=message):
            plateaux.load_predictor(exported, **options)  # type: ignore[arg-type]
    assert plateaux.load_predictor(exported, ood_score="max_probability", alpha=0.1, device="cpu").calibrated
    with pytest.raises(RunError, match="is not empty"):
        plateaux.export(calibrated_run, exported)


@pytest.mark.xdist_group("bundle")
def test_a_calibrated_run_of_images_agrees_in_every_answer(exported: Path, calibrated_run: Path) -> None:
    x, _ = dataset.get("digits")().test.fetch(torch.arange(200))
    expected = plateaux.load_predictor(calibrated_run)(x)
    found = plateaux.load_predictor(exported, threads=1)(x)
    assert np.abs(found.probabilities - expected.probabilities).max() < 1e-5
    assert np.allclose(found.uncertainty.entropy, expected.uncertainty.entropy, atol=1e-5)
    assert np.allclose(found.ood_score, expected.ood_score, atol=1e-5)
    for name in ("label", "prediction_set", "abstain"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    assert 0 < found.abstain.sum() < 200  # type: ignore[union-attr]
    assert found.class_names == expected.class_names


@pytest.mark.xdist_group("bundle")
def test_the_manifest_has_measured_metrics_and_the_bundle_no_machine_paths(
    exported: Path, calibrated_run: Path
) -> None:
    manifest = Bundle.open(exported).manifest
    (accuracy,) = [number for number in manifest.measured if number.metric == "accuracy"]
    assert accuracy.value == plateaux.evaluate(calibrated_run, metrics=["accuracy"])["accuracy"].value
    assert (accuracy.split, accuracy.data, accuracy.samples) == ("test", "digits", 599)
    assert any(number.row.endswith("coverage") for number in manifest.measured)
    assert [check.file for check in manifest.checks] == ["model.onnx"]
    assert manifest.license == "CC0-1.0"
    for file in exported.rglob("*.*"):
        content = file.read_bytes() if file.is_file() else b""
        assert str(Path(plateaux.__file__).parents[2]).encode() not in content, file
        assert b"site-packages" not in content, file
        assert str(calibrated_run).encode() not in content, file
