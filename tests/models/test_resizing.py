"""Images that a network resizes: CIFAR-100 for a network of larger images, from training to an exported bundle."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plateaux
from plateaux.config.builders.data import build_data
from plateaux.config.builders.model import build_member
from plateaux.config.experiment import Experiment
from plateaux.config.recipe import Recipe
from plateaux.core.errors import DataError, RecipeError
from plateaux.data.sources import DataSplits, InMemorySource, from_tensors
from plateaux.evaluation.splits import ood_split
from plateaux.models.architectures.small import cnn
from plateaux.models.resizing import resize, resize_inputs, resized_shape
from plateaux.training.recipe_rules import check

SIZE = 48  # pixels that the network sees; those of CIFAR-100 are 32
COUNT = 30  # images of each split
IMAGES = torch.rand(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))
RNG = np.random.default_rng(0)
# With patches of 16 px, the position embeddings have 1 + 3 x 3 rows for 48 px, and 1 + 2 x 2 for 32 px.
VIT = {"name": "vit", "patch_size": 16, "width": 12, "depth": 1, "heads": 2}


def reference(x: Tensor, size: int, interpolation: str) -> Tensor:
    return F.interpolate(x, (size, size), mode=interpolation, antialias=True, align_corners=False)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with CIFAR-100 and CIFAR-100-C in their published layouts, but few images."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "cifar-100-binary").mkdir()
    for name in ("train", "test"):
        labels = np.stack([np.zeros(COUNT), np.arange(COUNT) % 100], axis=1).astype(np.uint8)  # coarse, fine
        pixels = RNG.integers(0, 256, (COUNT, 3 * 32 * 32), dtype=np.uint8)
        np.concatenate([labels, pixels], axis=1).tofile(folder / "cifar-100-binary" / f"{name}.bin")
    (folder / "CIFAR-100-C").mkdir()
    np.save(folder / "CIFAR-100-C" / "fog.npy", RNG.integers(0, 256, (5 * COUNT, 32, 32, 3), dtype=np.uint8))
    np.save(folder / "CIFAR-100-C" / "labels.npy", np.tile(np.arange(COUNT) % 100, 5).astype(np.uint8))
    return folder


def recipe(root: Path, **model: Any) -> Recipe:
    return Recipe.from_dict(
        {
            "members": 2,
            "data": {"name": "cifar100", "root": str(root), "batch_size": 10, "crop": 4, "flip": True},
            "model": {**VIT, "image_size": SIZE, "image_interpolation": "bicubic", **model},
            "optimizer": {"name": "SGD", "lr": 0.02},
            "train": {"epochs": 2},
            "executor": {"threads": 1},
        }
    )


@pytest.fixture(scope="module")
def run(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    plateaux.train(recipe(root), out)
    return out


def expected_logits(run: Path, root: Path, images: Tensor) -> Tensor:
    """Return the logits of the members for uint8 images that torch resizes beforehand."""
    stored = plateaux.Run.open(run)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)))
    x = reference((images.float() / 255 - mean) / std, SIZE, "bicubic")
    plain = recipe(root).replaced(model={"image_size": None, "image_interpolation": None})
    sized = DataSplits("cifar100", *[InMemorySource(x, torch.zeros(len(x)).long())] * 2, 100, (3, SIZE, SIZE))
    logits = []
    for number in range(2):
        module = build_member(plain, sized, number).eval()
        module.load_state_dict(stored.weights(number))
        logits.append(module(x))
    return torch.stack(logits).detach()


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [8, 24])
def test_a_network_receives_images_of_its_size(interpolation: Any, size: int) -> None:
    plain = cnn(shape=(3, size, size), classes=5, channels=(4,)).eval()
    network = copy.deepcopy(plain)
    resize_inputs(network, size, interpolation)
    expected = plain(reference(IMAGES, size, interpolation))
    assert torch.equal(network(IMAGES), expected)
    assert torch.equal(copy.deepcopy(network)(IMAGES), expected)
    assert list(network.state_dict()) == list(plain.state_dict())
    assert resize(IMAGES, 16, interpolation) is IMAGES


def test_bicubic_resizing_equals_pillow() -> None:
    """The weights of timm's transformers are evaluated with Pillow's bicubic resizing."""
    image_module = pytest.importorskip("PIL.Image")
    pixels = (IMAGES[0, 0] * 255).numpy()
    pillow = np.array(image_module.fromarray(pixels).resize((56, 56), image_module.Resampling.BICUBIC))
    torch.testing.assert_close(
        resize(torch.from_numpy(pixels)[None, None], 56, "bicubic")[0, 0], torch.from_numpy(pillow), rtol=0, atol=1e-3
    )


def test_a_model_is_built_for_the_resized_images(root: Path) -> None:
    data = from_tensors((IMAGES, torch.zeros(6).long()), (IMAGES, torch.zeros(6).long()), classes=100)
    module = build_member(recipe(root), data, 0)
    assert module.get_parameter("pos_embed").shape[-2] == 1 + (SIZE // 16) ** 2
    assert module(IMAGES).shape == (6, 100)


def test_the_data_set_and_the_run_stay_at_32_pixels(run: Path, root: Path) -> None:
    info = plateaux.Run.open(run).info
    assert info.data.shape == (3, 32, 32)
    assert info.inputs is not None
    assert info.inputs.inputs["x"].shape == (3, 32, 32)
    seen: list[tuple[int, ...]] = []

    class Recorder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 100)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(tuple(x.shape))
            return self.layer(x.mean((2, 3)))  # type: ignore[no-any-return]

    resized = Recipe.from_dict({**recipe(root).to_dict(), "model": {"name": "given", "image_size": SIZE}})
    out = run.parent / "recorded"
    plateaux.train(resized, out, model=Recorder)
    assert {shape[1:] for shape in seen} == {(3, SIZE, SIZE)}
    assert max(shape[0] for shape in seen) <= 10  # a batch, never the whole set
    upsampled_bytes = COUNT * 3 * SIZE**2
    assert sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) < upsampled_bytes


def test_the_logits_equal_those_of_images_resized_in_advance(run: Path, root: Path) -> None:
    x = torch.from_numpy(RNG.integers(0, 256, (4, 3, 32, 32), dtype=np.uint8))
    torch.testing.assert_close(
        plateaux.load_predictor(run).ensemble.logits(x), expected_logits(run, root, x), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("mode", ["vmap", "offload"])
def test_every_executor_mode_trains_the_same_members(mode: str, run: Path, root: Path, tmp_path: Path) -> None:
    other = plateaux.train(recipe(root).replaced(executor={"mode": mode}), tmp_path / "run")
    for number in range(2):
        torch.testing.assert_close(other.weights(number), plateaux.Run.open(run).weights(number), rtol=1e-3, atol=1e-5)


def test_published_corrupted_images_are_found_and_resized(run: Path, root: Path) -> None:
    (found,) = plateaux.evaluate(run, split="corrupted:fog:3", metrics=["nll"])
    images = np.load(root / "CIFAR-100-C" / "fog.npy")[2 * COUNT : 3 * COUNT]
    logits = expected_logits(run, root, torch.from_numpy(images).permute(0, 3, 1, 2))
    expected = [float(F.cross_entropy(each, torch.arange(COUNT) % 100)) for each in logits]
    assert [found.rows[f"member {number}"].value for number in range(2)] == pytest.approx(expected, rel=1e-5)
    assert found.split == "fog 3"


def test_images_of_other_data_sets_and_generated_corruptions_are_resized(run: Path, tmp_path: Path) -> None:
    image_module = pytest.importorskip("PIL.Image")
    for number in range(3):
        pixels = RNG.integers(0, 256, (40, 50, 3), dtype=np.uint8)
        image_module.fromarray(pixels).save(tmp_path / f"{number}.png")
    stored = plateaux.Run.open(run).recipe
    source, ids = ood_split(f"{tmp_path}/", "far").open(stored, build_data(stored))
    assert source.fetch(ids)[0].shape == (3, 3, 32, 32)  # type: ignore[union-attr]
    (found,) = plateaux.evaluate(run, split="corrupted:snow:2@8", metrics=["accuracy"])
    assert found.rows


@pytest.mark.slow
def test_a_predictor_and_a_bundle_take_images_of_the_data_set(run: Path, root: Path, tmp_path: Path) -> None:
    x = torch.from_numpy(RNG.integers(0, 256, (3, 3, 32, 32), dtype=np.uint8))
    expected = expected_logits(run, root, x).softmax(-1).mean(0).numpy()
    predictor = plateaux.load_predictor(run)
    np.testing.assert_allclose(predictor(x).probabilities, expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(DataError, match=r"has shape \[3, 48, 48\]. Expected: \[3, 32, 32\]"):
        predictor(torch.zeros(3, SIZE, SIZE))
    pytest.importorskip("onnxruntime")
    plateaux.export(run, tmp_path / "bundle", license="CC0-1.0")
    bundle = plateaux.load_predictor(tmp_path / "bundle")
    np.testing.assert_allclose(bundle(x).probabilities, expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(DataError, match=r"Expected: \[3, 32, 32\]"):
        bundle(torch.zeros(3, SIZE, SIZE))


def test_another_size_is_another_experiment(root: Path) -> None:
    sizes = [recipe(root), recipe(root, image_size=32), recipe(root, image_interpolation="bilinear")]
    assert len({str(each.identity()) for each in sizes}) == 3


def test_inconsistent_keys_are_rejected(root: Path) -> None:
    with pytest.raises(RecipeError, match=r"without model.image_size"):
        recipe(root, image_size=None)
    with pytest.raises(RecipeError, match=r"image_interpolation"):
        recipe(root, image_interpolation="nearest")
    assert check(Experiment(recipe(root))) is False
    with pytest.raises(RecipeError, match=r"shape \[7\] and are no images"):
        resized_shape((7,), 32)
