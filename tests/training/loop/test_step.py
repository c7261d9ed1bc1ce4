"""One training step: precision, gradient accumulation, BatchNorm, dropout, pruning, and data parallelism."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import GIVEN, JOINT, Corner, corner, distance, make_state, recipe, steps, trained
from laws.meshes import mesh
from reference import sam as reference
from torch import Tensor, nn

from plateaux.config.builders.data import build_data
from plateaux.config.builders.model import build_member
from plateaux.core import runtime
from plateaux.core.errors import RecipeError
from plateaux.core.member import at_params, preserve_buffers
from plateaux.core.method import Average, GradRequest, Method, Objective, StepContext, Update
from plateaux.core.types import Batch, TensorTree
from plateaux.distributed.executors.local import SINGLE_PROCESS
from plateaux.methods.sam import asam, gsam, sam
from plateaux.optim.losses import cross_entropy
from plateaux.training.loop.state import GradScaler, StepOptions, TrainState
from plateaux.training.loop.step import step
from plateaux.training.train import train
from tests.optim.test_sam import gradient_of, to_numpy

LOSS = cross_entropy()
PLAIN = Method(Objective(LOSS))
FAMILY = {
    "plain": PLAIN,
    "sam": sam(LOSS, rho=0.3),
    "asam": asam(LOSS, rho=0.5),
    "asam elementwise": asam(LOSS, rho=2.0, variant="elementwise"),
    "gsam": gsam(LOSS, rho=0.3),
}
SAM_METHODS = [name for name in FAMILY if name != "plain"]


def state_after(
    name: str, net: str, count: int = 1, *, dtype: torch.dtype = torch.float64, **options: Any
) -> TensorTree:
    own = corner(net, dtype=dtype)
    steps(make_state(own.module, FAMILY[name], momentum=0.9), [own.batch] * count, **options)
    return {key: value.clone() for key, value in own.module.state_dict().items()}


# --- BatchNorm


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("name", SAM_METHODS)
def test_the_perturbed_pass_does_not_update_batchnorm(name: str, momentum: float | None) -> None:
    buffers = []
    for method in (FAMILY[name], PLAIN):
        own = corner("conv_bn", dtype=torch.float32)
        for layer in own.module.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = momentum
        steps(make_state(own.module, method), [own.batch])
        buffers.append({key: value.clone() for key, value in own.module.named_buffers()})
    assert len(buffers[0]) == 6  # mean, variance and count of two layers
    assert all(torch.equal(buffers[0][key], buffers[1][key]) for key in buffers[0])


def test_the_tests_detect_an_update_of_batchnorm_in_the_perturbed_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    from plateaux.core import member

    monkeypatch.setattr(member, "preserve_buffers", lambda _: nullcontext())
    touched, untouched = state_after("sam", "conv_bn"), state_after("plain", "conv_bn")
    assert not torch.equal(touched["0.1.running_mean"], untouched["0.1.running_mean"])
    assert int(touched["0.1.num_batches_tracked"]) == 2


def test_parameters_and_buffers_are_restored_even_after_an_error() -> None:
    own = corner("conv_bn")
    member = make_state(own.module, PLAIN)
    before = {key: value.clone() for key, value in own.module.state_dict().items()}
    other = {key: value + 1 for key, value in member.params.items()}

    def fail() -> None:
        own.module(own.batch.x)
        assert all(torch.equal(member.params[key], other[key]) for key in other)
        raise RuntimeError("expected")

    with pytest.raises(RuntimeError, match="expected"), at_params(member.params, other, buffers=member.buffers):
        fail()
    with preserve_buffers(member.buffers):
        own.module(own.batch.x)
    assert all(torch.equal(value, before[key]) for key, value in own.module.state_dict().items())


# --- Precision


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2), ("fp16", 2e-3)])
@pytest.mark.parametrize("net", ["mlp", "conv"])
@pytest.mark.parametrize("name", FAMILY)
def test_every_precision_is_close_to_float64(name: str, net: str, precision: str, tolerance: float) -> None:
    own = corner(net, dtype=torch.float32)
    scaler = GradScaler(scale=1024.0) if precision == "fp16" else None
    steps(make_state(own.module, FAMILY[name], momentum=0.9, scaler=scaler), [own.batch] * 3, precision=precision)
    truth = state_after(name, net, 3)
    result = own.module.state_dict()
    assert max(float((result[key] - truth[key]).abs().max()) for key in truth) < tolerance
    assert all(value.dtype == torch.float32 for value in result.values())
    assert scaler is None or (scaler.scale, scaler.steps_since_overflow) == (1024.0, 3)


def from_start(name: str, net: str, *, precision: str) -> TensorTree:
    start = corner(net, dtype=torch.float32).module.state_dict()
    return {
        key: value - start[key]
        for key, value in state_after(name, net, dtype=torch.float32, precision=precision).items()
    }


@pytest.mark.parametrize("net", ["mlp", "conv"])
def test_sam_under_bf16_is_not_plain_descent(net: str) -> None:
    with_sam, without_sam = from_start("sam", net, precision="bf16"), from_start("plain", net, precision="bf16")
    truth = from_start("sam", net, precision="fp32")
    wrong = sum(float((without_sam[key] - truth[key]).square().sum()) for key in truth)
    rest = sum(float((with_sam[key] - truth[key]).square().sum()) for key in truth)
    assert rest < 0.05 * wrong


def test_one_autocast_context_for_both_passes_would_make_sam_plain_descent() -> None:
    # Inside one context the second pass uses the cached copies of the weights that were perturbed.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with_sam, without_sam = from_start("sam", "mlp", precision="bf16"), from_start("plain", "mlp", precision="bf16")
    assert all(torch.equal(with_sam[key], without_sam[key]) for key in without_sam)


def test_every_forward_pass_opens_its_own_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    from plateaux.training.loop import gradients

    opened: list[str] = []

    def counting_autocast(precision: str, device: torch.device) -> Any:
        opened.append(precision)
        return runtime.autocast(precision, device)

    monkeypatch.setattr(gradients, "autocast", counting_autocast)
    state_after("sam", "mlp", dtype=torch.float32, precision="bf16", gradient_accumulation_steps=2)
    assert opened == ["bf16"] * 4


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_losses_are_computed_in_float32(precision: str) -> None:
    seen: list[torch.dtype] = []

    def recording_loss(outputs: Tensor, batch: Batch) -> Tensor:
        seen.append(outputs.dtype)
        return LOSS(outputs, batch)

    own = corner("mlp", dtype=torch.float32)
    steps(make_state(own.module, sam(recording_loss, rho=0.5)), [own.batch], precision=precision)
    assert seen == [torch.float32] * 2


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("name", FAMILY)
def test_an_overflow_skips_the_step_and_halves_the_scale(name: str, clip: float | None) -> None:
    own = corner("mlp", dtype=torch.float32)
    scaler = GradScaler(scale=1024.0)
    member = make_state(own.module, FAMILY[name], momentum=0.9, scaler=scaler, max_grad_norm=clip)
    steps(member, [own.batch], precision="fp16")
    before = {key: value.clone() for key, value in own.module.state_dict().items()}
    momentum = {p: member.optimizer.state[p]["momentum_buffer"].clone() for p in member.params.values()}
    scaler.scale = 2.0**40  # the gradient of the logits does not fit into half precision
    steps(member, [own.batch], precision="fp16")
    assert all(torch.equal(value, before[key]) for key, value in own.module.state_dict().items())
    assert all(torch.equal(member.optimizer.state[p]["momentum_buffer"], momentum[p]) for p in momentum)
    assert (scaler.scale, scaler.steps_since_overflow) == (2.0**39, 0)


def test_training_under_fp16_reduces_the_scale_until_it_fits_and_continues() -> None:
    own = corner("mlp", dtype=torch.float32)
    scaler = GradScaler(scale=2.0**24)
    member = make_state(own.module, FAMILY["sam"], scaler=scaler)
    start = {key: value.clone() for key, value in own.module.state_dict().items()}
    steps(member, [own.batch] * 20, precision="fp16")
    assert 1 < scaler.scale < 2.0**24
    assert scaler.steps_since_overflow > 0
    assert any(not torch.equal(value, start[key]) for key, value in own.module.state_dict().items())


def test_the_scale_doubles_after_enough_steps_without_overflow() -> None:
    scaler = GradScaler(scale=8.0, growth_interval=3)
    for _ in range(3):
        scaler.update(True)
    assert scaler.scale == 16.0
    scaler.update(False)
    assert (scaler.scale, scaler.steps_since_overflow) == (8.0, 0)
    for _ in range(10):
        scaler.update(False)
    assert scaler.scale == 1.0


@pytest.mark.slow
def test_fp16_from_a_recipe_ends_near_fp32(tmp_path: Path) -> None:
    # The first steps may overflow and be skipped, so the runs are compared at their end.
    long = {"optimizer": {"name": "SGD", "lr": 0.2}, "train": {"epochs": 20}, "run": {"log_every": 1}}
    full = train(recipe("sam", **long), tmp_path / "fp32", **GIVEN.keywords())
    half = train(recipe("sam", precision="fp16", **long), tmp_path / "fp16", **GIVEN.keywords())
    for number in range(3):
        last = [run.log(number)[-1]["train loss"] for run in (half, full)]
        assert last[0] == pytest.approx(last[1], abs=0.02)


# --- Gradient accumulation


@pytest.mark.parametrize("accumulate", [2, 3, 5, 100])
@pytest.mark.parametrize("net", ["mlp", "conv"])
@pytest.mark.parametrize("name", FAMILY)
def test_gradient_accumulation_equals_the_full_batch(name: str, net: str, accumulate: int) -> None:
    full, accumulated = state_after(name, net, 3), state_after(name, net, 3, gradient_accumulation_steps=accumulate)
    assert max(float((full[key] - accumulated[key]).abs().max()) for key in full) < 1e-12


@pytest.mark.parametrize("accumulate", [2, 3, 8])
def test_gradient_accumulation_within_groups_equals_the_groups(accumulate: int) -> None:
    ends = []
    for count in (1, accumulate):
        own = corner()
        steps(make_state(own.module, sam(LOSS, rho=0.3, m=3)), [own.batch], gradient_accumulation_steps=count)
        ends.append(own.module.state_dict())
    assert max(float((ends[0][key] - ends[1][key]).abs().max()) for key in ends[0]) < 1e-12


@pytest.mark.parametrize("mode", ["loop", "vmap", "offload"])
@pytest.mark.parametrize("method", ["apart", "apart, climbing"])
def test_joint_members_support_gradient_accumulation(method: str, mode: str, tmp_path: Path) -> None:
    row = recipe(method, precision="fp64")
    pieces = row.replaced(optimizer={"gradient_accumulation_steps": 3}, executor={"mode": mode})
    assert distance(trained(pieces, tmp_path / "pieces"), trained(row, tmp_path / "full")) < 1e-12


@pytest.mark.slow
def test_gradient_accumulation_with_dropout_is_the_same_when_offloaded(tmp_path: Path) -> None:
    row = recipe("apart, climbing", "dropout", optimizer={"gradient_accumulation_steps": 3})
    offloaded = trained(row.replaced(executor={"mode": "offload"}), tmp_path / "offload")
    assert distance(offloaded, trained(row, tmp_path / "loop")) == 0


@pytest.mark.parametrize("method", [name for name in JOINT if name.startswith("balanced")])
def test_losses_of_full_batches_reject_gradient_accumulation(method: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="gradient_accumulation_steps must be 1"):
        trained(recipe(method, optimizer={"gradient_accumulation_steps": 2}), tmp_path / "run")


# --- Dropout


class RecordingDropout(nn.Module):
    """A linear model with dropout that records its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = F.dropout(torch.ones(len(x), 3), 0.5, training=self.training)
        self.masks.append(mask)
        return self.linear(x) * mask


def batch_of(size: int = 16, seed: int = 0) -> Batch:
    return Batch(torch.randn(size, 2), torch.arange(size) % 3, torch.arange(size), seed=seed)


@pytest.mark.parametrize("name", SAM_METHODS)
def test_both_passes_drop_the_same_units(name: str) -> None:
    module = RecordingDropout()
    steps(make_state(module, FAMILY[name]), [batch_of(seed=0), batch_of(seed=1)])
    first, second, third, fourth = module.masks
    assert torch.equal(first, second)
    assert torch.equal(third, fourth)
    assert not torch.equal(first, third)  # another step drops other units


def test_every_member_has_its_own_dropout_masks() -> None:
    modules = [RecordingDropout(), RecordingDropout()]
    states = [make_state(module, PLAIN, number=number) for number, module in enumerate(modules)]
    step(SINGLE_PROCESS, states, [batch_of()] * 2, StepOptions())
    assert not torch.equal(modules[0].masks[0], modules[1].masks[0])


@pytest.mark.parametrize(("method", "accumulate"), [(PLAIN, 2), (sam(LOSS, m=8), 1)], ids=["accumulation", "groups"])
def test_every_micro_batch_has_its_own_dropout_masks(method: Method, accumulate: int) -> None:
    module = RecordingDropout()
    steps(make_state(module, method), [batch_of()], gradient_accumulation_steps=accumulate)
    masks = {mask.numpy().tobytes() for mask in module.masks}
    assert all(len(mask) == 8 for mask in module.masks)
    assert len(masks) == 2


def test_a_step_does_not_use_the_global_generator() -> None:
    module, batch = RecordingDropout(), batch_of()
    before = torch.get_rng_state()
    steps(make_state(module, FAMILY["sam"]), [batch])
    assert torch.equal(torch.get_rng_state(), before)


# --- Pruning


@pytest.mark.parametrize("mode", ["loop", "vmap", "offload"])
@pytest.mark.parametrize("method", ["deep_ensemble", "sam", "asam", "gsam", "apart, climbing"])
def test_pruned_weights_stay_zero(method: str, mode: str, tmp_path: Path) -> None:
    row = recipe(method, model={"hidden_sizes": [6, 6], "sparsity": 0.5}, executor={"mode": mode})
    ends = trained(row, tmp_path / "run")
    data = build_data(row, GIVEN)
    for number, end in enumerate(ends):
        start = dict(build_member(row, data, number, GIVEN).named_parameters())
        zero = {key: value == 0 for key, value in start.items() if value.ndim > 1}
        assert [int(mask.sum()) for mask in zero.values()] == [0, 18, 0]  # half of 6 x 6; the first and last stay dense
        assert all(torch.equal(end[key] == 0, mask) for key, mask in zero.items())


def test_pruned_weights_stay_zero_with_an_optimizer_that_moves_them() -> None:
    module, mask = nn.Linear(3, 2, bias=False).double(), torch.arange(6).view(2, 3) % 2 == 0
    member = make_state(module, sam(LOSS, rho=0.5), masks={"weight": mask})
    member.optimizer.register_step_post_hook(lambda *_: module.weight.data.add_(1.0))
    batch = Batch(torch.randn(6, 3, dtype=torch.float64), torch.arange(6) % 2, torch.arange(6))
    steps(member, [batch])
    assert torch.equal(module.weight == 0, ~mask)


def test_pruned_weights_do_not_count_in_the_perturbation_norm() -> None:
    # |g| is the norm over unpruned weights: compare with a network that has only these.
    module = nn.Linear(3, 2, bias=False).double()
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]], dtype=torch.float64)
    with torch.no_grad():
        module.weight.mul_(mask)
    x = torch.randn(6, 3, dtype=torch.float64)
    batch = Batch(x, torch.arange(6) % 2, torch.arange(6))
    before = module.weight.detach().clone()

    def gradient(w: reference.Arrays) -> reference.Arrays:
        weight = torch.from_numpy(w["weight"]).requires_grad_()
        return {"weight": torch.autograd.grad(F.cross_entropy(x @ (weight * mask).T, batch.y), weight)[0].numpy()}

    truth = reference.perturbed_gradient(
        {"weight": before.numpy()}, gradient, lambda w, g: reference.sam_epsilon(w, g, 0.5)
    )
    steps(make_state(module, sam(LOSS, rho=0.5), lr=1.0, masks={"weight": mask.bool()}), [batch])
    torch.testing.assert_close(before - module.weight.detach(), torch.from_numpy(truth["weight"]))


# --- Data parallelism


def shared_step(perturbation: str, m: int | None, size: int) -> reference.Arrays:
    """Take one step of SAM in one of the processes that share a batch."""
    from plateaux.distributed.executors.mesh import mesh as make

    executor = make(data_parallel=2)
    own = corner(size=size)
    part = own.batch.take(executor.shard(size))
    member = make_state(own.module, sam(LOSS, rho=0.3, m=m, perturbation=perturbation))  # type: ignore[arg-type]
    step(executor, [member], [part], StepOptions(), share=len(part) / size)
    return to_numpy(own.module)


def after(own: Corner, direction: reference.Arrays) -> reference.Arrays:
    return reference.Descent(0.1).step(to_numpy(own.module), direction)


@pytest.mark.process
@pytest.mark.parametrize("size", [8, 7])
@pytest.mark.parametrize("kind", ["global", "per_worker", "groups"])
def test_data_parallel_perturbations_equal_the_reference(kind: str, size: int) -> None:
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
        truths[name] = after(own, reference.in_groups(to_numpy(own.module), gradients, shares, 0.3))
    perturbation, m = ("global", 2) if kind == "groups" else (kind, None)
    for result in mesh(2).run("tests.training.loop.test_step:shared_step", perturbation, m, size):
        gaps = {name: max(abs(result[key] - truth[key]).max() for key in result) for name, truth in truths.items()}
        assert gaps.pop(kind) < 1e-12
        assert min(gaps.values()) > 1e-6  # the kinds differ


def groups_with_synced_norms() -> str:
    from plateaux.distributed.executors.mesh import mesh as make

    executor = make(data_parallel=2)
    own = corner("conv_bn")
    executor.setup_module(own.module)
    try:
        step(
            executor,
            [make_state(own.module, sam(LOSS, m=2))],
            [own.batch.take(executor.shard(8))],
            StepOptions(),
            share=0.5,
        )
    except RecipeError as error:
        return str(error)
    return ""


@pytest.mark.process
def test_groups_with_synchronized_batchnorm_are_rejected() -> None:
    for message in mesh(2).run("tests.training.loop.test_step:groups_with_synced_norms"):
        assert "executor.sync_batchnorm = false" in message


def dropout_mask_of_this_process() -> Tensor:
    from plateaux.distributed.executors.mesh import mesh as make

    executor, module = make(data_parallel=2), RecordingDropout()
    step(executor, [make_state(module, FAMILY["sam"])], [batch_of(8)], StepOptions(), share=0.5)
    assert torch.equal(module.masks[0], module.masks[1])
    return module.masks[0]


@pytest.mark.process
def test_processes_that_share_a_batch_have_their_own_dropout_masks() -> None:
    first, second = mesh(2).run("tests.training.loop.test_step:dropout_mask_of_this_process")
    assert not torch.equal(first, second)


# --- Statistics and side effects of a step


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("method", [*FAMILY.values(), sam(LOSS, m=3)], ids=[*FAMILY, "groups"])
def test_statistics_cover_the_full_batch_at_the_weights_before_the_step(method: Method, accumulate: int) -> None:
    own = corner()
    outputs = own.module(own.batch.x).detach()
    (stats,) = steps(make_state(own.module, method), [own.batch], gradient_accumulation_steps=accumulate)
    assert stats.correct is not None
    assert int(stats.correct) == int((outputs.argmax(1) == own.batch.y).sum())
    torch.testing.assert_close(stats.loss.double(), F.cross_entropy(outputs, own.batch.y))


def test_the_loss_of_an_empty_batch_is_zero() -> None:
    own = corner()
    (stats,) = steps(make_state(own.module, FAMILY["sam"]), [own.batch.take(slice(0, 0))])
    assert float(stats.loss) == 0


def test_soft_labels_have_no_accuracy() -> None:
    own = corner()
    soft = Batch(own.batch.x, F.one_hot(own.batch.y, 3).double(), own.batch.index)
    (stats,) = steps(make_state(own.module, PLAIN), [soft])
    assert stats.correct is None


def test_a_step_clears_the_gradients() -> None:
    own = corner()
    member = make_state(own.module, FAMILY["gsam"])
    steps(member, [own.batch])
    assert all(param.grad is None for param in member.params.values())


def test_an_unused_weight_has_a_gradient_of_zero() -> None:
    class PartlyUsed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(2, 3), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)  # type: ignore[no-any-return]

    module = PartlyUsed()
    before = module.idle.weight.detach().clone()
    steps(make_state(module, FAMILY["sam"]), [batch_of()])
    assert torch.equal(module.idle.weight, before)


def test_a_scheduler_with_interval_step_advances_with_every_step() -> None:
    own = corner()
    member = make_state(own.module, PLAIN, lr=1.0)
    member.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(member.optimizer, 0.5)
    member.every_step = True
    steps(member, [own.batch] * 3)
    assert member.optimizer.param_groups[0]["lr"] == 0.125


def test_an_update_receives_learning_rate_and_batch_size() -> None:
    contexts: list[Any] = []

    def update(params: TensorTree, context: Any):  # type: ignore[no-untyped-def]
        contexts.append(context)
        return (yield GradRequest())

    own = corner()
    member = make_state(own.module, Method(Objective(LOSS), update), lr=1.0)
    member.optimizer.param_groups[0]["lr"] = 0.25
    steps(member, [own.batch])
    assert (contexts[0].size, contexts[0].lr, contexts[0].peak_lr) == (8, 0.25, 1.0)


def test_an_average_weights_a_tree_by_the_share_of_the_process_and_is_no_gradient_request() -> None:
    """Members of a joint loss request the same number of gradients, but any number of averages."""
    answers: list[TensorTree] = []

    def update(averages: int) -> Update:
        def update(
            params: TensorTree, context: StepContext
        ) -> Generator[GradRequest | Average, TensorTree, TensorTree]:
            gradient = yield GradRequest()
            for _ in range(averages):
                answers.append((yield Average({"value": torch.tensor(4.0)})))
            return gradient

        return update

    own = corner()
    states = [
        make_state(corner().module, Method(Objective(LOSS, gather="members"), update(i)), number=i) for i in (0, 1)
    ]
    stats = step(SINGLE_PROCESS, states, [own.batch] * 2, StepOptions(), share=0.25)
    assert answers == [{"value": torch.tensor(1.0)}]
    loss = F.cross_entropy(own.module(own.batch.x), own.batch.y).detach()
    assert float(stats[0].loss) == float(stats[1].loss) == pytest.approx(float(loss))


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", FAMILY)
def test_a_step_on_cuda_equals_the_cpu(name: str, precision: str) -> None:
    device = torch.device("cuda")
    own = corner("conv_bn", dtype=torch.float32)
    own.module.to(device)
    batch = Batch(own.batch.x.to(device), own.batch.y.to(device), own.batch.index.to(device))
    member: TrainState = make_state(own.module, FAMILY[name], momentum=0.9)
    member.scaler = GradScaler() if precision == "fp16" else None
    steps(member, [batch] * 3, precision=precision, device=device)
    truth = state_after(name, "conv_bn", 3)
    assert all(float((value.cpu() - truth[key]).abs().max()) < 0.05 for key, value in own.module.state_dict().items())
