"""How a member is seen inside an offer."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from cases import corner
from torch import Tensor, nn

from plateaux.core.member import MemberModule
from plateaux.core.method import Objective, StepContext, plain_gradient
from plateaux.core.outputs import logits, supports_vmap
from plateaux.core.tensor_tree import is_finite
from plateaux.core.types import Batch
from plateaux.optim.losses import cross_entropy
from plateaux.optim.sample_scores import features


def test_a_view_calls_the_network_itself() -> None:
    own = corner()
    assert torch.equal(logits(MemberModule(own.module), own.batch), own.module(own.batch.x))


def test_weights_may_stand_in_for_the_members_own() -> None:
    own, other = corner(), corner(seed=1)
    before = {name: p.clone() for name, p in own.module.named_parameters()}
    stand_in = dict(other.module.named_parameters())
    assert torch.equal(MemberModule(own.module)(own.batch.x, stand_in), other.module(own.batch.x))
    assert torch.equal(MemberModule(own.module, replaced=stand_in)(own.batch.x), other.module(own.batch.x))
    assert all(torch.equal(p, before[name]) for name, p in own.module.named_parameters())


def test_gradients_reach_weights_that_stand_in() -> None:
    own = corner()
    stand_in = {name: p.detach().clone().requires_grad_() for name, p in own.module.named_parameters()}
    MemberModule(own.module)(own.batch.x, stand_in).sum().backward()
    assert all(p.grad is not None for p in stand_in.values())
    assert all(p.grad is None for p in own.module.parameters())


class Text(nn.Module):
    """A model as those of transformers: named inputs, an output with `.logits`."""

    def forward(self, ids: Tensor, mask: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=ids * mask)


def test_named_inputs_and_an_output_with_logits_are_understood() -> None:
    x = {"ids": torch.tensor([[2.0, 3.0]]), "mask": torch.tensor([[1.0, 0.0]])}
    batch = Batch(x, torch.zeros(1), torch.arange(1))
    assert torch.equal(logits(MemberModule(Text()), batch), torch.tensor([[2.0, 0.0]]))


def test_every_forward_opens_its_own_context() -> None:
    opened: list[int] = []

    @contextmanager
    def forward():  # type: ignore[no-untyped-def]
        opened.append(1)
        yield

    own = corner()
    view = MemberModule(own.module, forward=forward)
    view(own.batch.x), view(own.batch.x)
    assert len(opened) == 2


def test_a_record_is_what_the_layers_see() -> None:
    own = corner("conv")
    output, seen = MemberModule(own.module).record(own.batch.x, ["0", "3"])
    assert torch.equal(seen["0"].inputs, own.batch.x)
    assert torch.equal(seen["3"].output, output)
    assert torch.equal(own.module[3](seen["3"].inputs), output)
    assert not own.module[0]._forward_hooks  # nothing stays behind


def test_a_record_leaves_nothing_behind_when_the_forward_fails() -> None:
    own = corner("conv")
    with pytest.raises(RuntimeError):
        MemberModule(own.module).record(torch.zeros(1, 9, 9), ["0"])
    assert not own.module[0]._forward_hooks


def test_features_are_a_layers_output_laid_flat() -> None:
    own = corner("conv")
    offer = features("0")
    assert torch.equal(offer(MemberModule(own.module), own.batch), own.module[0](own.batch.x).flatten(1))
    assert not supports_vmap(offer)


def test_plain_descent_goes_where_the_gradient_says() -> None:
    walk = plain_gradient({}, StepContext(1, 0.1, 0.1))
    ask = next(walk)
    assert (ask.at, ask.weight, ask.rows, ask.local, ask.average) == (None, None, None, False, None)
    gradient = {"w": torch.ones(1)}
    with pytest.raises(StopIteration) as end:
        walk.send(gradient)
    assert end.value.value is gradient


def test_an_objective_sees_its_own_row_unless_it_says_otherwise() -> None:
    objective = Objective(cross_entropy())
    assert (objective.gather, objective.per_sample, objective.output) == ("none", True, logits)


@pytest.mark.parametrize(("bad", "good"), [(float("nan"), False), (float("inf"), False), (3.0, True)])
def test_finite_means_every_entry_is_a_number(bad: float, good: bool) -> None:
    assert is_finite([torch.zeros(3), torch.tensor([[1.0, bad]])]) is good


def test_nothing_at_all_is_finite() -> None:
    assert is_finite([])
