"""Corruption functions compared with closed forms, Pillow, scipy, colorsys, and expected references."""

from __future__ import annotations

import colorsys
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plateaux.core.errors import DataError
from plateaux.data.corruptions import blur, digital, image_ops, noise, weather
from plateaux.data.corruptions.image_ops import Array, generators

ndimage = pytest.importorskip("scipy.ndimage")
Image = pytest.importorskip("PIL.Image")


def rngs(count: int, seed: int = 0) -> list[np.random.Generator]:
    return generators(seed, range(count))


def constant_images(value: float, count: int = 8, side: int = 32) -> Array:
    return np.full((count, side, side, 3), value, np.float32)


def random_images(count: int = 2, height: int = 32, width: int = 32) -> Array:
    return np.random.default_rng(0).random((count, height, width, 3), dtype=np.float32)


def centered_patch(side: int = 64, margin: int = 22) -> Array:
    """Return a random patch in the center of a black image, far from the edges."""
    x = np.zeros((1, side, side, 3), np.float32)
    x[:, margin:-margin, margin:-margin] = random_images(1, side - 2 * margin, side - 2 * margin)
    return x


# Noise.


def test_gaussian_noise_has_the_given_mean_and_standard_deviation() -> None:
    difference = noise.gaussian_noise(constant_images(0.5), rngs(8), 0.1) - 0.5
    assert abs(difference.mean()) < 4 * 0.1 / difference.size**0.5
    assert abs(difference.std() - 0.1) < 4 * 0.1 / (2 * difference.size) ** 0.5


def test_speckle_noise_is_proportional_to_the_value() -> None:
    for value in (0.25, 0.75):
        difference = noise.speckle_noise(constant_images(value), rngs(8), 0.2) - value
        assert abs(difference.std() - 0.2 * value) < 4 * 0.2 * value / (2 * difference.size) ** 0.5
    assert not noise.speckle_noise(constant_images(0.0), rngs(8), 0.2).any()


def test_shot_noise_has_the_mean_and_variance_of_a_poisson_count() -> None:
    counts = noise.shot_noise(constant_images(0.6), rngs(8), 50) * 50
    assert np.abs(counts - np.rint(counts)).max() < 1e-4
    assert abs(counts.mean() - 30) < 4 * (30 / counts.size) ** 0.5
    # 1.02: the fourth moment of a Poisson distribution is slightly larger than that of a Gaussian.
    assert abs(counts.var() - 30) < 4 * 30 * (2 / counts.size) ** 0.5 * 1.02
    assert not noise.shot_noise(constant_images(0.0), rngs(8), 50).any()


def test_impulse_noise_replaces_the_given_fraction_by_black_and_white_equally() -> None:
    x = noise.impulse_noise(constant_images(0.5, 16), rngs(16), 0.2)
    error = (0.2 * 0.8 / x.size) ** 0.5
    assert set(np.unique(x)) == {0.0, 0.5, 1.0}
    assert abs((x != 0.5).mean() - 0.2) < 4 * error
    assert abs((x == 1).mean() - 0.1) < 4 * error


# Color.


def change_hsv(x: Array, change: Callable[[float, float, float], tuple[float, float, float]]) -> Any:
    pixels = x.astype(np.float64).reshape(-1, 3)
    return np.array([colorsys.hsv_to_rgb(*change(*colorsys.rgb_to_hsv(*pixel))) for pixel in pixels]).reshape(x.shape)


def sample_colors() -> Array:
    """Return random colors that include black, white, gray, primaries, and near-black."""
    x = random_images(1, 16, 16)
    special = [(0, 0, 0), (1, 1, 1), (0.5, 0.5, 0.5), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1 / 255, 0)]
    x[0, 0, : len(special)] = special
    return x


@pytest.mark.parametrize("added", [0.05, 0.3, 0.5])
def test_brightness_raises_the_v_of_hsv(added: float) -> None:
    expected = change_hsv(sample_colors(), lambda h, s, v: (h, s, min(v + added, 1)))
    assert np.abs(digital.brightness(sample_colors(), [], added) - expected).max() < 1e-6


@pytest.mark.parametrize(("factor", "added"), [(0.3, 0), (0.1, 0), (2, 0.1), (30, 0.2)])
def test_saturate_changes_the_s_of_hsv(factor: float, added: float) -> None:
    expected = change_hsv(sample_colors(), lambda h, s, v: (h, min(s * factor + added, 1), v))
    assert np.abs(digital.saturate(sample_colors(), [], factor, added) - expected).max() < 1e-5


def test_contrast_scales_the_distance_to_the_mean_of_each_image_and_channel() -> None:
    x = random_images(3).astype(np.float64)
    x[1] *= 0.2
    mean = x.reshape(3, -1, 3).mean(1)[:, None, None]
    assert np.abs(digital.contrast(x.astype(np.float32), [], 0.15) - (0.15 * x + 0.85 * mean)).max() < 1e-6


# Blurs.

BLURS: dict[str, Callable[[Array], Array]] = {
    "gaussian": lambda x: blur.gaussian_blur(x, [], 1.5),
    "glass": lambda x: blur.glass_blur(x, rngs(len(x)), 0.7, 2, 2),
    "defocus": lambda x: blur.defocus_blur(x, [], 3, 0.5),
    "wide defocus": lambda x: blur.defocus_blur(x, [], 10, 0.5),
    "motion": lambda x: blur.motion_blur(x, rngs(len(x)), 9, 2.5),
    "zoom": lambda x: blur.zoom_blur(x, [], 1.26, 0.01),
}


@pytest.mark.parametrize("blur", BLURS.values(), ids=BLURS)
def test_blur_does_not_change_a_constant_image(blur: Callable[[Array], Array]) -> None:
    assert np.abs(blur(constant_images(200 / 255, 2)) - 200 / 255).max() < 2e-6


@pytest.mark.parametrize("name", ["gaussian", "defocus", "wide defocus", "motion"])
def test_a_blur_away_from_the_edges_preserves_the_mean(name: str) -> None:
    x = centered_patch()
    assert BLURS[name](x).mean((1, 2)) == pytest.approx(x.mean((1, 2)), rel=1e-5)
    assert BLURS[name](x).var() < x.var()


def test_gaussian_blur_filters_each_channel_independently() -> None:
    x = random_images(2, 20, 24)
    for i, channel in ((0, 0), (1, 2)):
        expected = ndimage.gaussian_filter(x[i, ..., channel].astype(np.float64), 0.8, mode="nearest", truncate=4)
        assert np.abs(blur.gaussian_blur(x, [], 0.8)[i, ..., channel] - expected).max() < 1e-6


def test_a_disk_covers_the_pixels_within_its_radius() -> None:
    cross = np.zeros((5, 5))
    cross[[1, 2, 2, 2, 3], [2, 1, 2, 3, 2]] = 0.2
    hard = blur.disk(1, 1e-3)
    assert hard.shape == (5, 5)
    assert hard == pytest.approx(cross)
    soft = blur.disk(10, 0.5)
    assert soft.shape == (25, 25)
    assert soft.sum() == pytest.approx(1, abs=1e-5)
    assert np.array_equal(soft, soft.T)
    assert soft[12, 12] == soft.max()


def test_defocus_blur_convolves_with_a_disk_and_mirrors_at_the_edge() -> None:
    x, kernel = random_images(1, 16, 18), blur.disk(1.5, 0.1)
    padded = np.pad(x, ((0, 0), (2, 2), (2, 2), (0, 0)), mode="reflect")
    expected = np.zeros_like(x)
    for row in range(16):
        for column in range(18):
            window = padded[0, row : row + 5, column : column + 5]
            expected[0, row, column] = (window * kernel[..., None]).sum((0, 1))
    assert np.abs(blur.defocus_blur(x, [], 1.5, 0.1) - expected).max() < 1e-6


@pytest.mark.parametrize(("degrees", "step"), [(0, (0, 1)), (90, (1, 0)), (-90, (-1, 0)), (45, None)])
def test_blur_along_an_angle_is_a_one_sided_gaussian(degrees: float, step: tuple[int, int] | None) -> None:
    x = np.zeros((1, 41, 41, 1), np.float32)
    x[0, 20, 20] = 1
    weights = np.exp(-(np.arange(13) ** 2) / (2 * 2.0**2))
    weights /= weights.sum()
    blurred = blur.blur_along(x, np.array([degrees], np.float32), 6, 2.0)[0, ..., 0]
    for k in range(13):  # each pixel reads k steps ahead, so a point appears k steps before its position
        down, right = (k * step[0], k * step[1]) if step else (round(k * 0.5**0.5),) * 2
        assert blurred[20 - down, 20 - right] >= weights[k] - 1e-4
    assert blurred.sum() == pytest.approx(1, abs=1e-5)
    assert np.count_nonzero(blurred) <= 13


def test_each_image_has_its_own_angle() -> None:
    x = np.repeat(centered_patch(), 3, 0)
    moved = blur.motion_blur(x, rngs(3), 9, 2.5)
    assert not np.allclose(moved[0], moved[1], atol=1e-3)
    assert not np.allclose(moved[1], moved[2], atol=1e-3)


def clipped_zoom(image: Any, zoom: float) -> Any:
    """Enlarge the center of an image to its full size with scipy, as in the published scripts."""
    size = image.shape[0]
    crop = int(np.ceil(size / zoom))
    top = (size - crop) // 2
    factors = (zoom, zoom, 1)[: image.ndim]
    large = ndimage.zoom(image[top : top + crop, top : top + crop], factors, order=1)
    excess = (large.shape[0] - size) // 2
    return large[excess : excess + size, excess : excess + size]


@pytest.mark.parametrize(("max_zoom", "step", "side"), [(1.06, 0.01, 32), (1.26, 0.01, 32), (1.31, 0.03, 50)])
def test_zoom_blur_is_the_mean_over_all_enlargements(max_zoom: float, step: float, side: int) -> None:
    x = random_images(2, side, side)
    zooms = np.arange(1, max_zoom, step)
    for i in range(2):
        expected = (x[i] + sum(clipped_zoom(x[i].astype(np.float64), zoom) for zoom in zooms)) / (len(zooms) + 1)
        assert np.abs(blur.zoom_blur(x, [], max_zoom, step)[i] - expected).max() < 1e-5


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=40))
def test_pixels_are_copied_as_in_the_published_scripts(pairs: list[tuple[int, int]]) -> None:
    expected = np.arange(12)[:, None].repeat(3, axis=1)
    for a, b in pairs:
        expected[a], expected[b] = (
            expected[b],
            expected[a],
        )  # intended as a swap; both sides are views, so b is copied to a
    targets = np.array([a for a, _ in pairs], dtype=np.int64)
    sources = np.array([[b, a] for a, b in pairs], dtype=np.int64).reshape(-1, 2)
    order = blur.copy_in_order(12, targets, sources)
    assert order[:, 0].tolist() == expected[:, 0].tolist()
    assert order[:, 1].tolist() == list(range(12))  # copied to itself


def test_glass_blur_creates_no_new_color() -> None:
    x = random_images(3)  # a Gaussian of 0.05 pixels has no effect, so only the copies remain
    blurred = blur.glass_blur(x, rngs(3), 0.05, 1, 2)
    assert not np.array_equal(blurred, x)
    for before, after in zip(x, blurred, strict=True):
        colors = set(map(tuple, before.reshape(-1, 3).tolist()))
        assert set(map(tuple, after.reshape(-1, 3).tolist())) < colors


# Weather.


def reference_plasma(uniform: Any, decay: float) -> Any:
    """Run the diamond-square algorithm for one image, one pixel at a time."""
    side = len(uniform)
    field, step, amplitude = np.zeros((side, side)), side, 100.0
    while step >= 2:
        half = step // 2

        def fill(y: int, x: int, neighbors: list[tuple[int, int]], half: int = half, scale: float = amplitude) -> None:
            values = [field[(y + a * half) % side, (x + b * half) % side] for a, b in neighbors]
            field[y, x] = sum(values) / 4 + scale**2 * (2 * uniform[y, x] - 1)

        for y in range(half, side, step):
            for x in range(half, side, step):
                fill(y, x, [(-1, -1), (-1, 1), (1, -1), (1, 1)])
        for y in range(0, side, half):
            for x in range(half if y % step == 0 else 0, side, step):
                fill(y, x, [(-1, 0), (1, 0), (0, -1), (0, 1)])
        step, amplitude = half, amplitude / decay
    field -= field.min()
    return field / field.max()


@pytest.mark.parametrize("decay", [3, 1.75])
def test_plasma_noise_equals_a_per_pixel_diamond_square(decay: float) -> None:
    clouds = weather.plasma(rngs(2), 12, decay)
    uniform = image_ops.uniforms(rngs(2), 16, 16)
    assert clouds.shape == (2, 16, 16)
    for i in range(2):
        assert np.abs(clouds[i] - reference_plasma(uniform[i].astype(np.float64), decay)).max() < 1e-4


def test_fog_preserves_the_brightest_value_and_black() -> None:
    x = 0.8 * random_images(4)
    foggy = weather.fog(x, rngs(4), 1.5, 1.75)
    assert (foggy.max((1, 2, 3)) <= x.max((1, 2, 3)) + 1e-6).all()
    assert foggy.std() < x.std()
    assert not weather.fog(constant_images(0.0, 2), rngs(2), 1.5, 1.75).any()


def test_snow_without_flakes_or_whitening_is_the_identity() -> None:
    x = random_images(2)
    assert np.array_equal(weather.snow(x, rngs(2), -9, 0.1, 1.25, 0.5, 8, 3, 1), x)


def test_snow_is_symmetric_under_a_rotation_by_180_degrees() -> None:
    flakes = weather.snow(constant_images(0.0, 2), rngs(2), 0.1, 0.3, 1, 0.5, 10, 4, 1)
    assert flakes.max() > 0.05
    assert np.allclose(flakes, flakes[:, ::-1, ::-1], atol=1e-7)


def test_snow_whitens_by_the_gray_level_of_each_pixel() -> None:
    x = random_images(2)
    gray = (x.astype(np.float64) @ [0.299, 0.587, 0.114])[..., None]
    expected = 0.6 * x + 0.4 * np.maximum(x, 1.5 * gray + 0.5)
    assert np.abs(weather.snow(x, rngs(2), -9, 0.1, 1, 0.5, 8, 3, 0.6) - expected).max() < 1e-6


@pytest.mark.parametrize("zoom", [1, 1.25, 2.25, 4.5])
def test_enlarge_equals_scipy_zoom(zoom: float) -> None:
    layers = random_images(2)[..., 0]
    for i in range(2):
        assert np.abs(weather.enlarge(layers, zoom)[i] - clipped_zoom(layers[i].astype(np.float64), zoom)).max() < 1e-5


def test_frost_adds_a_crop_of_a_texture_to_the_image() -> None:
    x = random_images(3)
    assert np.array_equal(weather.frost(x, rngs(3), 1, 0, 0.2), x)
    textures = weather.frost_textures(0.2)
    assert textures.shape == (5, 140, 140, 3)
    assert 0 <= textures.min() < 0.3
    assert 0.9 < textures.max() <= 1
    for ice in weather.frost(constant_images(0.0, 3), rngs(3), 1, 1, 0.2):
        positions = np.argwhere(np.isclose(textures[:, :-31, :-31, 0], ice[0, 0, 0], atol=0))
        assert any(np.array_equal(textures[p, y : y + 32, x : x + 32], ice) for p, y, x in positions)


def test_frost_textures_are_enlarged_for_large_images() -> None:
    assert weather.frost(constant_images(0.5, 1, 210), rngs(1), 0.5, 0.5, 0.2).shape == (1, 210, 210, 3)


# Drops on the lens.


def test_the_outline_of_a_square_is_closed_and_one_pixel_wide() -> None:
    levels = np.zeros((2, 16, 16))
    levels[0, 5:11, 5:11] = 200
    edges = weather.outlines(levels)
    assert not edges[1].any()
    distance = ndimage.distance_transform_edt(edges[0] == 0)
    assert distance[8, 8] >= 2
    assert distance[0, 0] >= 4
    sides = edges[0, 4:12, 7], edges[0, 7, 4:12]
    assert all(side.sum() == 2 for side in sides)  # one pixel wide
    regions, _ = ndimage.label(~edges[0])
    assert regions[8, 8] != regions[0, 0]  # closed


def test_weak_edges_are_kept_if_connected_to_a_strong_edge() -> None:
    ramp = np.zeros((3, 12, 12))
    ramp[0, :, 6:] = 20  # a gradient of 4 x 20, below the strong threshold everywhere
    ramp[1, :, 6:] = 100
    ramp[2, :, 6:] = 20
    ramp[2, :5, 6:] = 100  # weak below, strong above
    weak, strong, mixed = weather.outlines(ramp)
    assert not weak.any()
    assert strong.any(1).all()
    assert mixed.any(1).all()


@given(st.lists(st.integers(0, 20), min_size=9, max_size=9))
def test_equalize_is_histogram_equalization(depths: list[int]) -> None:
    levels = np.array(depths).reshape(1, 3, 3)
    lowest = depths.count(min(depths))
    expected = [
        depth if lowest == 9 else np.rint((sum(d <= depth for d in depths) - lowest) * 255 / (9 - lowest))
        for depth in depths
    ]
    assert weather.equalize(levels).reshape(-1).tolist() == expected


def test_spatter_without_drops_is_the_identity() -> None:
    x = random_images(2)
    assert np.array_equal(weather.spatter(x, rngs(2), 0, 0.01, 1, 0.7, 0.5, 0), x)
    assert np.array_equal(weather.spatter(x, rngs(2), 0, 0.01, 1, 0.7, 0.5, 1), x)


def test_water_adds_its_color_and_mud_covers_the_image() -> None:
    wet = weather.spatter(constant_images(0.0, 4), rngs(4), 0.65, 0.3, 1, 0.69, 0.5, 0)
    assert wet.max((1, 2, 3)) == pytest.approx(0.5 * 238 / 255, abs=1e-6)
    assert np.allclose(wet[..., 0] * 238, wet[..., 1] * 175, atol=1e-4)
    muddy = weather.spatter(constant_images(1.0, 4), rngs(4), 1, 0.1, 1, 0.5, 0.6, 1)  # mud everywhere
    assert muddy == pytest.approx(np.broadcast_to(np.array([63, 42, 20]) / 255, muddy.shape), abs=1e-6)


# Geometry and compression.


@pytest.mark.parametrize("padding", ["mirror", "reflect"])
def test_bilinear_interpolation_equals_scipy_with_order_1(padding: image_ops.PaddingMode) -> None:
    x = random_images(2, 9, 13)
    shift = np.random.default_rng(1).uniform(-30, 30, (2, 2, 9, 13)).astype(np.float32)
    rows, columns = (grid + offset for grid, offset in zip(np.mgrid[:9, :13], shift, strict=True))
    sampled = image_ops.bilinear(x, rows, columns, padding=padding)
    for i in range(2):
        for channel in range(3):
            plane = x[i, ..., channel].astype(np.float64)
            expected = ndimage.map_coordinates(plane, [rows[i], columns[i]], order=1, mode=padding)
            assert np.abs(sampled[i, ..., channel] - expected).max() < 1e-5


def test_elastic_transform_without_shifts_is_the_identity() -> None:
    x = random_images(2)
    assert np.abs(digital.elastic_transform(x, rngs(2), 0, 0, 0) - x).max() < 1e-6
    assert np.abs(digital.elastic_transform(x, rngs(2), 1e-9, 0.1, 0) - x).max() < 1e-6


def test_the_affine_map_moves_its_three_points() -> None:
    shifts = np.array([[[2, -1], [0, 3], [-2, 1]]], np.float32)  # (x, y) of each point
    rows, columns = digital._affine_grid(32, 40, shifts)
    for corner, shift in zip([(30, 26), (30, 6), (10, 6)], shifts[0], strict=True):
        x, y = (np.array(corner) + shift).astype(int)
        assert (columns[0, y, x], rows[0, y, x]) == pytest.approx(corner, abs=1e-4)


def test_the_elastic_field_is_smooth_noise_times_alpha() -> None:
    height, width, alpha, sigma = 24, 24, 0.1, 0.04
    ramp = np.broadcast_to(np.arange(width, dtype=np.float32) / width, (1, height, width))
    transformed = digital.elastic_transform(np.stack([ramp] * 3, -1), rngs(1), alpha, sigma, 0)
    rng = rngs(1)[0]
    rng.uniform(size=(3, 2))  # the affine map draws first
    field = 2 * rng.random((2, height, width), dtype=np.float32) - 1
    smooth = ndimage.gaussian_filter(field[0].astype(np.float64), sigma * 24, mode="reflect", truncate=3) * alpha * 24
    interior = np.s_[:, 4:-4]  # away from the edges, the change of a ramp is proportional to the shift
    assert np.abs((transformed[0, ..., 0] - ramp[0]) * width - smooth)[interior].max() < 1e-4


@pytest.mark.parametrize("factor", [0.95, 0.65, 0.25])
def test_pixelate_equals_pillow_box_resampling(factor: float) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 40, 3), dtype=np.uint8)
    small = Image.fromarray(pixels).resize((int(40 * factor), int(32 * factor)), Image.Resampling.BOX)
    expected = np.asarray(small.resize((40, 32), Image.Resampling.BOX))
    pixelated = digital.pixelate(pixels[None].astype(np.float32) / 255, [], factor)
    assert np.array_equal(digital.to_uint8(pixelated)[0], expected)


def test_pixelate_does_not_change_a_constant_image() -> None:
    assert np.array_equal(digital.pixelate(constant_images(77 / 255, 2), [], 0.65), constant_images(77 / 255, 2))


def test_jpeg_compression_equals_pillow() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 40, 3), dtype=np.uint8)
    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=40)
    compressed = digital.jpeg_compression(pixels[None].astype(np.float32) / 255, [], 40)
    assert np.array_equal(digital.to_uint8(compressed)[0], np.asarray(Image.open(buffer)))


def test_to_uint8_clips_and_rounds_to_nearest() -> None:
    values = np.array([-1, 0, 0.4 / 255, 0.6 / 255, 254.6 / 255, 1, 7], np.float32)
    assert digital.to_uint8(values).tolist() == [0, 0, 0, 1, 255, 255, 255]
    levels = np.arange(256, dtype=np.uint8)
    assert np.array_equal(digital.to_uint8(levels.astype(np.float32) / np.float32(255)), levels)


@pytest.mark.parametrize(("module", "package"), [("PIL.Nowhere", "Pillow"), ("nowhere", "nowhere")])
def test_a_missing_library_is_reported_with_its_install_command(module: str, package: str) -> None:
    with pytest.raises(DataError, match=rf"need {package}.*pip install 'plateaux\[vision\]'"):
        image_ops.import_vision(module)
