"""Cost of evaluation: relative to bare forward passes, from cached logits, and memory for a million samples.

1. All prediction measures over five resnet18 (width 64) and 10,000 images, against bare forward passes of the same
   batches, taken in turn batch by batch in one process.
2. `plateaux measure` from kept logits of five members, 10,000 samples, 10 classes, against `python -c "import torch"`,
   in turn; what it takes more.
3. Synthetic logits of 1,000 classes streamed through every measure: the peak memory of two processes, one with four
   times the samples; what it grows by, for every sample and every number kept of it (rows of confidences).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from statistics import median

import torch
from _common import close, flags, interleaved
from members import peak

import plateaux
from plateaux.core.member import MemberModule
from plateaux.core.outputs import logits
from plateaux.core.runtime import configure_runtime
from plateaux.core.types import Batch
from plateaux.distributed.executors.local import SINGLE_PROCESS
from plateaux.evaluation.metric_loop import BatchOutputs, accumulate, run_members
from plateaux.evaluation.metric_specs import get_metrics
from plateaux.models.architectures.resnet import resnet18

MEMBERS = 2  # of the stream: rows are two members and two ensembles
ROWS = MEMBERS + 2


def against_bare(samples: int, width: int) -> dict[str, float]:
    """Return the time of the walk over that of bare forward passes, and the share of settling alone."""
    configure_runtime()
    nets = [resnet18(shape=(3, 32, 32), classes=10, width=width).eval() for _ in range(5)]
    for net in nets:
        net.to(memory_format=torch.channels_last)
    measures = get_metrics(["all"])
    offers = list(dict.fromkeys(measure.output for measure in measures.values()))
    views = [MemberModule(net) for net in nets]
    bare = 0.0
    batches = [_images(start, min(250, samples - start)) for start in range(0, samples, 250)]
    for net in nets:
        net(batches[0].x[:8])  # kernels are chosen at the first call

    def forward(batch: Batch) -> None:
        nonlocal bare
        begun = time.perf_counter()
        with torch.no_grad():
            for net in nets:
                net(batch.x)
        bare += time.perf_counter() - begun

    def fed() -> Iterator[Batch]:
        for position, batch in enumerate(batches):
            if position % 2:
                forward(batch)
            yield batch  # back here when it is heard and settled
            if not position % 2:
                forward(batch)

    begun = time.perf_counter()
    sums = accumulate(SINGLE_PROCESS, run_members(SINGLE_PROCESS, views, fed(), offers), measures)
    whole = time.perf_counter() - begun - bare
    begun = time.perf_counter()
    for (_, name), merged in sums.items():
        measures[name].compute(merged)
    whole += time.perf_counter() - begun
    return {"walk over bare": whole / bare, "bare seconds": bare}


def _images(start: int, count: int) -> Batch:
    generator = torch.Generator().manual_seed(start)
    x = torch.randn(count, 3, 32, 32, generator=generator).contiguous(memory_format=torch.channels_last)
    return Batch(x, torch.randint(10, (count,), generator=generator), torch.arange(start, start + count))


def from_kept(folder: str, samples: int, rounds: int) -> dict[str, float]:
    """Return what a second `plateaux measure` takes more than importing torch, in seconds."""
    recipe = plateaux.Recipe.from_dict(
        {
            "members": 5,
            "data": {"name": "blobs", "classes": 10, "samples": 100, "test_samples": samples},
            "model": {"name": "mlp", "hidden_sizes": [16]},
            "train": {"epochs": 1},
        }
    )
    plateaux.train(recipe, folder)
    env = _with_bytecode()
    call = [sys.executable, "-m", "plateaux", "evaluate", folder]
    first = subprocess.run(call, check=True, capture_output=True, text=True, env=env)
    assert "using cached" not in first.stderr
    second = subprocess.run(call, check=True, capture_output=True, text=True, env=env)
    assert "using cached" in second.stderr, second.stderr
    bare = [sys.executable, "-c", "import torch"]
    times = interleaved(
        {
            "measure": lambda _: subprocess.run(call, check=True, capture_output=True, env=env),
            "import": lambda _: subprocess.run(bare, check=True, capture_output=True, env=env),
        },
        rounds,
    )
    more = median(a - b for a, b in zip(times["measure"], times["import"], strict=True))
    return {"kept: seconds more than import torch": more, "import torch seconds": median(times["import"])}


def _with_bytecode() -> dict[str, str]:
    """Return an environment in which sources are compiled once, as they are where a package is installed."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def stream(samples: int, classes: int) -> None:
    """Measure synthetic logits in this process and print its peak memory: the inner half of `growth`."""
    configure_runtime()
    measures = {name: each for name, each in get_metrics(["all"]).items() if each.output is logits}
    sums = accumulate(SINGLE_PROCESS, _said(samples, classes), measures, samples=samples)
    for (_, name), merged in list(sums.items()):
        measures[name].compute(merged)
    kept = {id(t): t for merged in sums.values() for t in merged.values() if len(t.shape) and len(t) == samples}
    numbers = sum(tensor.numel() for tensor in kept.values()) // samples
    print(json.dumps({"peak": peak(), "kept": numbers}))


def _said(samples: int, classes: int) -> Iterator[BatchOutputs]:
    for start in range(0, samples, 500):
        count = min(500, samples - start)
        generator = torch.Generator().manual_seed(start)
        table = 3 * torch.randn(MEMBERS, count, classes, generator=generator)
        ids = torch.arange(start, start + count)
        yield BatchOutputs({logits: table}, Batch(ids, ids % classes, ids), start, count)


def growth(samples: int, classes: int) -> dict[str, float]:
    """Return the bytes that memory grows by for every sample and number kept of it."""
    found = []
    for count in (samples // 4, samples):
        call = [sys.executable, __file__, "inner", str(count), str(classes)]
        found.append(json.loads(subprocess.check_output(call, text=True).splitlines()[-1]))
    bytes_ = (found[1]["peak"] - found[0]["peak"]) * 2**20 / (samples - samples // 4)
    kept = found[1]["kept"]
    return {"bytes per sample and number kept": bytes_ / kept, "numbers kept": kept, "peak MB": found[1]["peak"]}


def main() -> None:
    if sys.argv[1:2] == ["inner"]:
        stream(int(sys.argv[2]), int(sys.argv[3]))
        return
    args = flags(__doc__ or "")
    figures: dict[str, float] = {}

    def add(found: dict[str, float]) -> None:
        figures.update(found)
        if not args.json:
            for name, value in found.items():
                print(f"{name:>40}: {value:.3f}", flush=True)

    add(against_bare(500 if args.quick else 10_000, 8 if args.quick else 64))
    with tempfile.TemporaryDirectory() as folder:
        add(from_kept(folder, 1_000 if args.quick else 10_000, 3 if args.quick else 7))
    add(growth(40_000 if args.quick else 1_000_000, 10 if args.quick else 1000))
    limits = {
        "walk over bare": ("at most", 1.10),
        "kept: seconds more than import torch": ("at most", 1.5),
        "bytes per sample and number kept": ("at most", 8.0),
    }
    close(figures, limits, args.quick)


if __name__ == "__main__":
    main()
