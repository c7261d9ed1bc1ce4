"""OOD detection: test samples against other data sets, for every member and the ensemble."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from plateaux.config.recipe import Recipe
from plateaux.core.errors import DataError, RecipeError, RunError
from plateaux.core.registry import dataset
from plateaux.core.row_names import ALL_MEMBERS, row_name
from plateaux.data.corruptions.corrupt import CORRUPTIONS
from plateaux.data.sources import DataSplits, Source, from_tensors
from plateaux.deploy.load_predictor import load_predictor
from plateaux.deploy.predict import predict
from plateaux.ensembles.ood_scores import OOD_SCORES
from plateaux.evaluation.evaluation import Evaluation
from plateaux.evaluation.ood import detect_ood, parse_ood_suites
from plateaux.evaluation.splits import EvalSplit, ResizedSource, ood_split
from plateaux.evaluation.tables import result_tables
from plateaux.testing import write_data
from plateaux.training.train import train

RECIPE = {
    "members": 2,
    "data": {"name": "digits", "batch_size": 64},
    "model": {"name": "mlp", "hidden_sizes": [16]},
    "optimizer": {"name": "SGD", "lr": 0.1},
    "train": {"epochs": 3},
    "executor": {"threads": 1},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    train(Recipe.from_dict(RECIPE), out)
    return out


def test_a_data_set_against_itself_has_auroc_one_half(run: Path) -> None:
    (found,) = detect_ood(run, {"near": ["digits"]})
    assert found.split == "digits (near)"
    rows = {name.split(" · ")[0] for name in found.rows}
    assert rows == {"member 0", "member 1", ALL_MEMBERS}
    for name, value in found.rows.items():
        if name.endswith("auroc"):
            assert value.value == 0.5, name
    assert "positive" in found.definition


def test_ood_scores_are_computed_from_the_logits(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = dataset.get("digits")()
    other = (1 - data.test.x).flip(0)[:60] if data.test.x.is_floating_point() else (255 - data.test.x).flip(0)[:60]

    class Upside(Source):
        def __len__(self) -> int:
            return 60

        def fetch(self, ids: torch.Tensor, *, seed: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            return other[ids], torch.zeros(len(ids), dtype=torch.int64)

        def fingerprint(self) -> str:
            return "upside"

    def strange(name: str, of: str, _: object = None) -> EvalSplit:
        return EvalSplit(name, of, lambda *_: (Upside(), torch.arange(60)), labeled=False)

    monkeypatch.setattr(import_module("plateaux.evaluation.splits"), "ood_split", strange)
    (found,) = detect_ood(run, {"far": ["upside"]})
    ensemble = load_predictor(run).ensemble
    inside, outside = ensemble.logits(data.test.x), ensemble.logits(other)
    truth = np.concatenate([np.zeros(inside.shape[1]), np.ones(60)])
    for score, alarm in OOD_SCORES.items():
        both = torch.cat([alarm(inside), alarm(outside)]).float().numpy()
        value = found.rows[row_name(ALL_MEMBERS, score, "auroc")]
        assert value.value == pytest.approx(roc_auc_score(truth, both), abs=1e-3), score
        assert value.stderr is not None


def test_a_suite_of_several_sets_has_a_mean(run: Path) -> None:
    found = detect_ood(run, {"near": ["digits", "digits"]})
    assert [each.split for each in found] == ["digits (near)", "digits (near)", "mean of near (digits, digits)"]
    assert found[-1].rows[row_name(ALL_MEMBERS, "energy", "auroc")].value == 0.5


def test_inputs_other_than_images_are_rejected(run: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be resized to \(1, 8, 8\); only images can"):
        detect_ood(run, {"far": ["blobs"]})


def test_a_missing_data_set_is_an_error_or_is_skipped(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    monkeypatch.setenv("PLATEAUX_DATA", str(tmp_path))
    with pytest.raises(DataError, match="mnist"):
        detect_ood(run, {"far": ["mnist"]})
    log_lines.clear()
    assert detect_ood(run, {"far": ["mnist"]}, skip_missing=True).results == ()
    assert log_lines[-1].startswith("mnist is skipped: ")


def test_images_are_converted_to_the_size_and_channels_of_the_run() -> None:
    source = ood_split("digits", "near").open(Recipe.from_dict(RECIPE), dataset.get("digits")())[0]
    assert source.fetch(torch.arange(3))[0].shape == (3, 1, 8, 8)
    inner = dataset.get("digits")().test
    larger = ResizedSource(inner, (3, 32, 32)).fetch(torch.arange(4))[0]
    assert larger.shape == (4, 3, 32, 32)
    assert torch.equal(larger[:, 0], larger[:, 2])
    grey = ResizedSource(ResizedSource(inner, (3, 8, 8)), (1, 8, 8)).fetch(torch.arange(4))[0]
    assert torch.allclose(grey.float(), inner.fetch(torch.arange(4))[0].float(), atol=1)
    assert ResizedSource(inner, (3, 32, 32)).fingerprint() != ResizedSource(inner, (3, 8, 8)).fingerprint()


def test_suites_are_parsed_from_names() -> None:
    assert parse_ood_suites(["near=a", "far=c", "near=b"], "digits") == ({"near": ["a", "b"], "far": ["c"]}, False)
    named, by_name = parse_ood_suites(["near", "far"], "cifar10")
    assert (named["near"], by_name) == (["cifar100", "tin"], True)
    assert named["far"] == ["mnist", "svhn", "texture", "places365"]
    with pytest.raises(RecipeError, match="near=cifar100,tin far=mnist"):
        parse_ood_suites(["near"], "digits")


def test_a_resize_is_reported_in_the_table_with_both_sample_counts(run: Path, log_lines: list[str]) -> None:
    log_lines.clear()
    same = detect_ood(run, {"near": ["digits"]})
    assert "digits, digits (near) (599 in, 599 out of distribution): ood" in _title(same)
    assert not any("resized" in line for line in log_lines)

    @dataset
    def wide_digits() -> DataSplits:
        """Digits of another size."""
        data = dataset.get("digits")()
        images = ResizedSource(data.test, (3, 12, 12)).fetch(torch.arange(50))[0]
        samples = images, torch.zeros(50, dtype=torch.int64)
        return from_tensors(samples, samples, classes=10)

    for _ in range(2):  # with forward passes, and from the cache
        log_lines.clear()
        found = detect_ood(run, {"far": ["wide_digits"]})
        title = "digits, wide_digits (far) (599 in, 50 out of distribution, resized from 3x12x12 to 1x8x8): ood"
        assert title in _title(found)
        assert any("wide_digits: images were resized from 3x12x12 to 1x8x8" in line for line in log_lines)
    log_lines.clear()
    predict(run, split="wide_digits")
    assert any(line.startswith("wide_digits: images were resized") for line in log_lines)


def _title(found: Evaluation) -> str:
    return " ".join(table.title for table in result_tables(found.results))


def test_metrics_without_labels_are_computed_on_the_other_samples(run: Path) -> None:
    unique, scores = detect_ood(run, {"near": ["digits"]}, metrics=["unique"])
    assert (unique.metric, unique.split, scores.metric) == ("unique", "digits (near)", "ood")
    first, second = load_predictor(run).ensemble.logits(dataset.get("digits")().test.x).argmax(-1)
    assert unique.rows[ALL_MEMBERS].value == pytest.approx(float((1 + (first != second).float()).mean()))
    with pytest.raises(RecipeError, match="cannot be computed without labels"):
        detect_ood(run, {"near": ["digits"]}, metrics=["accuracy"])


@pytest.fixture
def cifar_run(tmp_path: Path) -> Path:
    """A run on generated files of CIFAR-10, with all published corruptions next to them."""
    write_data("cifar10", tmp_path / "data")
    data = {"name": "cifar10", "root": str(tmp_path / "data"), "batch_size": 8}
    train(Recipe.from_dict({**RECIPE, "data": data, "model": {"name": "cnn", "channels": [4]}}), tmp_path / "run")
    return tmp_path / "run"


def test_corruptions_of_the_test_samples_are_ood_sets(cifar_run: Path) -> None:
    found = detect_ood(cifar_run, {"C-5": ["corrupted:all:5"]})
    assert len(found) == 15 + 1
    assert found[0].split == "corrupted:gaussian_noise:5 (C-5)"
    assert found[0].data["outside"]["source"] == "published files"
    assert found[-1].split == "mean of C-5 (15 sets)"
    with pytest.raises(RunError, match="There is no corruption called 'fogg'"):
        detect_ood(cifar_run, {"C-5": ["corrupted:fogg:5"]})
    auroc = row_name(ALL_MEMBERS, "energy", "auroc")
    assert found[-1].rows[auroc].value == pytest.approx(np.mean([each.rows[auroc].value for each in found[:-1]]))


def test_only_missing_corruptions_are_skipped(cifar_run: Path, log_lines: list[str]) -> None:
    folder = cifar_run.parent / "data" / "CIFAR-10-C"
    for kind in ("gaussian_noise", "fog"):  # the first of all, and one between others
        (folder / f"{kind}.npy").write_bytes(b"")
    suites = {"C-5": ["corrupted:all:5"], "C-3": ["corrupted:fog:3", "corrupted:snow:3"]}
    with pytest.raises(DataError, match=r"gaussian_noise\.npy cannot be read"):
        detect_ood(cifar_run, suites)
    log_lines.clear()
    found = detect_ood(cifar_run, suites, skip_missing=True)
    kept = [f"corrupted:{kind}:5 (C-5)" for kind in CORRUPTIONS if kind not in ("gaussian_noise", "fog")]
    assert [each.split for each in found] == [*kept, "mean of C-5 (13 sets)", "corrupted:snow:3 (C-3)"]
    assert found[13].data["sets"] == kept
    skipped = [line.split(" is skipped: ")[0] for line in log_lines if " is skipped: " in line]
    assert skipped == ["corrupted:gaussian_noise:5", "corrupted:fog:5", "corrupted:fog:3"]
    with pytest.raises(RunError, match="'corrupted:all:9': the severity must be"):
        detect_ood(cifar_run, {"C": ["corrupted:all:9"]}, skip_missing=True)
