"""Averaged weights: the mean is exact, resuming changes no bit, and training itself does not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import GIVEN, distance, make_state, recipe, stop_after, trained, weights
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn

import plateaux
from plateaux.config.builders.data import bn_update_batches, build_data
from plateaux.config.builders.model import build_member
from plateaux.config.recipe import Recipe
from plateaux.core.errors import Interrupted
from plateaux.core.method import Method, Objective
from plateaux.core.types import TensorTree
from plateaux.evaluation.evaluate import evaluate
from plateaux.optim.losses import cross_entropy
from plateaux.optim.sam import plain_gradient
from plateaux.optim.weight_averaging import AveragedWeights
from plateaux.storage.run import Run
from plateaux.training.loop import trainer
from plateaux.training.loop.checkpointer import averaged_params
from plateaux.training.train import train

CPU = torch.device("cpu")


def record_weights(row: Recipe, out: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Run, list[TensorTree]]:
    """Train a recipe and return the weights of the first member after every step."""
    history: list[TensorTree] = []
    real_step = trainer.step

    def recording_step(executor: Any, states: Any, *args: Any, **options: Any) -> Any:
        stats = real_step(executor, states, *args, **options)
        history.append({name: tensor.detach().clone() for name, tensor in states[0].module.state_dict().items()})
        return stats

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "step", recording_step)
        return train(row, out, **GIVEN.keywords()), history


def mean(trees: list[TensorTree], name: str) -> Tensor:
    return torch.stack([tree[name].double() for tree in trees]).mean(0)


def test_the_running_average_is_the_mean_and_excludes_integers() -> None:
    generator = torch.Generator().manual_seed(0)
    trees = [{"w": torch.randn(5, generator=generator), "n": torch.tensor(number)} for number in range(50)]
    average = AveragedWeights(start=11)
    for number, tree in enumerate(trees, 1):
        average.add(tree)
        assert average.count == max(0, number - 10)
    assert set(average.tree) == {"w"}
    torch.testing.assert_close(average.tree["w"].double(), mean(trees[10:], "w"), rtol=0, atol=1e-6)


def test_the_mean_of_equal_weights_is_those_weights_exactly() -> None:
    w = {"w": torch.tensor([0.1, 1e-8, 3e7])}
    average = AveragedWeights(start=1)
    for _ in range(1000):
        average.add(w)
    assert torch.equal(average.tree["w"], w["w"])


def test_a_members_weights_are_the_mean_over_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, history = record_weights(recipe("sam", members=1, train={"swa_start": 3}), tmp_path / "run", monkeypatch)
    assert len(history) == 6
    for name, tensor in run.weights(0).items():
        torch.testing.assert_close(tensor.double(), mean(history[2:], name), rtol=0, atol=1e-6)
    assert run.progress(0).weights_source == "epoch 2, the mean of the last 4 steps, the last"


def test_batchnorm_statistics_are_recomputed_like_in_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = recipe("sam", "conv_bn", members=1, train={"swa_start": 2})
    run, history = record_weights(row, tmp_path / "run", monkeypatch)
    data = build_data(row, GIVEN)
    module: nn.Module = build_member(row, data, 0, GIVEN)
    averaged = AveragedModel(module, use_buffers=False)
    for tree in history[1:]:
        module.load_state_dict(tree)
        averaged.update_parameters(module)
    update_bn(bn_update_batches(row, data, CPU), averaged)
    weights_in_file, truth = run.weights(0), averaged.module.state_dict()
    assert any("running_var" in name for name in weights_in_file)
    for name, tensor in weights_in_file.items():
        torch.testing.assert_close(tensor, truth[name], rtol=1e-5, atol=1e-6)


def test_buffers_other_than_batchnorm_statistics_are_averaged() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("center", torch.zeros(2))
    state = make_state(module, Method(Objective(cross_entropy()), plain_gradient))
    state.average = AveragedWeights(start=1)
    for value in (1.0, 2.0, 6.0):
        module.center.fill_(value)
        state.apply_gradient({name: torch.zeros_like(p) for name, p in module.named_parameters()})
    with averaged_params(state, lambda: []):
        assert module.center.tolist() == [3.0, 3.0]
    assert module.center.tolist() == [6.0, 6.0]


@pytest.mark.parametrize("net", ["mlp", "conv_bn"])
def test_an_average_that_never_starts_changes_nothing(net: str, tmp_path: Path) -> None:
    late = trained(recipe("sam", net, train={"swa_start": 7}), tmp_path / "late")
    assert distance(late, trained(recipe("sam", net), tmp_path / "plain")) == 0
    assert Run.open(tmp_path / "late").progress(0).weights_source == "epoch 2, the last"


def test_an_average_of_the_last_step_is_the_last_step(tmp_path: Path) -> None:
    last = trained(recipe("sam", train={"swa_start": 6}), tmp_path / "last")
    assert distance(last, trained(recipe("sam"), tmp_path / "plain")) == 0


def test_validating_averaged_weights_does_not_change_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"members": 1, "data": {"validation_split": 5}}
    _, plain = record_weights(recipe("sam", "conv_bn", **options), tmp_path / "plain", monkeypatch)
    row = recipe("sam", "conv_bn", train={"swa_start": 1, "select": "best:nll"}, **options)
    _, averaged = record_weights(row, tmp_path / "mean", monkeypatch)
    assert distance(averaged, plain) == 0


def test_the_best_averaged_weights_on_validation_samples_are_selected(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": {"validation_split": 20}, "samples": 60, "batch": 10}
    row = recipe("sam", "conv_bn", train={"swa_start": 2, "select": "best:nll", "epochs": 4}, **options)
    run = train(row, tmp_path / "run", **GIVEN.keywords())
    (result,) = evaluate(plateaux.Run.open(tmp_path / "run", GIVEN), split="validation", metrics=["nll"])
    for number in range(3):
        progress = run.progress(number)
        logged = [line["validation nll"] for line in run.log(number) if "validation nll" in line]
        assert progress.best == min(logged)
        steps = 4 * progress.best_epoch - 1  # from the second on
        source = f"epoch {progress.best_epoch}, the mean of the last {steps} steps, the best nll on validation samples"
        assert progress.weights_source == source
        assert result.rows[f"member {number}"].value == pytest.approx(progress.best, rel=1e-5)


def train_until_stopped(row: Recipe, out: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stop_after(steps, patch)
        with pytest.raises(Interrupted):
            train(row, out, **GIVEN.keywords())


@pytest.mark.parametrize(
    ("method", "net", "mode", "steps"),  # before and after the average starts, and in the second epoch
    [("sam", "mlp", "loop", 1), ("sam", "conv_bn", "loop", 5), ("sed", "conv_bn", "offload", 4)],
)
def test_an_interruption_at_any_step_changes_no_bit(
    method: str, net: str, mode: str, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_part = {"swa_start": 2, "select": "best:nll"}
    plain = recipe(method, net, data={"validation_split": 3}, train=train_part)
    full = trained(plain, tmp_path / "full")
    train_until_stopped(plain.replaced(executor={"mode": mode}), tmp_path / "run", steps, monkeypatch)
    assert distance(weights(train(plain, tmp_path / "run", **GIVEN.keywords())), full) == 0


def test_the_tests_detect_an_average_that_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = recipe("sam", train={"swa_start": 1})
    full = trained(row, tmp_path / "full")
    train_until_stopped(row, tmp_path / "run", 4, monkeypatch)
    monkeypatch.setattr(AveragedWeights, "load_state_dict", lambda self, state, device: None)
    assert distance(weights(train(row, tmp_path / "run", **GIVEN.keywords())), full) > 1e-6


def test_adding_a_member_does_not_change_the_average_of_others(tmp_path: Path) -> None:
    three, two = (recipe("sam", "conv_bn", members=m, train={"swa_start": 2}) for m in (3, 2))
    assert distance(trained(three, tmp_path / "3")[:2], trained(two, tmp_path / "2")) == 0


def test_an_inactive_member_averages_only_its_active_steps(tmp_path: Path) -> None:
    run = train(recipe("sed", train={"swa_start": 1, "epochs": 3}), tmp_path / "run", **GIVEN.keywords())
    sources = [run.progress(number).weights_source for number in range(3)]
    counts = [int(source.split("last ")[1].split()[0]) for source in sources]
    assert sum(counts) == 2 * 9  # two of three members in each of nine steps
