"""Output functions of one member: features of a layer, and scores of samples."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from reference.gradient_norms import gradient_norms
from torch import Tensor, nn

from plateaux.core.errors import RecipeError
from plateaux.core.member import MemberModule
from plateaux.core.method import LossFn
from plateaux.core.outputs import OutputFn, supports_vmap
from plateaux.core.registry import model
from plateaux.core.types import Batch
from plateaux.models.pruning import prune
from plateaux.optim.losses import cross_entropy
from plateaux.optim.sample_scores import features, gradient_norm, last_layer, sample_loss

SMOOTH = cross_entropy(label_smoothing=0.2)


def case(*, bias: bool = True) -> tuple[nn.Module, Batch]:
    module = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 4, bias=bias)).double().eval()
    return module, Batch(torch.randn(5, 6).double(), torch.tensor([0, 1, 2, 3, 0]), torch.arange(5))


@pytest.mark.parametrize("output", [features("1"), gradient_norm(), last_layer(), sample_loss()])
def test_scores_that_use_hooks_do_not_support_vmap(output: OutputFn) -> None:
    assert not supports_vmap(output)


def test_features_equal_the_output_of_the_layer() -> None:
    module, batch = case()
    torch.testing.assert_close(features("1")(MemberModule(module), batch), torch.tanh(module[0](batch.x)))


@pytest.mark.parametrize("loss", [None, SMOOTH], ids=["cross entropy", "smoothed"])
def test_gradient_norms_equal_one_backward_pass_per_sample(loss: LossFn | None) -> None:
    module, batch = case()
    found = gradient_norm(loss)(MemberModule(module), batch)
    torch.testing.assert_close(found, gradient_norms(module, batch, loss), rtol=1e-10, atol=0)


@pytest.mark.parametrize("loss", [None, SMOOTH], ids=["cross entropy", "smoothed"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("pruned", [True, False])
def test_last_layer_norms_equal_those_of_a_network_that_trains_only_its_last_layer(
    loss: LossFn | None, bias: bool, pruned: bool
) -> None:
    module, batch = case(bias=bias)
    if pruned:
        prune(module, 0.4)
    whole = gradient_norm(loss)(MemberModule(module), batch)
    module[0].requires_grad_(False)
    only = last_layer(loss)(MemberModule(module), batch)
    torch.testing.assert_close(only, gradient_norm(loss)(MemberModule(module), batch), rtol=1e-10, atol=0)
    torch.testing.assert_close(only, gradient_norms(module, batch, loss), rtol=1e-10, atol=0)
    assert bool((only < whole).all())


def test_a_network_without_a_linear_last_layer_is_rejected() -> None:
    module, batch = case()
    with pytest.raises(
        RecipeError, match=r'score = "last_layer" needs a network whose output is the output of an nn\.Linear'
    ):
        last_layer()(MemberModule(nn.Sequential(module, nn.Tanh())), batch)


def test_the_last_layer_of_a_resnet_is_found() -> None:
    module = model.get("resnet8")(shape=(3, 32, 32), classes=4).eval()
    batch = Batch(torch.randn(3, 3, 32, 32), torch.arange(3), torch.arange(3))
    found = last_layer()(MemberModule(module), batch)
    head = {name: p for name, p in module.named_parameters() if name.startswith("linear.")}
    torch.testing.assert_close(found, gradient_norm()(MemberModule(module, own=head), batch), rtol=1e-5, atol=0)


@pytest.mark.parametrize("labels", [torch.tensor([0, 1, 2, 3, 0]), torch.rand(5, 4).softmax(1)], ids=["hard", "mixed"])
def test_the_loss_of_a_sample_is_its_cross_entropy(labels: Tensor) -> None:
    module, batch = case()
    mixed = Batch(batch.x, labels.double() if labels.ndim == 2 else labels, batch.index)
    truth = F.cross_entropy(module(batch.x), mixed.y, reduction="none")
    torch.testing.assert_close(sample_loss()(MemberModule(module), mixed), truth)
    torch.testing.assert_close(
        sample_loss(SMOOTH)(MemberModule(module), mixed), SMOOTH(module(batch.x)[None], mixed)[0]
    )
    assert not sample_loss()(MemberModule(module), mixed).requires_grad
