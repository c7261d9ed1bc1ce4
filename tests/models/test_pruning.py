"""Pruning at initialization: exact counts, live weights in every layer, and dense first and last layers."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plateaux
from plateaux.config.builders.model import build_member
from plateaux.config.recipe import Recipe
from plateaux.core import registry
from plateaux.core.errors import RecipeError
from plateaux.core.member import pruning_masks
from plateaux.data.sources import DataSplits, InMemorySource
from plateaux.models.pruning import end_layers, live_counts, prune


def net(name: str = "resnet8", *, width: int = 16, classes: int = 10, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return registry.model.get(name)(shape=(3, 32, 32), classes=classes, width=width, **options)


def data(samples: int = 1) -> DataSplits:
    """Ten classes of noise, each with a mean image of its own."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(samples) % 10
    means = torch.randn(10, 3, 8, 8, generator=generator)
    source = InMemorySource(means[y] + torch.randn(samples, 3, 8, 8, generator=generator), y)
    return DataSplits("noise", source, source, 10, (3, 8, 8))


def sparse_recipe(sparsity: float, name: str = "resnet8", **changes: Any) -> Recipe:
    model = {"name": name, "sparsity": sparsity}
    return Recipe.from_dict({"members": 1, "data": {"name": "noise"}, "model": model, **changes})


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters() if p.ndim >= 2}


def flat(tree: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tree.values()])


# --- What a recipe prunes


@pytest.mark.parametrize(
    ("name", "sparsity"), [*(("resnet8", s) for s in (0.8, 0.95, 0.99)), ("resnet18", 0.95), ("resnet18", 0.99)]
)
def test_every_layer_of_a_sparse_network_has_nonzero_weights(name: str, sparsity: float) -> None:
    module = build_member(sparse_recipe(sparsity, name), data(), 0)
    found = weights(module)
    for key in ("conv1.weight", "linear.weight"):
        assert int((found.pop(key) == 0).sum()) == 0  # the first and the last layer stay dense
    assert all(bool((tensor.flatten(1) != 0).any(1).all()) for tensor in found.values())  # and so does every filter
    assert int((flat(found) == 0).sum()) == round(sparsity * flat(found).numel())


@pytest.mark.parametrize("sparsity", [0.8, 0.95, 0.99])
def test_a_sparse_network_learns_more_than_class_frequencies(sparsity: float, tmp_path: Path) -> None:
    splits = data(400)
    recipe = sparse_recipe(
        sparsity,
        data={"name": "noise", "batch_size": 50},
        optimizer={"name": "SGD", "lr": 0.1, "momentum": 0.9},
        train={"epochs": 4},
    )
    module = plateaux.load_predictor(
        plateaux.open_run(plateaux.train(recipe, tmp_path / "run", data=splits), data=splits)
    ).ensemble.members[0]
    x, y = splits.train.fetch(torch.arange(400))
    with torch.no_grad():
        logits = module.eval()(x)
    losses = F.cross_entropy(logits, y, reduction="none").double()
    frequencies = y.bincount(minlength=10) / len(y)
    gains = -frequencies[y].log() - losses  # per sample, against a constant prediction
    assert float(gains.mean()) > 2 * float(gains.std()) / math.sqrt(len(gains))
    # Equal logits for all inputs are what a classifier without weights has.
    assert float(logits.std(0).min()) > 1e-3


def test_a_network_without_layers_between_the_first_and_the_last_cannot_be_pruned() -> None:
    recipe = sparse_recipe(0.5, model={"name": "mlp", "hidden_sizes": [8], "sparsity": 0.5})
    with pytest.raises(RecipeError, match=r"sparsity = 0\.5, but there is no layer to prune.*at least three layers"):
        build_member(recipe, data(), 0)


@pytest.mark.parametrize(
    ("name", "options", "ends"),
    [
        ("resnet8", {}, ("conv1.weight", "linear.weight")),
        ("vit", {"width": 12, "depth": 1}, ("patch_embed.proj.weight", "head.weight")),
        ("wrn", {"depth": 10, "widen_factor": 1}, ("conv1.weight", "fc.weight")),
    ],
)
def test_the_first_and_last_layers_are_those_of_the_input_and_the_output(
    name: str, options: dict[str, Any], ends: tuple[str, str]
) -> None:
    assert end_layers(registry.model.get(name)(shape=(3, 32, 32), classes=4, **options)) == ends


# --- Which weights remain


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.9, 0.995])
def test_exactly_the_requested_fraction_is_pruned(sparsity: float) -> None:
    pruned = net()
    prune(pruned, sparsity)
    found = pruning_masks(pruned)
    assert set(found) == set(weights(pruned))
    alive = flat(found)
    assert int((~alive).sum()) == round(sparsity * len(alive))
    for name, mask in found.items():
        assert torch.equal(pruned.get_parameter(name) != 0, mask)


def reference_densities(shapes: list[tuple[int, ...]], sparsity: float) -> list[float]:
    """Densities of the published code: proportional to sum(shape) / prod(shape); layers above one become dense."""
    dense: set[int] = set()
    while True:
        others = [i for i in range(len(shapes)) if i not in dense]
        budget = (1 - sparsity) * sum(math.prod(s) for s in shapes) - sum(math.prod(shapes[i]) for i in dense)
        scale = budget / sum(sum(shapes[i]) for i in others)
        densities = {i: scale * sum(shapes[i]) / math.prod(shapes[i]) for i in others}
        if max(densities.values()) <= 1:
            return [1.0 if i in dense else densities[i] for i in range(len(shapes))]
        dense.add(max(densities, key=lambda i: densities[i]))


@pytest.mark.parametrize("sparsity", [0.3, 0.8, 0.95])
def test_densities_are_those_of_the_published_erk_code(sparsity: float) -> None:
    shapes = [tuple(tensor.shape) for tensor in weights(net("resnet18")).values()]
    truth = reference_densities(shapes, sparsity)
    for count, density, shape in zip(live_counts(shapes, sparsity), truth, shapes, strict=True):
        assert abs(count - density * math.prod(shape)) < 1


def test_every_output_unit_keeps_a_weight_where_its_density_would_give_it_none() -> None:
    assert live_counts([(100, 2), (100, 100)], 0.98) == [100, 104]


def test_the_largest_weights_of_a_layer_remain() -> None:
    pruned, original = net(), net()
    prune(pruned, 0.7)
    for name, mask in pruning_masks(pruned).items():
        magnitudes = original.get_parameter(name).detach().abs().flatten(1)
        rest = magnitudes.masked_fill(magnitudes == magnitudes.amax(1, keepdim=True), -1.0)
        kept, gone = rest[mask.flatten(1)], magnitudes[~mask.flatten(1)]
        kept = kept[kept >= 0]  # without the largest weight of every filter, which always remains
        assert not gone.numel() or not kept.numel() or float(kept.min()) >= float(gone.max())


def test_every_output_unit_keeps_its_largest_weight() -> None:
    layer = nn.Linear(4, 3, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[9.0, 8.0, 7.0, 6.0], [0.1, -0.2, 0.0, 0.1], [5.0, 4.0, 3.0, 2.0]]))
    prune(layer, 8 / 12)
    assert pruning_masks(layer)["weight"].int().tolist() == [[1, 1, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]]


def test_among_equal_weights_the_first_are_pruned() -> None:
    layer = nn.Linear(4, 2, bias=False)
    nn.init.constant_(layer.weight, -0.5)
    with torch.no_grad():
        layer.weight[0, 0], layer.weight[1, 0] = 9.0, -9.0
    prune(layer, 0.5)
    assert pruning_masks(layer)["weight"].flatten().int().tolist() == [1, 0, 0, 0, 1, 0, 1, 1]


def test_kept_submodules_are_not_pruned_and_masks_are_not_in_the_state_dict() -> None:
    pruned = net()
    names = list(pruned.state_dict())
    prune(pruned, 0.8, keep=["linear", "layer1.0.conv1"])
    assert not {"linear.weight", "layer1.0.conv1.weight"} & set(pruning_masks(pruned))
    assert list(pruned.state_dict()) == names
    assert pruning_masks(copy.deepcopy(pruned)).keys() == pruning_masks(pruned).keys()


def test_pruning_more_keeps_earlier_zeros() -> None:
    pruned = net()
    prune(pruned, 0.5)
    fallen = ~flat(pruning_masks(pruned))
    prune(pruned, 0.8)
    alive = flat(pruning_masks(pruned))
    assert not (alive & fallen).any()
    assert int((~alive).sum()) == round(0.8 * len(alive))


def test_position_embeddings_and_tokens_are_not_pruned() -> None:
    vit = net("vit", width=12, depth=1)
    prune(vit, 0.5)
    assert not {"pos_embed", "cls_token"} & set(pruning_masks(vit))


# --- What is rejected


@pytest.mark.parametrize("sparsity", [-0.1, 1.0, 90.0, math.nan])
def test_an_invalid_sparsity_is_rejected(sparsity: float) -> None:
    with pytest.raises(RecipeError, match="not a fraction of the weights"):
        prune(net(), sparsity)


def test_a_sparsity_that_leaves_units_without_weights_is_rejected_with_the_largest_possible_one() -> None:
    with pytest.raises(RecipeError, match=r"leaves 1 of 12 weights, but there are 3 output units.*at most 0\.75"):
        prune(nn.Linear(4, 3), 0.9)
    prune(nn.Linear(4, 3), 0.75)


@pytest.mark.parametrize(("wrong", "right"), [("layer_1", "'layer1'"), ("layer1.2", "'layer1.0'")])
def test_an_unknown_submodule_is_rejected_with_a_suggestion(wrong: str, right: str) -> None:
    with pytest.raises(RecipeError, match=right):
        prune(net(), 0.5, keep=[wrong])
