"""Tests of every registered model; a new file in plateaux/models/architectures is included automatically."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from plateaux.core.errors import RecipeError, UnknownNameError
from plateaux.core.registry import model

IMAGE, CLASSES = (3, 32, 32), 5
SMALL: dict[str, dict[str, Any]] = {
    "resnet110": {"width": 4},
    "resnet18": {"width": 8},
    "resnet34": {"width": 8},
    "vit": {"width": 24, "depth": 2},
    "wrn": {"depth": 10, "widen_factor": 1},
    **{f"vgg{depth}{norm}": {"width": 8} for depth in (11, 13, 16, 19) for norm in ("", "_bn")},
}
BIG = {"wrn28_10"}  # 36 M parameters and no option to shrink it: its parts are those of wrn
STAND_INS: dict[str, list[str]] = {
    "timm:<name>": ["timm:resnet10t", "timm:vit_tiny_patch16_224"],
    "hf:<name>": [],  # needs a folder: tests/integrations/test_huggingface_models.py
}
TEXT = {"albert", "minilm"}  # take rows of tokens: test_albert.py and test_minilm.py in tests/integrations
NAMES = [name for found in model.names() if found not in BIG | TEXT for name in STAND_INS.get(found, [found])]


def build(name: str, *, shape: tuple[int, ...] = IMAGE, seed: int = 0, **options: Any) -> nn.Module:
    if name.startswith("timm:") and find_spec("timm") is None:
        pytest.skip("timm is not installed")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        built: nn.Module = model.get(name)(shape=shape, classes=CLASSES, **SMALL.get(name, {}), **options)
        return built


def images(count: int = 2, shape: tuple[int, ...] = IMAGE) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", model.names())
def test_options_are_keyword_only_with_types_that_pydantic_knows(name: str) -> None:
    factory = model.prefixes.get(name.removesuffix("<name>")) or model.get(name)
    hints = get_type_hints(factory)
    options = {n: p for n, p in inspect.signature(factory).parameters.items() if n != "name"}
    assert {"shape", "classes"} <= set(options)
    for option, parameter in options.items():
        assert parameter.kind is parameter.KEYWORD_ONLY
        if option not in ("shape", "classes"):
            assert TypeAdapter(hints[option]).validate_python(parameter.default) == parameter.default


@pytest.mark.parametrize("name", model.names())
def test_its_docstring_starts_with_one_sentence(name: str) -> None:
    assert model.describe()[name].endswith(".")


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    net = build(name).train()
    out = net(images())
    assert out.shape == (2, CLASSES)
    out.square().sum().backward()
    for parameter, tensor in net.named_parameters():
        assert tensor.grad is not None, parameter
        assert tensor.grad.isfinite().all(), parameter


@pytest.mark.parametrize("name", NAMES)
def test_vmap_over_weights_equals_a_loop(name: str) -> None:
    nets = [build(name, seed=seed).double().eval() for seed in (0, 1)]
    x = images().double()
    params, buffers = stack_module_state(nets)  # type: ignore[arg-type]
    with torch.no_grad():
        table = vmap(lambda p, b: functional_call(nets[0], (p, b), (x,)))(params, buffers)
        loop = torch.stack([net(x) for net in nets])
    assert (loop[0] - loop[1]).abs().max() > 0
    torch.testing.assert_close(table, loop, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_its_weights_round_trip_through_safetensors(name: str, tmp_path: Path) -> None:
    source, target = build(name, seed=0).eval(), build(name, seed=1).eval()
    save_file(source.state_dict(), tmp_path / "weights.safetensors")
    target.load_state_dict(load_file(tmp_path / "weights.safetensors"), strict=True)
    torch.testing.assert_close(target(images()), source(images()), atol=0, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_builds_the_same_weights(name: str) -> None:
    for one, two in zip(build(name).state_dict().values(), build(name).state_dict().values(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet8", "wrn", "vgg11", "vit"])
def test_it_accepts_grayscale_images_of_8_pixels(name: str) -> None:
    assert build(name, shape=(1, 8, 8))(images(shape=(1, 8, 8))).shape == (2, CLASSES)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "mlp"])
def test_an_image_model_rejects_inputs_that_are_not_images(name: str) -> None:
    with pytest.raises(RecipeError, match="needs images"):
        build(name, shape=(2,))


def test_an_unknown_model_is_rejected_with_a_suggestion() -> None:
    with pytest.raises(UnknownNameError, match="resnet20"):
        model.get("resnet_20")
