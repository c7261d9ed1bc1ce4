"""SharpBalance in a custom loop: `perturbed(mask=...)` and the scores of samples."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Corner, corner, make_state, steps
from torch import Tensor, nn

from plateaux.core.errors import RecipeError, TrainingLoopError
from plateaux.core.types import Batch
from plateaux.methods.sharpbalance import sharpbalance
from plateaux.optim import SampleSharpness, SharpnessAware
from plateaux.optim.losses import cross_entropy
from tests.optim.custom_loops import (
    OPTIMIZERS,
    batches_of,
    plain_step,
    same_bits,
    same_start,
    weights_and_buffers,
    wrapped,
)

F32 = torch.float32
MASKS = {
    "some": torch.tensor([True, False, True, False, False, True, False, False]),
    "one": torch.arange(8) == 3,
    "all": torch.ones(8, dtype=torch.bool),
    "none": torch.zeros(8, dtype=torch.bool),
}


def engine_weights(own: Corner, mask: Tensor, variant: str = "sam") -> Any:
    module = copy.deepcopy(own.module)
    method = sharpbalance(cross_entropy(), epochs=2, rho=0.3, sam_variant=variant)  # type: ignore[arg-type]
    state = make_state(module, method)
    state.optimizer, state.sam_set = OPTIMIZERS["momentum"](module.parameters()), lambda index: mask[index]
    steps(state, batches_of(own))
    return weights_and_buffers(module)


HELD: list[Any] = []  # the last iterator over parts: it must not depend on garbage collection


def mixed_step(optimizer: SharpnessAware, module: nn.Module, batch: Batch, mask: Tensor) -> None:
    compute_parts(optimizer, module, batch, mask)
    optimizer.step()


def compute_parts(
    optimizer: SharpnessAware,
    module: nn.Module,
    batch: Batch,
    mask: Tensor,
    *,
    stop: int = 9,
    error: type[BaseException] | None = None,
) -> None:
    """Compute at most `stop` parts of a batch; then raise an error, if given."""
    assert isinstance(batch.x, Tensor)
    with optimizer.perturbed(mask=mask) as parts:
        HELD[:] = [parts]
        for number, rows in enumerate(parts, start=1):
            (F.cross_entropy(module(batch.x[rows]), batch.y[rows], reduction="sum") / len(batch)).backward()
            if number == stop:
                if error is not None:
                    raise error
                break


@pytest.mark.parametrize("net", ["mlp", "conv_bn"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_mask_equals_the_sharpbalance_update_of_the_engine_bit_for_bit(name: str, net: str, adaptive: bool) -> None:
    if name == "one" and net == "conv_bn":
        name = "some"
    own, module = same_start(net, dtype=F32)
    optimizer = wrapped(module, "momentum", adaptive=adaptive)
    for batch in batches_of(own):
        mixed_step(optimizer, module, batch, MASKS[name][batch.index])
    expected = engine_weights(own, MASKS[name], "asam" if adaptive else "sam")
    assert same_bits(weights_and_buffers(module), expected)


def test_different_masks_give_different_weights() -> None:
    own = corner(dtype=F32)
    results = [engine_weights(own, mask) for mask in MASKS.values()]
    assert not any(same_bits(a, b) for i, a in enumerate(results) for b in results[:i])


@pytest.mark.parametrize("name", ["some", "all", "none"])
def test_masks_of_micro_batches_accumulate(name: str) -> None:
    own, module = same_start()
    halves = [own.batch.take(slice(0, 4)), own.batch.take(slice(4, 8))]
    gradients = []
    for parts_of_batch in ([halves[0]], [halves[1]], halves):
        optimizer = wrapped(module)
        optimizer.zero_grad()
        for part in parts_of_batch:
            with optimizer.perturbed(mask=MASKS[name][part.index]) as parts:
                for rows in parts:
                    F.cross_entropy(module(part.x[rows]), part.y[rows], reduction="sum").backward()  # type: ignore[index]
        gradients.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
    for name in gradients[2]:
        torch.testing.assert_close(gradients[2][name], gradients[0][name] + gradients[1][name])


@pytest.mark.parametrize("score", ["gradient_norm", "last_layer", "loss"])
def test_scores_accept_class_weights_in_the_precision_of_the_network(score: Any) -> None:
    torch.manual_seed(0)
    net, x, y, weight = nn.Linear(3, 2), torch.randn(8, 3), torch.arange(8) % 2, torch.tensor([1.0, 3.0])
    found, wide = (
        SampleSharpness(net, nn.CrossEntropyLoss(weight=w), score=score)(x, y) for w in (weight, weight.double())
    )
    assert torch.equal(found, wide)
    with pytest.raises(RecipeError, match=r"float64.* Convert its tensors .* weight\.to\(outputs\.dtype\)"):
        SampleSharpness(net, partial(F.cross_entropy, weight=weight, reduction="none"), score=score)(x, y)


def test_dropout_noise_of_the_masked_samples_is_equal_in_both_passes() -> None:
    own, module = same_start("dropout")
    kept: list[Tensor] = []
    module[2].register_forward_pre_hook(lambda *_: kept.append(torch.get_rng_state()))
    mixed_step(wrapped(module), module, own.batch, MASKS["some"])
    assert len(kept) == 3
    assert torch.equal(kept[1], kept[2])
    assert not torch.equal(kept[0], kept[1])


def test_an_overflow_at_the_weights_reaches_the_scaler() -> None:
    torch.manual_seed(0)
    net, x, y = nn.Linear(3, 2), torch.randn(8, 3), torch.arange(8) % 2
    optimizer, scaler = wrapped(net), torch.amp.GradScaler("cpu", init_scale=4.0)
    before = weights_and_buffers(net)
    with optimizer.perturbed(mask=MASKS["some"]) as parts:
        for number, rows in enumerate(parts, start=1):
            scaler.scale(F.cross_entropy(net(x[rows]).nan_to_num(0.5), y[rows])).backward()
            if number == 2:
                net.weight.grad.fill_(float("inf"))  # type: ignore[union-attr]
    scaler.step(optimizer)
    scaler.update()
    assert same_bits(weights_and_buffers(net), before)
    assert scaler.get_scale() == 2.0


def test_an_incomplete_loop_over_the_parts_is_an_error_and_restores_the_weights() -> None:
    own, module = same_start("conv_bn", dtype=F32)
    optimizer = wrapped(module)
    for stop in (1, 2, 3):
        # BatchNorm statistics change in the parts at the original weights, so only weights are compared.
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        with pytest.raises(TrainingLoopError, match="ended before all parts"):
            compute_parts(optimizer, module, own.batch, MASKS["some"], stop=stop)
        assert same_bits({name: p.detach() for name, p in module.named_parameters()}, before)
        with pytest.raises(TrainingLoopError, match="without a gradient at perturbed weights"):
            optimizer.step()


def test_weights_are_restored_after_an_exception_in_a_part() -> None:
    own, module = same_start(dtype=F32)
    optimizer = wrapped(module)
    before = weights_and_buffers(module)
    with pytest.raises(KeyboardInterrupt):
        compute_parts(optimizer, module, own.batch, MASKS["some"], stop=3, error=KeyboardInterrupt)
    assert same_bits(weights_and_buffers(module), before)
    plain_step(optimizer, module, own.batch)


@pytest.mark.parametrize("mask", [torch.ones(8), torch.ones(2, 4, dtype=torch.bool)])
def test_a_mask_must_have_one_boolean_per_sample(mask: Tensor) -> None:
    with pytest.raises(TrainingLoopError, match="one boolean per sample"):
        wrapped(corner().module).perturbed(mask=mask)


def test_gradients_from_before_the_block_are_an_error() -> None:
    own, module = same_start()
    optimizer = wrapped(module)
    F.cross_entropy(module(own.batch.x), own.batch.y).backward()
    with (
        pytest.raises(TrainingLoopError, match="gradients of an earlier backward pass"),
        optimizer.perturbed(mask=MASKS["some"]),
    ):
        pass


# --- Scores


def slow_scores(module: nn.Module, batch: Batch, loss: Any) -> Tensor:
    """Return the squared gradient norm of every sample, from one backward pass per sample."""
    module = copy.deepcopy(module).eval()
    norms = []
    for i in range(len(batch)):
        one = batch.take(slice(i, i + 1))
        value = loss(module(one.x), one.y).sum()
        norms.append(sum(g.square().sum() for g in torch.autograd.grad(value, list(module.parameters()))))
    return torch.stack(norms).detach()  # type: ignore[arg-type]


@pytest.mark.parametrize("net", ["mlp", "conv_bn", "dropout"])
@pytest.mark.parametrize(
    "loss", [None, nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.2), F.cross_entropy]
)
def test_scores_equal_one_backward_pass_per_sample(net: str, loss: Any) -> None:
    own = corner(net)
    scores = SampleSharpness(own.module, loss)(own.batch.x, own.batch.y)
    torch.testing.assert_close(scores, slow_scores(own.module, own.batch, loss or F.cross_entropy))


def test_scores_of_a_loss_of_your_own() -> None:
    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return (logits - F.one_hot(y, logits.shape[1])).square().sum(1)

    own = corner("conv")
    scores = SampleSharpness(own.module, loss)(own.batch.x, own.batch.y)
    torch.testing.assert_close(scores, slow_scores(own.module, own.batch, loss))
    by_loss = SampleSharpness(own.module, loss, score="loss")(own.batch.x, own.batch.y)
    torch.testing.assert_close(by_loss, loss(own.module(own.batch.x), own.batch.y).detach())
    with pytest.raises(TrainingLoopError, match="reduction='none'"):
        SampleSharpness(own.module, nn.MultiMarginLoss())(own.batch.x, own.batch.y)
    with pytest.raises(TrainingLoopError, match="did you mean 'loss'"):
        SampleSharpness(own.module, score="los")  # type: ignore[arg-type]


class FocalLoss(nn.CrossEntropyLoss):
    """The focal loss of gamma 2: it inherits from the cross entropy, and computes something else."""

    def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs, y, reduction="none")
        losses = (1 - (-losses).exp()).square() * losses
        return losses if self.reduction == "none" else losses.mean()


def test_a_loss_that_inherits_from_cross_entropy_is_scored_as_itself() -> None:
    torch.manual_seed(0)
    net, x, y = nn.Linear(3, 2), torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    expected = FocalLoss(reduction="none")(net(x), y).detach().double()
    torch.testing.assert_close(SampleSharpness(net, FocalLoss(), score="loss")(x, y), expected)


def test_scoring_does_not_disturb_training() -> None:
    own, module = same_start("conv_bn", dtype=F32)
    module[0].eval()  # mixed modes are restored
    modes = [layer.training for layer in module.modules()]
    other = copy.deepcopy(module)
    optimizer, reference = wrapped(module, "momentum"), wrapped(other, "momentum")
    sharpness = SampleSharpness(module)
    for batch in batches_of(own):
        sharpness(batch.x, batch.y)
        F.cross_entropy(module(batch.x), batch.y).backward()
        sharpness(batch.x, batch.y)
        with optimizer.perturbed():
            F.cross_entropy(module(batch.x), batch.y).backward()
        sharpness(batch.x, batch.y)
        optimizer.step()
        optimizer.zero_grad()
        plain_step(reference, other, batch)
    assert [layer.training for layer in module.modules()] == modes
    assert same_bits(weights_and_buffers(module), weights_and_buffers(other))
    torch.testing.assert_close(sharpness(own.batch.x, own.batch.y), SampleSharpness(other)(own.batch.x, own.batch.y))
