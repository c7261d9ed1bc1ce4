"""Every built-in recipe loads, is valid, matches its paper, and trains."""

from __future__ import annotations

import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import plateaux
from plateaux.config.builtin_recipes import recipe_file
from plateaux.config.experiment import Experiment
from plateaux.data.sources import InMemorySource
from plateaux.training.recipe_rules import check

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
FILES = sorted(FOLDER.rglob("*.toml"))
SHAPES = {  # of one sample, and how many classes
    "digits": ((1, 8, 8), 10),
    "fashion_mnist": ((1, 28, 28), 10),
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "tiny_imagenet": ((3, 64, 64), 200),
    "image_folder": ((3, 224, 224), 100),
    "mrpc": ((32,), 2),
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_is_valid_and_found_by_its_name(file: Path) -> None:
    assert recipe_file(file.stem).read_text(encoding="utf-8") == file.read_text(encoding="utf-8")
    assert check(Experiment(plateaux.Recipe.load(file))) is False  # no members see each other in a batch


def test_no_two_recipes_share_a_name() -> None:
    stems = [file.stem for file in FILES]
    assert sorted(set(stems)) == sorted(stems)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_trains_two_steps(file: Path, tmp_path: Path) -> None:
    whole = plateaux.Recipe.load(file)
    if whole.data.name == "mrpc" and find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    is_large = whole.data.name == "image_folder" or whole.model.image_size is not None
    batch = 2 if is_large else 4  # large images cost more
    validation = 2 if whole.data.validation_split else 0
    partitions = whole.method.name == "sharpbalance"  # then before the first step, with at least two members
    recipe = whole.replaced(
        members=2 if partitions else 1,
        # ALBERT's layer is applied twice instead of twelve times, with the same weights.
        model={"weights": None, "cached_augmentations": 1, **({"depth": 2} if whole.model.name == "albert" else {})},
        method={"partition_epoch": 0} if partitions else {},
        data={"batch_size": batch, "validation_split": validation},
        train={"epochs": 1},
        executor={"processes": 1, "threads": 1},
        run={"feature_cache": str(tmp_path / "features")},
    )
    run = plateaux.train(recipe, tmp_path / "run", data=made_up(whole.data.name, 2 * batch + validation))
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


def made_up(name: str, samples: int) -> plateaux.DataSplits:
    """Return noise of the shape of a published set."""
    shape, classes = SHAPES[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (samples, *shape), generator=generator, dtype=torch.uint8)
    tokens = {word: x % 2 for word in ("attention_mask", "token_type_ids")} | {"input_ids": x}
    text = {word: rows.long() for word, rows in tokens.items()}
    source = InMemorySource(text if name == "mrpc" else x, torch.arange(samples) % classes)
    middle = (0.5,) * shape[0]
    return plateaux.DataSplits(name, source, source, classes, shape, mean=middle, std=middle)
