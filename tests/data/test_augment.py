"""Augmentation compared with a per-sample reference, closed forms, and scipy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from reference import augment as reference

from plateaux.core.errors import RecipeError
from plateaux.data.augment import (
    RATIOS,
    ROW,
    SHARE,
    UNIFORMS_PER_SAMPLE,
    WHICH,
    Augment,
    beta,
    crop_and_flip,
    crop_boxes,
    mix_partners,
    mixup_cutmix,
    normalize,
    uniforms,
)

SEEDS = (0, 1, 2**63 - 1, 123456789)


def images(n: int = 6, height: int = 7, width: int = 9) -> torch.Tensor:
    return torch.randint(0, 256, (n, 3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("seed", SEEDS)
def test_uniforms_equal_the_reference_bit_for_bit(seed: int) -> None:
    ids = torch.tensor([0, 1, 2, 77, 10**9, 2**40])
    expected = [[reference.uniform(seed, int(i), column) for column in range(5)] for i in ids]
    assert uniforms(seed, ids, 5).tolist() == expected


def test_uniforms_do_not_depend_on_how_the_ids_are_batched() -> None:
    ids = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    expected = uniforms(7, ids, 4)
    assert torch.equal(torch.cat([uniforms(7, part, 4) for part in ids.split(37)]), expected)
    assert torch.equal(uniforms(7, ids.flip(0), 4).flip(0), expected)
    assert torch.equal(uniforms(7, ids, 9)[:, :4], expected)


def test_uniforms_are_uniform() -> None:
    u = uniforms(3, torch.arange(200_000), 4)
    assert u.min() >= 0
    assert u.max() < 1
    for column in u.T:
        counts = torch.histc(column, 100, 0, 1)
        chi2 = ((counts - 2000) ** 2 / 2000).sum().item()
        assert abs(chi2 - 99) < 5 * math.sqrt(2 * 99)


def test_uniforms_of_adjacent_ids_columns_and_seeds_are_independent() -> None:
    n = 200_000
    ids = torch.arange(n)
    u, next_seed = uniforms(3, ids, 4), uniforms(4, ids, 4)
    pairs = [(u[:-1, 0], u[1:, 0]), (u[:, 0], u[:, 1]), (u[:, 2], u[:, 3]), (u[:, 0], next_seed[:, 0])]
    pairs += [(u[:-1, 0], u[1:, 1]), (u[:, 0] * 64 % 1, u[:, 1] * 64 % 1)]
    for a, b in pairs:
        joint = torch.histc(torch.floor(a * 10) * 10 + torch.floor(b * 10), 100, 0, 100)
        expected = len(a) / 100
        assert abs(((joint - expected) ** 2 / expected).sum().item() - 99) < 5 * math.sqrt(2 * 99)


@pytest.mark.parametrize(("pad", "flip"), [(0, True), (1, False), (2, True), (4, True)])
def test_crop_and_flip_equals_the_reference(pad: int, flip: bool) -> None:
    x, ids = images(), torch.tensor([5, 0, 17, 99, 3, 12345])
    rows = [reference.crop_and_flip(image, 11, int(i), pad, flip) for image, i in zip(x, ids, strict=True)]
    augmented = crop_and_flip(x, ids, seed=11, augment=Augment(crop=pad, flip=flip))
    assert isinstance(augmented, torch.Tensor)
    assert augmented.dtype == torch.uint8
    assert torch.equal(augmented, torch.stack(rows))


def test_every_crop_position_occurs() -> None:
    x = torch.zeros(4000, 1, 3, 3, dtype=torch.uint8)
    x[:, :, 1, 1] = 1
    augmented = crop_and_flip(x, torch.arange(4000), seed=0, augment=Augment(crop=1))
    assert isinstance(augmented, torch.Tensor)
    counts = augmented.sum(0).flatten()
    assert counts.sum() == 4000
    assert counts.min() > 350  # 4000 / 9 = 444, four standard deviations below


def test_flips_depend_only_on_their_own_column_of_random_numbers() -> None:
    x, ids = torch.zeros(64, 1, 5, 5, dtype=torch.uint8), torch.arange(64)
    x[..., 0] = 1
    flipped = crop_and_flip(x, ids, seed=5, augment=Augment(flip=True))
    u = uniforms(5, ids, UNIFORMS_PER_SAMPLE)
    assert isinstance(flipped, torch.Tensor)
    assert torch.equal(flipped[:, 0, 0, 4] == 1, u[:, 2] < 0.5)


def test_crop_and_flip_does_not_change_its_input() -> None:
    x = images()
    before = x.clone()
    crop_and_flip(x, torch.arange(6), seed=0, augment=Augment(crop=2, flip=True))
    assert torch.equal(x, before)


U = torch.linspace(0, 1, 401, dtype=torch.float64)[:-1]


@pytest.mark.parametrize(
    ("a", "distribution"),
    [
        (0.5, lambda t: 2 / math.pi * torch.asin(t.sqrt())),
        (1.0, lambda t: t),
        (2.0, lambda t: 3 * t**2 - 2 * t**3),
    ],
)
def test_beta_quantiles_invert_the_closed_forms(a: float, distribution: object) -> None:
    assert callable(distribution)
    assert torch.allclose(distribution(beta(U, a)), U, atol=1e-6)


@pytest.mark.parametrize("a", [0.05, 0.2, 0.7, 5.0, 50.0])
def test_beta_quantiles_equal_scipy(a: float) -> None:
    stats = pytest.importorskip("scipy.stats")
    assert torch.allclose(beta(U, a), torch.from_numpy(stats.beta.ppf(U.numpy(), a, a)), atol=5e-6)


def test_mixing_partners_come_from_all_training_samples_and_not_from_the_batch() -> None:
    train_ids = torch.arange(1000) * 3
    ids = train_ids[:500]
    partners = mix_partners(ids, train_ids, seed=9)
    assert torch.isin(partners, train_ids).all()
    assert not torch.isin(partners, ids).all()
    assert torch.equal(mix_partners(ids[100:107], train_ids, seed=9), partners[100:107])
    assert len(partners.unique()) > 300


def mix_random_batch(augment: Augment, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    x, other = torch.randn(2, 40, 3, 8, 6, generator=generator, dtype=dtype)
    y, other_y = torch.randint(0, 5, (2, 40), generator=generator)
    ids = torch.arange(40) + 100
    mixed, soft = mixup_cutmix(x, y, other, other_y, ids, seed=6, classes=5, augment=augment)
    return x, y, other, other_y, uniforms(6, ids, UNIFORMS_PER_SAMPLE), mixed, soft


def test_mixup_blends_each_pair_with_its_own_weight() -> None:
    x, y, other, other_y, u, mixed, soft = mix_random_batch(Augment(mixup=0.4))
    shares = beta(u[:, SHARE], 0.4).tolist()
    for i, s in enumerate(shares):
        assert torch.allclose(mixed[i], s * x[i] + (1 - s) * other[i], atol=1e-12)
        assert soft[i].tolist() == pytest.approx(reference.mixed_label(int(y[i]), int(other_y[i]), s, 5))


def test_cutmix_pastes_the_reference_box_and_weights_labels_by_its_area() -> None:
    x, y, other, other_y, u, mixed, soft = mix_random_batch(Augment(cutmix=1.0))
    shares = beta(u[:, SHARE], 1.0).tolist()
    for i, s in enumerate(shares):
        mask = reference.box(8, 6, s, float(u[i, ROW]), float(u[i, ROW + 1]))
        assert torch.equal(mixed[i], torch.where(mask, other[i], x[i]))
        share = 1 - mask.double().mean().item()
        assert soft[i].tolist() == pytest.approx(reference.mixed_label(int(y[i]), int(other_y[i]), share, 5))


def test_with_mixup_and_cutmix_each_sample_gets_exactly_one_of_them() -> None:
    x, _, other, _, u, mixed, soft = mix_random_batch(Augment(mixup=0.4, cutmix=1.0))
    is_cutmix = u[:, WHICH] < 0.5
    assert 5 < int(is_cutmix.sum()) < 35
    pasted = ((mixed == x) | (mixed == other)).flatten(1).all(1)
    assert pasted[is_cutmix].all()
    s = beta(u[:, SHARE], 0.4)[~is_cutmix].view(-1, 1, 1, 1)
    assert torch.allclose(mixed[~is_cutmix], s * x[~is_cutmix] + (1 - s) * other[~is_cutmix], atol=1e-12)
    assert torch.allclose(soft.sum(1), torch.ones(40, dtype=torch.float64))


def test_soft_labels_are_float32_for_bfloat16_inputs() -> None:
    *_, mixed, soft = mix_random_batch(Augment(mixup=1.0), torch.bfloat16)
    assert mixed.dtype == torch.bfloat16
    assert soft.dtype == torch.float32


MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_normalize_equals_the_formula(dtype: torch.dtype) -> None:
    x = images()
    mean, std = (torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in (MEAN, STD))
    expected = (x.double() / 255 - mean) / std
    out = normalize(x, MEAN, STD, dtype)
    assert isinstance(out, torch.Tensor)
    assert out.dtype == dtype
    assert torch.allclose(out.double(), expected, **{"rtol": 0, "atol": max(4 * torch.finfo(dtype).eps, 1e-12)})


def test_normalize_does_not_scale_floats_and_returns_tokens_and_dicts_unchanged() -> None:
    floats, tokens = torch.randn(4, 2), torch.arange(6).view(2, 3)
    assert torch.equal(normalize(floats), floats)  # type: ignore[arg-type]
    assert normalize(tokens, (0.5,), (0.5,)) is tokens
    named = {"input_ids": tokens}
    assert normalize(named, (0.5,), (0.5,)) is named
    scaled = normalize(images())
    assert isinstance(scaled, torch.Tensor)
    assert torch.allclose(scaled, images() / 255)


def test_normalize_does_not_change_its_input() -> None:
    x = torch.rand(2, 3, 4, 4)
    before = x.clone()
    out = normalize(x, MEAN, STD)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(x, before)
    assert not torch.equal(out, before)


def test_unsupported_inputs_and_options_are_rejected() -> None:
    with pytest.raises(RecipeError, match="images"):
        crop_and_flip(torch.zeros(3, 2), torch.arange(3), seed=0, augment=Augment(flip=True))
    tokens = torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(RecipeError, match="mixup and cutmix to 0"):
        mixup_cutmix(
            tokens, tokens[:, 0], tokens, tokens[:, 0], torch.arange(3), seed=0, classes=2, augment=Augment(mixup=1)
        )


def test_the_padding_of_a_crop_has_the_fill_value() -> None:
    x, ids = images(), torch.arange(6)
    for fill in (0, 128, 255):
        found = crop_and_flip(x, ids, seed=3, augment=Augment(crop=2, crop_fill=fill))
        for i, image in enumerate(x):
            top, left = (math.floor(reference.uniform(3, i, column) * 5) for column in (0, 1))
            assert torch.equal(found[i], reference.crop(image, top, left, 2, fill))
    floats = crop_and_flip(x / 255, ids, seed=3, augment=Augment(crop=2, crop_fill=128))
    expected = crop_and_flip(x, ids, seed=3, augment=Augment(crop=2, crop_fill=128)) / 255
    assert torch.allclose(floats, expected)


@pytest.mark.parametrize("size", [(32, 32), (7, 9), (4, 40), (40, 4)])
@pytest.mark.parametrize("areas", [(0.08, 1.0), (0.5, 0.5), (1.0, 1.0)])
def test_a_resized_crop_is_a_bilinear_resize_of_the_box_of_the_reference(
    size: tuple[int, int], areas: tuple[float, float]
) -> None:
    x, ids = torch.rand(40, 3, *size, generator=torch.Generator().manual_seed(0)), torch.arange(100, 140)
    found = crop_and_flip(x, ids, seed=5, augment=Augment(resized_crop=areas))
    assert isinstance(found, torch.Tensor)
    for i, image in enumerate(x):
        top, left, height, width = reference.crop_box(5, 100 + i, *size, areas)
        part = image[None, :, top : top + height, left : left + width]
        expected = torch.nn.functional.interpolate(part, size, mode="bilinear", align_corners=False)[0]
        assert torch.allclose(found[i], expected, atol=1e-5)
    whole = (x * 255).round().to(torch.uint8)
    rounded = crop_and_flip(whole, ids, seed=5, augment=Augment(resized_crop=areas))
    assert isinstance(rounded, torch.Tensor)
    assert rounded.dtype == torch.uint8
    exact = crop_and_flip(whole.float(), ids, seed=5, augment=Augment(resized_crop=areas))
    assert (rounded.float() - exact).abs().max() <= 0.5 + 1e-3


def test_areas_and_ratios_of_resized_crops_have_their_distribution() -> None:
    ids = torch.arange(20_000)
    u = uniforms(1, ids, RATIOS.stop)
    top, left, height, width = crop_boxes(u, (20_000, 3, 1000, 1000), (0.08, 1.0))
    assert int((top + height).max()) <= 1000
    assert int((left + width).max()) <= 1000
    area, ratio = height * width / 1e6, width / height
    assert float(area.min()) > 0.079
    assert 0.74 < float(ratio.min()) < 0.76
    assert 1.32 < float(ratio.max()) < 1.34
    assert float(ratio.log().mean()) == pytest.approx(0, abs=0.01)  # as likely wide as high


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"resized_crop": (0.5, 0.2)}, "smallest and the largest area"),
        ({"resized_crop": (0.0, 1.0)}, "smallest and the largest area"),
        ({"resized_crop": (0.5, 1.0), "crop": 4}, "Use one of them"),
    ],
)
def test_wrong_crops_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Augment(**settings)
