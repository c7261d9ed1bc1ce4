"""A backbone shared by all members: splits of networks, heads, and memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plateaux.config.builders.model import build_backbone, build_member, build_members, shared_param_names
from plateaux.config.components import Components
from plateaux.config.experiment import Experiment
from plateaux.config.recipe import Recipe
from plateaux.core.errors import RecipeError
from plateaux.core.member import pruning_masks
from plateaux.data.sources import from_tensors
from plateaux.ensembles.ensemble import Ensemble
from plateaux.models.architectures.resnet import resnet
from plateaux.models.architectures.small import cnn, mlp
from plateaux.models.architectures.vit import vit
from plateaux.models.backbone import (
    Backbone,
    BackboneWithHead,
    build_head,
    common_backbone,
    own_head,
    split_module,
)
from plateaux.models.surgery import size_in_bytes
from plateaux.storage.run import Run
from plateaux.training.recipe_rules import check
from plateaux.training.train import train

SHAPE = (3, 16, 16)
IMAGES = torch.rand(40, *SHAPE, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(40) % 5
DATA = from_tensors((IMAGES[:30], LABELS[:30]), (IMAGES[30:], LABELS[30:]), classes=5, mean=(0.5,) * 3, std=(0.5,) * 3)
GIVEN = Components(data=DATA)

NETS: dict[str, Any] = {
    "cnn": lambda: cnn(shape=SHAPE, classes=5, channels=(4, 6), norm="batch"),
    "resnet8": lambda: resnet(depth=8, shape=SHAPE, classes=5, width=4),
    "vit": lambda: vit(shape=SHAPE, classes=5, patch_size=8, width=8, depth=2, heads=2),
    "mlp": lambda: mlp(shape=SHAPE, classes=5, hidden_sizes=(7, 6)),
}
CUTS = [("cnn", "0"), ("cnn", "features"), ("resnet8", "layer1"), ("resnet8", "layer2.0"), ("resnet8", "features"),
        ("vit", "norm"), ("vit", "features"), ("mlp", "2"), ("mlp", "4")]  # fmt: skip


def recipe(**model: Any) -> Recipe:
    return Recipe.from_dict(
        {
            "members": 3,
            "data": {"name": "given", "batch_size": 10},
            "model": {"name": "cnn", "channels": [4, 6], **model},
            "optimizer": {"name": "SGD", "lr": 0.05, "momentum": 0.9},
            "train": {"epochs": 2},
            "executor": {"threads": 1},
        }
    )


@pytest.mark.parametrize(("name", "layer"), CUTS)
def test_the_own_head_of_features_equals_the_network_of_images(name: str, layer: str) -> None:
    whole = NETS[name]().eval()
    backbone = Backbone(copy.deepcopy(whole), layer, shape=SHAPE, pool=False)
    member = BackboneWithHead(backbone, own_head(copy.deepcopy(whole), layer, SHAPE)).eval()
    with torch.no_grad():
        features = backbone(IMAGES)
        assert tuple(features.shape[1:]) == backbone.shape
        assert torch.equal(member(IMAGES), whole(IMAGES))
        assert torch.equal(member(features), whole(IMAGES))
    parts = size_in_bytes([backbone]), size_in_bytes([member.head])
    assert sum(parts) == size_in_bytes([whole])  # every weight is on one side, and none on both


def test_the_own_head_keeps_its_parameter_names() -> None:
    whole = resnet(depth=8, shape=SHAPE, classes=5, width=4)
    after = own_head(whole, "layer2", SHAPE)
    assert {name for name, _ in after.named_parameters()} == {
        name for name, _ in whole.named_parameters() if name.startswith(("layer3", "linear"))
    }
    after.train()
    assert all(part.training for part in after.modules())


class Odd(nn.Module):
    """A network of parts, and whatever a test does with them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.never = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


class LooksBack(Odd):
    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x)) + x[:, :3]


class DropsByHand(Odd):
    def forward(self, x: Tensor) -> Tensor:
        return self.two(F.dropout(self.one(x), training=self.training))


class Branches(Odd):
    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x)) if bool((x > 0).any()) else x


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Odd()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.two(self.inner.one(x))


class Soft(Odd):
    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x)).softmax(-1)


class Pairs(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.rnn(x[:, None])[0][:, 0])


@pytest.mark.parametrize(
    ("net", "layer", "words"),
    [
        (LooksBack, "one", "tensors from before the split"),
        (DropsByHand, "one", "differently in training"),
        (Branches, "one", "cannot be traced"),
        (Odd, "never", "does not call that submodule"),
    ],
)
def test_a_head_that_cannot_be_traced_is_rejected_with_an_alternative(net: Any, layer: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words) as problem:
        own_head(net(), layer, (4,))
    assert "model.head = 'linear' or 'mlp'" in str(problem.value)


def test_a_split_inside_a_submodule_is_supported() -> None:
    whole = Deep()
    x = torch.randn(2, 4)
    assert torch.equal(own_head(whole, "inner.one", (4,))(whole.inner.one(x)), whole(x))


def test_invalid_splits_are_rejected_with_the_available_submodules() -> None:
    with pytest.raises(RecipeError, match="did you mean 'layer2'"):
        split_module(resnet(depth=8, shape=SHAPE, classes=5, width=4), "layer_2", SHAPE)
    with pytest.raises(RecipeError, match="allowed: features, never"):
        split_module(Odd(), "xyz", (4,))
    with pytest.raises(RecipeError, match=r"does not end in one\. Name the submodule to split after: one, two"):
        split_module(Soft(), "features", (4,))
    with pytest.raises(RecipeError, match="never reaches the submodule 'never'"):
        Backbone(Odd(), "never", shape=(4,))
    with pytest.raises(RecipeError, match="cannot be distinguished"):
        Backbone(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), "0", shape=(4,))


def test_the_first_of_several_outputs_is_the_feature_and_positions_are_averaged() -> None:
    whole = Pairs()
    x = torch.randn(2, 4)
    assert torch.equal(Backbone(whole, "rnn", shape=(4,))(x), whole.rnn(x[:, None])[0].mean(1))
    picture = cnn(shape=SHAPE, classes=5, channels=(4, 6))
    assert Backbone(picture, "0", shape=SHAPE).shape == (4,)


def test_images_are_resized_before_the_backbone() -> None:
    whole = cnn(shape=SHAPE, classes=5, channels=(4,))
    backbone = Backbone(copy.deepcopy(whole), "0", shape=SHAPE, image_size=24, pool=False)
    assert backbone.shape == (4, 12, 12)
    expected = F.interpolate(IMAGES, (24, 24), mode="bilinear", antialias=True, align_corners=False)
    assert torch.equal(backbone(IMAGES), whole[0](expected))
    sharper = Backbone(copy.deepcopy(whole), "0", shape=SHAPE, image_size=24, interpolation="bicubic", pool=False)
    expected = F.interpolate(IMAGES, (24, 24), mode="bicubic", antialias=True, align_corners=False)
    assert torch.equal(sharper(IMAGES), whole[0](expected))
    assert sharper.hash() != backbone.hash()


def test_the_hash_depends_on_weights_and_split() -> None:
    whole = NETS["cnn"]()
    backbones = [Backbone(copy.deepcopy(whole), layer, shape=SHAPE, image_size=size)
              for layer, size in (("0", None), ("0", None), ("1", None), ("0", 8))]  # fmt: skip
    first, same, *others = [backbone.hash() for backbone in backbones]
    assert first == same
    assert len({first, *others}) == 3
    assert copy.deepcopy(backbones[0]).double().hash() == first
    with torch.no_grad():
        next(backbones[0].parameters()).mul_(1.001)
    assert backbones[0].hash() != first


def test_heads_have_one_or_two_layers() -> None:
    sizes = {
        kind: [p.numel() for p in build_head(kind, (4, 2), classes=5, width=3).parameters()]
        for kind in ("linear", "mlp")
    }
    assert sizes == {"linear": [40, 5], "mlp": [24, 3, 15, 5]}


def test_two_hundred_heads_store_their_backbone_once() -> None:
    net = {"name": "resnet8", "width": 16, "backbone": "features", "head": "linear"}
    config = Recipe.from_dict({**recipe().to_dict(), "model": net})
    two, many = (build_members(config.replaced(members=count), DATA, range(count), GIVEN) for count in (2, 200))
    backbone = size_in_bytes([many[0].backbone])  # type: ignore[list-item]
    one = size_in_bytes([many[0].head])  # type: ignore[list-item]
    assert backbone > 100 * one
    assert size_in_bytes(many) == backbone + 200 * one
    assert size_in_bytes(two) == backbone + 2 * one
    assert torch.equal(two[1].head[1].weight, many[1].head[1].weight)  # type: ignore[union-attr,index]
    assert not torch.equal(many[0].head[1].weight, many[1].head[1].weight)  # type: ignore[union-attr,index]
    held = Ensemble(many).bytes()
    assert held == {"held": backbone + 200 * one, "unshared": 200 * (backbone + one)}


def test_an_ensemble_runs_its_backbone_once(monkeypatch: pytest.MonkeyPatch) -> None:
    members = build_members(recipe(backbone="features", head="mlp", head_width=[3, 4, 5]), DATA, range(3), GIVEN)
    ensemble = Ensemble(members, mean=DATA.mean, std=DATA.std)
    expected = torch.stack([member((IMAGES - 0.5) / 0.5) for member in members])
    calls: list[int] = []
    before = Backbone.forward
    monkeypatch.setattr(Backbone, "forward", lambda self, *a, **k: (calls.append(1), before(self, *a, **k))[1])
    torch.testing.assert_close(ensemble.logits(IMAGES), expected)
    assert len(calls) == 1
    assert [member.head[1].out_features for member in members] == [3, 4, 5]  # type: ignore[union-attr,index]
    assert common_backbone([nn.Linear(1, 1)]) is common_backbone([]) is None
    assert common_backbone([members[0], copy.deepcopy(members[1])]) is None


@pytest.mark.parametrize("top", ["own", "mlp"])
def test_members_share_only_the_backbone(top: str, tmp_path: Path) -> None:
    config = recipe(backbone="0", head=top, norm="batch")
    run = train(config, tmp_path / "run", **GIVEN.keywords())
    shared = run.shared()
    assert shared
    assert all(name.startswith("backbone.model.0.") for name in shared)
    start = build_backbone(config, DATA, GIVEN).state_dict()
    assert all(torch.equal(tensor, start[name.removeprefix("backbone.")]) for name, tensor in shared.items())
    weights = [run.weights(number) for number in range(3)]
    assert all(name.startswith("head.") for name in weights[0])
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_vmapped_heads_equal_looped_heads(tmp_path: Path) -> None:
    found: list[Run] = []
    for mode in ("loop", "vmap", "offload"):
        config = recipe(backbone="features", head="mlp", head_width=6).replaced(
            executor={"mode": mode}, data={"shuffle": "shared"}
        )
        found.append(train(config, tmp_path / mode, **GIVEN.keywords()))
    for number in range(3):
        looped, stacked, offloaded = [run.weights(number) for run in found]
        assert all(torch.equal(looped[name], offloaded[name]) for name in looped)
        torch.testing.assert_close(stacked, looped, rtol=1e-4, atol=1e-6)  # convolutions under vmap round otherwise


def test_pruning_does_not_change_the_backbone() -> None:
    module = build_member(recipe(backbone="features", head="mlp", head_width=6, sparsity=0.5), DATA, 0, GIVEN)
    assert set(pruning_masks(module)) == {"head.1.weight"}  # and the last layer stays dense
    assert shared_param_names(recipe(backbone="0"), build_member(recipe(backbone="0"), DATA, 0, GIVEN)) == {
        "backbone.model.0.0.weight", "backbone.model.0.0.bias"}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        ({"head": "mlp"}, {}, "model.head = 'mlp' needs a backbone"),
        ({"cache_features": True}, {}, "model.cache_features = True needs a backbone"),
        ({"backbone": "features", "name": ["cnn", "cnn", "cnn"]}, {}, "one backbone. Use one model name"),
        ({"backbone": "features", "freeze": ["0"]}, {}, "Omit one of them"),
        ({"backbone": "features", "cache_features": True}, {"mixup": 0.2}, "Omit one of the two"),
    ],
)
def test_inconsistent_keys_are_rejected(model: dict[str, Any], data: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        check(Experiment(recipe(**model).replaced(data=data), GIVEN))


def test_a_recipe_without_a_backbone_keeps_its_identity() -> None:
    assert set(recipe().identity()["model"]) == {"name", "channels", "weights_prefix", "strict", "freeze", "sparsity"}
    assert {"backbone", "head", "cache_features"} <= set(recipe(backbone="0").identity()["model"])
