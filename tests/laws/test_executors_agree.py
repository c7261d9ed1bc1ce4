"""Every method ends at the same weights on every executor."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import GIVEN, JOINT, METHODS, NETS, distance, recipe, trained, weights
from laws.conftest import Loop
from laws.meshes import mesh

from plateaux.core.errors import DivergedError
from plateaux.core.types import TensorTree
from plateaux.storage.run import Run
from plateaux.training.train import train

EXACT = 1e-12  # what float64 may lose when sums are taken in another order


def on_mesh(
    processes: int, copies: int, out: Path, method: str, net: str, sabotage: str = "", **options
) -> list[TensorTree]:
    row = recipe(method, net, executor={"name": "mesh", "data_parallel": copies}, **options)
    mesh(processes).run("laws.meshes:train_here", row.to_dict(), str(out), sabotage)
    return weights(Run.open(out))


@pytest.mark.parametrize("net", ["mlp", "conv_bn", "dropout"])
@pytest.mark.parametrize("method", METHODS)
def test_offload_equals_the_loop_bit_for_bit(method: str, net: str, loop: Loop, tmp_path: Path) -> None:
    parked = trained(recipe(method, net, executor={"mode": "offload"}), tmp_path / "run")
    assert distance(parked, loop(method, net)) == 0


@pytest.mark.parametrize("net", ["mlp", "conv_bn", "dropout"])
@pytest.mark.parametrize("method", METHODS)
def test_a_mesh_of_members_equals_the_loop_bit_for_bit(method: str, net: str, loop: Loop, tmp_path: Path) -> None:
    assert distance(on_mesh(2, 1, tmp_path / "run", method, net), loop(method, net)) == 0


@pytest.mark.parametrize("copies", [1, 2])
def test_a_process_that_plans_late_uses_the_same_plan(copies: int, loop: Loop, tmp_path: Path) -> None:
    late = on_mesh(2, copies, tmp_path / "run", "sharpbalance", "mlp", "one plans late", precision="fp64")
    assert distance(late, loop("sharpbalance", "mlp", precision="fp64")) <= EXACT


@pytest.mark.parametrize("method", METHODS)
def test_vmap_equals_the_loop_bit_for_bit_for_an_mlp(method: str, loop: Loop, tmp_path: Path) -> None:
    # torch multiplies stacks of matrices with under 400 products each by a loop of its own that rounds otherwise.
    size = {"samples": 40, "batch": 16}
    stacked = trained(recipe(method, "wide", **size, executor={"mode": "vmap"}), tmp_path / "run")
    assert distance(stacked, loop(method, "wide", **size)) == 0


@pytest.mark.parametrize("net", ["mlp", "conv_bn"])
@pytest.mark.parametrize("method", METHODS)
def test_vmap_equals_the_loop_in_float64(method: str, net: str, loop: Loop, tmp_path: Path) -> None:
    row = recipe(method, net, precision="fp64", executor={"mode": "vmap"})
    assert distance(trained(row, tmp_path / "run"), loop(method, net, precision="fp64")) <= EXACT


# An objective that sees all members on its share of the batch is the same only as a mean over samples, as `apart` is.
@pytest.mark.parametrize(
    ("net", "processes", "data"),
    [("mlp", 2, 2), ("conv", 2, 2), ("conv_bn", 2, 2), ("mlp", 4, 2), ("conv_bn", 4, 2)],
    ids=["mlp-1x2", "conv-1x2", "conv_bn-1x2", "mlp-2x2", "conv_bn-2x2"],
)
@pytest.mark.parametrize("method", [name for name, way in METHODS.items() if way.sharded])
def test_a_data_axis_equals_the_loop_in_float64(
    method: str, net: str, processes: int, data: int, loop: Loop, tmp_path: Path
) -> None:
    spread = on_mesh(processes, data, tmp_path / "run", method, net, precision="fp64")
    assert distance(spread, loop(method, net, precision="fp64")) <= EXACT


@pytest.mark.parametrize("net", ["mlp", "conv_bn"])
@pytest.mark.parametrize("method", ["sam", "sam per worker", "apart, climbing", "balanced, climbing", "a2d", "sed"])
def test_a_replica_without_samples_has_no_effect(method: str, net: str, loop: Loop, tmp_path: Path) -> None:
    spread = on_mesh(2, 2, tmp_path / "run", method, net, precision="fp64", samples=8)  # batches of 7 and 1
    alone = loop(method, net, precision="fp64", samples=8)
    if method != "sam per worker":
        assert distance(spread, alone) <= EXACT
    assert all(tensor.isfinite().all() for member in spread for tensor in member.values())


def test_sam_groups_that_fit_a_shard_equal_the_loop(loop: Loop, tmp_path: Path) -> None:
    options = {"precision": "fp64", "samples": 12, "batch": 6}
    spread = on_mesh(2, 2, tmp_path / "run", "sam in groups", "mlp", **options)
    assert distance(spread, loop("sam in groups", "mlp", **options)) <= EXACT


@pytest.mark.parametrize("method", ["sam", "gsam", "apart, climbing", "a2d on labelled, climbing"])
@pytest.mark.parametrize("net", ["mlp", "conv_bn"])
def test_chunks_of_a_batch_on_a_data_axis_do_not_deadlock(method: str, net: str, loop: Loop, tmp_path: Path) -> None:
    # Shares of 2 and 3 samples cut into three make two pieces here and three there.
    spread = on_mesh(
        2, 2, tmp_path / "run", method, net, precision="fp64", batch=5, optimizer={"gradient_accumulation_steps": 3}
    )
    if not NETS[net].batchnorm:  # whose statistics are of other samples in other pieces
        assert distance(spread, loop(method, net, precision="fp64", batch=5)) <= EXACT
    assert all(tensor.isfinite().all() for member in spread for tensor in member.values())


def test_local_batchnorm_differs_from_the_loop(loop: Loop, tmp_path: Path) -> None:
    row = recipe(
        "sam", "conv_bn", precision="fp64", executor={"name": "mesh", "data_parallel": 2, "sync_batchnorm": False}
    )
    mesh(2).run("laws.meshes:train_here", row.to_dict(), str(tmp_path / "run"))
    assert distance(weights(Run.open(tmp_path / "run")), loop("sam", "conv_bn", precision="fp64")) > 1e-6


LIVE = [name for name in JOINT if not METHODS[name].ordered]
ONE_EACH = [next(name for name in LIVE if METHODS[name].sees == sees) for sees in ("members", "batch")]


@pytest.mark.parametrize("sabotage", ["others live", "own rows only", "own row detached"])
@pytest.mark.parametrize(
    ("method", "processes", "data"), [*((name, 2, 1) for name in LIVE), *((name, 4, 2) for name in ONE_EACH)]
)
def test_a_broken_member_index_is_detected(
    method: str, sabotage: str, processes: int, data: int, loop: Loop, tmp_path: Path
) -> None:
    options = {"precision": "fp64", "members": 2, "samples": 24, "batch": 8}
    spread = on_mesh(processes, data, tmp_path / "run", method, "mlp", sabotage, **options)
    assert distance(spread, loop(method, "mlp", **options)) > 1e-4


def test_fewer_members_than_mesh_columns_leave_a_process_idle(loop: Loop, tmp_path: Path) -> None:
    assert distance(on_mesh(2, 1, tmp_path / "run", "sam", "mlp", members=1), loop("sam", "mlp", members=1)) == 0


def test_members_at_different_epochs_resume_on_a_mesh(loop: Loop, tmp_path: Path) -> None:
    row = recipe(
        "sam", members=2, executor={"name": "mesh"}, run={"keep_checkpoints": "last", "checkpoint_every_epochs": 1}
    )
    mesh(2).run("laws.meshes:train_here", row.to_dict(), str(tmp_path / "run"))
    # Member 1 is trained again from its start: a plan with one job of one member, for two processes.
    for file in (tmp_path / "run" / "members" / "1").glob("*.*"):
        file.unlink()
    mesh(2).run("laws.meshes:train_here", row.to_dict(), str(tmp_path / "run"))
    assert distance(weights(Run.open(tmp_path / "run")), loop("sam", members=2)) == 0


def test_a_member_that_stops_early_does_not_stop_the_others_on_a_mesh(tmp_path: Path) -> None:
    options = {"members": 2, "train": {"epochs": 12, "early_stopping_patience": 1}, "data": {"validation_split": 6}}
    options |= {
        "optimizer": {"name": "SGD", "lr": [0.0, 0.05], "momentum": 0.0},
        "lr_scheduler": (),
    }  # the first one never gets better
    alone = train(recipe("deep_ensemble", **options), tmp_path / "loop", **GIVEN.keywords())
    ends = [alone.progress(number).epoch for number in range(2)]
    assert ends[0] != ends[1]
    assert distance(on_mesh(2, 1, tmp_path / "mesh", "deep_ensemble", "mlp", **options), weights(alone)) == 0


def test_a_member_that_diverges_does_not_stop_the_others_on_a_mesh(tmp_path: Path) -> None:
    options = {"members": 2, "optimizer": {"name": "SGD", "lr": [1e30, 0.1]}, "run": {"log_every": 1}}
    row = recipe("sam", executor={"name": "mesh"}, **options)
    said = mesh(2).run("laws.meshes:problem_here", row.to_dict(), str(tmp_path / "mesh"))
    assert "became NaN or infinite" in said[0]
    assert "another process" in said[1]
    alone = recipe("sam", **options)
    with pytest.raises(DivergedError):
        train(alone, tmp_path / "loop", **GIVEN.keywords())
    mine, its = (Run.open(tmp_path / name).weights(1) for name in ("mesh", "loop"))
    assert distance([mine], [its]) == 0


def test_all_processes_of_a_mesh_continue_without_a_failed_member(tmp_path: Path) -> None:
    options = {"optimizer": {"name": "SGD", "lr": [0.1, 1e30, 0.1]}, "run": {"log_every": 1, "min_members": 2}}
    row = recipe("sharpbalance", executor={"name": "mesh"}, **options)
    said = mesh(2).run("laws.meshes:problem_here", row.to_dict(), str(tmp_path / "mesh"))
    assert "another process" in said[0]
    assert "became NaN or infinite" in said[1]
    with pytest.raises(DivergedError):
        train(recipe("sharpbalance", **options), tmp_path / "loop", **GIVEN.keywords())
    runs = [Run.open(tmp_path / name) for name in ("mesh", "loop")]
    for run in runs:
        assert run.store.get_json("sam_sets/1/summary.json")["without"] == [1]
        assert [each.finished for each in run.all_progress()] == [True, False, True]
    for number in (0, 2):
        assert distance(*([run.weights(number)] for run in runs)) == 0


@pytest.mark.parametrize("method", [name for name in JOINT if not METHODS[name].ordered])
def test_joint_methods_are_rejected_on_too_many_processes(method: str, tmp_path: Path) -> None:
    row = recipe(method, members=1, executor={"name": "mesh"})
    for said in mesh(2).run("laws.meshes:problem_here", row.to_dict(), str(tmp_path / "run")):
        assert "must hold a member" in said


def test_a_process_pool_equals_the_loop_bit_for_bit(loop: Loop, tmp_path: Path) -> None:
    pooled = trained(recipe("sam", "dropout", executor={"processes": 2}), tmp_path / "run")
    assert distance(pooled, loop("sam", "dropout")) == 0


def test_the_case_table_includes_batchnorm_dropout_and_both_kinds_of_joint_methods() -> None:
    assert any(net.batchnorm for net in NETS.values())
    assert any(net.dropout for net in NETS.values())
    assert {METHODS[name].sees for name in JOINT} == {"members", "batch"}


@pytest.mark.parametrize("net", ["mlp", "conv_bn"])
def test_averaged_weights_are_the_same_on_a_data_axis(net: str, loop: Loop, tmp_path: Path) -> None:
    options = {"precision": "fp64", "train": {"swa_start": 2, "select": "best:nll"}, "data": {"validation_split": 5}}
    spread = on_mesh(2, 2, tmp_path / "run", "sam", net, **options)
    assert distance(spread, loop("sam", net, **options)) <= EXACT
