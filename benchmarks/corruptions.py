"""Cost of corrupting 10,000 CIFAR-sized images on one thread, each kind at its most expensive severity.

Time is the processor's, which other work on the machine does not lengthen; 2,000 images are corrupted and their time is
scaled. They are CIFAR-10's test images where PLATEAUX_DATA has them, else made-up ones.
"""

from __future__ import annotations

import time

import torch
from _common import close, flags
from torch import Tensor

from plateaux.core.errors import DataError
from plateaux.data.corruptions.corrupt import CORRUPTIONS, EXTRA, corrupt
from plateaux.data.datasets.cifar import cifar10

WHOLE = 10_000
MOST = 10.0  # seconds


def images(count: int) -> tuple[Tensor, str]:
    """Return images to corrupt, and what they are."""
    try:
        x, _ = cifar10().test.fetch(torch.arange(count))
        assert isinstance(x, Tensor)
        return x, "CIFAR-10"
    except DataError:
        coarse = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        smooth = torch.nn.functional.interpolate(coarse, (32, 32), mode="bicubic", align_corners=False)
        return (255 * smooth).clamp(0, 255).byte(), "made up"


def cost(x: Tensor, name: str, severity: int) -> float:
    """Return the processor's seconds for 10,000 images."""
    begun = time.process_time()
    corrupt(x, torch.arange(len(x)), name, severity)
    return (time.process_time() - begun) * WHOLE / len(x)


def main() -> None:
    args = flags(__doc__ or "")
    torch.set_num_threads(1)
    x, what = images(100 if args.quick else 2000)
    severities = (5,) if args.quick else (1, 3, 5)
    figures: dict[str, float] = {}
    for name in (*CORRUPTIONS, *EXTRA):
        for severity in severities:  # tables and pictures are made once and kept
            corrupt(x[:1], torch.arange(1), name, severity)
        costs = [cost(x, name, severity) for severity in severities]
        figures[f"{name}: seconds for 10,000 images"] = max(costs)
        if not args.json:
            print(f"{name:18} {' '.join(f'{each:5.2f}' for each in costs)} s", flush=True)
    limits = {name: ("at most", MOST) for name in figures}
    close(figures, limits, args.quick, images=what, severities=list(severities), threads=1)


if __name__ == "__main__":
    main()
