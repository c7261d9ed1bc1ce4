"""The corrupt function: seeds, batches, rejected inputs, and the accuracy of a trained network."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plateaux.core.errors import DataError, RecipeError, UnknownNameError
from plateaux.data.corruptions.corrupt import CORRUPTIONS, EXTRA, VERSION, Corrupted, corrupt, describe
from plateaux.data.corruptions.severities import SIZES, TABLES, table_size
from plateaux.data.loader import ordered_batches
from plateaux.data.sources import InMemorySource
from plateaux.models.architectures.resnet import resnet
from plateaux.models.surgery import load_weights

pytest.importorskip("scipy")
pytest.importorskip("PIL")

DOCS = Path(__file__).resolve().parents[3] / "docs"
ALL_KINDS = [*CORRUPTIONS, *EXTRA]
DETERMINISTIC = {"defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression", "gaussian_blur"}
DETERMINISTIC |= {"saturate"}


def sample_images(count: int = 6, height: int = 32, width: int = 32) -> Tensor:
    """Return smooth color images with edges, similar to photographs."""
    generator = torch.Generator().manual_seed(7)
    coarse = torch.rand(count, 3, 4, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic", align_corners=False)
    smooth[:, :, height // 4 : height // 2, width // 4 : -width // 4] *= 0.4
    return (255 * smooth).clamp(0, 255).byte()


def mean_change(images: Tensor, name: str, severity: int) -> float:
    """Return the mean absolute change of the pixels."""
    corrupted = corrupt(images, torch.arange(len(images)), name, severity)
    return float((corrupted.float() - images.float()).abs().mean())


# The kinds and their constants.


def test_there_are_fifteen_standard_and_four_extra_corruptions() -> None:
    assert (len(CORRUPTIONS), len(EXTRA)) == (15, 4)
    assert CORRUPTIONS[0] == "gaussian_noise"
    assert set(EXTRA) == {"speckle_noise", "gaussian_blur", "spatter", "saturate"}


@pytest.mark.parametrize("size", SIZES)
def test_every_kind_has_constants_for_five_severities(size: int) -> None:
    assert list(TABLES[size]) == ALL_KINDS
    for rows in TABLES[size].values():
        assert len(rows) == 5
        assert len({len(row) for row in rows}) == 1


def test_other_sizes_use_the_nearest_constants_and_the_description_says_so() -> None:
    nearest = [32, 32, 64, 64, 224, 224]
    assert [table_size(side, side) for side in (28, 44, 48, 96, 128, 512)] == nearest
    assert table_size(224, 32) == 32
    assert describe("fog", 2, (64, 64)) == "fog, severity 2: generated, CIFAR-C-like"
    assert "constants for 64 px on 96 x 80 px" in describe("fog", 2, (96, 80))
    images = sample_images(2, 96, 96)
    assert "constants for 64 px" in Corrupted(InMemorySource(images, torch.zeros(2).long()), "fog", 2).remark()


# Every kind.


@pytest.mark.parametrize("name", ALL_KINDS)
def test_shape_and_dtype_are_preserved_and_pixels_change(name: str, rng_unchanged: None) -> None:
    images = sample_images()
    before = images.clone()
    for severity in range(1, 6):
        corrupted = corrupt(images, torch.arange(6), name, severity)
        assert corrupted.shape == images.shape
        assert corrupted.dtype == torch.uint8
        assert corrupted.is_contiguous()
        assert not torch.equal(corrupted, images)
    assert torch.equal(images, before)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (40, 24), (16, 100), (17, 19)])
@pytest.mark.parametrize("name", ALL_KINDS)
def test_other_sizes_work_too(name: str, height: int, width: int) -> None:
    images = sample_images(2, height, width)
    for severity in (1, 5):
        assert corrupt(images, torch.arange(2), name, severity).shape == images.shape


@pytest.mark.parametrize("name", ALL_KINDS)
def test_large_images_work_too(name: str) -> None:
    images = sample_images(1, 224, 224)
    assert corrupt(images, torch.arange(1), name, 2).shape == images.shape


# With the published constants, elastic_transform replaces large shifts by fine ones, and saturate first decreases the
# saturation and then increases it.
@pytest.mark.parametrize("name", [name for name in ALL_KINDS if name not in ("elastic_transform", "saturate")])
def test_severity_five_changes_more_than_severity_one(name: str) -> None:
    images = sample_images(24)
    assert mean_change(images, name, 5) > mean_change(images, name, 1)


@pytest.mark.parametrize("name", ALL_KINDS)
def test_the_result_for_an_image_does_not_depend_on_the_batch(name: str) -> None:
    images, ids = sample_images(), torch.tensor([5, 0, 9999, 3, 12, 7])
    expected = corrupt(images, ids, name, 4)
    assert torch.equal(expected, corrupt(images, ids, name, 4))
    single = [corrupt(images[i : i + 1], ids[i : i + 1], name, 4) for i in range(6)]
    assert torch.equal(expected, torch.cat(single))
    permutation = torch.tensor([3, 1, 5, 0, 2, 4])
    assert torch.equal(corrupt(images[permutation], ids[permutation], name, 4), expected[permutation])


@settings(max_examples=15)
@given(cuts=st.lists(st.integers(0, 8), max_size=4), name=st.sampled_from(ALL_KINDS), severity=st.integers(1, 5))
def test_splitting_a_batch_does_not_change_a_bit(cuts: list[int], name: str, severity: int) -> None:
    images, ids = sample_images(8), torch.arange(8)
    borders = [0, *sorted(cuts), 8]
    parts = [slice(a, b) for a, b in pairwise(borders)]
    joined = torch.cat([corrupt(images[part], ids[part], name, severity) for part in parts])
    assert torch.equal(joined, corrupt(images, ids, name, severity))


def test_the_chunk_size_does_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    images, ids = sample_images(), torch.arange(6)
    expected = corrupt(images, ids, "elastic_transform", 3)
    monkeypatch.setattr("plateaux.data.corruptions.corrupt.CHUNK", 2 * 3 * 32 * 32)
    assert torch.equal(corrupt(images, ids, "elastic_transform", 3), expected)


@pytest.mark.parametrize("name", [name for name in ALL_KINDS if name not in DETERMINISTIC])
def test_randomness_depends_on_the_id(name: str) -> None:
    images = sample_images(1).repeat(2, 1, 1, 1)
    first, second = corrupt(images, torch.tensor([1, 2]), name, 3)
    assert not torch.equal(first, second)
    same_id = corrupt(images, torch.tensor([4, 4]), name, 3)
    assert torch.equal(same_id[0], same_id[1])


def test_noise_of_another_severity_or_kind_is_independent() -> None:
    gray = torch.full((1, 3, 32, 32), 128, dtype=torch.uint8)
    ids = torch.tensor([0])
    noises = [corrupt(gray, ids, *kind)[0].double().flatten() - 128 for kind in NOISES]
    correlation = torch.corrcoef(torch.stack(noises)).abs() - torch.eye(len(noises))
    assert float(correlation.max()) < 0.08  # 4 / sqrt(3072) = 0.07


NOISES = [("gaussian_noise", 2), ("gaussian_noise", 3), ("speckle_noise", 2), ("shot_noise", 2)]


def test_channels_last_and_empty_batches_are_supported() -> None:
    images, ids = sample_images(), torch.arange(6)
    channels_last = images.contiguous(memory_format=torch.channels_last)
    assert torch.equal(corrupt(channels_last, ids, "fog", 3), corrupt(images, ids, "fog", 3))
    assert corrupt(images[:0], ids[:0], "fog", 3).shape == (0, 3, 32, 32)


# Closed forms.


def test_gaussian_noise_has_its_published_standard_deviation() -> None:
    gray = torch.full((40, 3, 32, 32), 128, dtype=torch.uint8)
    for severity, sigma in enumerate((0.04, 0.06, 0.08, 0.09, 0.10), start=1):
        std = float((corrupt(gray, torch.arange(40), "gaussian_noise", severity).double() / 255).std())
        with_rounding = (sigma**2 + 1 / (12 * 255**2)) ** 0.5
        assert abs(std - with_rounding) < 4 * sigma / (2 * gray.numel()) ** 0.5 + 1e-5


def test_impulse_noise_changes_its_published_fraction_of_values() -> None:
    gray = torch.full((40, 3, 32, 32), 128, dtype=torch.uint8)
    fraction = float((corrupt(gray, torch.arange(40), "impulse_noise", 5) != 128).double().mean())
    assert abs(fraction - 0.07) < 4 * (0.07 * 0.93 / gray.numel()) ** 0.5


@pytest.mark.parametrize("name", ["defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "gaussian_blur"])
def test_blur_does_not_change_a_constant_image(name: str) -> None:
    gray = torch.full((2, 3, 32, 32), 201, dtype=torch.uint8)
    for severity in range(1, 6):
        assert torch.equal(corrupt(gray, torch.arange(2), name, severity), gray)


# Rejected inputs.


def test_unknown_names_and_severities_are_rejected_with_the_allowed_ones() -> None:
    images, ids = sample_images(1), torch.arange(1)
    with pytest.raises(UnknownNameError, match="Unknown corruption 'gausian_noise'; did you mean 'gaussian_noise'"):
        corrupt(images, ids, "gausian_noise", 1)
    for severity in (0, 6, -1):
        with pytest.raises(RecipeError, match=rf"severity {severity}\. .*1, 2, 3, 4, and 5"):
            corrupt(images, ids, "fog", severity)
    with pytest.raises(UnknownNameError, match="'fog'"):
        Corrupted(InMemorySource(images, ids), "fogg", 1)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(2, 4, 32, 32, dtype=torch.uint8), r"\[2, 4, 32, 32\].*color .* or gray"),
        (torch.zeros(2, 3, 32, 32), r"torch\.float32.*uint8 images.*before normalization"),
        (torch.zeros(2, 32, 32, dtype=torch.uint8), r"\[2, 32, 32\]"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "at least 16 pixels"),
        (torch.zeros(3, 3, 32, 32, dtype=torch.uint8), r"3 images need ids of shape \[3\]"),
    ],
)
def test_inputs_that_are_not_color_images_are_rejected(images: Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        corrupt(images, torch.arange(2), "fog", 1)


# As a source.


def test_a_corrupted_source_returns_corrupted_images_with_their_labels() -> None:
    inner = InMemorySource(sample_images(), torch.arange(6) % 3)
    source = Corrupted(inner, "snow", 4)
    ids = torch.tensor([4, 1])
    x, y = source.fetch(ids)
    assert len(source) == 6
    assert y.tolist() == [1, 1]
    assert torch.equal(x, corrupt(sample_images()[ids], ids, "snow", 4))
    batches = list(ordered_batches(source, batch_size=4))
    assert torch.equal(torch.cat([batch.x for batch in batches]) * 255, source.fetch(torch.arange(6))[0].float())


def test_a_corrupted_source_can_be_pickled() -> None:
    source = Corrupted(InMemorySource(sample_images(), torch.zeros(6).long()), "frost", 2)
    unpickled = pickle.loads(pickle.dumps(source))
    assert torch.equal(unpickled.fetch(torch.arange(6))[0], source.fetch(torch.arange(6))[0])


def test_a_fingerprint_depends_on_samples_kind_severity_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    inner, other = (
        InMemorySource(sample_images(), torch.zeros(6).long()),
        InMemorySource(sample_images(5), torch.zeros(5).long()),
    )
    sources = [(inner, "fog", 1), (inner, "fog", 2), (inner, "snow", 1), (other, "fog", 1)]
    fingerprints = [Corrupted(*source).fingerprint() for source in sources]
    assert fingerprints == [Corrupted(*source).fingerprint() for source in sources]
    monkeypatch.setattr("plateaux.data.corruptions.corrupt.VERSION", VERSION + 1)
    fingerprints += [Corrupted(*source).fingerprint() for source in sources]
    assert len({*fingerprints, inner.fingerprint()}) == 9


def test_samples_that_are_not_images_are_rejected() -> None:
    text = InMemorySource({"ids": torch.zeros(2, 5), "mask": torch.ones(2, 5)}, torch.zeros(2).long())
    with pytest.raises(DataError, match="keys ids, mask"):
        Corrupted(text, "fog", 1).fetch(torch.arange(2))


# The accuracy of a published network.


@pytest.fixture(scope="module")
def network() -> Any:
    return resnet(depth=20, shape=(3, 32, 32), classes=10).eval()


def load_cifar10_test(root: Path, count: int) -> tuple[Tensor, Tensor]:
    raw = np.fromfile(root / "cifar-10-batches-bin" / "test_batch.bin", dtype=np.uint8, count=count * 3073)
    rows = torch.from_numpy(raw).view(count, 3073)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()


def build_accuracy(data_root: Callable[[str], Path], net: Any, count: int) -> Callable[[str, int], float]:
    """Return a function that maps corruption and severity to the accuracy of the published resnet20."""
    weights = "weights/resnet20_32_44_56_cifar10.safetensors"
    load_weights(net, data_root(weights) / weights, prefix="resnet20")
    net.to(memory_format=torch.channels_last)  # twice as fast on CPU
    images, labels = load_cifar10_test(data_root("cifar-10-batches-bin"), count)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))

    def accuracy(name: str, severity: int) -> float:
        x = corrupt(images, torch.arange(count), name, severity)
        with torch.no_grad():
            parts = [((part / 255 - mean) / std).contiguous(memory_format=torch.channels_last) for part in x.split(100)]
            preds = [net(part).argmax(1) for part in parts]
        return float((torch.cat(preds) == labels).double().mean())

    return accuracy


@pytest.mark.parametrize("name", ["gaussian_noise", "contrast", "pixelate"])
def test_accuracy_of_a_published_network_drops_with_severity(
    name: str, data_root: Callable[[str], Path], network: Any
) -> None:
    accuracy = build_accuracy(data_root, network, 100)
    assert accuracy(name, 5) < accuracy(name, 1) - 0.1


@pytest.mark.slow
@pytest.mark.timeout(900)  # 16,200 images on one thread
def test_accuracy_of_a_published_network_drops_for_every_kind(data_root: Callable[[str], Path], network: Any) -> None:
    accuracy = build_accuracy(data_root, network, 200)
    results = {name: [accuracy(name, severity) for severity in range(1, 6)] for name in CORRUPTIONS}
    # The published constants of saturate first decrease the saturation (0.3, 0.1) and then increase it (1.5 and more).
    results |= {name: [accuracy(name, severity) for severity in (1, 5)] for name in EXTRA if name != "saturate"}
    not_worse = [name for name, accuracies in results.items() if accuracies[-1] >= accuracies[0]]
    assert not_worse == []
    means = np.mean([results[name] for name in CORRUPTIONS], axis=0)
    assert (np.diff(means) < 0).all(), means


@pytest.mark.parametrize("name", sorted({*CORRUPTIONS, *EXTRA} - {"saturate"}))
def test_one_channel_images_are_corrupted_like_gray_images_of_three_channels(name: str) -> None:
    """Except for noise, which is drawn for every channel, and tinted drops and ice, whose luminance is used."""
    gray = torch.randint(0, 256, (3, 1, 28, 28), dtype=torch.uint8)
    ids = torch.tensor([4, 7, 9])
    small, wide = (corrupt(images, ids, name, 3) for images in (gray, gray.expand(-1, 3, -1, -1)))
    assert small.shape == gray.shape
    assert not torch.equal(small, gray)
    if name.endswith("noise"):
        spread = [(image.double() - gray).std() for image in (small, wide)]
        assert abs(spread[0] / spread[1] - 1) < 0.15
    else:
        luminance = (wide.double() * torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1, keepdim=True)
        assert (small.double() - luminance).abs().max() < 1.01  # each is rounded
    assert torch.equal(corrupt(gray[1:2], ids[1:2], name, 3), small[1:2])


def test_saturation_of_one_channel_images_is_refused_with_the_reason() -> None:
    with pytest.raises(DataError, match="gray images have no saturation"):
        corrupt(torch.zeros(2, 1, 32, 32, dtype=torch.uint8), torch.arange(2), "saturate", 1)
