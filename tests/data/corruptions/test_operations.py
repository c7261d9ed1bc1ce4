"""Distortions against closed forms, Pillow, scipy, colorsys and slow obvious twins."""

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


def rngs(count: int, first: int = 0) -> list[np.random.Generator]:
    return generators(first, range(count))


def flat(value: float, count: int = 8, side: int = 32) -> Array:
    return np.full((count, side, side, 3), value, np.float32)


def noisy(count: int = 2, height: int = 32, width: int = 32) -> Array:
    return np.random.default_rng(0).random((count, height, width, 3), dtype=np.float32)


def island(side: int = 64, margin: int = 22) -> Array:
    """Return a random patch in the middle of black, far from every edge."""
    x = np.zeros((1, side, side, 3), np.float32)
    x[:, margin:-margin, margin:-margin] = noisy(1, side - 2 * margin, side - 2 * margin)
    return x


# Noise.


def test_gaussian_noise_has_its_mean_and_spread() -> None:
    difference = noise.gaussian_noise(flat(0.5), rngs(8), 0.1) - 0.5
    assert abs(difference.mean()) < 4 * 0.1 / difference.size**0.5
    assert abs(difference.std() - 0.1) < 4 * 0.1 / (2 * difference.size) ** 0.5


def test_speckle_noise_grows_with_the_value() -> None:
    for value in (0.25, 0.75):
        difference = noise.speckle_noise(flat(value), rngs(8), 0.2) - value
        assert abs(difference.std() - 0.2 * value) < 4 * 0.2 * value / (2 * difference.size) ** 0.5
    assert not noise.speckle_noise(flat(0.0), rngs(8), 0.2).any()


def test_shot_noise_has_the_mean_and_variance_of_counted_light() -> None:
    counted = noise.shot_noise(flat(0.6), rngs(8), 50) * 50
    assert np.abs(counted - np.rint(counted)).max() < 1e-4
    assert abs(counted.mean() - 30) < 4 * (30 / counted.size) ** 0.5
    assert (
        abs(counted.var() - 30) < 4 * 30 * (2 / counted.size) ** 0.5 * 1.02
    )  # a Poisson's fourth moment is a bit more
    assert not noise.shot_noise(flat(0.0), rngs(8), 50).any()


def test_impulse_noise_replaces_its_share_by_black_and_white_alike() -> None:
    x = noise.impulse_noise(flat(0.5, 16), rngs(16), 0.2)
    error = (0.2 * 0.8 / x.size) ** 0.5
    assert set(np.unique(x)) == {0.0, 0.5, 1.0}
    assert abs((x != 0.5).mean() - 0.2) < 4 * error
    assert abs((x == 1).mean() - 0.1) < 4 * error


# Colour.


def by_colorsys(x: Array, change: Callable[[float, float, float], tuple[float, float, float]]) -> Any:
    pixels = x.astype(np.float64).reshape(-1, 3)
    return np.array([colorsys.hsv_to_rgb(*change(*colorsys.rgb_to_hsv(*pixel))) for pixel in pixels]).reshape(x.shape)


def colours() -> Array:
    """Return random colours with black, white, grey, primaries and near-black among them."""
    x = noisy(1, 16, 16)
    special = [(0, 0, 0), (1, 1, 1), (0.5, 0.5, 0.5), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1 / 255, 0)]
    x[0, 0, : len(special)] = special
    return x


@pytest.mark.parametrize("added", [0.05, 0.3, 0.5])
def test_brightness_raises_the_v_of_hsv(added: float) -> None:
    expected = by_colorsys(colours(), lambda h, s, v: (h, s, min(v + added, 1)))
    assert np.abs(digital.brightness(colours(), [], added) - expected).max() < 1e-6


@pytest.mark.parametrize(("factor", "added"), [(0.3, 0), (0.1, 0), (2, 0.1), (30, 0.2)])
def test_saturate_changes_the_s_of_hsv(factor: float, added: float) -> None:
    expected = by_colorsys(colours(), lambda h, s, v: (h, min(s * factor + added, 1), v))
    assert np.abs(digital.saturate(colours(), [], factor, added) - expected).max() < 1e-5


def test_contrast_shrinks_the_distance_to_the_mean_of_each_image_and_channel() -> None:
    x = noisy(3).astype(np.float64)
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
def test_a_constant_image_stays_constant_under_blur(blur: Callable[[Array], Array]) -> None:
    assert np.abs(blur(flat(200 / 255, 2)) - 200 / 255).max() < 2e-6


@pytest.mark.parametrize("name", ["gaussian", "defocus", "wide defocus", "motion"])
def test_a_blur_away_from_the_edges_keeps_the_mean(name: str) -> None:
    x = island()
    assert BLURS[name](x).mean((1, 2)) == pytest.approx(x.mean((1, 2)), rel=1e-5)
    assert BLURS[name](x).var() < x.var()


def test_gaussian_blur_is_that_of_each_channel_alone() -> None:
    x = noisy(2, 20, 24)
    for i, channel in ((0, 0), (1, 2)):
        alone = ndimage.gaussian_filter(x[i, ..., channel].astype(np.float64), 0.8, mode="nearest", truncate=4)
        assert np.abs(blur.gaussian_blur(x, [], 0.8)[i, ..., channel] - alone).max() < 1e-6


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


def test_defocus_sums_over_its_disk_and_mirrors_at_the_edge() -> None:
    x, kernel = noisy(1, 16, 18), blur.disk(1.5, 0.1)
    wide = np.pad(x, ((0, 0), (2, 2), (2, 2), (0, 0)), mode="reflect")
    slow = np.zeros_like(x)
    for row in range(16):
        for column in range(18):
            window = wide[0, row : row + 5, column : column + 5]
            slow[0, row, column] = (window * kernel[..., None]).sum((0, 1))
    assert np.abs(blur.defocus_blur(x, [], 1.5, 0.1) - slow).max() < 1e-6


@pytest.mark.parametrize(("degrees", "step"), [(0, (0, 1)), (90, (1, 0)), (-90, (-1, 0)), (45, None)])
def test_a_trail_is_half_a_gaussian_along_its_angle(degrees: float, step: tuple[int, int] | None) -> None:
    x = np.zeros((1, 41, 41, 1), np.float32)
    x[0, 20, 20] = 1
    weights = np.exp(-(np.arange(13) ** 2) / (2 * 2.0**2))
    weights /= weights.sum()
    found = blur.trail(x, np.array([degrees], np.float32), 6, 2.0)[0, ..., 0]
    for k in range(13):  # each pixel looks k steps along the angle, so a point is seen from k steps before it
        down, right = (k * step[0], k * step[1]) if step else (round(k * 0.5**0.5),) * 2
        assert found[20 - down, 20 - right] >= weights[k] - 1e-4
    assert found.sum() == pytest.approx(1, abs=1e-5)
    assert np.count_nonzero(found) <= 13


def test_each_image_has_its_own_angle() -> None:
    x = np.repeat(island(), 3, 0)
    moved = blur.motion_blur(x, rngs(3), 9, 2.5)
    assert not np.allclose(moved[0], moved[1], atol=1e-3)
    assert not np.allclose(moved[1], moved[2], atol=1e-3)


def clipped_zoom(image: Any, zoom: float) -> Any:
    """Return the middle of an image enlarged to its size by scipy, the published way."""
    size = image.shape[0]
    crop = int(np.ceil(size / zoom))
    top = (size - crop) // 2
    factors = (zoom, zoom, 1)[: image.ndim]
    large = ndimage.zoom(image[top : top + crop, top : top + crop], factors, order=1)
    over = (large.shape[0] - size) // 2
    return large[over : over + size, over : over + size]


@pytest.mark.parametrize(("most", "step", "side"), [(1.06, 0.01, 32), (1.26, 0.01, 32), (1.31, 0.03, 50)])
def test_zoom_blur_is_the_mean_over_all_enlargements(most: float, step: float, side: int) -> None:
    x = noisy(2, side, side)
    zooms = np.arange(1, most, step)
    for i in range(2):
        slow = (x[i] + sum(clipped_zoom(x[i].astype(np.float64), zoom) for zoom in zooms)) / (len(zooms) + 1)
        assert np.abs(blur.zoom_blur(x, [], most, step)[i] - slow).max() < 1e-5


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=40))
def test_places_are_copied_as_the_published_scripts_do_it(pairs: list[tuple[int, int]]) -> None:
    slow = np.arange(12)[:, None].repeat(3, axis=1)
    for a, b in pairs:
        slow[a], slow[b] = slow[b], slow[a]  # meant as an exchange; both sides are views, so b is copied onto a
    here = np.array([a for a, _ in pairs], dtype=np.int64)
    there = np.array([[b, a] for a, b in pairs], dtype=np.int64).reshape(-1, 2)
    found = blur.copied(12, here, there)
    assert found[:, 0].tolist() == slow[:, 0].tolist()
    assert found[:, 1].tolist() == list(range(12))  # copied onto itself


def test_glass_blur_makes_no_new_colour() -> None:
    x = noisy(3)  # a Gaussian of 0.05 is less than a pixel wide, so nothing but the copies is left
    mixed = blur.glass_blur(x, rngs(3), 0.05, 1, 2)
    assert not np.array_equal(mixed, x)
    for before, after in zip(x, mixed, strict=True):
        known = set(map(tuple, before.reshape(-1, 3).tolist()))
        assert set(map(tuple, after.reshape(-1, 3).tolist())) < known


# Weather.


def slow_plasma(uniform: Any, decay: float) -> Any:
    """Return the diamond-square clouds of one image, a pixel at a time."""
    side = len(uniform)
    field, step, amplitude = np.zeros((side, side)), side, 100.0
    while step >= 2:
        half = step // 2

        def fill(y: int, x: int, neighbours: list[tuple[int, int]], half: int = half, reach: float = amplitude) -> None:
            values = [field[(y + a * half) % side, (x + b * half) % side] for a, b in neighbours]
            field[y, x] = sum(values) / 4 + reach**2 * (2 * uniform[y, x] - 1)

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
def test_clouds_are_those_of_a_slow_diamond_square(decay: float) -> None:
    found = weather.plasma(rngs(2), 12, decay)
    uniform = image_ops.uniforms(rngs(2), 16, 16)
    assert found.shape == (2, 16, 16)
    for i in range(2):
        assert np.abs(found[i] - slow_plasma(uniform[i].astype(np.float64), decay)).max() < 1e-4


def test_fog_keeps_the_brightest_value_and_black() -> None:
    x = 0.8 * noisy(4)
    foggy = weather.fog(x, rngs(4), 1.5, 1.75)
    assert (foggy.max((1, 2, 3)) <= x.max((1, 2, 3)) + 1e-6).all()
    assert foggy.std() < x.std()
    assert not weather.fog(flat(0.0, 2), rngs(2), 1.5, 1.75).any()


def test_snow_without_flakes_or_whitening_is_nothing() -> None:
    x = noisy(2)
    assert np.array_equal(weather.snow(x, rngs(2), -9, 0.1, 1.25, 0.5, 8, 3, 1), x)


def test_snow_lies_alike_on_an_image_turned_upside_down() -> None:
    fallen = weather.snow(flat(0.0, 2), rngs(2), 0.1, 0.3, 1, 0.5, 10, 4, 1)
    assert fallen.max() > 0.05
    assert np.allclose(fallen, fallen[:, ::-1, ::-1], atol=1e-7)


def test_snow_whitens_by_the_grey_of_each_pixel() -> None:
    x = noisy(2)
    grey = (x.astype(np.float64) @ [0.299, 0.587, 0.114])[..., None]
    expected = 0.6 * x + 0.4 * np.maximum(x, 1.5 * grey + 0.5)
    assert np.abs(weather.snow(x, rngs(2), -9, 0.1, 1, 0.5, 8, 3, 0.6) - expected).max() < 1e-6


@pytest.mark.parametrize("zoom", [1, 1.25, 2.25, 4.5])
def test_layers_are_enlarged_as_scipy_does(zoom: float) -> None:
    layers = noisy(2)[..., 0]
    for i in range(2):
        assert np.abs(weather.enlarge(layers, zoom)[i] - clipped_zoom(layers[i].astype(np.float64), zoom)).max() < 1e-5


def test_frost_is_a_cut_of_a_picture_over_the_image() -> None:
    x = noisy(3)
    assert np.array_equal(weather.frost(x, rngs(3), 1, 0, 0.2), x)
    pictures = weather.frost_textures(0.2)
    assert pictures.shape == (5, 140, 140, 3)
    assert 0 <= pictures.min() < 0.3
    assert 0.9 < pictures.max() <= 1
    for ice in weather.frost(flat(0.0, 3), rngs(3), 1, 1, 0.2):
        places = np.argwhere(np.isclose(pictures[:, :-31, :-31, 0], ice[0, 0, 0], atol=0))
        assert any(np.array_equal(pictures[p, y : y + 32, x : x + 32], ice) for p, y, x in places)


def test_frost_fits_images_larger_than_its_scale() -> None:
    assert weather.frost(flat(0.5, 1, 210), rngs(1), 0.5, 0.5, 0.2).shape == (1, 210, 210, 3)


# Drops on the lens.


def test_the_outline_of_a_square_goes_round_it() -> None:
    levels = np.zeros((2, 16, 16))
    levels[0, 5:11, 5:11] = 200
    found = weather.outlines(levels)
    assert not found[1].any()
    inside = ndimage.distance_transform_edt(found[0] == 0)
    assert inside[8, 8] >= 2  # the middle is none
    assert inside[0, 0] >= 4
    sides = found[0, 4:12, 7], found[0, 7, 4:12]
    assert all(side.sum() == 2 for side in sides)  # one pixel wide
    ring, _ = ndimage.label(~found[0])
    assert ring[8, 8] != ring[0, 0]  # and closed


def test_weak_edges_count_where_they_touch_a_strong_one() -> None:
    ramp = np.zeros((3, 12, 12))
    ramp[0, :, 6:] = 20  # a slope of 4 x 20, below the strong threshold everywhere
    ramp[1, :, 6:] = 100
    ramp[2, :, 6:] = 20
    ramp[2, :5, 6:] = 100  # weak below, strong above
    weak, strong, mixed = weather.outlines(ramp)
    assert not weak.any()
    assert strong.any(1).all()
    assert mixed.any(1).all()


@given(st.lists(st.integers(0, 20), min_size=9, max_size=9))
def test_depths_are_equalised_as_a_histogram_is(depths: list[int]) -> None:
    levels = np.array(depths).reshape(1, 3, 3)
    lowest = depths.count(min(depths))
    slow = [
        depth if lowest == 9 else np.rint((sum(d <= depth for d in depths) - lowest) * 255 / (9 - lowest))
        for depth in depths
    ]
    assert weather.equalize(levels).reshape(-1).tolist() == slow


def test_no_drops_leave_the_image_as_it_was() -> None:
    x = noisy(2)
    assert np.array_equal(weather.spatter(x, rngs(2), 0, 0.01, 1, 0.7, 0.5, 0), x)
    assert np.array_equal(weather.spatter(x, rngs(2), 0, 0.01, 1, 0.7, 0.5, 1), x)


def test_water_adds_its_colour_and_mud_covers_with_its_own() -> None:
    wet = weather.spatter(flat(0.0, 4), rngs(4), 0.65, 0.3, 1, 0.69, 0.5, 0)
    assert wet.max((1, 2, 3)) == pytest.approx(0.5 * 238 / 255, abs=1e-6)
    assert np.allclose(wet[..., 0] * 238, wet[..., 1] * 175, atol=1e-4)
    muddy = weather.spatter(flat(1.0, 4), rngs(4), 1, 0.1, 1, 0.5, 0.6, 1)  # mud everywhere
    assert muddy == pytest.approx(np.broadcast_to(np.array([63, 42, 20]) / 255, muddy.shape), abs=1e-6)


# Geometry and compression.


@pytest.mark.parametrize("edge", ["mirror", "reflect"])
def test_reading_between_pixels_is_scipys_order_one(edge: image_ops.Edge) -> None:
    x = noisy(2, 9, 13)
    shift = np.random.default_rng(1).uniform(-30, 30, (2, 2, 9, 13)).astype(np.float32)
    rows, columns = (place + each for place, each in zip(np.mgrid[:9, :13], shift, strict=True))
    found = image_ops.bilinear(x, rows, columns, edge=edge)
    for i in range(2):
        for channel in range(3):
            plane = x[i, ..., channel].astype(np.float64)
            slow = ndimage.map_coordinates(plane, [rows[i], columns[i]], order=1, mode=edge)
            assert np.abs(found[i, ..., channel] - slow).max() < 1e-5


def test_elastic_transform_without_shifts_is_nothing() -> None:
    x = noisy(2)
    assert np.abs(digital.elastic_transform(x, rngs(2), 0, 0, 0) - x).max() < 1e-6
    assert np.abs(digital.elastic_transform(x, rngs(2), 1e-9, 0.1, 0) - x).max() < 1e-6


def test_the_affine_map_moves_its_three_points() -> None:
    moved = np.array([[[2, -1], [0, 3], [-2, 1]]], np.float32)  # x and y of each
    rows, columns = digital._affine(32, 40, moved)
    for corner, shift in zip([(30, 26), (30, 6), (10, 6)], moved[0], strict=True):
        x, y = (np.array(corner) + shift).astype(int)
        assert (columns[0, y, x], rows[0, y, x]) == pytest.approx(corner, abs=1e-4)


def test_the_elastic_field_is_smooth_noise_times_its_pull() -> None:
    height, width, pull, sigma = 24, 24, 0.1, 0.04
    ramp = np.broadcast_to(np.arange(width, dtype=np.float32) / width, (1, height, width))
    found = digital.elastic_transform(np.stack([ramp] * 3, -1), rngs(1), pull, sigma, 0)
    rng = rngs(1)[0]
    rng.uniform(size=(3, 2))  # the affine map's draws come first
    field = 2 * rng.random((2, height, width), dtype=np.float32) - 1
    smooth = ndimage.gaussian_filter(field[0].astype(np.float64), sigma * 24, mode="reflect", truncate=3) * pull * 24
    middle = np.s_[:, 4:-4]  # a ramp shows the shift wherever no edge is near
    assert np.abs((found[0, ..., 0] - ramp[0]) * width - smooth)[middle].max() < 1e-4


@pytest.mark.parametrize("factor", [0.95, 0.65, 0.25])
def test_pixelate_is_pillows_box_there_and_back(factor: float) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 40, 3), dtype=np.uint8)
    small = Image.fromarray(pixels).resize((int(40 * factor), int(32 * factor)), Image.Resampling.BOX)
    expected = np.asarray(small.resize((40, 32), Image.Resampling.BOX))
    found = digital.pixelate(pixels[None].astype(np.float32) / 255, [], factor)
    assert np.array_equal(digital.to_bytes(found)[0], expected)


def test_a_constant_image_stays_constant_under_pixelate() -> None:
    assert np.array_equal(digital.pixelate(flat(77 / 255, 2), [], 0.65), flat(77 / 255, 2))


def test_jpeg_is_pillows() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 40, 3), dtype=np.uint8)
    held = BytesIO()
    Image.fromarray(pixels).save(held, "JPEG", quality=40)
    found = digital.jpeg_compression(pixels[None].astype(np.float32) / 255, [], 40)
    assert np.array_equal(digital.to_bytes(found)[0], np.asarray(Image.open(held)))


def test_bytes_are_clipped_and_rounded_to_the_nearest() -> None:
    values = np.array([-1, 0, 0.4 / 255, 0.6 / 255, 254.6 / 255, 1, 7], np.float32)
    assert digital.to_bytes(values).tolist() == [0, 0, 0, 1, 255, 255, 255]
    every = np.arange(256, dtype=np.uint8)
    assert np.array_equal(digital.to_bytes(every.astype(np.float32) / np.float32(255)), every)


@pytest.mark.parametrize(("module", "package"), [("PIL.Nowhere", "Pillow"), ("nowhere", "nowhere")])
def test_a_missing_library_is_named_with_the_way_to_install_it(module: str, package: str) -> None:
    with pytest.raises(DataError, match=rf"need {package}.*pip install 'plateaux\[vision\]'"):
        image_ops.import_scipy(module)
