"""Memory of members: peak memory of offloaded members and of members in a loop, and a frozen backbone stored once.

Every figure is the peak resident memory of a separate process, minus what it had used to train a tiny network
(interpreter, libraries, kernels).
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
from _common import Results, at_least, at_most, parse_flags

import plateaux
from plateaux.config.builders.model import build_members
from plateaux.core.runtime import configure_runtime
from plateaux.data.sources import DataSplits, InMemorySource
from plateaux.models.surgery import size_in_bytes

BACKBONE = ["conv1", "bn1", "layer1", "layer2", "layer3", "layer4"]


def random_images() -> DataSplits:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8, generator=generator)
    source = InMemorySource(x, torch.arange(8))
    return DataSplits("noise", source, source, 10, (3, 32, 32), (0.5,) * 3, (0.25,) * 3)


def recipe_for(members: int, mode: str, **model: object) -> plateaux.Recipe:
    return plateaux.Recipe.from_dict(
        {
            "members": members,
            "data": {"name": "noise", "batch_size": 4},
            "model": {"name": "resnet18", "width": 64, **model},
            "optimizer": {"lr": 0.01, "momentum": 0.9},
            "train": {"epochs": 1},
            "executor": {"mode": mode},
        }
    )


def peak_memory() -> float:
    """Return the peak resident memory of this process so far, in MB."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would include the memory of the process that started this one
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status.read_text(encoding="utf-8"))[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 / 1024


def train_and_print(members: int, mode: str) -> None:
    """Train in this process and print its memory; called by `memory_in_process` in a separate process."""
    configure_runtime()
    data = random_images()
    with tempfile.TemporaryDirectory() as folder:
        plateaux.train(recipe_for(1, mode, width=1), f"{folder}/tiny", data=data)  # imports everything
        before = peak_memory()
        plateaux.train(recipe_for(members, mode), f"{folder}/run", data=data)
    print(json.dumps({"before": before, "net": peak_memory() - before}))


def memory_in_process(members: int, mode: str) -> dict[str, float]:
    line = subprocess.check_output([sys.executable, __file__, "inner", str(members), mode], text=True)
    return dict(json.loads(line.splitlines()[-1]))


def bytes_of_heads(count: int) -> tuple[float, float]:
    """Return the bytes held by heads on one backbone, and the bytes of one backbone and that number of heads."""
    modules = build_members(recipe_for(count, "loop", freeze=BACKBONE), random_images(), range(count))
    head = size_in_bytes([modules[0].linear])  # type: ignore[list-item]
    backbone = size_in_bytes([modules[0]]) - head
    return float(size_in_bytes(modules)), float(backbone + count * head)


def main() -> None:
    args = parse_flags(__doc__ or "")
    results = Results(args.quick, args.json)
    count = 3 if args.quick else 10
    one, offloaded = memory_in_process(1, "offload"), memory_in_process(count, "offload")
    looped = memory_in_process(count, "loop")
    held, needed = bytes_of_heads(20 if args.quick else 200)
    results.add(
        f"{count} offloaded / 1, peak memory", offloaded["net"] / one["net"], full=at_most(1.3), quick=at_most(1.3)
    )
    results.add(
        f"{count} in a loop / 1, peak memory", looped["net"] / one["net"], full=at_least(4.0), quick=at_least(1.4)
    )
    results.add("1 member, MB", one["net"])
    results.add(f"{count} offloaded, MB", offloaded["net"])
    results.add(f"{count} in a loop, MB", looped["net"])
    results.add("a tiny network alone, MB", one["before"])
    results.add(
        "heads on a frozen backbone: memory held / (backbone once + heads), bytes",
        held / needed,
        full=at_most(1.01),
        quick=at_most(1.01),
    )
    results.add("heads on a frozen backbone: memory held, MB", held / 1e6)
    results.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["inner"]:
        train_and_print(int(sys.argv[2]), sys.argv[3])
    else:
        main()
