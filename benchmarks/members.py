"""Memory of members: peak memory of offloaded and looped members, and a frozen backbone stored once.

Every figure is the peak resident memory of a process of its own, less what it had taken to train a tiny
network: interpreter, libraries and kernels.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from _common import close, flags, listed

import plateaux
from plateaux.config.builders.model import build_members
from plateaux.config.components import Components
from plateaux.core.runtime import configure_runtime
from plateaux.data.sources import DataSplits, InMemorySource
from plateaux.models.surgery import size_in_bytes

TRUNK = ["conv1", "bn1", "layer1", "layer2", "layer3", "layer4"]


def images() -> DataSplits:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8, generator=generator)
    both = InMemorySource(x, torch.arange(8))
    return DataSplits("noise", both, both, 10, (3, 32, 32), (0.5,) * 3, (0.25,) * 3)


def recipe_for(members: int, manner: str, **model: object) -> plateaux.Recipe:
    return plateaux.Recipe.from_dict(
        {
            "members": members,
            "data": {"name": "noise", "batch_size": 4},
            "model": {"name": "resnet18", "width": 64, **model},
            "optimizer": {"lr": 0.01, "momentum": 0.9},
            "train": {"epochs": 1},
            "executor": {"mode": manner},
        }
    )


def peak() -> float:
    """Return the peak resident memory of this process so far, in MB."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count what the process that started this one held, too
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status.read_text(encoding="utf-8"))[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 / 1024


def trained(members: int, manner: str) -> None:
    """Train in this process and print what it took: the inner half of `measured`."""
    configure_runtime()
    components = Components(data=images())
    with tempfile.TemporaryDirectory() as folder:
        plateaux.train(
            recipe_for(1, manner, width=1), f"{folder}/tiny", **components.keywords()
        )  # everything is imported now
        before = peak()
        plateaux.train(recipe_for(members, manner), f"{folder}/run", **components.keywords())
    print(json.dumps({"before": before, "net": peak() - before}))


def measured(members: int, manner: str) -> dict[str, float]:
    line = subprocess.check_output([sys.executable, __file__, "inner", str(members), manner], text=True)
    return dict(json.loads(line.splitlines()[-1]))


def heads(count: int) -> tuple[float, float]:
    """Return the bytes held by so many heads over one trunk, and the bytes of one trunk and so many heads."""
    modules = build_members(recipe_for(count, "loop", freeze=TRUNK), images(), range(count))
    head = size_in_bytes([modules[0].linear])  # type: ignore[list-item]
    trunk = size_in_bytes([modules[0]]) - head
    return float(size_in_bytes(modules)), float(trunk + count * head)


def main() -> None:
    args = flags(__doc__ or "")
    count = 3 if args.quick else 10
    one, parked, looped = measured(1, "offload"), measured(count, "offload"), measured(count, "loop")
    held, needed = heads(20 if args.quick else 200)
    figures = {
        f"{count} parked / 1, peak memory": parked["net"] / one["net"],
        f"{count} looped / 1, peak memory": looped["net"] / one["net"],
        "1 member, MB": one["net"],
        f"{count} parked, MB": parked["net"],
        f"{count} looped, MB": looped["net"],
        "a tiny network alone, MB": one["before"],
        "heads over a frozen trunk: held / (trunk once + heads), bytes": held / needed,
        "heads over a frozen trunk: held, MB": held / 1e6,
    }
    limits = {
        f"{count} parked / 1, peak memory": ("at most", 1.3),
        "heads over a frozen trunk: held / (trunk once + heads), bytes": ("at most", 1.01),
    }
    if not args.quick:
        limits[f"{count} looped / 1, peak memory"] = ("at least", 4.0)
    if not args.json:
        listed(figures)
    close(figures, limits, args.quick)


if __name__ == "__main__":
    if sys.argv[1:2] == ["inner"]:
        trained(int(sys.argv[2]), sys.argv[3])
    else:
        main()
