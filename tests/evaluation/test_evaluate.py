"""Evaluating a run: the correct samples and weights, and results stored in the run folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss

from plateaux.config.builders.data import build_data, train_val_split
from plateaux.config.components import Components
from plateaux.config.experiment import Experiment
from plateaux.config.recipe import Recipe
from plateaux.core.errors import RunError, UnknownNameError, UntrustedCodeError
from plateaux.core.progress import ProgressEvent, WorkDone
from plateaux.core.row_names import MEAN_LOGIT, MEAN_OF_MEMBERS, MEAN_PROBABILITY
from plateaux.deploy.load_predictor import load_predictor
from plateaux.evaluation.evaluate import STANDARD, evaluate
from plateaux.storage.local_store import LocalStore
from plateaux.storage.member_writer import write_member
from plateaux.storage.run import Run
from plateaux.training.train import train

CASES = Components(trust=("cases",))
TEXT = """
members = 3
[data]
name = "spirals"
samples = 90
test_samples = 300
batch_size = 16
validation_split = 30
[model]
name = "mlp"
hidden_sizes = [16]
[optimizer]
name = "SGD"
lr = 0.3
[train]
epochs = 3
[executor]
threads = 1
"""


def recipe(*changes: str) -> Recipe:
    return Recipe.parse(TEXT, changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    train(recipe(), out)
    return out


def truth(run: Path, on: str) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities `[M, N, C]` and labels, by hand."""
    data = build_data(recipe())
    train_ids, valid_ids = train_val_split(recipe(), data)
    source, ids = {
        "test": (data.test, torch.arange(300)),
        "train": (data.train, train_ids),
        "validation": (data.train, valid_ids),
    }[on]
    x, y = source.fetch(ids)
    return load_predictor(run).ensemble.logits(x).softmax(-1).numpy(), y.numpy()


@pytest.mark.parametrize("on", ["test", "train", "validation"])
def test_metrics_of_the_stored_weights_equal_scikit_learn(run: Path, on: str) -> None:
    found = {each.metric: each for each in evaluate(run, split=on)}
    p, y = truth(run, on)
    assert list(found) == list(STANDARD)
    rows = {f"member {n}": p[n] for n in range(3)} | {MEAN_PROBABILITY: p.mean(0)}
    for name, row in rows.items():
        assert found["accuracy"].rows[name].value == pytest.approx(accuracy_score(y, row.argmax(-1)))
        assert found["nll"].rows[name].value == pytest.approx(log_loss(y, row), rel=1e-5)
    assert found["accuracy"].data["samples"] == len(y)


def test_rows_are_ordered_and_include_the_mean_of_members(run: Path) -> None:
    (found,) = evaluate(run, metrics=["nll"])
    names = [f"member {n}" for n in range(3)]
    assert list(found.rows) == [*names, MEAN_OF_MEMBERS, MEAN_PROBABILITY, MEAN_LOGIT]
    numbers = [found.rows[name].value for name in names]
    assert found.rows[MEAN_OF_MEMBERS].value == pytest.approx(np.mean(numbers))
    assert found.rows[MEAN_OF_MEMBERS].stderr == pytest.approx(np.std(numbers, ddof=1) / 3**0.5)
    assert found.rows[MEAN_PROBABILITY].value <= np.mean(numbers)  # Jensen
    assert found.rows[MEAN_LOGIT].value <= np.mean(numbers)


def test_every_result_is_stored_with_its_metadata(run: Path) -> None:
    (found,) = evaluate(run, metrics=["brier"], split="validation")
    store = LocalStore(run)
    kept = [store.get_json(name) for name in store.names("metrics") if name.startswith("metrics/brier-")]
    assert found.to_dict() in kept
    assert found.to_dict()["weights"] == {f"member {n}": "epoch 3, the last" for n in range(3)}
    assert (found.split, found.higher_is_better) == ("validation", False)
    before = set((run / "metrics").iterdir())
    evaluate(run, metrics=["brier"], split="validation")
    assert set((run / "metrics").iterdir()) == before  # the same question, the same object
    evaluate(run, metrics=["brier"], split="train")
    asked = [json.loads(p.read_text())["split"] for p in (run / "metrics").glob("brier-*.json")]
    assert len(asked) == len(set(asked)) >= 2


def test_evaluation_writes_only_metrics_predictions_and_warnings(run: Path) -> None:
    def rest() -> dict[str, bytes]:
        files = (
            p for p in run.rglob("*") if p.is_file() and not {"metrics", "predictions", "warnings.json"} & set(p.parts)
        )
        return {str(p): p.read_bytes() for p in files}

    before = rest()
    evaluate(run)
    assert rest() == before


def test_a_missing_split_is_rejected(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="There is no split called 'tset'; allowed: test, train, validation"):
        evaluate(run, split="tset")
    train(recipe("data.validation_split=0", "train.epochs=1"), tmp_path)
    with pytest.raises(
        RunError,
        match=r"no validation samples, .* to calibrate, a part of them: --split test --fraction 0.5$",
    ):
        evaluate(tmp_path, split="validation")


def test_unknown_and_untrusted_metrics_are_rejected(run: Path) -> None:
    with pytest.raises(UnknownNameError, match="There is no metric called 'acuracy'; did you mean 'accuracy'"):
        evaluate(run, metrics=["acuracy"])
    with pytest.raises(UntrustedCodeError):
        evaluate(run, metrics=["cases:apart"])


def test_progress_is_reported(run: Path) -> None:
    events: list[ProgressEvent] = []
    evaluate(run, metrics=["nll"], cache_logits="off", progress=events.append)
    assert events == [WorkDone(256, 300), WorkDone(300, 300)]


def test_a_member_without_weights_is_an_error(tmp_path: Path) -> None:
    train(recipe("members=1"), tmp_path)
    Run.begin(tmp_path, Experiment(recipe("members=2")), Run.open(tmp_path).info)
    with pytest.raises(RunError, match=r"Member 1 of .* has no weights yet \(0 of 3 epochs done\)"):
        evaluate(tmp_path)
    with pytest.raises(RunError, match="has no weights yet"):
        load_predictor(tmp_path)


def test_weights_of_another_model_are_refused(run: Path, tmp_path: Path) -> None:
    train(recipe("members=1", "train.epochs=1"), tmp_path)
    opened = Run.open(tmp_path)
    with write_member(opened, 0) as writer:
        writer.commit(replace(writer.progress, weights=writer.put_weights({"other": torch.ones(1)}, epoch=1)))
    with pytest.raises(
        RunError,
        match=r"The weights of member 0 do not match the model 'mlp': missing \['1\.bias'.*unexpected \['other'\]",
    ):
        load_predictor(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        ["model.hidden_sizes=[16, 16]", "model.sparsity=0.5"],
        ["model.freeze=['1']"],
        ["train.precision=bf16"],
        ["train.precision=fp64"],
        ["train.select=best:nll"],
        ["model.hidden_sizes=[[4], [8, 8], [16]]"],
    ],
    ids=str,
)
def test_loaded_members_have_the_trained_weights(tmp_path: Path, changes: list[str]) -> None:
    out = train(recipe(*changes), tmp_path)
    loaded = load_predictor(tmp_path).ensemble
    for number, member in enumerate(loaded.members):
        state = member.state_dict()
        for name, tensor in {**out.weights(number), **out.shared()}.items():
            assert torch.equal(state[name], tensor), name
    (found,) = evaluate(tmp_path, split="validation", metrics=["nll"])
    for number in range(3):
        logged = [line["validation nll"] for line in out.log(number) if "validation nll" in line]
        wanted = min(logged) if changes == ["train.select=best:nll"] else logged[-1]
        assert found.rows[f"member {number}"].value == pytest.approx(wanted, rel=1e-6)


def test_loading_needs_no_data(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 255, (20, 3, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "d.npz", x_train=x, y_train=np.arange(20) % 2, x_test=x, y_test=np.arange(20) % 2)
    what = Recipe.from_dict(
        {
            "members": 2,
            "data": {"name": "arrays", "path": "d.npz", "root": str(tmp_path), "mean": [0.5] * 3, "std": [0.2] * 3},
            "model": {"name": "cnn", "channels": [4]},
            "train": {"epochs": 1},
        }
    )
    train(what, tmp_path / "run")
    (found,) = evaluate(tmp_path / "run", metrics=["accuracy"])
    (tmp_path / "d.npz").unlink()
    guess = load_predictor(tmp_path / "run").ensemble.predict(torch.from_numpy(x)).argmax(-1)
    share = float((guess == torch.arange(20) % 2).float().mean())
    assert found.rows[MEAN_PROBABILITY].value == pytest.approx(share)
