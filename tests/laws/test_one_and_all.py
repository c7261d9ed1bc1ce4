"""Losses accept any members in any order and are deterministic; updates make equally many gradient requests."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from cases import GIVEN, JOINT, METHODS, OWN, corner, make_state, recipe, trained
from laws.meshes import mesh
from torch import Tensor

from plateaux.config.builders.training import build_method
from plateaux.core.errors import RecipeError
from plateaux.core.method import GradRequest, Method, StepContext
from plateaux.core.types import Batch, TensorTree
from plateaux.distributed.executors.local import local
from plateaux.training.loop.state import StepOptions
from plateaux.training.loop.step import step


def method(name: str, number: int = 0) -> Method:
    return build_method(recipe(name), number, GIVEN)


def random_logits(name: str, rows: int, size: int = 5, seed: int = 0) -> tuple[Tensor, Batch]:
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (size,), generator=rng)
    batch = Batch(torch.zeros(size, 2), y, torch.arange(size), seed=seed)
    num_unlabeled = 4 if METHODS[name].unlabelled else 0
    return torch.randn(rows, size + num_unlabeled, 3, generator=rng, dtype=torch.float64), batch


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("name", METHODS)
def test_a_loss_accepts_any_number_of_members(name: str, rows: int) -> None:
    losses = method(name).objective.loss(*random_logits(name, rows))
    assert losses.shape == (rows, 5)
    assert losses.isfinite().all()


@pytest.mark.parametrize("name", [name for name, way in METHODS.items() if not way.ordered])
def test_a_loss_does_not_depend_on_member_indices(name: str) -> None:
    rows, batch = random_logits(name, 4)
    loss_fn, order = method(name).objective.loss, torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(loss_fn(rows[order], batch), loss_fn(rows, batch)[order], rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", OWN)
def test_a_loss_without_gather_is_independent_of_other_members(name: str) -> None:
    rows, batch = random_logits(name, 4)
    loss_fn = method(name).objective.loss
    assert torch.equal(loss_fn(rows[1:3], batch), loss_fn(rows, batch)[1:3])


@pytest.mark.parametrize("name", JOINT)
def test_a_loss_with_gather_depends_on_other_members(name: str) -> None:
    rows, batch = random_logits(name, 4)
    loss_fn = method(name).objective.loss
    assert not torch.allclose(loss_fn(rows[1:3], batch), loss_fn(rows, batch)[1:3])


@pytest.mark.parametrize("name", METHODS)
def test_a_loss_is_deterministic_given_logits_batch_and_seed(name: str) -> None:
    torch.manual_seed(1)
    first = method(name).objective.loss(*random_logits(name, 3))
    torch.manual_seed(2)  # the global random state must not matter
    assert torch.equal(first, method(name).objective.loss(*random_logits(name, 3)))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.usefixtures("rng_unchanged")
def test_a_loss_does_not_use_the_global_random_generator(name: str) -> None:
    method(name).objective.loss(*random_logits(name, 3))


@pytest.mark.parametrize("name", JOINT)
def test_every_process_of_a_mesh_computes_the_same_loss(name: str) -> None:
    first, second = mesh(2).run("laws.test_one_and_all:loss_on_mesh", name)
    assert torch.equal(first, second)


def loss_on_mesh(name: str) -> Tensor:
    """Gather the outputs of all processes and compute the loss."""
    from plateaux.distributed.executors.mesh import mesh as make

    executor = make()
    rows, batch = random_logits(name, 4)
    mine = rows[executor.local_members(4).start : executor.local_members(4).stop]
    gathered = executor.all_gather(mine)
    assert torch.equal(gathered, rows)
    return method(name).objective.loss(gathered, batch)


def trace_requests(update: Method, size: int, seed: int) -> list[GradRequest]:
    """Return the gradient requests of an update if every gradient is random."""
    rng = torch.Generator().manual_seed(seed)
    params: TensorTree = {"weight": torch.randn(3, 2, generator=rng), "bias": torch.randn(2, generator=rng)}
    generator = update.update(params, StepContext(size, lr=0.1, peak_lr=0.1))
    requests = [next(generator)]
    try:
        while True:
            scale = 10.0 ** (len(requests) + seed)
            requests.append(generator.send({n: scale * torch.randn(p.shape, generator=rng) for n, p in params.items()}))
    except StopIteration:
        return requests


@pytest.mark.parametrize("name", METHODS)
def test_the_number_of_gradient_requests_does_not_depend_on_values(name: str) -> None:
    counts = {len(trace_requests(method(name), 7, seed)) for seed in range(4)}
    assert len(counts) == 1


@pytest.mark.parametrize("name", JOINT)
def test_members_of_a_joint_method_make_equally_many_gradient_requests(name: str) -> None:
    requests = [trace_requests(method(name, number), 7, number) for number in range(3)]
    assert all(len(one) == len(other) for one, other in pairwise(requests))


@pytest.mark.parametrize("mode", ["loop", "vmap"])
def test_members_with_different_numbers_of_requests_are_rejected(mode: str) -> None:
    row = recipe("apart", method={"rho": [0.1, 0.0, 0.1]})
    states = [
        make_state(corner(seed=number).module, build_method(row, number, GIVEN), number=number) for number in range(3)
    ]
    with pytest.raises(RecipeError, match="same number of gradients"):
        step(local(mode=mode), states, [corner().batch] * 3, StepOptions())


def test_a_recipe_with_different_numbers_of_requests_is_rejected_before_writing(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="same number of gradients"):
        trained(recipe("balanced", method={"rho": [0.1, 0.0, 0.1]}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
