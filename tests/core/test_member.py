"""MemberModule, output functions, and default objectives."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from cases import corner
from torch import Tensor, nn

from plateaux.core.member import MemberModule
from plateaux.core.method import GradRequest, Objective, StepContext, plain_gradient
from plateaux.core.outputs import logits, supports_vmap
from plateaux.core.tensor_tree import is_finite
from plateaux.core.types import Batch
from plateaux.optim.losses import cross_entropy
from plateaux.optim.sample_scores import features


def test_a_member_calls_its_network() -> None:
    own = corner()
    assert torch.equal(logits(MemberModule(own.module), own.batch), own.module(own.batch.x))


def test_params_replace_the_weights_of_a_member() -> None:
    own, other = corner(), corner(seed=1)
    before = {name: p.clone() for name, p in own.module.named_parameters()}
    stand_in = dict(other.module.named_parameters())
    assert torch.equal(MemberModule(own.module)(own.batch.x, stand_in), other.module(own.batch.x))
    assert torch.equal(MemberModule(own.module, replaced=stand_in)(own.batch.x), other.module(own.batch.x))
    assert all(torch.equal(p, before[name]) for name, p in own.module.named_parameters())


def test_gradients_reach_replaced_weights() -> None:
    own = corner()
    stand_in = {name: p.detach().clone().requires_grad_() for name, p in own.module.named_parameters()}
    MemberModule(own.module)(own.batch.x, stand_in).sum().backward()
    assert all(p.grad is not None for p in stand_in.values())
    assert all(p.grad is None for p in own.module.parameters())


class Text(nn.Module):
    """A model as those of transformers: named inputs, an output with `.logits`."""

    def forward(self, ids: Tensor, mask: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=ids * mask)


def test_named_inputs_and_outputs_with_logits_are_supported() -> None:
    x = {"ids": torch.tensor([[2.0, 3.0]]), "mask": torch.tensor([[1.0, 0.0]])}
    batch = Batch(x, torch.zeros(1), torch.arange(1))
    assert torch.equal(logits(MemberModule(Text()), batch), torch.tensor([[2.0, 0.0]]))


def test_every_forward_pass_opens_a_context() -> None:
    opened: list[int] = []

    @contextmanager
    def forward():  # type: ignore[no-untyped-def]
        opened.append(1)
        yield

    own = corner()
    member = MemberModule(own.module, forward=forward)
    member(own.batch.x), member(own.batch.x)
    assert len(opened) == 2


def test_a_record_contains_inputs_and_outputs_of_layers() -> None:
    own = corner("conv")
    output, records = MemberModule(own.module).record(own.batch.x, ["0", "3"])
    assert torch.equal(records["0"].inputs, own.batch.x)
    assert torch.equal(records["3"].output, output)
    assert torch.equal(own.module[3](records["3"].inputs), output)
    assert not own.module[0]._forward_hooks  # hooks are removed


def test_record_removes_its_hooks_if_the_forward_fails() -> None:
    own = corner("conv")
    with pytest.raises(RuntimeError):
        MemberModule(own.module).record(torch.zeros(1, 9, 9), ["0"])
    assert not own.module[0]._forward_hooks


def test_features_are_the_flattened_output_of_a_layer() -> None:
    own = corner("conv")
    output = features("0")
    assert torch.equal(output(MemberModule(own.module), own.batch), own.module[0](own.batch.x).flatten(1))
    assert not supports_vmap(output)


def test_the_plain_update_returns_the_gradient() -> None:
    walk = plain_gradient({}, StepContext(1, 0.1, 0.1))
    ask = next(walk)
    assert ask == GradRequest()
    gradient = {"w": torch.ones(1)}
    with pytest.raises(StopIteration) as end:
        walk.send(gradient)
    assert end.value.value is gradient


def test_an_objective_gathers_nothing_by_default() -> None:
    objective = Objective(cross_entropy())
    assert (objective.gather, objective.per_sample, objective.output) == ("none", True, logits)


@pytest.mark.parametrize(("bad", "good"), [(float("nan"), False), (float("inf"), False), (3.0, True)])
def test_is_finite_rejects_nan_and_infinity(bad: float, good: bool) -> None:
    assert is_finite([torch.zeros(3), torch.tensor([[1.0, bad]])]) is good


def test_an_empty_tree_is_finite() -> None:
    assert is_finite([])
