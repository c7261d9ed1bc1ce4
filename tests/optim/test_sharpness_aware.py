"""SharpnessAware in a custom loop equals the engine bit for bit, and no mistake turns it into plain descent."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import corner
from torch import Tensor, nn

from plateaux.core.errors import TrainingLoopError
from plateaux.core.types import Batch, derive_seed
from plateaux.methods.sam import asam, sam
from plateaux.optim import SharpnessAware
from plateaux.optim.losses import cross_entropy
from tests.optim.custom_loops import (
    OPTIMIZERS,
    batches_of,
    engine,
    plain_step,
    same_bits,
    same_start,
    weights_and_buffers,
    wrapped,
)

LOSS = cross_entropy()
F32 = torch.float32


def sam_weights(own: Any, **options: Any) -> Any:
    return engine(own, sam(LOSS, rho=0.3), batches_of(own), **options)


# --- Equal to the engine


@pytest.mark.parametrize("net", ["mlp", "conv_bn", "dropout"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_custom_loop_equals_the_engine_bit_for_bit(name: str, net: str, adaptive: bool) -> None:
    own, module = same_start(net, dtype=F32)
    optimizer = wrapped(module, name, adaptive=adaptive)
    for batch in batches_of(own):
        plain_step(optimizer, module, batch)
    method = asam(LOSS, rho=0.3) if adaptive else sam(LOSS, rho=0.3)
    assert same_bits(weights_and_buffers(module), engine(own, method, batches_of(own), name=name))


@pytest.mark.parametrize("net", ["mlp", "conv_bn", "dropout"])
def test_a_closure_equals_the_engine_bit_for_bit(net: str) -> None:
    own, module = same_start(net, dtype=F32)
    optimizer = wrapped(module, "momentum")
    losses = []
    for batch in batches_of(own):

        def closure(batch: Batch = batch) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(module(batch.x), batch.y)
            loss.backward()
            return loss

        torch.manual_seed(derive_seed(batch.seed, "forward", 0))
        losses.append(optimizer.step(closure))
    assert same_bits(weights_and_buffers(module), sam_weights(own, name="momentum"))
    assert losses[0] > losses[-1]


def test_rho_zero_is_plain_descent() -> None:
    own, module = same_start("conv_bn", dtype=F32)
    optimizer = wrapped(module, "momentum", rho=0)
    for batch in batches_of(own):
        plain_step(optimizer, module, batch)
    assert same_bits(weights_and_buffers(module), engine(own, sam(LOSS, rho=0), batches_of(own), name="momentum"))


def test_pitfall_clipping_applies_to_the_second_gradient_as_in_the_engine() -> None:
    own, module = same_start(dtype=F32)
    optimizer = wrapped(module)
    for batch in batches_of(own):
        F.cross_entropy(module(batch.x), batch.y).backward()
        with optimizer.perturbed():
            F.cross_entropy(module(batch.x), batch.y).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    assert same_bits(weights_and_buffers(module), sam_weights(own, max_grad_norm=0.1))
    assert not same_bits(weights_and_buffers(module), sam_weights(own))


def test_pitfall_clipping_the_first_gradient_by_its_norm_does_not_change_the_perturbation() -> None:
    at = []
    for limit in (1e9, 0.01):
        own, module = same_start()
        optimizer = wrapped(module)
        F.cross_entropy(module(own.batch.x), own.batch.y).backward()
        nn.utils.clip_grad_norm_(module.parameters(), limit)
        with optimizer.perturbed():
            at.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
            F.cross_entropy(module(own.batch.x), own.batch.y).backward()
    torch.testing.assert_close(at[0], at[1], rtol=0, atol=1e-9)


def test_weights_in_the_block_are_perturbed_by_rho() -> None:
    own, module = same_start()
    optimizer = wrapped(module, rho=0.25)
    before = torch.cat([p.detach().flatten() for p in module.parameters()])
    F.cross_entropy(module(own.batch.x), own.batch.y).backward()
    slope = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    with optimizer.perturbed():
        moved = torch.cat([p.detach().flatten() for p in module.parameters()]) - before
        F.cross_entropy(module(own.batch.x), own.batch.y).backward()
    torch.testing.assert_close(moved, 0.25 * slope / slope.norm())


# --- Pitfalls of other libraries, each with a test of its name


@pytest.mark.parametrize("net", ["mlp", "conv_bn"])
def test_pitfall_gradient_accumulation_one_perturbation_equals_gradient_accumulation_steps(net: str) -> None:
    own, module = same_start(net, dtype=F32)
    optimizer = wrapped(module, "momentum")
    for batch in batches_of(own):
        parts = [batch.take(slice(0, 4)), batch.take(slice(4, 8))]
        optimizer.zero_grad()
        for part in parts:
            (F.cross_entropy(module(part.x), part.y) / 2).backward()
        with optimizer.perturbed():
            for part in parts:
                (F.cross_entropy(module(part.x), part.y) / 2).backward()
        optimizer.step()
    expected = sam_weights(own, name="momentum", gradient_accumulation_steps=2)
    assert same_bits(weights_and_buffers(module), expected)


@pytest.mark.parametrize("net", ["mlp", "conv_bn"])
def test_pitfall_gradient_accumulation_a_perturbation_per_micro_batch_equals_m_sharpness(net: str) -> None:
    own, module = same_start(net, dtype=F32)
    optimizer = wrapped(module, "momentum")
    for batch in batches_of(own):
        optimizer.zero_grad()
        for part in (batch.take(slice(0, 4)), batch.take(slice(4, 8))):
            (F.cross_entropy(module(part.x), part.y) / 2).backward()
            with optimizer.perturbed():
                (F.cross_entropy(module(part.x), part.y) / 2).backward()
        optimizer.step()
    expected = engine(own, sam(LOSS, rho=0.3, m=4), batches_of(own), name="momentum")
    assert same_bits(weights_and_buffers(module), expected)
    assert not same_bits(expected, sam_weights(own, name="momentum"))


def test_pitfall_gradient_accumulation_with_zero_grad_in_a_closure() -> None:
    """The closure discards its own first gradient, and not those of earlier micro-batches."""
    gradients = []
    for clears in (False, True):
        own, module = same_start()
        optimizer = wrapped(module)
        first, second = own.batch.take(slice(0, 4)), own.batch.take(slice(4, 8))
        F.cross_entropy(module(first.x), first.y).backward()
        with optimizer.perturbed():
            F.cross_entropy(module(first.x), first.y).backward()
        F.cross_entropy(module(second.x), second.y).backward()
        with optimizer.perturbed():
            if clears:
                F.cross_entropy(module(first.x), first.y).backward()
                optimizer.zero_grad()
            F.cross_entropy(module(second.x), second.y).backward()
        gradients.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
    assert same_bits(*gradients)


def test_pitfall_gradient_accumulation_replays_the_noise_of_every_micro_batch() -> None:
    own, module = same_start("dropout")
    states: list[Tensor] = []
    module[2].register_forward_pre_hook(lambda *_: states.append(torch.get_rng_state()))
    optimizer = wrapped(module)
    parts = (own.batch.take(slice(0, 4)), own.batch.take(slice(4, 8)))
    for part in parts:
        torch.rand(3)  # for example augmentation between the forward passes
        F.cross_entropy(module(part.x), part.y).backward()
    after = torch.get_rng_state()
    with optimizer.perturbed():
        for part in parts:
            F.cross_entropy(module(part.x), part.y).backward()
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), after)  # as if there were no second pass
    assert torch.equal(states[0], states[2])
    assert torch.equal(states[1], states[3])
    assert not torch.equal(states[0], states[1])


def test_pitfall_dropout_noise_of_discarded_forward_passes_is_not_replayed() -> None:
    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.drawn: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.drawn.append(torch.rand(3))
            return x * self.weight * self.drawn[-1]

    net = Noise()
    optimizer = SharpnessAware(torch.optim.SGD(net.parameters(), lr=0.1), rho=0.1, model=net)
    x = torch.ones(3)
    net(x)  # never differentiated
    with torch.no_grad():
        net(x)
    net(x).sum().backward()
    optimizer.zero_grad()  # for example a batch with a NaN loss
    loss = net(x).sum()
    optimizer.zero_grad()  # between forward and backward
    loss.backward()
    with optimizer.perturbed():
        net(x).sum().backward()
    optimizer.step()
    assert torch.equal(net.drawn[3], net.drawn[4])
    assert not torch.equal(net.drawn[2], net.drawn[4])


def test_pitfall_batchnorm_statistics_are_updated_once() -> None:
    own, module = same_start("conv_bn", dtype=F32)
    plain = copy.deepcopy(module)
    plain(own.batch.x)
    plain_step(wrapped(module), module, own.batch)
    assert same_bits(dict(module.named_buffers()), dict(plain.named_buffers()))
    assert len(list(module.buffers())) == 6


class Counting(nn.Linear):
    """Assigns new tensors to its buffers, as some layers do instead of writing in place."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.calls: Tensor
        self.average: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("average", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        self.calls = self.calls + 1
        self.average = 0.9 * self.average + 0.1 * output.detach().mean(0)
        return output


def test_pitfall_buffers_that_are_assigned_are_updated_once() -> None:
    torch.manual_seed(0)
    module, x = Counting(), torch.randn(4, 3)
    optimizer = SharpnessAware(torch.optim.SGD(module.parameters(), lr=0.1), rho=0.5, model=module)
    module(x).square().sum().backward()
    average = module.average
    with optimizer.perturbed():
        module(x).square().sum().backward()
    assert module.calls == 1
    assert module.average is average
    optimizer.step()
    module(x)
    assert module.calls == 2


def test_pitfall_momentum_lost_on_resume() -> None:
    own, module = same_start(dtype=F32)
    optimizer = wrapped(module, "momentum")
    batches = batches_of(own, 6)
    for batch in batches[:3]:
        plain_step(optimizer, module, batch)
    file = io.BytesIO()
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = corner(dtype=F32, seed=9).module
    other = wrapped(resumed, "momentum")
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    for batch in batches[3:]:
        plain_step(optimizer, module, batch)
        plain_step(other, resumed, batch)
    assert same_bits(weights_and_buffers(resumed), weights_and_buffers(module))
    # The state is that of the wrapped optimizer, which therefore resumes without SharpnessAware, too.
    inner = OPTIMIZERS["momentum"](corner(dtype=F32).module.parameters())
    inner.load_state_dict(saved["optimizer"])
    assert len(inner.state) == len(list(module.parameters()))


def test_pitfall_grad_scaler_equals_training_without_a_scaler() -> None:
    own, module = same_start(dtype=F32)
    optimizer, scaler = wrapped(module, "momentum"), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for batch in batches_of(own):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(module(batch.x), batch.y)).backward()
        with optimizer.perturbed():
            scaler.scale(F.cross_entropy(module(batch.x), batch.y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    assert same_bits(weights_and_buffers(module), sam_weights(own, name="momentum", max_grad_norm=0.5))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("second_is_finite", [True, False])
def test_pitfall_grad_scaler_sees_an_overflow_of_the_first_gradient(bad: float, second_is_finite: bool) -> None:
    torch.manual_seed(0)
    net, x, y = nn.Linear(3, 2), torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    optimizer, scaler = wrapped(net, "momentum"), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = weights_and_buffers(net)
    scaler.scale(F.cross_entropy(net(x), y)).backward()
    net.weight.grad[0, 0] = bad  # type: ignore[index]
    with optimizer.perturbed():
        outputs = net(x).nan_to_num(0.5) if second_is_finite else net(x)  # the weights are NaN
        scaler.scale(F.cross_entropy(outputs, y)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert same_bits(weights_and_buffers(net), before)
    assert scaler.get_scale() == 2.0**9
    optimizer.zero_grad()
    F.cross_entropy(net(x), y).backward()
    with pytest.raises(TrainingLoopError, match="without a gradient at perturbed weights"):
        optimizer.step()  # the gradient of the skipped step does not count


def test_pitfall_autocast_caches_weights_from_before_the_perturbation() -> None:
    gradients = []
    for one_context in (True, False):
        own, module = same_start(dtype=F32)
        optimizer = wrapped(module, rho=2.0)
        with torch.autocast("cpu", torch.bfloat16) if one_context else nullcontext():
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(module(own.batch.x), own.batch.y)
            loss.backward()
            with optimizer.perturbed():
                with torch.autocast("cpu", torch.bfloat16):
                    loss = F.cross_entropy(module(own.batch.x), own.batch.y)
                loss.backward()
        gradients.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
    assert same_bits(*gradients)


def test_pitfall_step_with_a_closure_that_does_nothing_uses_the_perturbed_gradient() -> None:
    own, module = same_start(dtype=F32)
    optimizer = wrapped(module)
    calls = []
    for batch in batches_of(own):
        F.cross_entropy(module(batch.x), batch.y).backward()
        with optimizer.perturbed():
            F.cross_entropy(module(batch.x), batch.y).backward()
        optimizer.step(lambda: calls.append(1))
        optimizer.zero_grad()
    assert len(calls) == 4
    assert same_bits(weights_and_buffers(module), sam_weights(own))


def test_pitfall_random_numbers_of_a_closure_are_equal_in_both_calls() -> None:
    own, module = same_start()
    optimizer = wrapped(module)
    drawn = []

    def closure() -> None:
        drawn.append(torch.rand(2))  # for example mixup
        F.cross_entropy(module(own.batch.x), own.batch.y).backward()

    for _ in range(2):
        optimizer.step(closure)
        optimizer.zero_grad()
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[2], drawn[3])
    assert not torch.equal(drawn[0], drawn[2])


def test_pitfall_a_closure_after_accumulation_is_rejected() -> None:
    own, module = same_start()
    optimizer = wrapped(module)

    def closure() -> Tensor:
        loss = F.cross_entropy(module(own.batch.x), own.batch.y)
        loss.backward()
        return loss

    closure()
    with pytest.raises(TrainingLoopError, match=r"gradient accumulation.*does not compute again"):
        optimizer.step(closure)


def test_pitfall_learning_rate_schedules_work_on_the_wrapper() -> None:
    own, module = same_start(dtype=F32)
    optimizer = wrapped(module, "momentum")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for batch in batches_of(own):
            plain_step(optimizer, module, batch)
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == optimizer.optimizer.param_groups[0]["lr"] == 0.025


@pytest.mark.slow
def test_pitfall_torch_compile_with_the_compiled_or_the_original_model() -> None:
    own = corner(dtype=F32)
    results = []
    for passed in ("original", "compiled", "eager"):
        module = copy.deepcopy(own.module)
        compiled = torch.compile(module, backend="aot_eager") if passed != "eager" else module
        target: Any = module if passed == "original" else compiled
        optimizer = SharpnessAware(OPTIMIZERS["momentum"](module.parameters()), rho=0.3, model=target)
        for batch in batches_of(own):
            plain_step(optimizer, compiled, batch)  # type: ignore[arg-type]
        results.append(weights_and_buffers(module))
    for result in results[:2]:
        for name, value in result.items():
            torch.testing.assert_close(value, results[2][name], rtol=0, atol=1e-6)
    assert not same_bits(results[0], sam_weights(own, name="sgd"))


# --- Never silent plain descent


def test_step_without_a_second_gradient_is_an_error() -> None:
    own, module = same_start()
    optimizer = wrapped(module)
    before = weights_and_buffers(module)
    F.cross_entropy(module(own.batch.x), own.batch.y).backward()
    with pytest.raises(TrainingLoopError, match="without a gradient at perturbed weights"):
        optimizer.step()
    with pytest.raises(TrainingLoopError, match="without a gradient at perturbed weights"):
        optimizer.step(lambda: None)
    assert same_bits(weights_and_buffers(module), before)


def test_a_backward_pass_after_the_block_makes_step_an_error() -> None:
    own, module = same_start()
    optimizer = wrapped(module)
    F.cross_entropy(module(own.batch.x), own.batch.y).backward()
    with optimizer.perturbed():
        F.cross_entropy(module(own.batch.x), own.batch.y).backward()
    F.cross_entropy(module(own.batch.x), own.batch.y).backward()
    with pytest.raises(TrainingLoopError, match="without a gradient at perturbed weights"):
        optimizer.step()


def test_step_after_zero_grad_is_an_error() -> None:
    own, module = same_start()
    optimizer = wrapped(module)
    F.cross_entropy(module(own.batch.x), own.batch.y).backward()
    with optimizer.perturbed():
        F.cross_entropy(module(own.batch.x), own.batch.y).backward()
    optimizer.zero_grad()
    with pytest.raises(TrainingLoopError, match="without a gradient at perturbed weights"):
        optimizer.step()


def test_two_steps_with_one_gradient_are_an_error() -> None:
    own, module = same_start()
    optimizer = wrapped(module)
    plain_step(optimizer, module, own.batch)
    with pytest.raises(TrainingLoopError, match="without a gradient at perturbed weights"):
        optimizer.step()


def test_a_forward_pass_for_logging_between_block_and_step_changes_nothing() -> None:
    own, module = same_start(dtype=F32)
    optimizer = wrapped(module)
    for batch in batches_of(own):
        optimizer.zero_grad()
        F.cross_entropy(module(batch.x), batch.y).backward()
        with optimizer.perturbed():
            F.cross_entropy(module(batch.x), batch.y).backward()
        module(batch.x)
        optimizer.step()
    assert same_bits(weights_and_buffers(module), sam_weights(own))


def test_a_block_without_a_gradient_is_an_error() -> None:
    own, module = same_start()
    optimizer = wrapped(module)
    plain_step(optimizer, module, own.batch)
    with pytest.raises(TrainingLoopError, match="no gradient of a forward pass"), optimizer.perturbed():
        pass
    F.cross_entropy(module(own.batch.x), own.batch.y).backward()
    with pytest.raises(TrainingLoopError, match="No gradient was computed"), optimizer.perturbed():
        pass


def test_a_model_that_the_loop_does_not_call_is_an_error() -> None:
    own, module = same_start()
    optimizer = wrapped(module)

    def closure() -> None:
        F.cross_entropy(module.forward(own.batch.x), own.batch.y).backward()

    with pytest.raises(TrainingLoopError, match="the module that you call"):
        optimizer.step(closure)
    with pytest.raises(TrainingLoopError, match="the module that you call"), optimizer.perturbed():
        pass


def test_parameters_outside_of_the_model_are_an_error() -> None:
    module = corner().module
    params = [*module.parameters(), nn.Parameter(torch.zeros(2))]
    with pytest.raises(TrainingLoopError, match="1 of 5 parameters of the optimizer are not parameters"):
        SharpnessAware(torch.optim.SGD(params, lr=0.1), rho=0.1, model=module)


@pytest.mark.parametrize("rho", [-0.1, float("nan"), float("inf")])
def test_an_invalid_radius_is_an_error(rho: float) -> None:
    with pytest.raises(TrainingLoopError, match="not a radius"):
        wrapped(corner().module, rho=rho)


# --- Weights are restored exactly


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("closure", [False, True])
def test_pitfall_weights_stay_perturbed_after_an_exception(error: type[BaseException], closure: bool) -> None:
    own, module = same_start("conv_bn", dtype=F32)
    optimizer = wrapped(module, "momentum", rho=0.7)
    plain_step(optimizer, module, own.batch)
    rng = torch.get_rng_state()
    counted: list[Any] = []

    def compute() -> None:
        optimizer.zero_grad()
        F.cross_entropy(module(own.batch.x), own.batch.y).backward()
        counted.append(weights_and_buffers(module))
        if len(counted) == 2:
            raise error

    def step_without_closure() -> None:
        compute()
        with optimizer.perturbed():
            compute()

    with pytest.raises(error):
        optimizer.step(compute) if closure else step_without_closure()
    assert same_bits(weights_and_buffers(module), counted[0])
    assert not same_bits(counted[1], counted[0])
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(p.grad is None for p in module.parameters())
    with pytest.raises(TrainingLoopError, match="without a gradient at perturbed weights"):
        optimizer.step()
    plain_step(optimizer, module, own.batch)  # training can continue


# --- The model and the optimizer as objects


def test_param_groups_and_state_are_those_of_the_wrapped_optimizer() -> None:
    _, module = same_start()
    inner = torch.optim.SGD(module[1].parameters(), lr=0.1, momentum=0.9)
    optimizer = SharpnessAware(inner, rho=0.1, model=module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    optimizer.add_param_group({"params": module[3].parameters(), "lr": 0.5})
    assert [group["lr"] for group in inner.param_groups] == [0.1, 0.5]
    inner.load_state_dict(inner.state_dict())  # replaces both
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state


def test_frozen_and_unused_parameters_do_not_change() -> None:
    own, module = same_start()
    module[1].requires_grad_(False)
    optimizer = wrapped(module, "momentum")
    before = weights_and_buffers(module)
    plain_step(optimizer, module, own.batch)
    changed = [name for name, value in module.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["3.weight", "3.bias"]


def test_copies_of_the_model_are_not_observed_and_models_can_be_pickled() -> None:
    own, module = same_start()
    optimizer = wrapped(module)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        F.cross_entropy(other(own.batch.x), own.batch.y).backward()
    with pytest.raises(TrainingLoopError, match="no gradient of a forward pass"), optimizer.perturbed():
        pass


def test_the_hooks_of_the_model_are_removed_with_the_optimizer() -> None:
    own, module = same_start()
    optimizer = wrapped(module)
    plain_step(optimizer, module, own.batch)
    assert len(module._forward_pre_hooks) == len(module._forward_hooks) == 1
    del optimizer
    gc.collect()
    assert len(module._forward_pre_hooks) == len(module._forward_hooks) == 0


def test_outputs_can_be_nested_or_of_an_unknown_type() -> None:
    class Opaque:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    class Nested(nn.Module):
        def __init__(self, kind: Any) -> None:
            super().__init__()
            self.layer, self.kind = nn.Linear(2, 2), kind

        def forward(self, x: Tensor) -> Any:
            return self.kind(self.layer(x))

    results = []
    kinds = (lambda t: t, lambda t: {"logits": t}, Opaque)
    for kind, read in zip(kinds, (lambda o: o, lambda o: o["logits"], lambda o: o.logits), strict=True):
        torch.manual_seed(0)
        net = Nested(kind)
        optimizer = SharpnessAware(torch.optim.SGD(net.parameters(), lr=0.1), rho=0.1, model=net)
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(2):
                read(net(torch.ones(3, 2))).square().mean().backward()
                with optimizer.perturbed():
                    read(net(torch.ones(3, 2))).square().mean().backward()
            optimizer.step()
        results.append(weights_and_buffers(net))
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])
