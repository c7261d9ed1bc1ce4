"""Losses against their formulas and against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plateaux.core.errors import RecipeError
from plateaux.core.types import Batch
from plateaux.optim.losses import LOSSES, UNSUPPORTED, cross_entropy, get_loss


def problem(rows: int = 3, size: int = 5, classes: int = 4) -> tuple[Tensor, Batch]:
    y = torch.arange(size) % classes
    return torch.randn(rows, size, classes, dtype=torch.float64), Batch(torch.zeros(size, 1), y, torch.arange(size))


def by_hand(table: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """Minus the weighted sum over classes of target times log probability."""
    log_p = table - table.exp().sum(-1, keepdim=True).log()
    return -(weights * target * log_p).sum(-1)


def test_cross_entropy_equals_its_formula() -> None:
    table, batch = problem()
    truth = by_hand(table, F.one_hot(batch.y, 4), torch.ones(4))
    torch.testing.assert_close(cross_entropy()(table, batch), truth)


def test_soft_labels_weight_the_classes() -> None:
    table, batch = problem()
    soft = torch.rand(5, 4, dtype=torch.float64)
    soft = soft / soft.sum(1, keepdim=True)
    found = cross_entropy()(table, Batch(batch.x, soft, batch.index))
    torch.testing.assert_close(found, by_hand(table, soft, torch.ones(4)))


@pytest.mark.parametrize("soft", [False, True])
def test_hard_labels_equal_one_hot_soft_labels(soft: bool) -> None:
    table, batch = problem()
    options = {"label_smoothing": 0.2, "class_weights": (1.0, 2.0, 3.0, 4.0)}
    hot = Batch(batch.x, F.one_hot(batch.y, 4).double(), batch.index)
    torch.testing.assert_close(cross_entropy(**options)(table, batch), cross_entropy(**options)(table, hot))


def test_label_smoothing_spreads_labels_evenly() -> None:
    table, batch = problem()
    target = 0.8 * F.one_hot(batch.y, 4) + 0.2 / 4
    torch.testing.assert_close(cross_entropy(label_smoothing=0.2)(table, batch), by_hand(table, target, torch.ones(4)))


def test_class_weights_are_normalized_to_mean_one() -> None:
    table, batch = problem()
    weights = torch.tensor([1.0, 2.0, 3.0, 10.0], dtype=torch.float64)
    truth = by_hand(table, F.one_hot(batch.y, 4), weights / weights.mean())
    torch.testing.assert_close(cross_entropy(class_weights=(1.0, 2.0, 3.0, 10.0))(table, batch), truth)
    torch.testing.assert_close(cross_entropy(class_weights=(7.0,) * 4)(table, batch), cross_entropy()(table, batch))


def test_the_loss_of_a_text_is_the_mean_over_its_tokens() -> None:
    table = torch.randn(2, 3, 4, 6, dtype=torch.float64)  # rows, samples, classes, tokens
    y = torch.randint(4, (3, 6))
    found = cross_entropy()(table, Batch(torch.zeros(3, 1), y, torch.arange(3)))
    truth = torch.stack([F.cross_entropy(row, y, reduction="none").mean(1) for row in table])
    torch.testing.assert_close(found, truth)


def test_an_empty_batch_has_no_losses() -> None:
    table, batch = problem(size=0)
    assert cross_entropy()(table, batch).shape == (3, 0)


def test_the_loss_of_a_member_does_not_depend_on_other_members_bit_for_bit() -> None:
    table, batch = problem()
    loss = cross_entropy(label_smoothing=0.1)
    assert torch.equal(loss(table, batch), torch.cat([loss(table[i : i + 1], batch) for i in range(3)]))


def test_losses_are_found_by_name() -> None:
    assert get_loss("cross_entropy") is cross_entropy
    assert set(LOSSES) == {"cross_entropy"}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_loss_is_rejected(name: str) -> None:
    with pytest.raises(RecipeError, match=r"which is not supported yet; available: cross_entropy$"):
        get_loss(name)


def test_an_unknown_loss_is_rejected_with_the_closest_name() -> None:
    with pytest.raises(RecipeError, match="cross_entropy"):
        get_loss("crossentropy")


@pytest.mark.parametrize(
    ("options", "unweighted"),
    [({}, True), ({"label_smoothing": 0.1}, False), ({"class_weights": (1.0, 2.0)}, False)],
)
def test_only_plain_cross_entropy_has_the_closed_form_gradient(options: dict[str, Any], unweighted: bool) -> None:
    """The scores of SharpBalance use softmax - one-hot exactly where it is the gradient of the loss."""
    loss = cross_entropy(**options)
    logits, batch = (
        torch.randn(1, 4, 2, requires_grad=True),
        Batch(torch.zeros(4, 1), torch.tensor([0, 1, 1, 0]), torch.arange(4)),
    )
    (gradient,) = torch.autograd.grad(loss(logits, batch).sum(), logits)
    closed_form = logits.detach().softmax(-1) - torch.nn.functional.one_hot(batch.y, 2)
    assert loss.is_unweighted is unweighted
    assert torch.allclose(gradient, closed_form, atol=1e-6) is unweighted
