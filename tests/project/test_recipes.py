"""Every built-in recipe loads, is valid, matches its paper, and trains."""

from __future__ import annotations

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import plateaux
from plateaux.config.builtin import recipe_file
from plateaux.config.experiment import Experiment
from plateaux.data.sources import InMemorySource
from plateaux.training.checks import check

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
FILES = sorted(FOLDER.rglob("*.toml"))
PAPERS = [file for file in FILES if file.parent.name == "papers"]
IMAGES = [file for file in PAPERS if not file.stem.startswith("mrpc")]
SHAPES = {  # of one sample, and how many classes
    "digits": ((1, 8, 8), 10),
    "fashion_mnist": ((1, 28, 28), 10),
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "tiny_imagenet": ((3, 64, 64), 200),
    "image_folder": ((3, 224, 224), 100),
    "mrpc": ((32,), 2),
}
JOINT = {"sed_imagenet"}  # members see each other in every batch
BALANCED = {"cifar10": (0.4, 100), "cifar100": (0.5, 100), "tiny_imagenet": (0.3, 100)}  # top and meet_after, Table 1


def test_every_full_size_run_of_the_paper_has_a_recipe() -> None:
    nets = {"cifar10": ("resnet18", "wrn40_2"), "cifar100": ("resnet18", "wrn40_2"), "tiny_imagenet": ("resnet18",)}
    methods = ("deep_ensemble", "sam", "sharpbalance")
    wanted = {f"{d}_{n}_{m}" for d, known in nets.items() for n in known for m in methods}
    wanted |= {"cifar10_resnet18_sparse_sharpbalance", "cifar100_resnet18_sparse_sharpbalance"}
    wanted |= {f"{name}_{method}" for name in ("cifar100_vit_tiny", "mrpc_albert") for method in methods}
    assert {file.stem for file in PAPERS} == wanted


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_is_valid_and_found_by_its_name(file: Path) -> None:
    assert recipe_file(file.stem).read_text(encoding="utf-8") == file.read_text(encoding="utf-8")
    assert check(Experiment(plateaux.Recipe.load(file))) is (file.stem in JOINT)


def test_no_two_recipes_share_a_name() -> None:
    stems = [file.stem for file in FILES]
    assert sorted(set(stems)) == sorted(stems)


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

    recipe = plateaux.Recipe.load(FOLDER / "papers" / f"mrpc_albert_{method}.toml")
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


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_trains_two_steps(file: Path, tmp_path: Path) -> None:
    whole = plateaux.Recipe.load(file)
    if whole.data.name == "mrpc" and find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    joint = file.stem in JOINT
    is_large = whole.data.name == "image_folder" or whole.model.image_size is not None
    batch = 2 if is_large else 4  # large images cost more
    validation = 2 if whole.data.validation_split else 0
    partitions = whole.method.name == "sharpbalance"  # then before the first step, with at least two members
    recipe = whole.replaced(
        members=2 if partitions or joint else 1,
        # ALBERT's layer is applied twice instead of twelve times, with the same weights.
        model={"weights": None, "cached_augmentations": 1, **({"depth": 2} if whole.model.name == "albert" else {})},
        method={"partition_epoch": 0} if partitions else {},
        data={"batch_size": batch, "validation_split": validation},
        train={"epochs": 1},
        executor={"processes": 1, "threads": 1},
        run={"feature_cache": str(tmp_path / "features")},
    )
    run = plateaux.train(recipe, tmp_path / "run", data=made_up(whole.data.name, 2 * batch + validation, 1000 * joint))
    steps = [line["step"] for line in run.log(0) if "step" in line]
    assert steps[-1] == 2
    assert run.progress(0).finished
    start = tomllib.loads(file.read_text(encoding="utf-8"))["optimizer"]["lr"]
    to_zero = any(
        part.name == "cosine" and part.interval == "step" for part in whole.lr_scheduler
    )  # at the very last step
    rate = run.log(0)[0]["lr"]
    assert rate > 0 or (rate == 0 and to_zero)
    assert rate <= start
    assert all(bool(torch.isfinite(tensor).all()) for tensor in run.weights(0).values())
    assert run.store.has("sam_sets/0/summary.json") is partitions


def test_the_recipe_of_sed_matches_its_paper() -> None:
    recipe = plateaux.Recipe.load(FOLDER / "sed_imagenet.toml")
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


def made_up(name: str, samples: int, classes: int = 0) -> plateaux.DataSplits:
    """Return noise of the shape of a published set."""
    shape, usual = SHAPES[name]
    classes = classes or usual
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (samples, *shape), generator=generator, dtype=torch.uint8)
    tokens = {word: x % 2 for word in ("attention_mask", "token_type_ids")} | {"input_ids": x}
    text = {word: rows.long() for word, rows in tokens.items()}
    source = InMemorySource(text if name == "mrpc" else x, torch.arange(samples) % classes)
    middle = (0.5,) * shape[0]
    return plateaux.DataSplits(name, source, source, classes, shape, mean=middle, std=middle)
