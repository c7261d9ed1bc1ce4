"""Ensemble for inference: logits of members, shared weights, and combined predictions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plateaux.ensembles.ensemble import Ensemble
from plateaux.models.surgery import freeze, share


def members(count: int, inputs: int = 4, classes: int = 3) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(inputs, 8), nn.Dropout(0.5), nn.Linear(8, classes)) for _ in range(count)]


def test_logits_contain_the_output_of_each_member() -> None:
    nets, x = members(3), torch.randn(5, 4)
    rows = Ensemble(nets).logits(x)
    assert rows.shape == (3, 5, 3)
    for row, net in zip(rows, nets, strict=True):
        assert torch.equal(row, net.eval()(x))
    assert not rows.requires_grad


@pytest.mark.parametrize("count", [1, 2, 5])
def test_predictions_are_the_mean_of_probabilities_or_of_logits(count: int) -> None:
    ensemble, x = Ensemble(members(count)), torch.randn(6, 4)
    rows = ensemble.logits(x)
    torch.testing.assert_close(ensemble.predict(x), rows.softmax(-1).mean(0))
    torch.testing.assert_close(ensemble.predict(x, combine="logit"), rows.mean(0).softmax(-1))
    torch.testing.assert_close(ensemble(x), ensemble.predict(x))
    torch.testing.assert_close(ensemble.predict(x).sum(-1), torch.ones(6))
    assert len(ensemble) == count


def test_inputs_are_normalized_like_the_data_set() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    images = torch.randint(0, 256, (4, 3, 2, 2), dtype=torch.uint8)
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    by_hand = (images.float() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(Ensemble([net], mean=mean, std=std).logits(images)[0], net(by_hand))


def test_dict_inputs_and_outputs_with_logits_are_supported() -> None:
    class Output:
        def __init__(self, logits: torch.Tensor) -> None:
            self.logits = logits

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logits = nn.Embedding(10, 3)

        def forward(self, *, ids: torch.Tensor, mask: torch.Tensor) -> Output:
            return Output((self.logits(ids) * mask[..., None]).sum(1))

    x = {"ids": torch.randint(0, 10, (2, 4)), "mask": torch.ones(2, 4)}
    assert Ensemble([Reader(), Reader()]).logits(x).shape == (2, 2, 3)


def test_predict_uses_no_dropout_and_no_random_numbers() -> None:
    ensemble, x = Ensemble(members(2)), torch.randn(5, 4)
    before = torch.get_rng_state()
    assert torch.equal(ensemble.predict(x), ensemble.predict(x))
    assert torch.equal(torch.get_rng_state(), before)


def test_shared_weights_are_stored_once() -> None:
    backbone_bytes = 1000 * 1000 * 4 + 1000 * 4
    nets = [nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 2)) for _ in range(4)]
    separate = Ensemble(nets).bytes()
    assert separate["held"] == separate["unshared"]
    for net in nets:
        freeze(net, ["0"])
    share(nets, ["0"])
    shared = Ensemble(nets).bytes()
    assert shared["held"] == separate["held"] - 3 * backbone_bytes
    assert shared["unshared"] == separate["unshared"]


def test_members_may_differ_in_architecture() -> None:
    different = [nn.Linear(4, 3), *members(1)]
    assert Ensemble(different).predict(torch.randn(2, 4)).shape == (2, 3)


def test_float64_is_preserved() -> None:
    ensemble = Ensemble([net.double() for net in members(2)])
    assert ensemble.predict(torch.randn(2, 4, dtype=torch.float64)).dtype == torch.float64
