"""The recipes of the papers are valid, and match their papers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import plateaux
from plateaux_papers import RECIPES, ROOT

FILES = sorted(file for folder in RECIPES for file in folder.glob("*.toml"))
PAPER = sorted((ROOT / "lu2024" / "recipes").glob("*.toml"))
IMAGES = [file for file in PAPER if not file.stem.startswith("mrpc")]
BALANCED = {"cifar10": (0.4, 100), "cifar100": (0.5, 100), "tiny_imagenet": (0.3, 100)}  # top and meet_after, Table 1


def test_every_recipe_is_valid_and_found_by_its_name(tmp_path: Path) -> None:
    for file in FILES:
        assert plateaux.Recipe.load(file.stem) == plateaux.Recipe.load(file)
    words = [sys.executable, "-m", "plateaux", "recipe", "check", "sed_imagenet", "--json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["method"]["name"] == "sed"


@pytest.mark.parametrize("file", PAPER, ids=lambda file: file.stem)
def test_the_commands_in_the_comments_of_a_recipe_name_it(file: Path) -> None:
    named = re.findall(r"^#\s+plateaux train (\S+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(named) == {file.stem}


def test_every_full_size_run_of_the_paper_has_a_recipe() -> None:
    nets = {"cifar10": ("resnet18", "wrn40_2"), "cifar100": ("resnet18", "wrn40_2"), "tiny_imagenet": ("resnet18",)}
    methods = ("deep_ensemble", "sam", "sharpbalance")
    wanted = {f"{d}_{n}_{m}" for d, known in nets.items() for n in known for m in methods}
    wanted |= {"cifar10_resnet18_sparse_sharpbalance", "cifar100_resnet18_sparse_sharpbalance"}
    wanted |= {f"{name}_{method}" for name in ("cifar100_vit_tiny", "mrpc_albert") for method in methods}
    assert {file.stem for file in PAPER} == wanted


@pytest.mark.parametrize("file", IMAGES, ids=lambda file: file.stem)
def test_a_recipe_of_the_paper_matches_the_paper(file: Path) -> None:
    data, net, sparse, method = re.fullmatch(r"(.+?)_(resnet18|wrn40_2|vit_tiny)_(sparse_)?(.+)", file.stem).groups()  # type: ignore[union-attr]
    recipe = plateaux.Recipe.load(file)
    assert (recipe.members, recipe.data.name, recipe.data.batch_size, recipe.train.epochs) == (3, data, 128, 200)
    assert (recipe.data.crop, recipe.data.flip) == (4, True)
    assert recipe.model.image_size == (224 if net == "vit_tiny" else None)
    assert recipe.data.validation_split == (0 if data == "tiny_imagenet" else 5000)
    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay) == (0.1, 5e-4)
    assert recipe.optimizer.options == {"momentum": 0.9}
    assert [(part.name, part.options) for part in recipe.lr_scheduler] == [
        ("multistep", {"milestones": [100, 150], "gamma": 0.1})
    ]
    assert recipe.model.sparsity == (0.95 if sparse else 0)
    top, meet_after = BALANCED[data]
    if sparse and data == "cifar100":
        meet_after = 150  # appendix D.3
    options = {
        "deep_ensemble": {},
        "sam": {"rho": 0.2},
        "sharpbalance": {"rho": 0.2, "top_k": top, "partition_epoch": meet_after},
    }
    assert (recipe.method.name, recipe.method.options) == (method, options[method])


@pytest.mark.parametrize("method", ["deep_ensemble", "sam", "sharpbalance"])
def test_albert_is_fine_tuned_as_by_its_authors(method: str) -> None:
    """AdamW at 2e-5, 200 of 800 steps of warm-up, and batches of 32 are MRPC's row of google-research/albert."""
    from plateaux.config.builders.training import build_lr_scheduler, build_optimizer

    recipe = plateaux.Recipe.load(ROOT / "lu2024" / "recipes" / f"mrpc_albert_{method}.toml")
    assert (recipe.members, recipe.data.batch_size, recipe.data.validation_split) == (3, 32, 0.1)
    assert recipe.data.options["test_split"] == "dev"
    assert (recipe.model.lora, recipe.model.freeze, recipe.model.backbone) == (None, (), None)  # all of it is trained
    options = {"deep_ensemble": {}, "sam": {"rho": 0.2}}
    options["sharpbalance"] = {"rho": 0.2, "top_k": 0.4, "partition_epoch": 4}
    assert (recipe.method.name, recipe.method.options) == (method, options[method])
    optimizer = build_optimizer(recipe, 0, {"weight": torch.nn.Parameter(torch.zeros(1))})
    steps = -(-(3668 - 367) // 32)
    schedule, every_step = build_lr_scheduler(recipe, optimizer, steps=steps)
    assert schedule is not None
    assert every_step
    rates = []
    for _ in range(recipe.train.epochs * steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert (len(rates), rates.index(max(rates)), max(rates)) == (832, 208, 2e-5)
    assert rates[104] == pytest.approx(1e-5, rel=0.02)
    assert rates[520] == pytest.approx(1e-5, rel=0.02)
    assert rates[-1] < 1e-7


def test_the_papers_learning_rate_drops_by_10_after_100_and_150_epochs() -> None:
    from plateaux.config.builders.training import build_lr_scheduler, build_optimizer

    recipe = plateaux.Recipe.load(IMAGES[0])
    optimizer = build_optimizer(recipe, 0, {"weight": torch.nn.Parameter(torch.zeros(1))})
    schedule, every_step = build_lr_scheduler(recipe, optimizer, steps=352)
    assert schedule is not None
    assert not every_step
    rates = []
    for _ in range(200):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.1] * 100 + [0.01] * 50 + [0.001] * 50)


def test_the_recipe_of_sed_matches_its_paper() -> None:
    recipe = plateaux.Recipe.load(ROOT / "sed2024" / "recipes" / "sed_imagenet.toml")
    assert (recipe.members, recipe.data.batch_size, recipe.train.epochs, recipe.model.cached_augmentations) == (
        5,
        16,
        10,
        4,
    )
    assert (recipe.method.name, recipe.method.options) == ("sed", {"diversity_weight": 0.1 / 2, "members_per_step": 2})
    assert (recipe.optimizer.name, recipe.optimizer.lr, recipe.optimizer.weight_decay) == ("AdamW", 1e-3, 0.01)
    assert recipe.model.name == "timm:deit3_base_patch16_224"
    assert recipe.model.cache_features
    # The name of the file says what the weights were trained on: not only on ImageNet-21k, as the paper says.
    assert recipe.model.weights == "deit3_base_patch16_224.fb_in22k_ft_in1k.safetensors"


@pytest.mark.parametrize("file", [file for file in IMAGES if file.stem.startswith("cifar")], ids=lambda file: file.stem)
def test_a_cifar_recipe_states_that_its_learning_rate_is_not_in_the_appendix(file: Path) -> None:
    header = " ".join(
        line.lstrip("# ") for line in file.read_text(encoding="utf-8").split("members = 3")[0].splitlines()
    )
    assert "D.3 gives no learning rate for CIFAR" in header or "which D.3 gives for TinyImageNet only" in header
    assert "released code" in header
