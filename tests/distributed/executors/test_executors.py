"""Executors: which members a process holds, map_members, all_gather, all_reduce, and barrier."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import corner
from laws.meshes import mesh
from torch import Tensor, nn

from plateaux.core import registry
from plateaux.core.errors import RecipeError
from plateaux.core.executor import all_reduce_max
from plateaux.core.member import MemberModule
from plateaux.core.outputs import logits
from plateaux.core.types import Batch
from plateaux.distributed.executors import mesh as meshes
from plateaux.distributed.executors.local import VmapExecutor, local, run_vmap
from plateaux.distributed.identity_collectives import IdentityCollectives
from plateaux.optim.sample_scores import features


def build_members(net: str, count: int = 3) -> tuple[list[MemberModule], Batch]:
    corners = [corner(net, seed=seed) for seed in range(count)]
    made = [
        MemberModule(c.module, own=dict(c.module.named_parameters()), buffers=dict(c.module.named_buffers()))
        for c in corners
    ]
    return made, corners[0].batch


def test_both_executors_are_found_by_name() -> None:
    assert {"local", "mesh"} <= set(registry.executor.names())


# --- Local


def test_the_local_executor_holds_all_members_and_collectives_are_the_identity() -> None:
    here = local()
    rows, tree = torch.randn(3, 4), {"w": torch.ones(2)}
    assert here.local_members(5) == range(5)
    assert here.all_gather(rows) is rows
    assert here.all_gather(rows, batch=True) is rows
    assert here.all_reduce(tree) is tree
    assert (here.shard(9), all_reduce_max(here, 2), here.is_writer()) == (slice(0, 9), 2, True)
    assert (here.data_rank, here.data_size) == (0, 1)
    here.barrier()
    here.setup_module(nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("mode", "is_joint", "groups"),
    [
        ("loop", False, [[0], [1], [2], [3]]),
        ("offload", False, [[0], [1], [2], [3]]),
        ("vmap", False, [[0, 2], [1], [3]]),
        ("loop", True, [[0, 1, 2, 3]]),
        ("vmap", True, [[0, 1, 2, 3]]),
    ],
)
def test_equal_architectures_are_grouped_under_vmap(mode: Any, is_joint: bool, groups: list[list[int]]) -> None:
    assert local(mode=mode).groups(["a", "b", "a", "c"], is_joint=is_joint) == groups


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("net", ["mlp", "conv", "conv_bn"])
def test_vmap_equals_the_loop(net: str, shared: bool) -> None:
    (members, batch), (others, _) = build_members(net), build_members(net)
    batches = [batch] * 3 if shared else [corner(net, seed=seed).batch for seed in range(3)]
    one, other = run_vmap(logits, members, batches, "error"), IdentityCollectives().map_members(logits, others, batches)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    one.square().sum().backward()
    other.square().sum().backward()
    for member, other_member in zip(members, others, strict=True):
        for name in member.own:
            torch.testing.assert_close(member.own[name].grad, other_member.own[name].grad, rtol=0, atol=1e-11)
        for name in member.buffers:
            torch.testing.assert_close(member.buffers[name], other_member.buffers[name], rtol=0, atol=1e-12)


def test_vmap_supports_named_inputs() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(2))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.w * a + b

    modules = [Named(), Named()]
    members = [MemberModule(m, own=dict(m.named_parameters())) for m in modules]
    batches = [
        Batch({"a": torch.randn(4, 2), "b": torch.randn(4, 2)}, torch.zeros(4), torch.arange(4)) for _ in range(2)
    ]
    torch.testing.assert_close(
        run_vmap(logits, members, batches, "error"), IdentityCollectives().map_members(logits, members, batches)
    )


def test_an_output_without_vmap_support_is_looped() -> None:
    members, batch = build_members("conv")
    rows = VmapExecutor().map_members(features("0"), members, [batch] * 3)
    torch.testing.assert_close(rows, IdentityCollectives().map_members(features("0"), members, [batch] * 3))


def test_members_of_different_architectures_are_not_stacked() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    modules = [nn.Linear(2, 3), Doubled(2, 3), nn.Linear(2, 3), Doubled(2, 3)]
    members = [MemberModule(m, own=dict(m.named_parameters()), kind=type(m)) for m in modules]
    batch = Batch(torch.randn(5, 2), torch.zeros(5), torch.arange(5))
    rows = VmapExecutor().map_members(logits, members, [batch] * 4)
    torch.testing.assert_close(rows, IdentityCollectives().map_members(logits, members, [batch] * 4))


def test_models_that_vmap_does_not_support_are_reported_with_an_alternative() -> None:
    class Asking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.weight.sum() > 0 else x  # control flow that depends on values

    modules = [Asking(2, 2), Asking(2, 2)]
    members = [MemberModule(m, own=dict(m.named_parameters())) for m in modules]
    batch = Batch(torch.randn(5, 2), torch.zeros(5), torch.arange(5))
    with pytest.raises(RecipeError, match=r'vmap does not support this model: .*executor\.mode = "loop"'):
        run_vmap(logits, members, [batch] * 2, "error")


def test_dropout_under_vmap_differs_between_members_when_asked_for() -> None:
    modules = [nn.Sequential(nn.Linear(2, 50), nn.Dropout(0.5)) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    members = [MemberModule(m, own=dict(m.named_parameters())) for m in modules]
    batch = Batch(torch.randn(5, 2), torch.zeros(5), torch.arange(5))
    rows = run_vmap(logits, members, [batch] * 2, "different")
    assert not torch.equal(rows[0] == 0, rows[1] == 0)
    with pytest.raises(RecipeError, match="randomness"):
        run_vmap(logits, members, [batch] * 2, "error")


# --- Mesh


def test_a_mesh_without_processes_names_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RecipeError, match="torchrun"):
        meshes.mesh()


@pytest.mark.parametrize(("total", "ranks"), [(5, 2), (3, 4), (8, 4), (0, 3), (7, 7)])
def test_blocks_cover_all_members_once_and_evenly(total: int, ranks: int) -> None:
    blocks = [meshes._block(total, rank, ranks) for rank in range(ranks)]
    assert [i for block in blocks for i in block] == list(range(total))
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1


def test_all_reduce_uses_few_buckets_of_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meshes, "BUCKET_BYTES", 40)
    tree = {"a": torch.zeros(4), "b": torch.zeros(5), "c": torch.zeros(2), "d": torch.zeros(3).double()}
    tree |= {"e": torch.zeros(100), "f": torch.zeros(1)}
    buckets = list(meshes._buckets(tree))
    assert buckets == [["a", "b"], ["c"], ["d"], ["e"], ["f"]]
    assert list(meshes._buckets({})) == []
    monkeypatch.undo()
    assert len(list(meshes._buckets({str(i): torch.zeros(100) for i in range(300)}))) == 1


def operations_here() -> dict[str, Any]:
    """Call every operation of a 2 x 2 mesh; the assertions run in every process."""
    executor = meshes.mesh(data_parallel=2)
    column, copy = divmod(torch.distributed.get_rank(), 2)
    held = executor.local_members(3)
    own = executor.shard(5)
    whole = torch.arange(30.0).view(3, 5, 2)
    member = whole[held.start : held.stop, own].clone().requires_grad_()
    table = executor.all_gather(member, batch=True)
    assert torch.equal(table, whole)
    assert torch.equal(executor.all_gather(member), whole[:, own])
    table.sum().backward()
    assert member.grad is not None
    assert torch.equal(member.grad, torch.ones_like(member))  # once, not once for every process
    mixed = {"w": torch.full((2, 2), 1.0 + copy), "n": torch.tensor([10.0 * column], dtype=torch.float64)}
    total = executor.all_reduce(mixed)
    assert list(total) == ["w", "n"]
    assert torch.equal(total["w"], torch.full((2, 2), 3.0))
    assert float(total["n"]) == 20.0 * column  # over copies, never over members
    largest = executor.all_reduce(mixed, "max")
    assert torch.equal(largest["w"], torch.full((2, 2), 2.0))
    assert float(executor.all_reduce(mixed, group="world")["n"]) == 20.0
    assert (executor.data_rank, executor.data_size) == (copy, 2)
    executor.barrier()
    return {
        "rows": list(held),
        "samples": list(range(5)[own]),
        "agree": all_reduce_max(executor, torch.distributed.get_rank()),
        "writes": executor.is_writer(),
        "groups": (executor.groups(["a", "a"], is_joint=False), executor.groups(["a", "a"], is_joint=True)),
    }


def test_a_mesh_assigns_members_and_samples_and_reduces_over_processes() -> None:
    found = mesh(4).run("tests.distributed.executors.test_executors:operations_here")
    assert [each["rows"] for each in found] == [[0], [0], [1, 2], [1, 2]]
    assert [each["samples"] for each in found] == [[0, 1], [2, 3, 4]] * 2
    assert [each["agree"] for each in found] == [3] * 4
    assert [each["writes"] for each in found] == [True, False, True, False]
    assert all(each["groups"] == ([[0], [1]], [[0, 1]]) for each in found)


def odd_mesh_here() -> str:
    try:
        meshes.mesh(data_parallel=3)
    except RecipeError as problem:
        return str(problem)
    return ""


def test_a_data_axis_must_divide_the_processes() -> None:
    assert all(
        "divisor of 2" in said for said in mesh(2).run("tests.distributed.executors.test_executors:odd_mesh_here")
    )


def prepared_here() -> list[str]:
    names = []
    for options in ({"data_parallel": 2}, {"data_parallel": 2, "sync_batchnorm": False}, {"data_parallel": 1}):
        module = nn.Sequential(nn.BatchNorm2d(3))
        meshes.mesh(**options).setup_module(module)  # type: ignore[arg-type]
        names.append(type(module[0]).__name__)
    return names


def test_batchnorm_is_synchronized_only_on_a_data_axis_and_if_enabled() -> None:
    for names in mesh(2).run("tests.distributed.executors.test_executors:prepared_here"):
        assert names == ["SyncedBatchNorm", "BatchNorm2d", "BatchNorm2d"]
