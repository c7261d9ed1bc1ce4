"""Losses accept any members in any order and are deterministic; updates make equally many gradient requests."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from cases import GIVEN, JOINT, METHODS, OWN, corner, make_state, recipe, steps, trained
from laws.meshes import mesh
from torch import Tensor

from plateaux.config.builders.training import build_method
from plateaux.core.errors import RecipeError
from plateaux.core.method import GradRequest, Method, Objective, StepContext
from plateaux.core.types import Batch, TensorTree
from plateaux.distributed.executors.local import LocalExecutor
from plateaux.training.state import StepOptions
from plateaux.training.step import step


def method(name: str, number: int = 0) -> Method:
    return build_method(recipe(name), number, GIVEN)


def table(name: str, rows: int, size: int = 5, seed: int = 0) -> tuple[Tensor, Batch]:
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (size,), generator=draw)
    batch = Batch(torch.zeros(size, 2), y, torch.arange(size), seed=seed)
    unlabelled = 4 if METHODS[name].unlabelled else 0
    return torch.randn(rows, size + unlabelled, 3, generator=draw, dtype=torch.float64), batch


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("name", METHODS)
def test_a_loss_accepts_any_number_of_members(name: str, rows: int) -> None:
    losses = method(name).objective.loss(*table(name, rows))
    assert losses.shape == (rows, 5)
    assert losses.isfinite().all()


@pytest.mark.parametrize("name", [name for name, way in METHODS.items() if not way.ordered])
def test_a_loss_does_not_depend_on_member_indices(name: str) -> None:
    rows, batch = table(name, 4)
    settle, order = method(name).objective.loss, torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(settle(rows[order], batch), settle(rows, batch)[order], rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", OWN)
def test_a_loss_without_gather_is_independent_of_other_members(name: str) -> None:
    rows, batch = table(name, 4)
    settle = method(name).objective.loss
    assert torch.equal(settle(rows[1:3], batch), settle(rows, batch)[1:3])


@pytest.mark.parametrize("name", JOINT)
def test_a_loss_with_gather_depends_on_other_members(name: str) -> None:
    rows, batch = table(name, 4)
    settle = method(name).objective.loss
    assert not torch.allclose(settle(rows[1:3], batch), settle(rows, batch)[1:3])


@pytest.mark.parametrize("name", METHODS)
def test_a_loss_is_deterministic_given_logits_batch_and_seed(name: str) -> None:
    torch.manual_seed(1)
    first = method(name).objective.loss(*table(name, 3))
    torch.manual_seed(2)  # what the global generator holds must not matter
    assert torch.equal(first, method(name).objective.loss(*table(name, 3)))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.usefixtures("rng_unchanged")
def test_a_loss_does_not_use_the_global_random_generator(name: str) -> None:
    method(name).objective.loss(*table(name, 3))


@pytest.mark.parametrize("name", JOINT)
def test_every_process_of_a_mesh_computes_the_same_loss(name: str) -> None:
    first, second = mesh(2).run("laws.test_one_and_all:settled_here", name)
    assert torch.equal(first, second)


def settled_here(name: str) -> Tensor:
    """Gather rows of this process and the others', and settle them."""
    from plateaux.distributed.executors.mesh import mesh as make

    executor = make()
    rows, batch = table(name, 4)
    mine = rows[executor.local_members(4).start : executor.local_members(4).stop]
    gathered = executor.all_gather(mine)
    assert torch.equal(gathered, rows)
    return method(name).objective.loss(gathered, batch)


def asked(update: Method, size: int, seed: int) -> list[GradRequest]:
    """Return what an update asks for when every answer is drawn at random."""
    draw = torch.Generator().manual_seed(seed)
    params: TensorTree = {"weight": torch.randn(3, 2, generator=draw), "bias": torch.randn(2, generator=draw)}
    walk = update.update(params, StepContext(size, lr=0.1, peak_lr=0.1))
    asks = [next(walk)]
    try:
        while True:
            scale = 10.0 ** (len(asks) + seed)
            asks.append(walk.send({n: scale * torch.randn(p.shape, generator=draw) for n, p in params.items()}))
    except StopIteration:
        return asks


@pytest.mark.parametrize("name", METHODS)
def test_the_number_of_gradient_requests_does_not_depend_on_values(name: str) -> None:
    counts = {len(asked(method(name), 7, seed)) for seed in range(4)}
    assert len(counts) == 1


@pytest.mark.parametrize("name", JOINT)
def test_members_of_a_joint_method_make_equally_many_gradient_requests(name: str) -> None:
    asks = [asked(method(name, number), 7, number) for number in range(3)]
    assert all(len(one) == len(other) for one, other in pairwise(asks))


@pytest.mark.parametrize("manner", ["loop", "vmap"])
def test_members_with_different_numbers_of_requests_are_rejected(manner: str) -> None:
    row = recipe("apart", method={"rho": [0.1, 0.0, 0.1]})
    states = [
        make_state(corner(seed=number).module, build_method(row, number, GIVEN), number=number) for number in range(3)
    ]
    with pytest.raises(RecipeError, match="same number of gradients"):
        step(LocalExecutor(manner, 1, (), "error"), states, [corner().batch] * 3, StepOptions())


def test_a_recipe_with_different_numbers_of_requests_is_rejected_before_writing(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="same number of gradients"):
        trained(recipe("balanced", method={"rho": [0.1, 0.0, 0.1]}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_sample_with_weight_zero_has_no_effect(accumulate: int) -> None:
    weight = torch.tensor([1.0, 0, 1, 0, 1, 1, 1, 1], dtype=torch.float64)
    found: list[TensorTree] = []

    def weighted(params: TensorTree, moment: StepContext):  # type: ignore[no-untyped-def]
        found.append({name: each.clone() for name, each in (yield GradRequest(weight=weight)).items()})
        return found[-1]

    own = corner()
    settle = method("deep_ensemble").objective.loss
    member = make_state(corner().module, Method(Objective(settle), weighted))
    steps(member, [own.batch], gradient_accumulation_steps=accumulate)
    kept = weight.bool()
    loss = torch.nn.functional.cross_entropy(own.module(own.batch.x[kept]), own.batch.y[kept], reduction="sum") / 8
    truth = torch.autograd.grad(loss, list(own.module.parameters()))
    for mine, other in zip(found[0].values(), truth, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-14)
