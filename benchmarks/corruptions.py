"""Cost of corrupting 10,000 CIFAR-sized images on one thread, each corruption at its slowest severity.

Times are CPU time of 2,000 images, scaled to 10,000. The images are CIFAR-10's test images if PLATEAUX_DATA contains
them, otherwise random ones. The quick form corrupts 100 images, whose fixed costs count a hundred times.
"""

from __future__ import annotations

import time

import torch
from _common import Results, at_most, parse_flags
from torch import Tensor

from plateaux.core.errors import DataError
from plateaux.core.registry import dataset
from plateaux.data.corruptions.corrupt import CORRUPTIONS, EXTRA, corrupt

IMAGES = 10_000
LIMIT, QUICK_LIMIT = at_most(10.0), at_most(40.0)  # seconds


def load_images(count: int) -> tuple[Tensor, str]:
    """Return images, and where they come from."""
    try:
        x, _ = dataset.get("cifar10")().test.fetch(torch.arange(count))
        assert isinstance(x, Tensor)
        return x, "CIFAR-10"
    except DataError:
        coarse = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        smooth = torch.nn.functional.interpolate(coarse, (32, 32), mode="bicubic", align_corners=False)
        return (255 * smooth).clamp(0, 255).byte(), "random"


def cost(x: Tensor, name: str, severity: int) -> float:
    """Return the CPU seconds for 10,000 images."""
    begin = time.process_time()
    corrupt(x, torch.arange(len(x)), name, severity)
    return (time.process_time() - begin) * IMAGES / len(x)


def main() -> None:
    args = parse_flags(__doc__ or "")
    torch.set_num_threads(1)
    results = Results(args.quick, args.json)
    x, source = load_images(100 if args.quick else 2000)
    severities = (5,) if args.quick else (1, 3, 5)
    for name in (*CORRUPTIONS, *EXTRA):
        for severity in severities:  # tables and textures are computed once and cached
            corrupt(x[:1], torch.arange(1), name, severity)
        slowest = max(cost(x, name, severity) for severity in severities)
        results.add(f"{name}: seconds for 10,000 images", slowest, full=LIMIT, quick=QUICK_LIMIT)
    results.finish(images=source, severities=list(severities), threads=1)


if __name__ == "__main__":
    main()
