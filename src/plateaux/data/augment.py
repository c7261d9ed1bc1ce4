"""How samples are varied in training: pad-and-crop, flip, mixup and cutmix, keyed by sample and never by batch.

Every random number is a function of (key, sample id, draw): the same sample is varied the same way in any batch,
worker or shard. The draws have fixed seats, so switching one variation on changes no other.
"""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class Augment:
    """Which variations a training sample goes through."""

    crop: int = 0  # zero padding on every side before a crop of the original size
    flip: bool = False  # left to right, every second sample
    mixup: float = 0.0  # a of the Beta(a, a) that a pair's share is drawn from; 0: off
    cutmix: float = 0.0  # likewise; where both are on, each takes half of the samples

    def __post_init__(self) -> None:
        for name in ("crop", "mixup", "cutmix"):
            if getattr(self, name) < 0:
                raise RecipeError(f"augment.{name} is {getattr(self, name)}; give 0 (off) or a positive number.")

    @property
    def mixes(self) -> bool:
        """Whether samples are mixed with a partner, and labels become probabilities."""
        return self.mixup > 0 or self.cutmix > 0


def uniforms(seed: int, ids: Tensor, count: int) -> Tensor:
    """Return numbers in [0, 1) that depend only on (key, id, draw): float64 `[B, draws]`."""
    start = _scramble(torch.tensor(_wrap(seed), device=ids.device) + _wrap(_GOLDEN))
    rows = _scramble(start ^ (ids.to(torch.int64) * _wrap(_GOLDEN)))  # [B]
    steps = torch.arange(1, count + 1, device=ids.device) * _wrap(_GOLDEN)
    return _shift(_scramble(rows[:, None] + steps), 11).to(torch.float64) * 2.0**-53


def crop_and_flip(x: Inputs, ids: Tensor, *, seed: int, augment: Augment) -> Inputs:
    """Return images `[B, C, H, W]` cropped and flipped as (key, id) say; the type stays."""
    if not (augment.crop or augment.flip):
        return x
    x = _images(x, "crop and flip")
    u = uniforms(seed, ids, UNIFORMS_PER_SAMPLE).to(x.device)
    if augment.crop:
        span = 2 * augment.crop + 1
        x = crop(x, _floor(u[:, TOP], span), _floor(u[:, LEFT], span), pad=augment.crop)
    return flip(x, u[:, FLIP] < 0.5) if augment.flip else x


def crop(x: Tensor, top: Tensor, left: Tensor, *, pad: int) -> Tensor:
    """Return windows of the original size that start at (top, left) of the zero-padded images."""
    _, _, height, width = x.shape
    # A view of all windows [B, C, 2p+1, 2p+1, H, W]; indexing it copies only the one asked for, row by row.
    windows = F.pad(x, (pad, pad, pad, pad)).unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(len(x), device=x.device), :, top, left]


def flip(x: Tensor, which: Tensor) -> Tensor:
    """Return the images with those that `which` `[B]` marks turned left to right."""
    rows = which.nonzero()[:, 0]
    return x.index_copy(0, rows, x.index_select(0, rows).flip(3))


def mix_partners(ids: Tensor, among: Tensor, *, seed: int) -> Tensor:
    """Return the sample each is mixed with, drawn from all training ids `among`."""
    drawn = uniforms(seed, ids, UNIFORMS_PER_SAMPLE)[:, PARTNER]
    return among[_floor(drawn, len(among))]


def mixup_cutmix(
    x: Inputs, y: Tensor, other: Inputs, other_y: Tensor, ids: Tensor, *, seed: int, classes: int, augment: Augment
) -> tuple[Tensor, Tensor]:
    """Return samples mixed with their partners, and probabilities `[B, C]` for labels.

    Mixup (arXiv:1710.09412) blends whole inputs, `s x + (1 - s) x'`; cutmix (arXiv:1905.04899) pastes a box of the
    partner and takes for s the share of the picture that is left. Inputs come normalised: blending commutes with it.
    """
    x, other = _floats(x), _floats(other)
    if y.dim() != 1 or y.is_floating_point():
        raise RecipeError(f"Mixing needs class numbers [B] for labels; these are {y.dtype} {list(y.shape)}.")
    u = uniforms(seed, ids, UNIFORMS_PER_SAMPLE).to(x.device)
    cut = (u[:, WHICH] < _cut_share(augment)).view(-1, 1, 1)
    # How much of the partner each pixel takes, [B, 1, 1] or [B, H, W]; lerp is exact at 0 and at 1.
    partner = torch.zeros(len(x), 1, 1, dtype=torch.float64, device=x.device)
    if augment.mixup:
        partner = 1 - beta(u[:, SHARE], augment.mixup).view(-1, 1, 1)
    if augment.cutmix:
        box = cutmix_boxes(_images(x, "cutmix"), beta(u[:, SHARE], augment.cutmix), u[:, ROW], u[:, COLUMN])
        partner = torch.where(cut, box.to(torch.float64), partner)
    weight = partner[:, None] if augment.cutmix else partner.view(-1, *[1] * (x.dim() - 1))
    mixed = torch.lerp(x, other, weight.to(x.dtype))
    share = 1 - partner.mean((1, 2))
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    share = share.to(wide)[:, None]
    soft = share * F.one_hot(y, classes).to(wide) + (1 - share) * F.one_hot(other_y, classes).to(wide)
    return mixed, soft


def cutmix_boxes(x: Tensor, share: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Return masks `[B, H, W]` of boxes that cover 1 - share of an image, less what falls over its edge."""
    height, width = x.shape[-2:]
    side = (1.0 - share).sqrt()

    def inside(centre: Tensor, length: int) -> Tensor:
        middle, half = (centre * length).floor(), (side * length).floor() / 2
        at = torch.arange(length, device=x.device)
        return (at >= (middle - half.floor())[:, None]) & (at < (middle + half.ceil())[:, None])

    return inside(row, height)[:, :, None] & inside(column, width)[:, None, :]


def beta(u: Tensor, a: float) -> Tensor:
    """Return the quantiles `u` of Beta(a, a), read off a table."""
    table, power = _beta_table(float(a))
    table = table.to(u.device)
    low = torch.minimum(u, 1 - u).contiguous()  # the density is symmetric: the lower half is enough
    right = torch.searchsorted(table, low, right=True).clamp(1, len(table) - 1)
    below, above = table[right - 1], table[right]
    s = (right - 1 + (low - below) / (above - below)) / (len(table) - 1) * 0.5**power
    t = s.clamp(0) ** (1 / power)
    return torch.where(u < 0.5, t, 1 - t)


def normalize(
    x: Inputs, mean: Sequence[float] = (), std: Sequence[float] = (), dtype: torch.dtype = torch.float32
) -> Inputs:
    """Return inputs as a model takes them: uint8 scaled to [0, 1], then `(x - mean) / std` for every channel.

    Token numbers and named inputs are passed through.
    """
    if not isinstance(x, Tensor) or (x.dtype != torch.uint8 and not x.is_floating_point()):
        return x
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scale = 255.0 if x.dtype == torch.uint8 else 1.0
    if not mean:
        return x.to(dtype) if scale == 1.0 else (x.to(wide) / scale).to(dtype)
    shape = (1, -1) + (1,) * (x.dim() - 2)
    middle, spread = (
        torch.tensor(v, dtype=torch.float64, device="cpu").mul(scale).to(wide).to(x.device).view(shape)
        for v in (mean, std)
    )
    return x.to(wide, copy=True).sub_(middle).div_(spread).to(dtype)


_GOLDEN = 0x9E3779B97F4A7C15


def _wrap(number: int) -> int:
    """The 64 bits of a number, read as int64: torch multiplies those with wrap-around."""
    return (number + 2**63) % 2**64 - 2**63


def _shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)  # >> alone would drag the sign along


def _scramble(z: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every output bit depends on every input bit."""
    z = (z ^ _shift(z, 30)) * _wrap(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _wrap(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


@lru_cache(maxsize=16)
def _beta_table(a: float, points: int = 4097) -> tuple[Tensor, float]:
    """The distribution function of Beta(a, a) up to 1/2, at t = s^(1/p) for evenly spaced s.

    With p = min(a, 1) the density in s is bounded, so that the trapezoid rule holds for small a too.
    """
    p = min(a, 1.0)
    s = torch.linspace(0, 0.5**p, points, dtype=torch.float64)
    t = s ** (1 / p)
    # In logarithms: t^(a-1) (1-t)^(a-1) underflows for large a.
    log = (a - 1) * (torch.log1p(-t) + (torch.log(s) if a > 1 else 0))
    density = (log - log.max()).exp()
    mass = torch.cat([torch.zeros(1, dtype=torch.float64), torch.cumulative_trapezoid(density)])
    return mass / mass[-1] * 0.5, p


def _cut_share(augment: Augment) -> float:
    if not augment.cutmix:
        return 0.0
    return 0.5 if augment.mixup else 1.0


def _floor(u: Tensor, count: int) -> Tensor:
    return (u * count).to(torch.int64).clamp(max=count - 1)


def _images(x: Inputs, what: str) -> Tensor:
    if isinstance(x, Tensor) and x.dim() == 4:
        return x
    given = f"shape {list(x.shape)}" if isinstance(x, Tensor) else f"the names {sorted(x)}"
    raise RecipeError(f"The augmentation {what} needs images [B, C, H, W]; these inputs have {given}. Switch it off.")


def _floats(x: Inputs) -> Tensor:
    if isinstance(x, Tensor) and x.is_floating_point():
        return x
    given = str(x.dtype) if isinstance(x, Tensor) else f"named ({', '.join(sorted(x))})"
    raise RecipeError(f"Mixing samples needs inputs that are numbers; these are {given}. Set mixup and cutmix to 0.")
