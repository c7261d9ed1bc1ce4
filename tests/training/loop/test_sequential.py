"""Sequential training: snapshots are points of one trajectory, and later A2D members see finished ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import GIVEN, distance, recipe, trained, weights
from reference import sequential as reference
from torch import Tensor, nn

import plateaux
from plateaux.config.builders.data import build_loader, build_training_data, train_val_split, uses_shared_order
from plateaux.config.builders.model import build_member
from plateaux.config.builders.training import build_method
from plateaux.config.experiment import Experiment
from plateaux.config.recipe import Recipe
from plateaux.core.errors import DivergedError, RecipeError, RunError
from plateaux.core.types import Batch
from plateaux.storage.run import Run
from plateaux.studies.trials import run_folder
from plateaux.training.cost import measured_cost
from plateaux.training.loop import sequential, trainer
from plateaux.training.planning import pending_jobs
from plateaux.training.recipe_rules import check
from plateaux.training.train import train

SGD = {"lr": 0.1, "momentum": 0.9, "decay": 1e-3}  # as the table's recipes have it
CPU = torch.device("cpu")


def batches_of(row: Recipe, number: int) -> list[Batch]:
    """Return every batch that a member is trained on."""
    data = build_training_data(row, GIVEN)
    shared = uses_shared_order(row, build_method(row, 0, GIVEN))
    loader = build_loader(row, data, number, shared=shared, device=CPU, ids=train_val_split(row, data)[0])
    return [batch for epoch in range(row.train.epochs) for batch in loader.epoch(epoch)]


def built(row: Recipe, number: int) -> nn.Module:
    return build_member(row, build_training_data(row, GIVEN), number, GIVEN).train()


def cross_entropy(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch.x), batch.y)


@pytest.mark.parametrize("net", ["mlp", "conv_bn"])
def test_snapshots_are_points_of_one_trajectory(net: str, tmp_path: Path) -> None:
    row = recipe("snapshot", net, precision="fp64")
    cycles = [batches_of(row, number) for number in range(3)]
    truth = reference.snapshots(built(row, 0), cycles, cross_entropy, **SGD)
    assert distance(trained(row, tmp_path / "run"), truth) <= 1e-12


def test_the_learning_rate_restarts_in_every_cycle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    real_step = trainer.step

    def recording_step(executor: Any, states: Any, *args: Any, **options: Any) -> Any:
        rates.append(states[0].optimizer.param_groups[0]["lr"])
        return real_step(executor, states, *args, **options)

    monkeypatch.setattr(trainer, "step", recording_step)
    train(recipe("snapshot", train={"epochs": 3}), tmp_path / "run", **GIVEN.keywords())
    assert rates == pytest.approx([reference.rate(t, 9, 0.1) for t in range(1, 28)])


def test_one_snapshot_is_a_deep_ensemble_of_one(tmp_path: Path) -> None:
    one, alone = (
        trained(recipe(name, "conv_bn", members=1), tmp_path / name) for name in ("snapshot", "deep_ensemble")
    )
    assert distance(one, alone) == 0


def test_snapshots_can_use_sam(tmp_path: Path) -> None:
    with_sam = trained(recipe("snapshot", method={"update": "sam", "rho": 0.1}), tmp_path / "with_sam")
    assert distance(with_sam[:1], trained(recipe("sam", members=1), tmp_path / "sam")) == 0
    assert distance(with_sam, trained(recipe("snapshot"), tmp_path / "plain")) > 1e-4


def test_snapshots_can_be_added_if_the_last_checkpoint_was_kept(tmp_path: Path) -> None:
    options = {"run": {"keep_checkpoints": "last"}}
    train(recipe("snapshot", members=2, **options), tmp_path / "run", **GIVEN.keywords())
    longer = weights(train(recipe("snapshot", **options), tmp_path / "run", **GIVEN.keywords()))
    assert distance(longer, trained(recipe("snapshot"), tmp_path / "full")) == 0
    with pytest.raises(RunError, match=r"final checkpoint of member 2, .* train with run\.keep_checkpoints = \"last\""):
        train(recipe("snapshot", members=4), tmp_path / "full", **GIVEN.keywords())


def test_averaging_weights_does_not_change_the_trajectory(tmp_path: Path) -> None:
    averaged = recipe("snapshot", train={"swa_start": 6})  # the last step of each cycle
    assert distance(trained(averaged, tmp_path / "averaged"), trained(recipe("snapshot"), tmp_path / "plain")) == 0


def test_the_loss_scaler_continues_in_the_next_member(tmp_path: Path) -> None:
    run = train(
        recipe("snapshot", precision="fp16", run={"keep_checkpoints": "last"}), tmp_path / "run", **GIVEN.keywords()
    )
    steps_since_overflow = [
        run.store.get_state(run.progress(number).checkpoints[-1][2])["scaler"]["steps_since_overflow"]
        for number in range(3)
    ]
    assert steps_since_overflow == sorted(steps_since_overflow)
    assert steps_since_overflow[2] > 6  # no cycle has more steps


def test_only_the_next_member_is_planned_and_none_after_a_failed_one(tmp_path: Path) -> None:
    row = recipe("snapshot", optimizer={"lr": [0.1, 1e30, 0.1]}, run={"log_every": 1})
    with pytest.raises(DivergedError, match="member 1"):
        train(row, tmp_path / "run", **GIVEN.keywords())
    run = Run.open(tmp_path / "run")
    assert [progress.finished for progress in run.all_progress()] == [True, False, False]
    assert [job.members for job in pending_jobs(plateaux.Run.open(run, GIVEN))] == [(1,)]
    assert pending_jobs(plateaux.Run.open(run, GIVEN), without={1}) == []


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"name": ["mlp", "mlp", "cases:bent"]}}, "the same model"),
        ({"model": {"sparsity": 0.5}}, "leave out model.sparsity"),
        (
            {"train": {"early_stopping_patience": 2}, "data": {"validation_split": 3}},
            "leave out train.early_stopping_patience",
        ),
    ],
)
def test_recipes_that_do_not_fit_snapshots_are_rejected(sections: dict[str, Any], message: str) -> None:
    row = recipe("snapshot", **sections)
    if "name" in sections.get("model", {}):
        row = Recipe.from_dict({**row.to_dict(), "model": sections["model"]})
    with pytest.raises(RecipeError, match=message):
        check(Experiment(row, GIVEN))


def test_snapshots_without_a_schedule_give_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"add \[\[lr_scheduler\]\]"):
        check(Experiment(recipe("snapshot", lr_scheduler=()), GIVEN))


def test_sequential_members_are_shared_by_studies_and_have_their_own_cost(tmp_path: Path) -> None:
    for name in ("snapshot", "a2d, sequential"):
        assert run_folder(recipe(name, members=2), GIVEN) == run_folder(recipe(name, members=3), GIVEN)
    run = train(recipe("snapshot", members=2), tmp_path / "run", **GIVEN.keywords())
    assert measured_cost(plateaux.Run.open(run, GIVEN), 1).seconds == run.progress(1).seconds > 0


def agree_to_disagree(module: nn.Module, batch: Batch, earlier: Any) -> Tensor:
    """Cross entropy plus the mean over earlier members of -log(p (1 - q) + q (1 - p)) at their most likely class."""
    loss = cross_entropy(module, batch)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    other = batch.extra["unlabeled"]
    p = torch.cat([module(batch.x), torch.func.functional_call(module, buffers, (other,))]).softmax(-1)
    for one in earlier:
        with torch.no_grad():
            q, top_class = torch.cat([one(batch.x), one(other)]).softmax(-1).max(-1)
        own = p.gather(1, top_class[:, None])[:, 0]
        loss = loss - (own * (1 - q) + q * (1 - own) + 1e-7).log().mean() / len(earlier)
    return loss


def test_sequential_members_are_trained_against_finished_ones(tmp_path: Path) -> None:
    row = recipe("a2d, sequential", precision="fp64")
    modules = [built(row, number) for number in range(3)]
    truth = reference.in_turn(modules, batches_of(row, 0), agree_to_disagree, **SGD)
    assert distance(trained(row, tmp_path / "run"), truth) <= 1e-12


def test_the_logged_loss_belongs_to_the_member_in_training(tmp_path: Path) -> None:
    row = recipe("a2d, sequential", precision="fp64", members=2, run={"log_every": 1})
    run = train(row, tmp_path / "run", **GIVEN.keywords())
    first = built(row, 0)
    first.load_state_dict(run.weights(0))
    truth = agree_to_disagree(built(row, 1), batches_of(row, 1)[0], [first.eval()])
    assert run.log(1)[0]["loss"] == pytest.approx(float(truth.detach()))


def test_finished_members_run_in_evaluation_mode_and_do_not_change(tmp_path: Path) -> None:
    row = recipe("a2d, sequential", "conv_bn", members=2, precision="fp64")
    run = train(row, tmp_path / "run", **GIVEN.keywords())
    first = built(row, 0)
    first.load_state_dict(run.weights(0))
    before = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    batch = batches_of(row, 0)[0]
    output = build_method(row, 0, GIVEN).objective.output
    (outputs,) = sequential.frozen_outputs([first], output, row, CPU)(batch)
    assert not outputs.requires_grad
    assert torch.equal(outputs, torch.cat([first(batch.x), first(batch.extra["unlabeled"])]))
    assert not first.training
    assert distance([dict(first.state_dict())], [before]) == 0


def test_sequential_members_may_have_their_own_order_and_options(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "data": {"shuffle": "per_member", "bootstrap": 1.0},
        "method": {"diversity_weight": [1.0, 0.0, 1.0]},
    }
    sequence = trained(recipe("a2d, sequential", **options), tmp_path / "run")
    alone = trained(recipe("deep_ensemble", data={"shuffle": "per_member", "bootstrap": 1.0}), tmp_path / "alone")
    assert distance(sequence[:2], alone[:2]) == 0
    assert distance(sequence[2:], alone[2:]) > 1e-4


def test_members_can_be_added_to_a_finished_sequence(tmp_path: Path) -> None:
    two = trained(recipe("a2d, sequential", members=2), tmp_path / "run")
    three = trained(recipe("a2d, sequential"), tmp_path / "run")
    assert distance(three[:2], two) == 0
    assert distance(three, trained(recipe("a2d, sequential"), tmp_path / "full")) == 0


def test_sequential_training_with_fp16_is_rejected() -> None:
    with pytest.raises(RecipeError, match="cannot be scaled"):
        check(Experiment(recipe("a2d, sequential", precision="fp16"), GIVEN))
