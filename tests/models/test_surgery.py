"""Module surgery: loading, freezing, sharing."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from plateaux.core.errors import RecipeError
from plateaux.core.registry import model
from plateaux.models import surgery


def net(name: str = "resnet8", *, seed: int = 0, classes: int = 3, **options: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        built: nn.Module = model.get(name)(shape=(3, 8, 8), classes=classes, **options)
        return built


def same(one: nn.Module, two: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


def under(prefix: str, tree: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tree.items()}


# Loading


def test_safetensors_load_by_prefix_and_without_batch_counters(tmp_path: Path) -> None:
    source, target = net(seed=1), net(seed=2)
    weights = {n: t for n, t in source.state_dict().items() if "num_batches" not in n}
    save_file({**under("a.b.", weights), **under("other.", net(seed=3).state_dict())}, tmp_path / "w.safetensors")
    surgery.load_weights(target, tmp_path / "w.safetensors", prefix="a.b")
    assert same(source, target)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda w: w,
        lambda w: {"state_dict": under("module.", w), "epoch": 3},
        lambda w: {"model": {"state_dict": under("module._orig_mod.", w)}},
    ],
)
def test_nested_torch_checkpoints_are_loaded(tmp_path: Path, wrap: Any) -> None:
    source, target = net(seed=1), net(seed=2)
    torch.save(wrap(source.state_dict()), tmp_path / "w.pt")
    surgery.load_weights(target, str(tmp_path / "w.pt"))
    assert same(source, target)


def test_half_precision_weights_are_converted_to_the_dtype_of_the_model(tmp_path: Path) -> None:
    source, target = net(seed=1).half(), net(seed=2)
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    surgery.load_weights(target, tmp_path / "w.safetensors")
    assert target.get_parameter("conv1.weight").dtype is torch.float32
    assert same(source.float(), target)


def test_mismatched_weights_are_listed_and_nothing_is_loaded(tmp_path: Path) -> None:
    weights = net(seed=1).state_dict()
    weights["linear.weight"] = torch.zeros(7, 64)
    weights["layer1.0.conv_1.weight"] = weights.pop("layer1.0.conv1.weight")
    save_file(weights, tmp_path / "w.safetensors")
    target, before = net(seed=2), net(seed=2)
    with pytest.raises(RecipeError) as error:
        surgery.load_weights(target, tmp_path / "w.safetensors")
    message = str(error.value)
    assert "1 weights are missing: layer1.0.conv1.weight." in message
    assert "1 are not in the model: layer1.0.conv_1.weight" in message
    assert "did you mean 'layer1.0.conv1.weight'" in message
    assert "linear.weight (7 x 64 in the file, 3 x 64 in the model)" in message
    assert same(target, before)


def test_partial_loading_skips_a_different_head_with_a_warning(tmp_path: Path) -> None:
    source, target, before = net(seed=1, classes=7), net(seed=2), net(seed=2)
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    with pytest.warns(UserWarning, match=r"Not loaded.*linear.weight \(7 x 64 in the file, 3 x 64 in the model\)"):
        surgery.load_weights(target, tmp_path / "w.safetensors", strict=False)
    assert torch.equal(target.get_parameter("layer3.0.conv2.weight"), source.get_parameter("layer3.0.conv2.weight"))
    assert torch.equal(target.get_parameter("linear.weight"), before.get_parameter("linear.weight"))


def test_partial_loading_allows_a_renamed_head_but_no_missing_backbone(tmp_path: Path) -> None:
    weights = net(seed=1).state_dict()
    weights["fc.weight"] = weights.pop("linear.weight")
    save_file(weights, tmp_path / "w.safetensors")
    with pytest.warns(UserWarning, match=r"linear.weight \(not in the file\), fc.weight \(not in the model\)"):
        surgery.load_weights(net(), tmp_path / "w.safetensors", strict=False)
    del weights["conv1.weight"]
    save_file(weights, tmp_path / "w.safetensors")
    with pytest.raises(RecipeError, match=r"missing: conv1\.weight"):
        surgery.load_weights(net(), tmp_path / "w.safetensors", strict=False)


def test_an_unknown_prefix_is_rejected_with_a_suggestion(tmp_path: Path) -> None:
    save_file(under("resnet8.", net().state_dict()), tmp_path / "w.safetensors")
    with pytest.raises(RecipeError, match="did you mean 'resnet8'"):
        surgery.load_weights(net(), tmp_path / "w.safetensors", prefix="resnet_8")


class Trap:
    def __reduce__(self) -> Any:
        return (print, ("ran",))


def test_a_file_with_code_or_without_weights_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trap.pt").write_bytes(pickle.dumps({"state_dict": Trap()}, protocol=2))
    torch.save({"state_dict": Trap()}, tmp_path / "trap2.pt")
    (tmp_path / "empty.safetensors").write_bytes(b"")
    (tmp_path / "empty.pt").write_bytes(b"")
    torch.save(3, tmp_path / "three.pt")
    for name in ("trap.pt", "trap2.pt", "empty.safetensors", "empty.pt", "three.pt", "nowhere.pt"):
        with pytest.raises(RecipeError, match=r"state_dict\(\)|no weights file"):
            surgery.load_weights(net(), tmp_path / name)
    assert "ran" not in capsys.readouterr().out


# Freezing and sharing


def test_frozen_submodules_do_not_change_while_others_train() -> None:
    frozen = net()
    names = surgery.freeze(frozen, ["conv1", "bn1", "layer1", "layer2.0.bn1"])
    before = copy.deepcopy(frozen.state_dict())
    optimiser = torch.optim.SGD([p for p in frozen.parameters() if p.requires_grad], lr=0.1)
    frozen.train()
    frozen(torch.randn(4, 3, 8, 8)).square().sum().backward()
    optimiser.step()
    moved = {name for name, tensor in frozen.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == set(before) - names
    assert {"conv1.weight", "bn1.running_var", "bn1.num_batches_tracked", "layer2.0.bn1.weight"} <= names


@pytest.mark.parametrize("through", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: m])
def test_frozen_submodules_stay_in_eval_mode_in_copies(through: Any) -> None:
    original = net()
    surgery.freeze(original, ["layer1"])
    copied = through(original)
    assert copied.train() is copied
    copied.layer1[0].bn1.train()
    assert not any(part.training for part in copied.layer1.modules())
    assert all(part.training for part in copied.layer2.modules())
    assert copied.layer1.train() is copied.layer1
    copied.eval()
    assert not any(part.training for part in copied.modules())


def test_a_copy_of_a_frozen_network_shares_no_memory_with_the_original() -> None:
    original = net()
    surgery.freeze(original, ["layer1"])
    copied = copy.deepcopy(original)
    copied.train()
    for part in copied.get_submodule("layer1").modules():
        assert vars(part)["train"].args == (part,)


def test_single_parameters_can_be_frozen() -> None:
    vit = net("vit", width=12, depth=1)
    assert surgery.freeze(vit, ["pos_embed", "cls_token"]) == {"pos_embed", "cls_token"}
    assert not vit.get_parameter("pos_embed").requires_grad
    assert vit.get_parameter("head.weight").requires_grad


@pytest.mark.parametrize(("wrong", "right"), [("layer_1", "'layer1'"), ("layer1.2", "'layer1.0'"), ("", "conv1")])
def test_an_unknown_submodule_is_rejected_with_a_suggestion(wrong: str, right: str) -> None:
    with pytest.raises(RecipeError, match=right):
        surgery.freeze(net(), [wrong])
    with pytest.raises(RecipeError, match=right):
        surgery.share([net(), net()], [wrong])


@pytest.mark.slow
def test_200_heads_store_their_backbone_once() -> None:
    backbone = ["conv1", "bn1", "layer1", "layer2", "layer3", "layer4"]
    first = net("resnet18", width=8)
    surgery.freeze(first, backbone)
    heads = [first]
    for seed in range(1, 200):
        heads.append(net("resnet18", width=8, seed=seed))
        surgery.share([first, heads[-1]], backbone)
    assert len({head.get_parameter("layer3.1.conv2.weight").data_ptr() for head in heads}) == 1
    assert len({head.get_parameter("linear.weight").data_ptr() for head in heads}) == 200
    one_head = surgery.size_in_bytes([first.get_submodule("linear")])
    assert one_head == 4 * (64 * 3 + 3)
    assert surgery.size_in_bytes(heads) == surgery.size_in_bytes([first]) + 199 * one_head
    for head in heads[1:3]:
        head.train()
        assert not head.get_submodule("layer1").training
    x = torch.randn(2, 3, 8, 8)
    assert not torch.equal(heads[1](x), heads[2](x))


def test_sharing_nested_submodules_does_not_change_their_siblings() -> None:
    one, two = net(seed=1), net(seed=2)
    surgery.share([one, two], ["layer1.0.conv1", "linear.bias"])
    assert two.get_submodule("layer1.0.conv1") is one.get_submodule("layer1.0.conv1")
    assert two.get_parameter("linear.bias") is one.get_parameter("linear.bias")
    assert two.get_submodule("layer1.0.conv2") is not one.get_submodule("layer1.0.conv2")
    assert [n for n, _ in two.named_parameters()] == [n for n, _ in one.named_parameters()]


def test_shared_memory_is_counted_once() -> None:
    layer, tied = nn.Linear(4, 8), nn.Linear(4, 2)
    tied.weight = nn.Parameter(layer.weight.detach()[:2])
    assert surgery.size_in_bytes([layer, tied]) == 4 * (32 + 8 + 2)
    with torch.device("meta"):
        assert surgery.size_in_bytes([nn.Linear(4, 8)]) == 4 * (32 + 8)


# What is inside


def test_batchnorm_layers_are_listed() -> None:
    assert len(surgery.batchnorm_layers(net())) == 7
    assert surgery.batchnorm_layers(net("vit", width=12, depth=1)) == []


class DropPath(nn.Module):
    def __init__(self, drop_prob: float | None) -> None:
        super().__init__()
        self.drop_prob = drop_prob


def test_dropout_layers_are_listed() -> None:
    parts: dict[str, nn.Module] = {
        "dropout": nn.Dropout(0.1),
        "dropout2d": nn.Dropout2d(0.1),
        "alpha": nn.AlphaDropout(0.1),
        "path": DropPath(0.1),
        "attention": nn.MultiheadAttention(4, 2, dropout=0.1),
        "lstm": nn.LSTM(2, 2, num_layers=2, dropout=0.1),
        "rrelu": nn.RReLU(),
    }
    deterministic: dict[str, nn.Module] = {
        "none": nn.Dropout(0.0),
        "nopath": DropPath(None),
        "quiet": nn.MultiheadAttention(4, 2),
        "norm": nn.BatchNorm2d(3),
    }
    assert surgery.dropout_layers(nn.ModuleDict({**parts, **deterministic})) == list(parts)


def test_frozen_dropout_is_not_listed_but_dropout_in_eval_mode_is() -> None:
    wide = net("wrn", depth=10, widen_factor=1, dropout=0.3)
    surgery.freeze(wide, ["block1", "block2"])
    assert surgery.dropout_layers(wide.eval()) == ["block3.layer.0.dropout"]
