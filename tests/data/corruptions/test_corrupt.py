"""The door of the image corruptions: seeds, batches, refusals, and what a real network makes of them."""

from __future__ import annotations

import pickle
import re
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
from plateaux.models.architectures.resnet import resnet20
from plateaux.models.surgery import load_weights

pytest.importorskip("scipy")
pytest.importorskip("PIL")

DOCS = Path(__file__).resolve().parents[3] / "docs"
EVERY = [*CORRUPTIONS, *EXTRA]
NOT_RANDOM = {"defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression", "gaussian_blur"}
NOT_RANDOM |= {"saturate"}


def pictures(count: int = 6, height: int = 32, width: int = 32) -> Tensor:
    """Return smooth colourful images with edges, as photographs have them."""
    draw = torch.Generator().manual_seed(7)
    coarse = torch.rand(count, 3, 4, 4, generator=draw)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic", align_corners=False)
    smooth[:, :, height // 4 : height // 2, width // 4 : -width // 4] *= 0.4
    return (255 * smooth).clamp(0, 255).byte()


def changed(images: Tensor, name: str, severity: int) -> float:
    """Return the mean distance of pixels from what they were."""
    made = corrupt(images, torch.arange(len(images)), name, severity)
    return float((made.float() - images.float()).abs().mean())


# What there is.


def test_there_are_fifteen_and_four() -> None:
    assert (len(CORRUPTIONS), len(EXTRA)) == (15, 4)
    assert CORRUPTIONS[0] == "gaussian_noise"
    assert set(EXTRA) == {"speckle_noise", "gaussian_blur", "spatter", "saturate"}


@pytest.mark.parametrize("size", SIZES)
def test_every_kind_has_constants_for_five_severities(size: int) -> None:
    assert list(TABLES[size]) == EVERY
    for rows in TABLES[size].values():
        assert len(rows) == 5
        assert len({len(row) for row in rows}) == 1


def test_the_page_shows_the_constants_as_they_are() -> None:
    shown: dict[str, list[list[tuple[float, ...]]]] = {}
    for line in (DOCS / "reference" / "corruptions.md").read_text(encoding="utf-8").splitlines():
        if match := re.match(r"\| `(\w+)` \(.*?\) \| (.*) \|$", line):
            cells = [cell.split(" · ") for cell in match[2].split(" | ")]
            shown[match[1]] = [[tuple(map(float, each.split(", "))) for each in cell] for cell in cells]
    assert list(shown) == EVERY
    for name, cells in shown.items():
        for size, rows in zip(SIZES, cells, strict=True):
            assert np.array(rows) == pytest.approx(np.array(TABLES[size][name]), rel=1e-3), (name, size)


def test_sizes_between_take_the_nearest_constants_and_say_so() -> None:
    nearest = [32, 32, 64, 64, 224, 224]
    assert [table_size(side, side) for side in (28, 44, 48, 96, 128, 512)] == nearest
    assert table_size(224, 32) == 32
    assert describe("fog", 2, (64, 64)) == "fog, severity 2: generated, CIFAR-C-like"
    assert "constants for 64 px on 96 x 80 px" in describe("fog", 2, (96, 80))
    images = pictures(2, 96, 96)
    assert "constants for 64 px" in Corrupted(InMemorySource(images, torch.zeros(2).long()), "fog", 2).remark()


# Every kind, at the door.


@pytest.mark.parametrize("name", EVERY)
def test_shape_and_type_stay_and_the_image_changes(name: str, untouched_randomness: None) -> None:
    images = pictures()
    kept = images.clone()
    for severity in range(1, 6):
        made = corrupt(images, torch.arange(6), name, severity)
        assert made.shape == images.shape
        assert made.dtype == torch.uint8
        assert made.is_contiguous()
        assert not torch.equal(made, images)
    assert torch.equal(images, kept)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (40, 24), (16, 100), (17, 19)])
@pytest.mark.parametrize("name", EVERY)
def test_other_sizes_work_too(name: str, height: int, width: int) -> None:
    images = pictures(2, height, width)
    for severity in (1, 5):
        assert corrupt(images, torch.arange(2), name, severity).shape == images.shape


@pytest.mark.parametrize("name", EVERY)
def test_large_images_work_too(name: str) -> None:
    images = pictures(1, 224, 224)
    assert corrupt(images, torch.arange(1), name, 2).shape == images.shape


# By the published constants elastic_transform trades large shifts for fine ones, and saturate takes colour away before
# it adds some.
@pytest.mark.parametrize("name", [name for name in EVERY if name not in ("elastic_transform", "saturate")])
def test_severity_five_changes_more_than_severity_one(name: str) -> None:
    images = pictures(24)
    assert changed(images, name, 5) > changed(images, name, 1)


@pytest.mark.parametrize("name", EVERY)
def test_an_image_is_the_same_alone_and_in_any_batch(name: str) -> None:
    images, ids = pictures(), torch.tensor([5, 0, 9999, 3, 12, 7])
    whole = corrupt(images, ids, name, 4)
    assert torch.equal(whole, corrupt(images, ids, name, 4))
    alone = [corrupt(images[i : i + 1], ids[i : i + 1], name, 4) for i in range(6)]
    assert torch.equal(whole, torch.cat(alone))
    turned = torch.tensor([3, 1, 5, 0, 2, 4])
    assert torch.equal(corrupt(images[turned], ids[turned], name, 4), whole[turned])


@settings(max_examples=15)
@given(cuts=st.lists(st.integers(0, 8), max_size=4), name=st.sampled_from(EVERY), severity=st.integers(1, 5))
def test_cutting_a_batch_anywhere_changes_no_bit(cuts: list[int], name: str, severity: int) -> None:
    images, ids = pictures(8), torch.arange(8)
    borders = [0, *sorted(cuts), 8]
    parts = [slice(a, b) for a, b in pairwise(borders)]
    joined = torch.cat([corrupt(images[part], ids[part], name, severity) for part in parts])
    assert torch.equal(joined, corrupt(images, ids, name, severity))


def test_batches_larger_than_what_is_worked_on_at_once_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    images, ids = pictures(), torch.arange(6)
    whole = corrupt(images, ids, "elastic_transform", 3)
    monkeypatch.setattr("plateaux.data.corruptions.corrupt.CHUNK", 2 * 3 * 32 * 32)
    assert torch.equal(corrupt(images, ids, "elastic_transform", 3), whole)


@pytest.mark.parametrize("name", [name for name in EVERY if name not in NOT_RANDOM])
def test_randomness_hangs_on_id_kind_and_severity(name: str) -> None:
    twice = pictures(1).repeat(2, 1, 1, 1)
    first, second = corrupt(twice, torch.tensor([1, 2]), name, 3)
    assert not torch.equal(first, second)
    same = corrupt(twice, torch.tensor([4, 4]), name, 3)
    assert torch.equal(same[0], same[1])


def test_noise_of_another_severity_or_kind_is_another_draw() -> None:
    grey = torch.full((1, 3, 32, 32), 128, dtype=torch.uint8)
    ids = torch.tensor([0])
    noises = [corrupt(grey, ids, *which)[0].double().flatten() - 128 for which in NOISES]
    related = torch.corrcoef(torch.stack(noises)).abs() - torch.eye(len(noises))
    assert float(related.max()) < 0.08  # 4 / sqrt(3072) = 0.07


NOISES = [("gaussian_noise", 2), ("gaussian_noise", 3), ("speckle_noise", 2), ("shot_noise", 2)]


def test_layout_and_empty_batches_do_not_matter() -> None:
    images, ids = pictures(), torch.arange(6)
    last = images.contiguous(memory_format=torch.channels_last)
    assert torch.equal(corrupt(last, ids, "fog", 3), corrupt(images, ids, "fog", 3))
    assert corrupt(images[:0], ids[:0], "fog", 3).shape == (0, 3, 32, 32)


# Closed forms, through the door.


def test_gaussian_noise_through_the_door_has_its_published_spread() -> None:
    grey = torch.full((40, 3, 32, 32), 128, dtype=torch.uint8)
    for severity, sigma in enumerate((0.04, 0.06, 0.08, 0.09, 0.10), start=1):
        spread = float((corrupt(grey, torch.arange(40), "gaussian_noise", severity).double() / 255).std())
        rounded = (sigma**2 + 1 / (12 * 255**2)) ** 0.5
        assert abs(spread - rounded) < 4 * sigma / (2 * grey.numel()) ** 0.5 + 1e-5


def test_impulse_noise_through_the_door_has_its_published_share() -> None:
    grey = torch.full((40, 3, 32, 32), 128, dtype=torch.uint8)
    share = float((corrupt(grey, torch.arange(40), "impulse_noise", 5) != 128).double().mean())
    assert abs(share - 0.07) < 4 * (0.07 * 0.93 / grey.numel()) ** 0.5


@pytest.mark.parametrize("name", ["defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "gaussian_blur"])
def test_a_constant_image_comes_back_to_the_bit_from_blur(name: str) -> None:
    grey = torch.full((2, 3, 32, 32), 201, dtype=torch.uint8)
    for severity in range(1, 6):
        assert torch.equal(corrupt(grey, torch.arange(2), name, severity), grey)


# Refusals.


def test_unknown_names_and_severities_are_refused_with_what_is_allowed() -> None:
    images, ids = pictures(1), torch.arange(1)
    with pytest.raises(UnknownNameError, match="no corruption 'gausian_noise'; did you mean 'gaussian_noise'"):
        corrupt(images, ids, "gausian_noise", 1)
    for severity in (0, 6, -1):
        with pytest.raises(RecipeError, match=rf"1, 2, 3, 4 and 5; {severity} was given"):
            corrupt(images, ids, "fog", severity)
    with pytest.raises(UnknownNameError, match="'fog'"):
        Corrupted(InMemorySource(images, ids), "fogg", 1)


@pytest.mark.parametrize(
    ("images", "complaint"),
    [
        (torch.zeros(2, 1, 32, 32, dtype=torch.uint8), r"colour images.*\[2, 1, 32, 32\].*expand"),
        (torch.zeros(2, 3, 32, 32), r"uint8 images.*torch\.float32.*before normalisation"),
        (torch.zeros(2, 32, 32, dtype=torch.uint8), r"\[2, 32, 32\]"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "at least 16 pixels"),
        (torch.zeros(3, 3, 32, 32, dtype=torch.uint8), r"3 images need as many ids, \[3\]"),
    ],
)
def test_what_is_no_colour_image_is_refused_with_a_sentence(images: Tensor, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        corrupt(images, torch.arange(2), "fog", 1)


# As a source.


def test_a_corrupted_source_hands_out_corrupted_images_with_their_labels() -> None:
    inner = InMemorySource(pictures(), torch.arange(6) % 3)
    source = Corrupted(inner, "snow", 4)
    ids = torch.tensor([4, 1])
    x, y = source.fetch(ids)
    assert len(source) == 6
    assert y.tolist() == [1, 1]
    assert torch.equal(x, corrupt(pictures()[ids], ids, "snow", 4))
    batches = list(ordered_batches(source, batch_size=4))
    assert torch.equal(torch.cat([batch.x for batch in batches]) * 255, source.fetch(torch.arange(6))[0].float())


def test_a_corrupted_source_can_be_sent_to_a_worker() -> None:
    source = Corrupted(InMemorySource(pictures(), torch.zeros(6).long()), "frost", 2)
    again = pickle.loads(pickle.dumps(source))
    assert torch.equal(again.fetch(torch.arange(6))[0], source.fetch(torch.arange(6))[0])


def test_a_fingerprint_names_the_samples_the_kind_the_severity_and_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    inner, other = InMemorySource(pictures(), torch.zeros(6).long()), InMemorySource(pictures(5), torch.zeros(5).long())
    sources = [(inner, "fog", 1), (inner, "fog", 2), (inner, "snow", 1), (other, "fog", 1)]
    prints = [Corrupted(*each).fingerprint() for each in sources]
    assert prints == [Corrupted(*each).fingerprint() for each in sources]
    monkeypatch.setattr("plateaux.data.corruptions.corrupt.VERSION", VERSION + 1)
    prints += [Corrupted(*each).fingerprint() for each in sources]
    assert len({*prints, inner.fingerprint()}) == 9


def test_samples_that_are_no_images_are_refused() -> None:
    words = InMemorySource({"ids": torch.zeros(2, 5), "mask": torch.ones(2, 5)}, torch.zeros(2).long())
    with pytest.raises(DataError, match="parts ids, mask"):
        Corrupted(words, "fog", 1).fetch(torch.arange(2))


# What a network trained by others makes of them.


@pytest.fixture(scope="module")
def network() -> Any:
    return resnet20(shape=(3, 32, 32), classes=10).eval()


def cifar(root: Path, count: int) -> tuple[Tensor, Tensor]:
    raw = np.fromfile(root / "cifar-10-batches-bin" / "test_batch.bin", dtype=np.uint8, count=count * 3073)
    rows = torch.from_numpy(raw).view(count, 3073)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()


def judge(data_root: Callable[[str], Path], net: Any, count: int) -> Callable[[str, int], float]:
    """Return a function from corruption and severity to the accuracy of the published resnet20."""
    weights = "weights/resnet20_32_44_56_cifar10.safetensors"
    load_weights(net, data_root(weights) / weights, prefix="resnet20")
    net.to(memory_format=torch.channels_last)  # half as long on a CPU
    images, labels = cifar(data_root("cifar-10-batches-bin"), count)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))

    def accuracy(name: str, severity: int) -> float:
        x = corrupt(images, torch.arange(count), name, severity)
        with torch.no_grad():
            parts = [((part / 255 - mean) / std).contiguous(memory_format=torch.channels_last) for part in x.split(100)]
            hits = [net(part).argmax(1) for part in parts]
        return float((torch.cat(hits) == labels).double().mean())

    return accuracy


@pytest.mark.parametrize("name", ["gaussian_noise", "contrast", "pixelate"])
def test_a_real_network_gets_worse_with_severity(name: str, data_root: Callable[[str], Path], network: Any) -> None:
    accuracy = judge(data_root, network, 100)
    assert accuracy(name, 5) < accuracy(name, 1) - 0.1


@pytest.mark.slow
@pytest.mark.timeout(900)  # 24,300 images on one thread
def test_a_real_network_gets_worse_under_every_kind(data_root: Callable[[str], Path], network: Any) -> None:
    accuracy = judge(data_root, network, 300)
    found = {name: [accuracy(name, severity) for severity in range(1, 6)] for name in CORRUPTIONS}
    # The published constants of saturate first take colour away (0.3, 0.1) and then add it (1.5 and more).
    found |= {name: [accuracy(name, severity) for severity in (1, 5)] for name in EXTRA if name != "saturate"}
    not_worse = [name for name, accuracies in found.items() if accuracies[-1] >= accuracies[0]]
    assert not_worse == []
    means = np.mean([found[name] for name in CORRUPTIONS], axis=0)
    assert (np.diff(means) < 0).all(), means
