"""Data augmentation: random crops, flip, mixup, and cutmix, seeded per sample instead of per batch.

Every random number is a function of (seed, sample id, column): a sample is augmented the same way in any batch, worker
process, or shard. Each augmentation reads fixed columns, so enabling one does not change another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from plateaux.core.errors import RecipeError
from plateaux.core.types import Inputs

TOP, LEFT, FLIP, PARTNER, SHARE, WHICH, ROW, COLUMN = range(8)
UNIFORMS_PER_SAMPLE = 8
# A random resized crop tries boxes of random area and aspect ratio until one fits, as torchvision does.
RESIZE_TRIES = 10
AREAS = slice(UNIFORMS_PER_SAMPLE, UNIFORMS_PER_SAMPLE + RESIZE_TRIES)
RATIOS = slice(AREAS.stop, AREAS.stop + RESIZE_TRIES)
MIN_RATIO, MAX_RATIO = 3 / 4, 4 / 3  # of width to height


@dataclass(frozen=True, slots=True)
class Augment:
    """The augmentations applied to training samples."""

    crop: int = 0  # padding on every side before a random crop of the original size
    crop_fill: int = 0  # the value of the padding, from 0 to 255
    resized_crop: tuple[float, float] | None = None  # the range of the area of a crop that is resized; None: off
    flip: bool = False  # horizontal, with probability 1/2
    mixup: float = 0.0  # a of Beta(a, a), the distribution of the mixing weight; 0: off
    cutmix: float = 0.0  # likewise; if both are on, each applies to half of the samples

    def __post_init__(self) -> None:
        if self.resized_crop is not None:
            low, high = self.resized_crop
            if not 0 < low <= high <= 1:
                raise RecipeError(
                    f"augment.resized_crop = {list(self.resized_crop)}: give the smallest and the largest area of a "
                    "crop as fractions of the image, such as [0.08, 1.0]."
                )
            if self.crop:
                raise RecipeError("augment.crop and augment.resized_crop are both set. Use one of them.")

    @property
    def moves(self) -> bool:
        """Whether pixels are moved: by a crop or a flip."""
        return bool(self.crop or self.flip or self.resized_crop)

    @property
    def mixes(self) -> bool:
        """Whether mixup or cutmix is on, so that labels become probabilities."""
        return self.mixup > 0 or self.cutmix > 0


def uniforms(seed: int, ids: Tensor, count: int) -> Tensor:
    """Return random numbers in [0, 1) that depend only on (seed, id, column): float64 `[B, count]`."""
    start = _scramble(torch.tensor(_wrap(seed), device=ids.device) + _wrap(_GOLDEN))
    rows = _scramble(start ^ (ids.to(torch.int64) * _wrap(_GOLDEN)))  # [B]
    steps = torch.arange(1, count + 1, device=ids.device) * _wrap(_GOLDEN)
    return _shift(_scramble(rows[:, None] + steps), 11).to(torch.float64) * 2.0**-53


def crop_and_flip(x: Inputs, ids: Tensor, *, seed: int, augment: Augment) -> Inputs:
    """Crop and flip images `[B, C, H, W]`, seeded by (seed, id); the dtype is preserved."""
    if not augment.moves:
        return x
    x = _require_images(x, "crop and flip")
    u = uniforms(seed, ids, UNIFORMS_PER_SAMPLE).to(x.device)
    if augment.crop:
        num_offsets = 2 * augment.crop + 1
        offsets = _to_index(u[:, TOP], num_offsets), _to_index(u[:, LEFT], num_offsets)
        x = crop(x, *offsets, pad=augment.crop, fill=augment.crop_fill)
    if augment.resized_crop is not None:
        x = resized_crop(x, *crop_boxes(uniforms(seed, ids, RATIOS.stop).to(x.device), x.shape, augment.resized_crop))
    return flip(x, u[:, FLIP] < 0.5) if augment.flip else x


def crop(x: Tensor, top: Tensor, left: Tensor, *, pad: int, fill: int = 0) -> Tensor:
    """Crop windows of the original size at offsets (top, left) `[B]` of the padded images.

    `fill` is a pixel value from 0 to 255, also for images of floats from 0 to 1.
    """
    _, _, height, width = x.shape
    value = fill / 255 if x.is_floating_point() else fill
    # A view of all windows [B, C, 2p+1, 2p+1, H, W]; indexing copies only the selected one.
    windows = F.pad(x, (pad, pad, pad, pad), value=value).unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(len(x), device=x.device), :, top, left]


def crop_boxes(u: Tensor, shape: Sequence[int], areas: tuple[float, float]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return top, left, height and width `[B]` of random boxes, as torchvision's `RandomResizedCrop` defines them.

    The area is uniform in a range of fractions, and the aspect ratio is log-uniform from 3/4 to 4/3. The first box of
    ten that fits into the image is taken; if none does, the largest centered box whose ratio is allowed.
    """
    height, width = shape[-2:]
    area = height * width * (areas[0] + (areas[1] - areas[0]) * u[:, AREAS])
    low, high = math.log(MIN_RATIO), math.log(MAX_RATIO)
    ratio = (low + (high - low) * u[:, RATIOS]).exp()
    w, h = (area * ratio).sqrt().round().long(), (area / ratio).sqrt().round().long()  # [B, tries]
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
    first = fits.int().argmax(1, keepdim=True)
    is_found = fits.any(1)
    middle_w = min(width, round(height * MAX_RATIO)) if width / height > MAX_RATIO else width
    middle_h = min(height, round(width / MIN_RATIO)) if width / height < MIN_RATIO else height
    w = torch.where(is_found, w.gather(1, first)[:, 0], middle_w)
    h = torch.where(is_found, h.gather(1, first)[:, 0], middle_h)
    top = torch.where(is_found, _to_index_below(u[:, TOP], height - h + 1), (height - h) // 2)
    left = torch.where(is_found, _to_index_below(u[:, LEFT], width - w + 1), (width - w) // 2)
    return top, left, h, w


def resized_crop(x: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor) -> Tensor:
    """Return boxes of the images `[B, C, H, W]`, each resized to H x W bilinearly.

    A box is at most as large as its image, so that nothing is reduced, and antialiasing would change nothing.
    """
    rows = _resize_positions(top, height, x.shape[2])
    columns = _resize_positions(left, width, x.shape[3])
    sample = torch.arange(len(x), device=x.device)[:, None, None]

    def at(row: Tensor, column: Tensor) -> Tensor:
        return x[sample, :, row[:, :, None], column[:, None, :]].to(torch.float32)  # [B, H, W, C]

    (row, next_row, row_weight), (column, next_column, column_weight) = rows, columns
    right = column_weight[:, None, :, None]
    upper = torch.lerp(at(row, column), at(row, next_column), right)
    lower = torch.lerp(at(next_row, column), at(next_row, next_column), right)
    mixed = torch.lerp(upper, lower, row_weight[:, :, None, None]).permute(0, 3, 1, 2)
    return mixed.contiguous().to(x.dtype) if x.is_floating_point() else mixed.round().to(x.dtype).contiguous()


def _resize_positions(start: Tensor, length: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each of `size` outputs the pixel before it, the one after it, and the weight of the latter.

    Pixels outside of a box are never read: positions before its first or after its last pixel are clamped.
    """
    scale = length[:, None].to(torch.float64) / size
    position = ((torch.arange(size, device=start.device) + 0.5) * scale - 0.5).clamp_min(0)
    before = position.floor().long()
    after = torch.minimum(before + 1, length[:, None] - 1)
    return start[:, None] + before, start[:, None] + after, (position - before).to(torch.float32)


def flip(x: Tensor, mask: Tensor) -> Tensor:
    """Flip the images selected by `mask` `[B]` horizontally."""
    rows = mask.nonzero()[:, 0]
    return x.index_copy(0, rows, x.index_select(0, rows).flip(3))


def mix_partners(ids: Tensor, train_ids: Tensor, *, seed: int) -> Tensor:
    """Sample the mixing partner of each sample from all training ids."""
    u = uniforms(seed, ids, UNIFORMS_PER_SAMPLE)[:, PARTNER]
    return train_ids[_to_index(u, len(train_ids))]


def mixup_cutmix(
    x: Inputs, y: Tensor, other: Inputs, other_y: Tensor, ids: Tensor, *, seed: int, classes: int, augment: Augment
) -> tuple[Tensor, Tensor]:
    """Mix samples with their partners by mixup or cutmix, and return them with label probabilities `[B, C]`.

    Mixup (arXiv:1710.09412) blends two inputs, `s x + (1 - s) x'`; cutmix (arXiv:1905.04899) pastes a box of the
    partner, and s is the fraction of the image that remains. Inputs are normalized: blending commutes with it.
    """
    x, other = _require_floats(x), _require_floats(other)
    if y.dim() != 1 or y.is_floating_point():
        raise RecipeError(
            f"Labels are {y.dtype} {list(y.shape)}. Mixup and cutmix need integer class labels [B]. "
            "Set mixup and cutmix to 0."
        )
    u = uniforms(seed, ids, UNIFORMS_PER_SAMPLE).to(x.device)
    is_cutmix = (u[:, WHICH] < _cutmix_probability(augment)).view(-1, 1, 1)
    # Weight of the partner per pixel, [B, 1, 1] or [B, H, W]; lerp is exact at 0 and at 1.
    partner = torch.zeros(len(x), 1, 1, dtype=torch.float64, device=x.device)
    if augment.mixup:
        partner = 1 - beta(u[:, SHARE], augment.mixup).view(-1, 1, 1)
    if augment.cutmix:
        box = cutmix_boxes(_require_images(x, "cutmix"), beta(u[:, SHARE], augment.cutmix), u[:, ROW], u[:, COLUMN])
        partner = torch.where(is_cutmix, box.to(torch.float64), partner)
    weight = partner[:, None] if augment.cutmix else partner.view(-1, *[1] * (x.dim() - 1))
    mixed = torch.lerp(x, other, weight.to(x.dtype))
    share = 1 - partner.mean((1, 2))
    label_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    share = share.to(label_dtype)[:, None]
    soft = share * F.one_hot(y, classes).to(label_dtype) + (1 - share) * F.one_hot(other_y, classes).to(label_dtype)
    return mixed, soft


def cutmix_boxes(x: Tensor, share: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Return masks `[B, H, W]` of boxes that cover 1 - share of an image, clipped at its border."""
    height, width = x.shape[-2:]
    side = (1.0 - share).sqrt()

    def inside(center: Tensor, length: int) -> Tensor:
        middle, half = (center * length).floor(), (side * length).floor() / 2
        position = torch.arange(length, device=x.device)
        return (position >= (middle - half.floor())[:, None]) & (position < (middle + half.ceil())[:, None])

    return inside(row, height)[:, :, None] & inside(column, width)[:, None, :]


def beta(u: Tensor, a: float) -> Tensor:
    """Return the quantiles `u` of Beta(a, a), interpolated in a precomputed CDF."""
    cdf, power = _beta_cdf(float(a))
    cdf = cdf.to(u.device)
    low = torch.minimum(u, 1 - u).contiguous()  # the density is symmetric: the lower half is enough
    right = torch.searchsorted(cdf, low, right=True).clamp(1, len(cdf) - 1)
    below, above = cdf[right - 1], cdf[right]
    s = (right - 1 + (low - below) / (above - below)) / (len(cdf) - 1) * 0.5**power
    t = s.clamp(0) ** (1 / power)
    return torch.where(u < 0.5, t, 1 - t)


def normalize(
    x: Inputs, mean: Sequence[float] = (), std: Sequence[float] = (), dtype: torch.dtype = torch.float32
) -> Inputs:
    """Normalize inputs: scale uint8 to [0, 1], then compute `(x - mean) / std` per channel.

    Token ids and dicts of inputs are returned unchanged.
    """
    if not isinstance(x, Tensor) or (x.dtype != torch.uint8 and not x.is_floating_point()):
        return x
    compute_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    scale = 255.0 if x.dtype == torch.uint8 else 1.0
    if not mean:
        return x.to(dtype) if scale == 1.0 else (x.to(compute_dtype) / scale).to(dtype)
    shape = (1, -1) + (1,) * (x.dim() - 2)
    mean_tensor, std_tensor = (
        torch.tensor(v, dtype=torch.float64, device="cpu").mul(scale).to(compute_dtype).to(x.device).view(shape)
        for v in (mean, std)
    )
    return x.to(compute_dtype, copy=True).sub_(mean_tensor).div_(std_tensor).to(dtype)


_GOLDEN = 0x9E3779B97F4A7C15


def _wrap(number: int) -> int:
    """Reinterpret an unsigned 64-bit number as int64: torch multiplies int64 with wrap-around."""
    return (number + 2**63) % 2**64 - 2**63


def _shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)  # >> alone is an arithmetic shift, which repeats the sign bit


def _scramble(z: Tensor) -> Tensor:
    """Apply the splitmix64 finalizer (Steele, Lea, Flood 2014): every output bit depends on every input bit."""
    z = (z ^ _shift(z, 30)) * _wrap(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _wrap(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


@lru_cache(maxsize=16)
def _beta_cdf(a: float, points: int = 4097) -> tuple[Tensor, float]:
    """Return the CDF of Beta(a, a) up to 1/2, at t = s^(1/p) for evenly spaced s, and p.

    With p = min(a, 1) the density in s is bounded, so the trapezoid rule is accurate for small a too.
    """
    p = min(a, 1.0)
    s = torch.linspace(0, 0.5**p, points, dtype=torch.float64)
    t = s ** (1 / p)
    # In logarithms: t^(a-1) (1-t)^(a-1) underflows for large a.
    log = (a - 1) * (torch.log1p(-t) + (torch.log(s) if a > 1 else 0))
    density = (log - log.max()).exp()
    mass = torch.cat([torch.zeros(1, dtype=torch.float64), torch.cumulative_trapezoid(density)])
    return mass / mass[-1] * 0.5, p


def _cutmix_probability(augment: Augment) -> float:
    if not augment.cutmix:
        return 0.0
    return 0.5 if augment.mixup else 1.0


def _to_index(u: Tensor, count: int) -> Tensor:
    return (u * count).to(torch.int64).clamp(max=count - 1)


def _to_index_below(u: Tensor, count: Tensor) -> Tensor:
    """Return indices below a count per sample `[B]`."""
    return torch.minimum((u * count).long(), count - 1)


def _require_images(x: Inputs, augmentation: str) -> Tensor:
    if isinstance(x, Tensor) and x.dim() == 4:
        return x
    actual = f"shape {list(x.shape)}" if isinstance(x, Tensor) else f"the keys {sorted(x)}"
    raise RecipeError(
        f"Inputs have {actual}. The augmentation {augmentation} needs images [B, C, H, W]. Set it to 0 or false."
    )


def _require_floats(x: Inputs) -> Tensor:
    if isinstance(x, Tensor) and x.is_floating_point():
        return x
    actual = str(x.dtype) if isinstance(x, Tensor) else f"a dict with keys {', '.join(sorted(x))}"
    raise RecipeError(f"Inputs are {actual}. Mixup and cutmix need floating-point tensors. Set mixup and cutmix to 0.")
