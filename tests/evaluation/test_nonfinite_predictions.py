"""NaN is not a prediction: evaluations refuse it and name the members, the samples, and the cause."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plateaux
from plateaux.config.builders.data import build_data
from plateaux.config.recipe import Recipe
from plateaux.core.errors import DataError, RunError
from plateaux.core.outputs import logits
from plateaux.core.types import Batch
from plateaux.data.sources import DataSplits, InMemorySource, from_dataset
from plateaux.distributed.executors.local import SINGLE_PROCESS
from plateaux.errors import PlateauxError
from plateaux.evaluation.finite import require_finite
from plateaux.evaluation.metric_loop import BatchOutputs
from plateaux.storage.member_writer import write_member
from plateaux.storage.run import Run

RECIPE = Recipe.parse("""
members = 2
[data]
name = "blobs"
samples = 60
test_samples = 40
batch_size = 20
validation_split = 20
[model]
name = "mlp"
hidden_sizes = [6]
[train]
epochs = 1
[executor]
threads = 1
""")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return plateaux.train(RECIPE, tmp_path / "run")


def damage_weights(run: Run, number: int) -> None:
    weights = {name: values.clone() for name, values in run.weights(number).items()}
    next(iter(weights.values())).view(-1)[0] = torch.nan
    with write_member(run, number) as writer:
        writer.commit(replace(writer.progress, weights=writer.put_weights(weights, epoch=1)))


def with_nan_inputs() -> DataSplits:
    data = build_data(RECIPE)
    x, y = data.test.fetch(torch.arange(40))
    assert isinstance(x, Tensor)
    return replace(data, test=InMemorySource(torch.where(torch.arange(40)[:, None] % 2 == 0, torch.nan, x), y))


EVALUATIONS = {
    "evaluate": lambda run: plateaux.evaluate(run),
    "predict": lambda run: plateaux.predict(run, split="test"),
    "detect_ood": lambda run: plateaux.detect_ood(run, {"far": ["spirals"]}),
    "calibrate": lambda run: plateaux.calibrate(run, split="test"),
    "soup": lambda run: plateaux.soup(run, Path(str(run)).parent / "soup", max_barrier=1e9),
}


@pytest.mark.parametrize("name", EVALUATIONS)
def test_a_member_with_nan_weights_is_refused_by_name(run: Run, name: str) -> None:
    damage_weights(run, 1)
    message = "weights of member 1 .*contain NaN" if name == "soup" else "Member 1 of 2 .*The weights of 1 contain NaN"
    with pytest.raises(RunError, match=message):
        EVALUATIONS[name](run)
    assert not list(run.store.names("predictions"))
    assert not list(run.store.names("metrics"))
    if name == "evaluate":
        assert len(plateaux.evaluate(run, members=[0])["accuracy"].members) == 1


@pytest.mark.parametrize("name", ["evaluate", "predict", "detect_ood", "calibrate"])
def test_nan_inputs_are_refused_with_their_number(tmp_path: Path, name: str) -> None:
    run = plateaux.train(RECIPE, tmp_path / "run", data=with_nan_inputs())
    with pytest.raises(
        DataError,
        match=r"Members 0, 1 of 2 predicted NaN or infinity for 20 of 40 samples of test \(samples 0, 2, 4, 6, 8, "
        r"\.\.\.\).*The inputs of 20 of these samples contain NaN",
    ):
        EVALUATIONS[name](run)
    assert not list(run.store.names("metrics"))


def test_cached_logits_with_nan_are_refused(run: Run) -> None:
    plateaux.evaluate(run)
    (name,) = [name for name in run.store.names("predictions") if name.endswith("-logits.safetensors")][:1]
    cached = run.store.get_tensors(name)["logits"].clone()
    cached[3] = torch.nan
    run.store.put_tensors(name, {"logits": cached})
    with pytest.raises(RunError, match=r"for 1 of 40 samples of test \(samples 3\).*These are cached logits: delete"):
        plateaux.evaluate(run)
    assert plateaux.evaluate(run, cache_logits="off")["accuracy"].ensemble.value > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (5,)}, r"inputs of shape \[5\] and 3 classes\. Expected: \[2\] and 3 classes"),
        ({"classes": 4}, r"inputs of shape \[2\] and 4 classes\. Expected: \[2\] and 3 classes"),
        ({"test": InMemorySource(torch.zeros(9, 7), torch.arange(9) % 3)}, r"A test input .* \[7\]\. Expected: \[2\]"),
        ({"test": InMemorySource(torch.zeros(9, 2), torch.arange(9) - 1)}, "labels range from -1 to 7"),
    ],
)
def test_data_of_another_run_are_refused(run: Run, change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        plateaux.evaluate(plateaux.open_run(run, data=replace(build_data(RECIPE), **change)))


def outputs(values: Tensor) -> list[BatchOutputs]:
    ids = torch.arange(values.shape[1])
    return [BatchOutputs({logits: values}, Batch(ids, ids, ids), 0, len(ids))]


def test_a_logit_of_minus_infinity_for_an_excluded_class_is_accepted() -> None:
    values = torch.zeros(2, 3, 4)
    values[..., 0] = -torch.inf
    assert len(list(require_finite(iter(outputs(values)), SINGLE_PROCESS, [0, 5], "test", str))) == 1
    values[1, 2] = -torch.inf
    with pytest.raises(RunError, match=r"Member 5 of 2 predicted NaN or infinity for 1 of 3 .*\[5\]"):
        list(require_finite(iter(outputs(values)), SINGLE_PROCESS, [0, 5], "test", str))


class OneNaN:
    """Samples of which one, that no fixed sample contains, has a NaN input."""

    def __init__(self, n: int, bad: int) -> None:
        self.n, self.bad = n, bad

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        x = torch.tensor([float(i % 3), 1.0])
        return (x * torch.nan if i == self.bad else x), i % 3


@pytest.mark.process
@pytest.mark.parametrize("processes", [1, 2])
def test_a_nan_input_in_training_is_reported_once_as_an_input_error(tmp_path: Path, processes: int) -> None:
    from plateaux.data.samples import sample_ids

    bad = next(i for i in range(100) if i not in sample_ids(100, 32))
    data = from_dataset(OneNaN(100, bad), OneNaN(10, -1), classes=3, shape=(2,))
    tree = {**RECIPE.to_dict(), "data": {"name": "given", "batch_size": 7}, "model": {"name": "given"}}
    recipe = Recipe.from_dict({**tree, "executor": {"processes": processes, "threads": 1}})
    with pytest.raises(
        DataError, match=rf"Training inputs contain NaN or infinity \(samples {bad}, epoch 0\)"
    ) as error:
        plateaux.train(recipe, tmp_path / "run", data=data, model=network)
    assert "optimizer.lr" not in str(error.value)
    assert str(error.value).count("NaN") == 1


def test_the_error_for_a_diverged_loss_on_finite_inputs_suggests_a_lower_learning_rate(tmp_path: Path) -> None:
    with pytest.raises(PlateauxError, match=r"Lower optimizer\.lr"):
        plateaux.train(RECIPE.replaced(optimizer={"lr": 1e9}, train={"epochs": 20}), tmp_path)


def network(shape: Any, classes: Any) -> nn.Module:
    return nn.Linear(2, 3)
