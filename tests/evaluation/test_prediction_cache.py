"""Cached logits: a second evaluation runs no forward pass and gives the same results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import weights_path

import plateaux
from plateaux.config.components import Components
from plateaux.config.recipe import Recipe
from plateaux.core.errors import RecipeError, RunError
from plateaux.core.member import MemberModule
from plateaux.core.metric import Metric
from plateaux.core.types import Estimate
from plateaux.data.sources import from_dataset
from plateaux.evaluation import prediction_cache
from plateaux.evaluation.evaluate import evaluate
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.splits import eval_split
from plateaux.storage.run import Run
from plateaux.training.train import train
from tests.evaluation.test_evaluate import recipe

ALL = ["all"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    train(recipe(), out)
    return out


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no network run."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a forward pass was run")

    monkeypatch.setattr(MemberModule, "__call__", never)
    monkeypatch.setattr(Evaluator, "data", property(never))


def rows(found: list[Any]) -> dict[str, Any]:
    return {each.metric: {name: (v.value, v.stderr) for name, v in each.rows.items()} for each in found}


def test_a_second_call_runs_no_forward_pass_and_reads_no_data(
    run: Path, request: pytest.FixtureRequest, log_lines: list[str]
) -> None:
    first = evaluate(run, metrics=ALL)
    assert {each.data["logits"] for each in first} == {"computed"}
    request.getfixturevalue("silent")
    log_lines.clear()
    second = evaluate(run, metrics=ALL)
    assert [line for line in log_lines if not line.endswith("]")] == [
        "test: using cached float32 logits of 300 samples"
    ]
    assert {each.data["logits"] for each in second} == {"cached, float32"}
    for name, numbers in rows(first).items():
        for row, (number, error) in numbers.items():
            again = rows(second)[name][row]
            assert again[0] == pytest.approx(number, rel=1e-6, abs=1e-7, nan_ok=True), (name, row)
            assert again[1] == (error if error is None else pytest.approx(error, rel=1e-4, abs=1e-7, nan_ok=True))


def test_a_subset_of_members_is_evaluated_from_cached_logits(run: Path, request: pytest.FixtureRequest) -> None:
    evaluate(run, metrics=ALL)
    request.getfixturevalue("silent")
    two = evaluate(run, metrics=["nll", "disagreement"], members=[0, 2])
    names = list(two[0].rows)
    assert names[:2] == ["member 0", "member 2"]
    assert list(two[1].rows) == ["members 0 and 2", "mean of pairs"]
    assert two[0].hashes.keys() == {"member 0", "member 2"}


def test_the_ensemble_of_a_subset_of_members_averages_only_these(run: Path) -> None:
    (found,) = evaluate(run, metrics=["nll"], members=[2, 1])
    evaluator = Evaluator(Run.open(run), members=[2, 1])
    x, y = evaluator.data.test.fetch(torch.arange(300))
    with torch.no_grad():
        p = torch.stack([view.module(x) for view in evaluator.modules]).double().softmax(-1).mean(0)
    truth = -p[torch.arange(300), y].log().mean()
    assert found.rows["ensemble (mean probability)"].value == pytest.approx(float(truth), rel=1e-6)


def test_cached_logits_of_other_weights_are_not_used(run: Path, tmp_path: Path, log_lines: list[str]) -> None:
    train(recipe("seed=1"), tmp_path)
    evaluate(tmp_path, metrics=["nll"])
    log_lines.clear()
    weights_path(tmp_path, 0).write_bytes(weights_path(run, 0).read_bytes())
    with pytest.raises(RunError, match="does not match its digest"):
        evaluate(tmp_path, metrics=["nll"], cache_logits="off")


def test_without_a_cache_logits_are_neither_read_nor_written(tmp_path: Path) -> None:
    train(recipe(), tmp_path)
    (first,) = evaluate(tmp_path, metrics=["nll"], cache_logits="off")
    assert not (tmp_path / "predictions").exists()
    evaluate(tmp_path, metrics=["nll"], cache_logits="float16")
    (second,) = evaluate(tmp_path, metrics=["nll"], cache_logits="off")
    assert second.data["logits"] == "computed"
    assert second.rows == first.rows


def test_logits_are_cached_in_float16_on_request(tmp_path: Path) -> None:
    train(recipe(), tmp_path)
    (fresh,) = evaluate(tmp_path, metrics=["nll"], cache_logits="float16")
    (kept,) = evaluate(tmp_path, metrics=["nll"])
    assert kept.data["logits"] == "cached, float16"
    for row, value in fresh.rows.items():
        assert kept.rows[row].value == pytest.approx(value.value, rel=1e-3)


def test_logits_above_the_size_limit_are_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    train(recipe(), tmp_path)
    evaluate(tmp_path, metrics=["nll"], cache_logits="off")
    assert not (tmp_path / "predictions").exists()
    monkeypatch.setattr(prediction_cache, "MAX_CACHE_BYTES", 100)
    log_lines.clear()
    evaluate(tmp_path, metrics=["nll"])
    assert not (tmp_path / "predictions").exists()
    assert log_lines == ["logits are not cached: they take 0 MB, the limit is 0 MB"]
    monkeypatch.setattr(
        prediction_cache, "MAX_CACHE_BYTES", 300 * 3 * (3 + 3) * 4
    )  # room for logits, not for 16 features
    evaluate(tmp_path, metrics=["nll", "cka"])
    kept = {p.name.split("-")[1] for p in (tmp_path / "predictions").rglob("*-*.safetensors")}
    assert kept == {"logits.safetensors"}


def test_features_are_cached_when_first_requested(tmp_path: Path, log_lines: list[str]) -> None:
    train(recipe(), tmp_path)
    evaluate(tmp_path, metrics=["nll"])
    log_lines.clear()
    (fresh,) = evaluate(tmp_path, metrics=["cka"])
    assert log_lines == []  # features were not cached before
    (kept,) = evaluate(tmp_path, metrics=["cka"])
    assert len(log_lines) == 1
    for row, value in fresh.rows.items():
        assert kept.rows[row].value == pytest.approx(value.value, rel=1e-5)


def test_features_of_different_widths_are_cached(tmp_path: Path) -> None:
    train(recipe("model.hidden_sizes=[[4], [8, 8], [16]]"), tmp_path)
    for _ in range(2):
        found = {each.metric: each.rows for each in evaluate(tmp_path, metrics=["cka", "nll"])}
        assert all(0 <= value.value <= 1 + 1e-9 for value in found["cka"].values())


def test_a_limit_is_cached_separately_from_all_samples(run: Path) -> None:
    (few,) = evaluate(run, metrics=["nll"], limit=100)
    (all_,) = evaluate(run, metrics=["nll"])
    assert (few.data["samples"], all_.data["samples"]) == (100, 300)
    assert few.rows["member 0"].value != all_.rows["member 0"].value


@pytest.mark.parametrize("members", [[], [0, 0], [3], [-1]])
def test_unknown_members_are_rejected(run: Path, members: list[int]) -> None:
    with pytest.raises(RecipeError, match=r"give distinct member ids from 0 to 2, such as \[0, 2\]"):
        evaluate(run, members=members)


def test_metrics_by_ensemble_size_are_means_over_all_subsets(run: Path) -> None:
    found = {each.metric: each for each in evaluate(run, metrics=["nll", "disagreement"], ensemble_sizes=True)}
    curve = found["nll by size"].rows
    assert list(curve) == ["1 member", "2 members", "3 members"]
    pairs = [evaluate(run, metrics=["nll"], members=two)[0].rows for two in ([0, 1], [0, 2], [1, 2])]
    mean = sum(each["ensemble (mean probability)"].value for each in pairs) / 3
    assert curve["2 members"].value == pytest.approx(mean)
    assert curve["1 member"].value == pytest.approx(found["nll"].rows["mean of members"].value)
    assert curve["3 members"].value == pytest.approx(found["nll"].rows["ensemble (mean probability)"].value)
    assert list(found["disagreement by size"].rows) == ["2 members", "3 members"]


def test_diversity_metrics_of_one_member_are_skipped_with_a_message(tmp_path: Path, log_lines: list[str]) -> None:
    train(recipe("members=1", "train.epochs=1"), tmp_path)
    log_lines.clear()
    found = evaluate(tmp_path, metrics=["nll", "kl"])
    assert [each.metric for each in found] == ["nll"]
    assert log_lines == ["kl is skipped: it needs at least 2 members, and there is 1"]


def test_damaged_cached_logits_are_an_error(tmp_path: Path) -> None:
    train(recipe("members=1", "train.epochs=1"), tmp_path)
    evaluate(tmp_path, metrics=["nll"])
    (file,) = (tmp_path / "predictions").rglob("*-logits.safetensors")
    file.write_bytes(b"no safetensors")
    with pytest.raises(RunError, match="logits"):
        evaluate(tmp_path, metrics=["nll"])


def test_cached_logits_can_be_read_without_plateaux(run: Path) -> None:
    from safetensors.torch import load_file

    evaluate(run, metrics=["nll"])
    folders = [p.parent for p in (run / "predictions").rglob("about.json") if "first" not in json.loads(p.read_text())]
    (folder,) = [f for f in folders if json.loads((f / "about.json").read_text())["split"] == "test"]
    cached = [load_file(p)["logits"] for p in folder.glob("*-logits.safetensors")]
    samples = load_file(folder / "samples.safetensors")
    assert {tuple(each.shape) for each in cached} == {(300, cached[0].shape[1])}
    assert samples["ids"].tolist() == list(range(300))


def test_a_network_without_features_is_evaluated_without_them(tmp_path: Path, log_lines: list[str]) -> None:
    class Doubled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * self.inner(x)

    def doubled(*, hidden_sizes: list[int]) -> torch.nn.Module:
        return Doubled()

    components = Components(model=doubled)
    train(recipe("train.epochs=1"), tmp_path, **components.keywords())
    log_lines.clear()
    names = [each.metric for each in evaluate(plateaux.Run.open(tmp_path, components), metrics=ALL)]
    assert "accuracy" in names
    assert "cka" not in names
    assert log_lines[0].startswith("cka is skipped: Features are the inputs of the last nn.Linear")
    with pytest.raises(RecipeError, match=r"is not the output of an nn\.Linear"):
        evaluate(plateaux.Run.open(tmp_path, components), metrics=["cka"])


def test_results_state_the_dtypes_of_cached_logits(tmp_path: Path) -> None:
    train(recipe(), tmp_path)
    evaluate(tmp_path, metrics=["nll"], members=[0], cache_logits="float16")
    evaluate(tmp_path, metrics=["nll"], members=[1])
    (both,) = evaluate(tmp_path, metrics=["nll"], members=[0, 1])
    assert both.data["logits"] == "cached, float16 and float32"


def test_logits_of_samples_without_a_content_hash_are_not_cached(tmp_path: Path) -> None:
    x = torch.randn(40, 2)
    sets = [torch.utils.data.TensorDataset(x + shift, torch.arange(40) % 3) for shift in (0, 0, 5)]
    first, second = (from_dataset(sets[0], test, classes=3, shape=(2,)) for test in sets[1:])
    run = train(recipe("train.epochs=1", "data.validation_split=0"), tmp_path, data=first)
    evaluate(run, metrics=["nll"])
    assert not (tmp_path / "predictions").exists()
    with pytest.raises(RunError, match="test samples have changed"):
        evaluate(plateaux.open_run(run, data=second), metrics=["nll"])


def test_data_that_changed_since_training_are_rejected(tmp_path: Path) -> None:
    def write(seed: int) -> None:
        x = np.random.default_rng(seed).normal(size=(20, 4)).astype(np.float32)
        np.savez(tmp_path / "d.npz", x_train=x, y_train=np.arange(20) % 2, x_test=x, y_test=np.arange(20) % 2)

    write(0)
    data = {"name": "arrays", "path": "d.npz", "root": str(tmp_path)}
    train(Recipe.from_dict({"data": data, "model": {"name": "mlp"}, "train": {"epochs": 1}}), tmp_path / "run")
    evaluate(tmp_path / "run", metrics=["nll"])
    write(1)
    with pytest.raises(RunError, match="The test samples have changed since this run was trained"):
        evaluate(tmp_path / "run", metrics=["nll"], cache_logits="off")


def test_a_metric_with_a_custom_output_is_evaluated_and_not_cached(run: Path) -> None:
    evaluator = Evaluator(Run.open(run))
    own = Metric(
        lambda table, batch: {"sum": table.double().sum(-1), "count": torch.tensor(len(batch))},
        lambda sums: {f"member {n}": Estimate(float(s / sums["count"])) for n, s in enumerate(sums["sum"])},
        output=lambda view, batch: view(batch.x).logsumexp(-1),
    )
    target = eval_split(evaluator.recipe, evaluator.data_info, "train")
    (found,) = evaluator.evaluate(target, {"own": own})
    assert len([name for name in found.rows if name.startswith("member ")]) == 3


def test_metrics_of_features_are_not_computed_by_ensemble_size(run: Path, log_lines: list[str]) -> None:
    log_lines.clear()
    found = {each.metric for each in evaluate(run, metrics=["reliability", "cka"], ensemble_sizes=True)}
    assert found == {"reliability", "reliability by size", "cka"}
    assert "metrics of features are not computed for other ensemble sizes" in log_lines
