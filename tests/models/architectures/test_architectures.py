"""Architectures compared with published numbers, other libraries, and slow references."""

from __future__ import annotations

import os
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import plateaux
from plateaux.config.schema import check
from plateaux.core.errors import RecipeError, UnknownNameError
from plateaux.core.imports import optional_import
from plateaux.core.registry import HubAccess, model
from plateaux.models.architectures.resnet import Pad
from plateaux.models.surgery import load_weights

DATA = Path(os.environ.get("PLATEAUX_DATA", "/nonexistent"))
WEIGHTS = DATA / "weights" / "resnet20_32_44_56_cifar10.safetensors"
needs_weights = pytest.mark.skipif(not WEIGHTS.exists(), reason="PLATEAUX_DATA has no resnet weights")
needs_timm = pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")


def build(name: str, *, shape: tuple[int, ...] = (3, 32, 32), classes: int = 10, **options: Any) -> nn.Module:
    net: nn.Module = model.get(name)(shape=shape, classes=classes, **options)
    return net


def count(name: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in build(name).parameters())


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("resnet20", 269_722),
        ("resnet32", 464_154),
        ("resnet44", 658_586),
        ("resnet56", 853_018),
        ("resnet110", 1_727_962),
        ("resnet18", 11_173_962),
        ("resnet34", 21_282_122),
        ("wrn28_10", 36_479_194),
        ("wrn40_2", 2_243_546),
        ("wrn16_4", 2_748_890),
        ("vgg16_bn", 14_728_266),
        ("vgg19_bn", 20_040_522),
    ],
)
def test_a_network_has_its_published_number_of_parameters(name: str, published: int) -> None:
    assert count(name) == published


@needs_weights
@pytest.mark.parametrize("depth", [20, 32, 44, 56])
def test_published_weights_load_strictly(depth: int) -> None:
    load_weights(build(f"resnet{depth}"), WEIGHTS, prefix=f"resnet{depth}")


@pytest.mark.slow
@needs_weights
def test_the_published_resnet20_has_its_published_error_rate() -> None:
    # All 10,000 test images give 91.73 %; the first 2,000 of them 1,833 hits.
    raw = np.fromfile(DATA / "cifar-10-batches-bin" / "test_batch.bin", dtype=np.uint8, count=2000 * 3073)
    rows = torch.from_numpy(raw).view(2000, 3073)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    x = (rows[:, 1:].view(-1, 3, 32, 32) / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    net = build("resnet20").eval()
    load_weights(net, WEIGHTS, prefix="resnet20")
    with torch.no_grad():
        hits = sum(int((net(a).argmax(1) == b).sum()) for a, b in zip(x.split(500), rows[:, 0].split(500), strict=True))
    assert abs(hits - 1833) <= 1  # a tie may fall either way on another processor


def test_the_shortcut_without_parameters_is_a_zero_padded_slice() -> None:
    x = torch.randn(2, 4, 7, 6)
    zeros = torch.zeros(2, 2, 4, 3)
    assert torch.equal(Pad(4, 2)(x), torch.cat([zeros, x[:, :, ::2, ::2], zeros], dim=1))


def test_the_shortcut_without_parameters_preserves_channels_last() -> None:
    x = torch.randn(2, 4, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    gradients: list[Tensor] = []
    (inner := x * 1).register_hook(gradients.append)
    out = Pad(4, 2)(inner)
    out.backward(torch.randn(2, 8, 4, 4).contiguous(memory_format=torch.channels_last))
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert gradients[0].is_contiguous(memory_format=torch.channels_last)


def test_more_layers_than_the_limit_are_refused_before_they_are_built() -> None:
    with pytest.raises(RecipeError, match=r"hidden_sizes lists 100,000 layers. Expected: at most 2,000"):
        model.get("mlp")(shape=(2,), classes=2, hidden_sizes=(8,) * 100_000)
    for name in ("vit", "wrn", "resnet"):
        with pytest.raises(RecipeError, match="less than or equal to 2000"):
            check("model", model.get(name), {"depth": 100_000})


def test_shortcuts_have_weights_only_where_the_shape_changes() -> None:
    extra = set(build("resnet20", shortcut="B").state_dict()) - set(build("resnet20").state_dict())
    assert {name.split(".shortcut")[0] for name in extra} == {"layer2.0", "layer3.0"}


def test_the_wide_resnet_equals_its_equations() -> None:
    net = build("wrn", depth=10, widen_factor=2).double().eval()
    w = {k: v.double().normal_() * 0.1 + ("var" in k) for k, v in net.state_dict().items() if "tracked" not in k}
    net.load_state_dict({k: v.abs() if "var" in k else v for k, v in w.items()}, strict=False)
    w = net.state_dict()

    def ready(x: Tensor, at: str) -> Tensor:
        mean, var = w[f"{at}.running_mean"], w[f"{at}.running_var"]
        return F.relu(F.batch_norm(x, mean, var, w[f"{at}.weight"], w[f"{at}.bias"]))

    x = images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    x = F.conv2d(x, w["conv1.weight"], padding=1)
    for stage, stride in (("block1", 1), ("block2", 2), ("block3", 2)):
        at = f"{stage}.layer.0"
        r = ready(x, f"{at}.bn1")
        out = F.conv2d(r, w[f"{at}.conv1.weight"], padding=1, stride=stride)
        out = F.conv2d(ready(out, f"{at}.bn2"), w[f"{at}.conv2.weight"], padding=1)
        x = out + F.conv2d(r, w[f"{at}.convShortcut.weight"], stride=stride)
    expected = F.linear(ready(x, "bn1").mean((2, 3)), w["fc.weight"], w["fc.bias"])
    torch.testing.assert_close(net(images), expected)


@pytest.mark.parametrize(("name", "depth"), [("resnet", 21), ("resnet", 2), ("wrn", 28 + 1)])
def test_an_invalid_depth_is_rejected_with_a_valid_one(name: str, depth: int) -> None:
    with pytest.raises(RecipeError, match=r"6n\+\d .*try \d+"):
        build(name, depth=depth)


def test_a_perceptron_without_hidden_layers_is_linear() -> None:
    net = build("mlp", shape=(2, 3), hidden_sizes=()).eval()
    x, y = torch.randn(2, 4, 2, 3)
    torch.testing.assert_close(net(x) - net(y), net(x - y) - net(torch.zeros_like(x)))
    assert sum(p.numel() for p in net.parameters()) == prod((2, 3)) * 10 + 10


def test_batch_norm_in_the_small_net_is_an_option() -> None:
    kinds = [
        sum(isinstance(p, nn.BatchNorm2d) for p in build("cnn", norm=norm).modules()) for norm in ("none", "batch")
    ]
    assert kinds == [0, 3]


@pytest.mark.parametrize("options", [{"patch_size": 5}, {"heads": 5}])
def test_a_transformer_with_inconsistent_sizes_is_rejected(options: dict[str, int]) -> None:
    with pytest.raises(RecipeError, match="Use a"):
        build("vit", **options)


@needs_timm
def test_the_transformer_agrees_with_timm() -> None:
    vision = optional_import("timm.models.vision_transformer", extra="timm")
    net = build("vit", width=48, depth=2, dropout=0.1).eval()
    reference = vision.VisionTransformer(32, 4, 3, 10, embed_dim=48, depth=2, num_heads=3).eval()
    reference.load_state_dict(net.state_dict(), strict=True)
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(net(x), reference(x))


def test_both_kinds_of_attention_agree() -> None:
    net, x = build("vit", width=48, depth=2).eval(), torch.randn(2, 3, 32, 32)
    fused = build("vit", width=48, depth=2, attention="fused").eval()
    fused.load_state_dict(net.state_dict())
    torch.testing.assert_close(net(x), fused(x))


def test_plain_attention_has_second_derivatives() -> None:
    net, x = build("vit", shape=(1, 8, 8), width=12, depth=1).double(), torch.randn(2, 1, 8, 8).double()
    where, along = net.get_parameter("blocks.0.attn.qkv.weight"), torch.randn(36, 12).double()

    def gradient(at: Tensor) -> Tensor:
        out = functional_call(net, {"blocks.0.attn.qkv.weight": at}, (x,)).square().sum()
        return torch.autograd.grad(out, at, create_graph=True)[0]

    exact = torch.autograd.grad(gradient(where), where, along)[0]
    step = 1e-5 * along
    by_hand = (gradient(where + step) - gradient(where - step)) / 2e-5
    torch.testing.assert_close(exact, by_hand, atol=1e-7, rtol=1e-4)


@needs_timm
def test_unknown_timm_models_and_options_are_rejected() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'resnet18'"):
        build("timm:resnet_18")
    with pytest.raises(UnknownNameError, match="list_models"):
        build("timm:qqqqqq")
    with pytest.raises(RecipeError, match="img_size"):
        build("timm:resnet18", img_size=32)


@needs_timm
def test_timm_models_use_the_rates_and_the_channels_of_the_data() -> None:
    net = build("timm:vit_tiny_patch16_224", shape=(1, 48, 32), drop_path_rate=0.1, drop_rate=0.2).eval()
    assert net(torch.randn(2, 1, 48, 32)).shape == (2, 10)
    assert {type(p).__name__ for p in net.modules()} >= {"DropPath", "Dropout"}


@needs_timm
def test_a_failed_download_of_pretrained_weights_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise OSError("no route")

    monkeypatch.setattr(optional_import("timm", extra="timm"), "create_model", offline)
    with pytest.raises(RecipeError, match="resnet18, which failed with OSError: no route"):
        build("timm:resnet18", pretrained=True, hub_access=HubAccess(download=True))
    with pytest.raises(OSError, match="no route"):
        build("timm:resnet18")


@needs_timm
def test_pretrained_weights_need_download_and_a_run_does_not_need_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timm, asked = optional_import("timm", extra="vision"), []
    create = timm.create_model

    def with_record(name: str, *, pretrained: bool, **options: Any) -> Any:
        asked.append(pretrained)
        return create(name, pretrained=False, **options)

    monkeypatch.setattr(timm, "create_model", with_record)
    recipe = plateaux.Recipe.from_dict(
        {
            "members": 1,
            "data": {"name": "digits", "batch_size": 600},
            "model": {"name": "timm:test_byobnet", "pretrained": True},
            "train": {"epochs": 1},
        }
    )
    with pytest.raises(RecipeError, match=r"--download \(in\s+Python: download=True\).*model\.weights"):
        plateaux.train(recipe, tmp_path / "run")
    assert asked == []
    plateaux.train(recipe, tmp_path / "run", download=True)
    assert set(asked) == {True}
    asked.clear()
    ensemble = plateaux.load_predictor(tmp_path / "run", device="cpu").ensemble
    assert asked == [False]
    saved = plateaux.Run.open(tmp_path / "run").weights(0)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in ensemble.members[0].state_dict().items())
