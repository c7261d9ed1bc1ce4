"""LoRA adapters: start at the base, merge exactly, share the base, and agree under every executor."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import GIVEN, distance, recipe, trained, weights
from laws.meshes import mesh
from laws.test_interrupted import train_with_interruption
from reference.gradient_norms import gradient_norms
from torch import Tensor, nn
from typer.testing import CliRunner

import plateaux
from plateaux.cli.main import app
from plateaux.config.builders.data import build_data
from plateaux.config.builders.model import architecture_hash, build_members, lora_config, shared_param_names
from plateaux.config.recipe import Recipe
from plateaux.core.errors import RecipeError, RunError
from plateaux.core.member import MemberModule
from plateaux.core.registry import model
from plateaux.core.types import Batch
from plateaux.ensembles.ensemble import Ensemble
from plateaux.models.lora import LoRALinear, add_lora, base_names, merge_lora
from plateaux.optim.grad_norms import squared_norms
from plateaux.storage.run import Run
from plateaux.training.train import train

METHODS = ["sharpbalance", "sed"]  # independent members with SAM and a data partition; a joint method
SHAPES = {"mlp": (5,), "vit": (3, 8, 8), "cnn": (3, 8, 8)}
LAYERS = {"mlp": ["1", "3"], "vit": ["*.qkv", "*.fc2"], "cnn": ["*"]}
OPTIONS: dict[str, dict[str, Any]] = {"mlp": {}, "vit": {"width": 24, "depth": 2}, "cnn": {"norm": "batch"}}


def net(name: str = "mlp", *, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        built: nn.Module = model.get(name)(shape=SHAPES[name], classes=3, **OPTIONS[name])
        return built


def inputs(name: str = "mlp", count: int = 6) -> Tensor:
    return torch.randn(count, *SHAPES[name], generator=torch.Generator().manual_seed(1))


def adapted(name: str = "mlp", *, moved: bool = True, **options: Any) -> nn.Module:
    """Return a network with adapters that have moved away from zero."""
    built = net(name)
    add_lora(built, **{"rank": 2, "alpha": 4.0, "target_modules": LAYERS[name], **options})
    generator = torch.Generator().manual_seed(2)
    for part in built.modules():
        if moved and isinstance(part, LoRALinear):
            part.up.weight.data = 0.3 * torch.randn(part.up.weight.shape, generator=generator)
    return built


# One network.


@pytest.mark.parametrize("name", ["mlp", "vit"])
def test_with_b_equal_to_zero_a_network_equals_its_base(name: str) -> None:
    assert torch.equal(adapted(name, moved=False)(inputs(name)), net(name)(inputs(name)))


def test_an_adapter_adds_alpha_over_rank_times_b_a_x() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(7, 4).double()
    layer = LoRALinear(plain, rank=3, alpha=6.0)
    layer.up.weight.data.normal_()
    x, a, b = torch.randn(5, 7).double(), layer.down.weight, layer.up.weight
    by_hand = torch.stack([plain.weight @ row + plain.bias + 2.0 * (b @ (a @ row)) for row in x])
    torch.testing.assert_close(layer(x), by_hand, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["mlp", "vit"])
def test_merged_weights_give_the_same_outputs_without_adapters(name: str) -> None:
    one, plain = adapted(name), net(name, seed=9)
    assert not torch.allclose(one(inputs(name)), net(name)(inputs(name)), atol=1e-2)
    plain.load_state_dict(merge_lora(one), strict=True)
    torch.testing.assert_close(plain(inputs(name)), one(inputs(name)), rtol=0, atol=1e-6)


def test_merging_does_not_change_the_network() -> None:
    one = adapted()
    before = {name: tensor.clone() for name, tensor in one.state_dict().items()}
    for tensor in merge_lora(one).values():
        tensor.zero_()
    assert all(torch.equal(before[name], tensor) for name, tensor in one.state_dict().items())


def test_only_adapters_and_the_last_layer_are_trained() -> None:
    one = adapted()
    trained_ = {name for name, p in one.named_parameters() if p.requires_grad}
    assert trained_ == {f"{n}.{part}.weight" for n in "13" for part in ("down", "up")} | {"5.weight", "5.bias"}
    assert base_names(one) == {f"{n}.{part}" for n in "13" for part in ("weight", "bias")}


def test_modules_to_save_are_fully_trained_without_an_adapter() -> None:
    one = adapted(target_modules=["*"], modules_to_save=["1"])
    assert [name for name, part in one.named_modules() if isinstance(part, LoRALinear)] == ["3", "5"]
    assert base_names(one, ["1"]) == {"3.weight", "3.bias", "5.weight", "5.bias"}
    assert all(p.requires_grad for p in one[1].parameters())  # type: ignore[index]


def test_batchnorm_of_a_lora_base_keeps_its_statistics() -> None:
    one = adapted("cnn", modules_to_save=[])
    before = {name: buffer.clone() for name, buffer in one.named_buffers()}
    one.train()(inputs("cnn"))
    assert before
    assert all(torch.equal(before[name], buffer) for name, buffer in one.named_buffers())


def test_a_layer_that_occurs_twice_gets_one_adapter() -> None:
    twice = nn.Linear(4, 4)
    one = nn.Sequential(twice, nn.ReLU(), twice, nn.Linear(4, 2))
    add_lora(one, rank=2, alpha=2.0, target_modules=["0", "2"])
    assert one[0] is one[2]
    assert sorted(merge_lora(one)) == sorted(nn.Sequential(twice, nn.ReLU(), twice, nn.Linear(4, 2)).state_dict())


@pytest.mark.parametrize("name", ["mlp", "vit"])
def test_per_sample_scores_equal_one_backward_pass_per_sample(name: str) -> None:
    one = adapted(name)
    batch = Batch(inputs(name), torch.arange(6) % 3, torch.arange(6))
    torch.testing.assert_close(squared_norms(MemberModule(one), batch), gradient_norms(one, batch), rtol=1e-5, atol=0)


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


@pytest.mark.parametrize(
    ("module", "options", "words"),
    [
        (
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            {"target_modules": ["*.query"]},
            r"'\*.query' matches no linear layer.*: 0",
        ),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), {"target_modules": ["1"]}, "matches no linear layer outside"),
        (
            nn.Sequential(nn.Linear(2, 2)),
            {"target_modules": ["0"], "modules_to_save": ["hed"]},
            "no submodule or tensor 'hed'",
        ),
        (nn.Sequential(Own(2, 2), nn.Linear(2, 2)), {"target_modules": ["0"]}, "overrides forward"),
        (
            nn.Sequential(nn.MultiheadAttention(2, 1), nn.Linear(2, 2)),
            {"target_modules": ["*proj"]},
            "without calling it",
        ),
        (
            nn.Sequential(nn.TransformerEncoderLayer(2, 1), nn.Linear(2, 2)),
            {"target_modules": ["*1"]},
            "without calling it",
        ),
    ],
)
def test_layers_that_cannot_be_adapted_are_rejected(module: nn.Module, options: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        add_lora(module, rank=2, alpha=2.0, **options)


# Recipes.


@pytest.mark.parametrize(
    ("model_part", "words"),
    [
        ({"lora": {"rank": 2}}, r"\[model\] lora lacks 'target_modules'"),
        ({"lora": {"rank": 0, "target_modules": ["1"]}}, r"lora\.rank = 0: Input should be greater than or equal to 1"),
        ({"lora": {"rnk": 1, "target_modules": ["1"]}}, r"\[model\] lora has no key 'rnk'; did you mean 'rank'"),
        ({"lora": {"target_modules": []}}, r"lora.target_modules = \[\]: "),
        ({"lora": {"target_modules": ["1"]}, "freeze": ["1"]}, "remove model.freeze"),
        ({"lora": {"target_modules": ["1"], "rank": [1, 2]}}, "lists 2 values, but the ensemble has 3"),
    ],
)
def test_invalid_lora_options_of_a_recipe_are_reported(model_part: dict[str, Any], words: str) -> None:
    def built() -> None:
        row = recipe("deep_ensemble", "mlp", model={"hidden_sizes": [6, 6], **model_part})
        build_members(row, build_data(row), [0])

    with pytest.raises(RecipeError, match=words):
        built()


def test_a_recipe_with_lora_round_trips_through_toml_and_other_hashes_are_unchanged() -> None:
    row = recipe("deep_ensemble", "adapted")
    assert Recipe.parse(row.to_toml()) == row
    assert "lora" not in recipe("deep_ensemble", "mlp").to_dict()["model"]


def test_members_store_the_base_once_and_differ_only_in_their_own_weights() -> None:
    row = recipe("deep_ensemble", "adapted", members=5, model={"hidden_sizes": [64, 64]})
    nets = build_members(row, build_data(row), range(5))
    names = shared_param_names(row, nets[0])
    states = [each.state_dict() for each in nets]
    assert all(states[0][name].data_ptr() == each[name].data_ptr() for name in names for each in states)
    assert all(not torch.equal(a["1.down.weight"], b["1.down.weight"]) for a, b in pairwise(states))
    held = Ensemble(nets).bytes()
    base = 4 * sum(states[0][name].numel() for name in names)
    own = 4 * sum(t.numel() for n, t in states[0].items() if n not in names)
    assert held == {"held": base + 5 * own, "unshared": 5 * (base + own)}
    again = build_members(row, build_data(row), [3])[0].state_dict()  # whoever else is built
    assert all(torch.equal(again[name], states[3][name]) for name in again)


def test_members_may_have_a_rank_and_an_alpha_each() -> None:
    row = recipe(
        "deep_ensemble", "adapted", model={"lora": {"rank": [1, 2, 3], "alpha": [4, 4, 6], "target_modules": ["1"]}}
    )
    nets = build_members(row, build_data(row), range(3))
    parts = [each[1] for each in nets]  # type: ignore[index]
    assert [(part.down.out_features, part.scale) for part in parts] == [(1, 4.0), (2, 2.0), (3, 2.0)]
    assert len({architecture_hash(row, number) for number in range(3)}) == 3
    assert lora_config(recipe(), 0) == {}


# The laws.


@pytest.mark.process
@pytest.mark.parametrize("method", METHODS)
def test_every_executor_trains_the_same_adapters_and_leaves_the_base_unchanged(method: str, tmp_path: Path) -> None:
    row = recipe(method, "adapted", precision="fp64")
    loop = train(row, tmp_path / "loop", **GIVEN.keywords())
    start = build_members(row, build_data(row), [0])[0].state_dict()
    assert all(torch.equal(start[name], tensor) for name, tensor in loop.shared().items())
    assert not loop.shared().keys() & loop.weights(0).keys()
    assert float(loop.weights(0)["3.up.weight"].abs().max()) > 1e-3
    assert distance(trained(row.replaced(executor={"mode": "offload"}), tmp_path / "offload"), weights(loop)) == 0
    assert distance(trained(row.replaced(executor={"mode": "vmap"}), tmp_path / "vmap"), weights(loop)) <= 1e-12
    for name, copies, bound in (("2x1", 1, 0.0), ("1x2", 2, 1e-12)):
        spread = row.replaced(executor={"name": "mesh", "data_parallel": copies})
        mesh(2).run("laws.meshes:train_here", spread.to_dict(), str(tmp_path / name))
        assert distance(weights(Run.open(tmp_path / name)), weights(loop)) <= bound


@pytest.mark.parametrize("method", ["sam", "sharpbalance"])
def test_resuming_does_not_change_a_bit_of_an_adapter(method: str, tmp_path: Path) -> None:
    row = recipe(method, "adapted")
    whole = trained(row, tmp_path / "whole")
    assert distance(weights(train_with_interruption(row, tmp_path / "parts", 4)), whole) == 0


# What is done with a run.


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(recipe("deep_ensemble", "adapted"), tmp_path_factory.mktemp("lora") / "run", **GIVEN.keywords())


def test_a_loaded_run_stores_its_base_once_and_can_be_merged(run: Run) -> None:
    ensemble = plateaux.load_predictor(run.store.root).ensemble
    assert ensemble.bytes()["held"] < ensemble.bytes()["unshared"]
    row = run.recipe.replaced(model={"lora": None})
    plain = build_members(row, build_data(row), [0])[0]
    plain.load_state_dict(merge_lora(ensemble.members[0]), strict=True)
    x = torch.randn(7, 2)
    torch.testing.assert_close(plain(x), ensemble.members[0](x), rtol=0, atol=1e-6)
    assert plateaux.evaluate(run.store.root, metrics=["accuracy"])


def test_status_shows_what_is_shared(run: Run) -> None:
    message = json.loads(CliRunner().invoke(app, ["status", str(run.store.root), "--json"]).stdout)
    assert message["shared_bytes"] == 4 * sum(tensor.numel() for tensor in run.shared().values()) > 0


def test_a_soup_of_unmerged_adapters_is_rejected(run: Run, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="Merge every member first"):
        plateaux.soup(run.store.root, tmp_path / "soup", split="test")
