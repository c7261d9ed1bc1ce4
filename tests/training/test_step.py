"""One step in every cell of the table: precision, accumulation, normalisation, dropout, pruning, a data axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import GIVEN, JOINT, Corner, corner, distance, learner, recipe, steps, trained
from laws.meshes import mesh
from reference import sam as twin
from torch import Tensor, nn

from plateaux.config.builders.data import build_data
from plateaux.config.builders.model import build_member
from plateaux.core import runtime
from plateaux.core.errors import RecipeError
from plateaux.core.method import GradRequest, Method, Objective
from plateaux.core.types import Batch, TensorTree
from plateaux.distributed.executors.local import SINGLE_PROCESS
from plateaux.methods.sam import asam, gsam, sam
from plateaux.optim.losses import cross_entropy
from plateaux.training.state import GradScaler, StepOptions, TrainState, at_params, preserve_buffers
from plateaux.training.step import step
from plateaux.training.train import train
from tests.optim.test_sam import gradient_of, numpied

LOSS = cross_entropy()
PLAIN = Method(Objective(LOSS))
FAMILY = {
    "plain": PLAIN,
    "sam": sam(LOSS, rho=0.3),
    "asam": asam(LOSS, rho=0.5),
    "asam elementwise": asam(LOSS, rho=2.0, variant="elementwise"),
    "gsam": gsam(LOSS, rho=0.3),
}
CLIMBING = [name for name in FAMILY if name != "plain"]


def state_after(name: str, net: str, count: int = 1, *, dtype: torch.dtype = torch.float64, **way: Any) -> TensorTree:
    own = corner(net, dtype=dtype)
    steps(learner(own.module, FAMILY[name], momentum=0.9), [own.batch] * count, **way)
    return {key: value.clone() for key, value in own.module.state_dict().items()}


# --- BatchNorm


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("name", CLIMBING)
def test_the_perturbed_pass_does_not_touch_batchnorm(name: str, momentum: float | None) -> None:
    buffers = []
    for method in (FAMILY[name], PLAIN):
        own = corner("conv_bn", dtype=torch.float32)
        for layer in own.module.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = momentum
        steps(learner(own.module, method), [own.batch])
        buffers.append({key: value.clone() for key, value in own.module.named_buffers()})
    assert len(buffers[0]) == 6  # mean, variance and count of two layers
    assert all(torch.equal(buffers[0][key], buffers[1][key]) for key in buffers[0])


def test_touching_batchnorm_in_the_perturbed_pass_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    from plateaux.training import state as engine

    monkeypatch.setattr(engine, "preserve_buffers", lambda _: nullcontext())
    touched, untouched = state_after("sam", "conv_bn"), state_after("plain", "conv_bn")
    assert not torch.equal(touched["0.1.running_mean"], untouched["0.1.running_mean"])
    assert int(touched["0.1.num_batches_tracked"]) == 2


def test_a_place_elsewhere_is_left_as_it_was_found_even_after_an_error() -> None:
    own = corner("conv_bn")
    member = learner(own.module, PLAIN)
    before = {key: value.clone() for key, value in own.module.state_dict().items()}
    there = {key: value + 1 for key, value in member.params.items()}

    def fail() -> None:
        own.module(own.batch.x)
        assert all(torch.equal(member.params[key], there[key]) for key in there)
        raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"), at_params(member, there):
        fail()
    with preserve_buffers(member.buffers):
        own.module(own.batch.x)
    assert all(torch.equal(value, before[key]) for key, value in own.module.state_dict().items())


# --- Precision


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2), ("fp16", 2e-3)])
@pytest.mark.parametrize("net", ["mlp", "conv"])
@pytest.mark.parametrize("name", FAMILY)
def test_every_precision_follows_float64(name: str, net: str, precision: str, tolerance: float) -> None:
    own = corner(net, dtype=torch.float32)
    scaler = GradScaler(factor=1024.0) if precision == "fp16" else None
    steps(learner(own.module, FAMILY[name], momentum=0.9, scaler=scaler), [own.batch] * 3, precision=precision)
    truth = state_after(name, net, 3)
    found = own.module.state_dict()
    assert max(float((found[key] - truth[key]).abs().max()) for key in truth) < tolerance
    assert all(value.dtype == torch.float32 for value in found.values())
    assert scaler is None or (scaler.factor, scaler.calm) == (1024.0, 3)


def from_start(name: str, net: str, *, precision: str) -> TensorTree:
    start = corner(net, dtype=torch.float32).module.state_dict()
    return {
        key: value - start[key]
        for key, value in state_after(name, net, dtype=torch.float32, precision=precision).items()
    }


@pytest.mark.parametrize("net", ["mlp", "conv"])
def test_sam_under_bf16_is_not_plain_descent(net: str) -> None:
    climbed, fell = from_start("sam", net, precision="bf16"), from_start("plain", net, precision="bf16")
    truth = from_start("sam", net, precision="fp32")
    wrong = sum(float((fell[key] - truth[key]).square().sum()) for key in truth)
    rest = sum(float((climbed[key] - truth[key]).square().sum()) for key in truth)
    assert rest < 0.05 * wrong


def test_one_autocast_context_for_both_passes_would_make_sam_plain_descent() -> None:
    # The trap itself: inside one context the second pass uses the cached copies of the weights that were perturbed.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        climbed, fell = from_start("sam", "mlp", precision="bf16"), from_start("plain", "mlp", precision="bf16")
    assert all(torch.equal(climbed[key], fell[key]) for key in fell)


def test_every_forward_opens_a_precision_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from plateaux.training import step as engine

    opened: list[str] = []

    def counted(precision: str, device: torch.device) -> Any:
        opened.append(precision)
        return runtime.autocast(precision, device)

    monkeypatch.setattr(engine, "autocast", counted)
    state_after("sam", "mlp", dtype=torch.float32, precision="bf16", gradient_accumulation_steps=2)
    assert opened == ["bf16"] * 4


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("name", FAMILY)
def test_an_overflow_skips_the_step_and_halves_the_factor(name: str, clip: float | None) -> None:
    own = corner("mlp", dtype=torch.float32)
    scaler = GradScaler(factor=1024.0)
    member = learner(own.module, FAMILY[name], momentum=0.9, scaler=scaler, max_grad_norm=clip)
    steps(member, [own.batch], precision="fp16")
    before = {key: value.clone() for key, value in own.module.state_dict().items()}
    momentum = {p: member.optimizer.state[p]["momentum_buffer"].clone() for p in member.params.values()}
    scaler.factor = 2.0**40  # the gradient of the logits does not fit into half precision
    steps(member, [own.batch], precision="fp16")
    assert all(torch.equal(value, before[key]) for key, value in own.module.state_dict().items())
    assert all(torch.equal(member.optimizer.state[p]["momentum_buffer"], momentum[p]) for p in momentum)
    assert (scaler.factor, scaler.calm) == (2.0**39, 0)


def test_training_under_fp16_finds_its_factor_and_goes_on() -> None:
    own = corner("mlp", dtype=torch.float32)
    scaler = GradScaler(factor=2.0**24)
    member = learner(own.module, FAMILY["sam"], scaler=scaler)
    start = {key: value.clone() for key, value in own.module.state_dict().items()}
    steps(member, [own.batch] * 20, precision="fp16")
    assert 1 < scaler.factor < 2.0**24
    assert scaler.calm > 0
    assert any(not torch.equal(value, start[key]) for key, value in own.module.state_dict().items())


def test_a_long_calm_doubles_the_factor() -> None:
    scaler = GradScaler(factor=8.0, patience=3)
    for _ in range(3):
        scaler.update(True)
    assert scaler.factor == 16.0
    scaler.update(False)
    assert (scaler.factor, scaler.calm) == (8.0, 0)
    for _ in range(10):
        scaler.update(False)
    assert scaler.factor == 1.0


def test_fp16_from_a_recipe_ends_near_fp32(tmp_path: Path) -> None:
    # The first steps may find the factor too large and be skipped, so the runs are compared by where they end.
    long = {"optimizer": {"lr": 0.2}, "train": {"epochs": 20}, "run": {"log_every": 1}}
    full = train(recipe("sam", **long), tmp_path / "fp32", **GIVEN.keywords())
    half = train(recipe("sam", precision="fp16", **long), tmp_path / "fp16", **GIVEN.keywords())
    for number in range(3):
        last = [run.log(number)[-1]["train loss"] for run in (half, full)]
        assert last[0] == pytest.approx(last[1], abs=0.02)


# --- Accumulation


@pytest.mark.parametrize("accumulate", [2, 3, 5, 100])
@pytest.mark.parametrize("net", ["mlp", "conv"])
@pytest.mark.parametrize("name", FAMILY)
def test_a_batch_in_pieces_is_the_whole_batch(name: str, net: str, accumulate: int) -> None:
    whole, pieces = state_after(name, net, 3), state_after(name, net, 3, gradient_accumulation_steps=accumulate)
    assert max(float((whole[key] - pieces[key]).abs().max()) for key in whole) < 1e-12


@pytest.mark.parametrize("accumulate", [2, 3, 8])
def test_pieces_of_groups_are_the_groups(accumulate: int) -> None:
    ends = []
    for count in (1, accumulate):
        own = corner()
        steps(learner(own.module, sam(LOSS, rho=0.3, m=3)), [own.batch], gradient_accumulation_steps=count)
        ends.append(own.module.state_dict())
    assert max(float((ends[0][key] - ends[1][key]).abs().max()) for key in ends[0]) < 1e-12


@pytest.mark.parametrize("manner", ["loop", "vmap", "offload"])
@pytest.mark.parametrize("method", ["apart", "apart, climbing"])
def test_members_that_see_each_other_may_work_in_pieces(method: str, manner: str, tmp_path: Path) -> None:
    row = recipe(method, precision="fp64")
    pieces = row.replaced(optimizer={"gradient_accumulation_steps": 3}, executor={"mode": manner})
    assert distance(trained(pieces, tmp_path / "pieces"), trained(row, tmp_path / "whole")) < 1e-12


def test_pieces_with_dropout_are_the_same_parked(tmp_path: Path) -> None:
    row = recipe("apart, climbing", "dropout", optimizer={"gradient_accumulation_steps": 3})
    parked = trained(row.replaced(executor={"mode": "offload"}), tmp_path / "offload")
    assert distance(parked, trained(row, tmp_path / "loop")) == 0


@pytest.mark.parametrize("method", [name for name in JOINT if name.startswith("balanced")])
def test_what_settles_whole_batches_is_refused_in_pieces(method: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="gradient_accumulation_steps must be 1"):
        trained(recipe(method, optimizer={"gradient_accumulation_steps": 2}), tmp_path / "run")


# --- Dropout


class Watched(nn.Module):
    """A linear model with dropout that remembers its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = F.dropout(torch.ones(len(x), 3), 0.5, training=self.training)
        self.masks.append(mask)
        return self.linear(x) * mask


def batch_of(size: int = 16, key: int = 0) -> Batch:
    return Batch(torch.randn(size, 2), torch.arange(size) % 3, torch.arange(size), seed=key)


@pytest.mark.parametrize("name", CLIMBING)
def test_both_passes_drop_the_same_units(name: str) -> None:
    module = Watched()
    steps(learner(module, FAMILY[name]), [batch_of(key=0), batch_of(key=1)])
    first, second, third, fourth = module.masks
    assert torch.equal(first, second)
    assert torch.equal(third, fourth)
    assert not torch.equal(first, third)  # another step drops others


def test_every_member_drops_units_of_its_own() -> None:
    modules = [Watched(), Watched()]
    learners = [learner(module, PLAIN, number=number) for number, module in enumerate(modules)]
    step(SINGLE_PROCESS, learners, [batch_of()] * 2, StepOptions())
    assert not torch.equal(modules[0].masks[0], modules[1].masks[0])


@pytest.mark.parametrize(("method", "accumulate"), [(PLAIN, 2), (sam(LOSS, m=8), 1)], ids=["pieces", "groups"])
def test_parts_of_a_batch_drop_units_of_their_own(method: Method, accumulate: int) -> None:
    module = Watched()
    steps(learner(module, method), [batch_of()], gradient_accumulation_steps=accumulate)
    seen = {mask.numpy().tobytes() for mask in module.masks}
    assert all(len(mask) == 8 for mask in module.masks)
    assert len(seen) == 2


def test_a_step_leaves_the_global_generator_alone() -> None:
    module, batch = Watched(), batch_of()
    before = torch.get_rng_state()
    steps(learner(module, FAMILY["sam"]), [batch])
    assert torch.equal(torch.get_rng_state(), before)


# --- Pruning


@pytest.mark.parametrize("manner", ["loop", "vmap", "offload"])
@pytest.mark.parametrize("method", ["deep_ensemble", "sam", "asam", "gsam", "apart, climbing"])
def test_pruned_weights_stay_zero(method: str, manner: str, tmp_path: Path) -> None:
    row = recipe(method, model={"sparsity": 0.5}, executor={"mode": manner})
    ends = trained(row, tmp_path / "run")
    data = build_data(row, GIVEN)
    for number, end in enumerate(ends):
        start = dict(build_member(row, data, number, GIVEN).named_parameters())
        zero = {key: value == 0 for key, value in start.items() if value.ndim > 1}
        assert sum(int(mask.sum()) for mask in zero.values()) == 15  # half of 6 x 2 + 3 x 6
        assert all(torch.equal(end[key] == 0, mask) for key, mask in zero.items())


def test_pruned_weights_do_not_lengthen_the_climb() -> None:
    # |g| is that of the weights that live: compare with a network in which the others do not exist.
    module = nn.Linear(3, 2, bias=False).double()
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]], dtype=torch.float64)
    with torch.no_grad():
        module.weight.mul_(mask)
    x = torch.randn(6, 3, dtype=torch.float64)
    batch = Batch(x, torch.arange(6) % 2, torch.arange(6))
    before = module.weight.detach().clone()

    def gradient(w: twin.Arrays) -> twin.Arrays:
        weight = torch.from_numpy(w["weight"]).requires_grad_()
        return {"weight": torch.autograd.grad(F.cross_entropy(x @ (weight * mask).T, batch.y), weight)[0].numpy()}

    truth = twin.climb({"weight": before.numpy()}, gradient, lambda w, g: twin.sam_epsilon(w, g, 0.5))
    steps(learner(module, sam(LOSS, rho=0.5), lr=1.0, masks={"weight": mask.bool()}), [batch])
    torch.testing.assert_close(before - module.weight.detach(), torch.from_numpy(truth["weight"]))


# --- A data axis


def shared_step(perturbation: str, m: int | None, size: int) -> twin.Arrays:
    """Take one step of SAM as one of the copies that share a batch."""
    from plateaux.distributed.executors.mesh import mesh as make

    executor = make(data_parallel=2)
    own = corner(size=size)
    part = own.batch.take(executor.shard(size))
    member = learner(own.module, sam(LOSS, rho=0.3, m=m, perturbation=perturbation))  # type: ignore[arg-type]
    step(executor, [member], [part], StepOptions(), share=len(part) / size)
    return numpied(own.module)


def after(own: Corner, direction: twin.Arrays) -> twin.Arrays:
    return twin.Descent(0.1).step(numpied(own.module), direction)


@pytest.mark.parametrize("size", [8, 7])
@pytest.mark.parametrize("kind", ["global", "per_worker", "groups"])
def test_a_climb_on_a_data_axis_is_that_of_its_reference(kind: str, size: int) -> None:
    own = corner(size=size)
    half = [slice(0, size // 2), slice(size // 2, size)]
    cuts = {
        "global": [slice(0, size)],
        "per_worker": half,
        "groups": [slice(i, min(i + 2, part.stop)) for part in half for i in range(part.start, part.stop, 2)],
    }
    truths = {}
    for name, parts in cuts.items():
        gradients = [gradient_of(own.module, own.batch.take(cut)) for cut in parts]
        shares = [(cut.stop - cut.start) / size for cut in parts]
        truths[name] = after(own, twin.in_groups(numpied(own.module), gradients, shares, 0.3))
    perturbation, m = ("global", 2) if kind == "groups" else (kind, None)
    for found in mesh(2).run("tests.training.test_step:shared_step", perturbation, m, size):
        gaps = {name: max(abs(found[key] - truth[key]).max() for key in found) for name, truth in truths.items()}
        assert gaps.pop(kind) < 1e-12
        assert min(gaps.values()) > 1e-6  # the others are something else


def groups_with_synced_norms() -> str:
    from plateaux.distributed.executors.mesh import mesh as make

    executor = make(data_parallel=2)
    own = corner("conv_bn")
    executor.setup_module(own.module)
    try:
        step(
            executor,
            [learner(own.module, sam(LOSS, m=2))],
            [own.batch.take(executor.shard(8))],
            StepOptions(),
            share=0.5,
        )
    except RecipeError as problem:
        return str(problem)
    return ""


def test_groups_with_batchnorm_over_a_data_axis_are_refused() -> None:
    for said in mesh(2).run("tests.training.test_step:groups_with_synced_norms"):
        assert "executor.sync_batchnorm=false" in said


def dropped_here() -> Tensor:
    from plateaux.distributed.executors.mesh import mesh as make

    executor, module = make(data_parallel=2), Watched()
    step(executor, [learner(module, FAMILY["sam"])], [batch_of(8)], StepOptions(), share=0.5)
    assert torch.equal(module.masks[0], module.masks[1])
    return module.masks[0]


def test_copies_that_share_a_batch_drop_units_of_their_own() -> None:
    first, second = mesh(2).run("tests.training.test_step:dropped_here")
    assert not torch.equal(first, second)


# --- What a step tells, and what it leaves


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("method", [*FAMILY.values(), sam(LOSS, m=3)], ids=[*FAMILY, "groups"])
def test_a_tally_is_of_the_whole_batch_where_the_member_stood(method: Method, accumulate: int) -> None:
    own = corner()
    outputs = own.module(own.batch.x).detach()
    (tally,) = steps(learner(own.module, method), [own.batch], gradient_accumulation_steps=accumulate)
    assert tally.correct is not None
    assert int(tally.correct) == int((outputs.argmax(1) == own.batch.y).sum())
    torch.testing.assert_close(tally.loss.double(), F.cross_entropy(outputs, own.batch.y))


def test_a_tally_of_no_samples_is_a_number() -> None:
    own = corner()
    (tally,) = steps(learner(own.module, FAMILY["sam"]), [own.batch.take(slice(0, 0))])
    assert float(tally.loss) == 0


def test_mixed_labels_are_not_counted_as_right() -> None:
    own = corner()
    soft = Batch(own.batch.x, F.one_hot(own.batch.y, 3).double(), own.batch.index)
    (tally,) = steps(learner(own.module, PLAIN), [soft])
    assert tally.correct is None


def test_a_step_leaves_no_gradients_behind() -> None:
    own = corner()
    member = learner(own.module, FAMILY["gsam"])
    steps(member, [own.batch])
    assert all(param.grad is None for param in member.params.values())


def test_a_weight_that_is_not_used_has_a_gradient_of_zero() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(2, 3), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)  # type: ignore[no-any-return]

    module = Idle()
    before = module.idle.weight.detach().clone()
    steps(learner(module, FAMILY["sam"]), [batch_of()])
    assert torch.equal(module.idle.weight, before)


def test_a_schedule_by_step_moves_with_every_step() -> None:
    own = corner()
    member = learner(own.module, PLAIN, lr=1.0)
    member.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(member.optimizer, 0.5)
    member.every_step = True
    steps(member, [own.batch] * 3)
    assert member.optimizer.param_groups[0]["lr"] == 0.125


def test_an_update_hears_the_rate_and_the_size_of_its_step() -> None:
    heard: list[Any] = []

    def update(params: TensorTree, moment: Any):  # type: ignore[no-untyped-def]
        heard.append(moment)
        return (yield GradRequest())

    own = corner()
    member = learner(own.module, Method(Objective(LOSS), update), lr=1.0)
    member.optimizer.param_groups[0]["lr"] = 0.25
    steps(member, [own.batch])
    assert (heard[0].size, heard[0].lr, heard[0].peak_lr) == (8, 0.25, 1.0)


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", FAMILY)
def test_a_step_on_cuda_follows_the_cpu(name: str, precision: str) -> None:
    device = torch.device("cuda")
    own = corner("conv_bn", dtype=torch.float32)
    own.module.to(device)
    batch = Batch(own.batch.x.to(device), own.batch.y.to(device), own.batch.index.to(device))
    member: TrainState = learner(own.module, FAMILY[name], momentum=0.9)
    member.scaler = GradScaler() if precision == "fp16" else None
    steps(member, [batch] * 3, precision=precision, device=device)
    truth = state_after(name, "conv_bn", 3)
    assert all(float((value.cpu() - truth[key]).abs().max()) < 0.05 for key, value in own.module.state_dict().items())
