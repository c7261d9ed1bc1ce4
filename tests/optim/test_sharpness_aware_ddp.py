"""SharpnessAware with DistributedDataParallel on two real processes equals the engine on the same two processes."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import corner, make_state
from laws.meshes import mesh
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from plateaux.core.types import TensorTree
from plateaux.methods.sam import sam
from plateaux.methods.sharpbalance import sharpbalance
from plateaux.optim import SharpnessAware
from plateaux.optim.losses import cross_entropy
from plateaux.training.loop.state import StepOptions
from plateaux.training.loop.step import step
from tests.optim.custom_loops import OPTIMIZERS, batches_of, same_bits

SAM_SET = torch.tensor([True, False, True, False, False, True, False, True])
NO_STATISTICS = ("mask", "conv_bn")
KINDS = ["global", "per_worker", "accumulation", "micro_batches", "mask"]


def params_of(module: nn.Module) -> TensorTree:
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def engine_and_ddp(kind: str, net: str, pass_inner: bool = False) -> tuple[TensorTree, TensorTree, bool]:
    """Train in one of two processes, with the engine and with DDP; also return whether perturbations were local."""
    from plateaux.distributed.executors.mesh import mesh as make

    executor = make(data_parallel=2, sync_batchnorm=False)
    own = corner(net, dtype=torch.float32)
    parts = [batch.take(executor.shard(8)) for batch in batches_of(own)]

    trained = copy.deepcopy(own.module)
    method = sam(
        cross_entropy(),
        rho=0.3,
        perturbation="per_worker" if kind == "per_worker" else "global",
        m=2 if kind == "micro_batches" else None,
    )
    if kind == "mask":
        method = sharpbalance(cross_entropy(), epochs=2, rho=0.3)
    state = make_state(trained, method)
    state.optimizer = OPTIMIZERS["momentum"](trained.parameters())
    state.sam_set = (lambda index: SAM_SET[index]) if kind == "mask" else None
    options = StepOptions(gradient_accumulation_steps=2 if kind == "accumulation" else 1)
    for part in parts:
        step(executor, [state], [part], options, share=0.5)

    inner = copy.deepcopy(own.module)
    ddp = DistributedDataParallel(inner, gradient_as_bucket_view=kind in ("micro_batches", "mask"))
    optimizer = SharpnessAware(OPTIMIZERS["momentum"](inner.parameters()), rho=0.3, model=inner if pass_inner else ddp)
    for part in parts:
        optimizer.zero_grad()
        LOOPS[kind](optimizer, ddp, part)
        optimizer.step()
    return params_of(trained), params_of(inner), has_local_perturbations(kind, optimizer, ddp, parts[0])


def loss_of(ddp: nn.Module, part: Any) -> Tensor:
    return F.cross_entropy(ddp(part.x), part.y)


def plain(optimizer: SharpnessAware, ddp: DistributedDataParallel, part: Any) -> None:
    loss_of(ddp, part).backward()
    with optimizer.perturbed():
        loss_of(ddp, part).backward()


def per_worker(optimizer: SharpnessAware, ddp: DistributedDataParallel, part: Any) -> None:
    with ddp.no_sync():  # the forward pass, too: it decides whether the backward pass communicates
        loss_of(ddp, part).backward()
    with optimizer.perturbed():
        loss_of(ddp, part).backward()


def accumulated(optimizer: SharpnessAware, ddp: DistributedDataParallel, part: Any) -> None:
    first, last = part.take(slice(0, 2)), part.take(slice(2, 4))

    def both() -> None:
        with ddp.no_sync():
            (loss_of(ddp, first) / 2).backward()
        (loss_of(ddp, last) / 2).backward()

    both()
    with optimizer.perturbed():
        both()


def micro_batches(optimizer: SharpnessAware, ddp: DistributedDataParallel, part: Any) -> None:
    for rows, is_last in ((slice(0, 2), False), (slice(2, 4), True)):
        with ddp.no_sync():
            (loss_of(ddp, part.take(rows)) / 2).backward()
        with optimizer.perturbed(), nullcontext() if is_last else ddp.no_sync():
            (loss_of(ddp, part.take(rows)) / 2).backward()


def masked(optimizer: SharpnessAware, ddp: DistributedDataParallel, part: Any) -> None:
    with optimizer.perturbed(mask=SAM_SET[part.index]) as parts:
        for rows in parts:
            (F.cross_entropy(ddp(part.x[rows]), part.y[rows], reduction="sum") / len(part)).backward()


def masks_of_micro_batches(optimizer: SharpnessAware, ddp: DistributedDataParallel, part: Any) -> None:
    with ddp.no_sync():
        masked(optimizer, ddp, part.take(slice(0, 2)))
    masked(optimizer, ddp, part.take(slice(2, 4)))


LOOPS = {
    "global": plain,
    "per_worker": per_worker,
    "accumulation": accumulated,
    "micro_batches": micro_batches,
    "mask": masked,
    "masks_of_micro_batches": masks_of_micro_batches,
}


def has_local_perturbations(kind: str, optimizer: SharpnessAware, ddp: DistributedDataParallel, part: Any) -> bool:
    """Return whether the weights of the two processes differ in the perturbed pass."""
    import torch.distributed as dist

    optimizer.zero_grad()
    with ddp.no_sync() if kind == "per_worker" else torch.enable_grad():
        loss_of(ddp, part).backward()
    with optimizer.perturbed():
        flat = torch.cat([p.detach().flatten() for p in ddp.parameters()])
        gathered = [torch.empty_like(flat) for _ in range(2)]
        dist.all_gather(gathered, flat)
        loss_of(ddp, part).backward()
    return not torch.equal(*gathered)


# With a mask, a process may have no sample of a part, for which BatchNorm has no statistics.
@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "net"), [(k, n) for k in KINDS for n in ("mlp", "conv_bn") if (k, n) != NO_STATISTICS]
)
def test_pitfall_ddp_equals_the_engine_bit_for_bit(kind: str, net: str) -> None:
    results = mesh(2).run("tests.optim.test_sharpness_aware_ddp:engine_and_ddp", kind, net)
    for engine, ddp, is_local in results:
        assert same_bits(engine, ddp)
        assert is_local == (kind == "per_worker")
    assert same_bits(results[0][1], results[1][1])


@pytest.mark.process
def test_pitfall_ddp_global_and_per_worker_perturbations_differ() -> None:
    results = {
        kind: mesh(2).run("tests.optim.test_sharpness_aware_ddp:engine_and_ddp", kind, "mlp")[0][1]
        for kind in ("global", "per_worker")
    }
    assert not same_bits(results["global"], results["per_worker"])


@pytest.mark.process
def test_the_module_inside_of_ddp_can_be_passed_as_the_model() -> None:
    for engine, ddp, _ in mesh(2).run("tests.optim.test_sharpness_aware_ddp:engine_and_ddp", "global", "mlp", True):
        assert same_bits(engine, ddp)


@pytest.mark.process
def test_processes_stay_equal_if_only_the_last_micro_batch_communicates() -> None:
    function = "tests.optim.test_sharpness_aware_ddp:engine_and_ddp"
    first, second = mesh(2).run(function, "masks_of_micro_batches", "mlp")
    assert same_bits(first[1], second[1])


def batchnorm_statistics(with_sam: bool) -> TensorTree:
    own = corner("conv_bn")
    ddp = DistributedDataParallel(own.module)
    optimizer = SharpnessAware(OPTIMIZERS["sgd"](ddp.parameters()), rho=0.3, model=ddp)
    for batch in batches_of(own, 2):
        if with_sam:
            plain(optimizer, ddp, batch)
            optimizer.zero_grad()  # no step: both cases stay at the same weights
        else:
            loss_of(ddp, batch).backward()
    return {name: buffer.clone() for name, buffer in own.module.named_buffers()}


@pytest.mark.process
def test_pitfall_batchnorm_statistics_are_updated_once_under_ddp() -> None:
    function = "tests.optim.test_sharpness_aware_ddp:batchnorm_statistics"
    for with_sam, without in zip(mesh(2).run(function, True), mesh(2).run(function, False), strict=True):
        assert same_bits(with_sam, without)
        assert int(with_sam["0.1.num_batches_tracked"]) == 2
