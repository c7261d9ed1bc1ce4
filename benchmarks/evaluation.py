"""Cost of evaluation: relative to bare forward passes, from cached logits, and memory for a million samples.

- `forward`: all prediction metrics over five resnet18 (width 64) and up to 10,000 images, as many as fit in the time,
  compared with bare forward passes of the same batches, before and after each batch. Their ratio is the control.
- `cached`: `plateaux evaluate` from cached logits of five members, 10,000 samples, 10 classes, compared with
  `python -c "import torch"`, alternating; the difference in seconds. Importing torch a second time is the control.
- `memory`: synthetic logits of 20 classes streamed through every metric, 250,000 and 1,000,000 samples, each in its own
  process; the increase of peak memory per sample and per number stored of it (rows of confidences).
- `memory_1000`: the same with 1,000 classes, 100,000 and 400,000 samples. The peak of a batch's tensors varies by more
  than the stored numbers, so the limit is relative to the size of all logits.

The quick form is too small for any of these limits and only shows that the parts run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
from _common import Results, at_most, budget, interleaved, parse_flags, ratio
from member_memory import peak_memory

import plateaux
from plateaux.core.member import MemberModule
from plateaux.core.outputs import logits
from plateaux.core.registry import model
from plateaux.core.runtime import configure_runtime
from plateaux.core.types import Batch
from plateaux.distributed.executors.local import SINGLE_PROCESS
from plateaux.evaluation.metric_loop import BatchOutputs, accumulate, run_members
from plateaux.evaluation.metric_specs import get_metrics

PARTS = ("forward", "cached", "memory", "memory_1000")
BATCH = 250
MEMBERS = 2  # of the synthetic logits


def measure_forward(results: Results, samples: int, width: int) -> None:
    """Compare the time of an evaluation with that of bare forward passes."""
    configure_runtime()
    nets = [model.get("resnet18")(shape=(3, 32, 32), classes=10, width=width).eval() for _ in range(5)]
    for net in nets:
        net.to(memory_format=torch.channels_last)
        net(_images(0, 8).x)  # torch selects kernels at the first call
    metrics = get_metrics(["all"])
    outputs = list(dict.fromkeys(metric.output for metric in metrics.values()))
    members = [MemberModule(net) for net in nets]
    bare, other, done = {"before": 0.0, "after": 0.0}, 0.0, 0
    within = budget(results.quick)

    def forward(batch: Batch, when: str) -> None:
        begin = time.perf_counter()
        with torch.no_grad():
            for net in nets:
                net(batch.x)
        bare[when] += time.perf_counter() - begin

    def batches() -> Iterator[Batch]:
        nonlocal other, done
        longest = 0.0
        for start in range(0, samples, BATCH):
            if done and longest > within.left():
                return
            begin = time.perf_counter()
            batch = _images(start, min(BATCH, samples - start))
            other += time.perf_counter() - begin
            forward(batch, "before")
            yield batch  # resumes when the batch is evaluated
            forward(batch, "after")
            done += len(batch.y)
            longest = max(longest, time.perf_counter() - begin)

    begin = time.perf_counter()
    sums = accumulate(SINGLE_PROCESS, run_members(SINGLE_PROCESS, members, batches(), outputs), metrics)
    for (_, name), merged in sums.items():
        metrics[name].compute(merged)
    total = time.perf_counter() - begin - sum(bare.values()) - other
    control = "bare forward passes / bare forward passes, time"
    results.add(control, bare["before"] / bare["after"], is_control=True)
    over = 2 * total / sum(bare.values())
    results.add("evaluation / bare forward passes, time", over, full=at_most(1.10), control=control)
    results.add("bare forward passes, seconds", sum(bare.values()) / 2)
    results.add("images", done)


def _images(start: int, count: int) -> Batch:
    generator = torch.Generator().manual_seed(start)
    x = torch.randn(count, 3, 32, 32, generator=generator).contiguous(memory_format=torch.channels_last)
    return Batch(x, torch.randint(10, (count,), generator=generator), torch.arange(start, start + count))


def measure_cached(results: Results, folder: str, samples: int, rounds: int) -> None:
    """Measure by how many seconds a second `plateaux evaluate` exceeds importing torch."""
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

    def run(words: list[str]) -> Callable[[int], object]:
        return lambda _: subprocess.run(words, check=True, capture_output=True, env=env)

    bare = run([sys.executable, "-c", "import torch"])
    sides = {"evaluate": run(call), "import": bare, "import, again": bare}
    pair = None if results.quick else ("import", "import, again")
    times = interleaved(sides, rounds, control=pair, within=budget(results.quick))
    control = "import torch / import torch, time"
    results.add(control, ratio(times["import"], times["import, again"]), is_control=True)
    more = median(a - b for a, b in zip(times["evaluate"], times["import"], strict=True))
    results.add("cached: seconds more than import torch", more, full=at_most(1.5), control=control)
    results.add("import torch, seconds", median(times["import"]))


def _with_bytecode() -> dict[str, str]:
    """Return an environment in which bytecode is cached, as for an installed package."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def stream(samples: int, classes: int) -> None:
    """Evaluate synthetic logits in this process and print its peak memory; called by `growth` in separate processes."""
    configure_runtime()
    metrics = {name: metric for name, metric in get_metrics(["all"]).items() if metric.output is logits}
    sums = accumulate(SINGLE_PROCESS, _synthetic(samples, classes), metrics, samples=samples)
    for (_, name), merged in list(sums.items()):
        metrics[name].compute(merged)
    stored = {id(t): t for merged in sums.values() for t in merged.values() if len(t.shape) and len(t) == samples}
    numbers = sum(tensor.numel() for tensor in stored.values()) // samples
    print(json.dumps({"peak": peak_memory(), "stored": numbers}))


def _synthetic(samples: int, classes: int) -> Iterator[BatchOutputs]:
    for start in range(0, samples, 500):
        count = min(500, samples - start)
        generator = torch.Generator().manual_seed(start)
        table = 3 * torch.randn(MEMBERS, count, classes, generator=generator)
        ids = torch.arange(start, start + count)
        yield BatchOutputs({logits: table}, Batch(ids, ids % classes, ids), start, count)


def growth(samples: int, classes: int) -> tuple[float, int, float]:
    """Return by how many bytes per sample memory grows, the numbers stored per sample, and the peak in MB."""
    found = []
    for count in (samples // 4, samples):
        call = [sys.executable, __file__, "inner", str(count), str(classes)]
        found.append(json.loads(subprocess.check_output(call, text=True).splitlines()[-1]))
    bytes_ = (found[1]["peak"] - found[0]["peak"]) * 2**20 / (samples - samples // 4)
    return bytes_, found[1]["stored"], found[1]["peak"]


def measure_memory(results: Results, samples: int) -> None:
    """Measure how memory grows with the number of samples, with few classes."""
    bytes_, numbers, peak = growth(samples, 20)
    results.add("bytes per sample and number stored, 20 classes", bytes_ / numbers, full=at_most(8.0))
    results.add("numbers stored per sample", numbers)
    results.add("peak memory, 20 classes, MB", peak)


def measure_memory_1000(results: Results, samples: int) -> None:
    """Measure how memory grows with the number of samples, with many classes."""
    bytes_, _, peak = growth(samples, 1000)
    results.add(
        "bytes per sample / bytes of its logits, 1000 classes", bytes_ / (4 * MEMBERS * 1000), full=at_most(0.1)
    )
    results.add("peak memory, 1000 classes, MB", peak)


def main() -> None:
    if sys.argv[1:2] == ["inner"]:
        stream(int(sys.argv[2]), int(sys.argv[3]))
        return
    args = parse_flags(__doc__ or "", PARTS)
    results = Results(args.quick, args.json)
    if "forward" in args.parts:
        measure_forward(results, 500 if args.quick else 10_000, 8 if args.quick else 64)
    if "cached" in args.parts:
        with tempfile.TemporaryDirectory() as folder:
            measure_cached(results, folder, 1_000 if args.quick else 10_000, 1 if args.quick else 7)
    if "memory" in args.parts:
        measure_memory(results, 40_000 if args.quick else 1_000_000)
    if "memory_1000" in args.parts and (not args.quick or args.part):
        measure_memory_1000(results, 2_000 if args.quick else 400_000)
    results.finish(parts=args.parts)


if __name__ == "__main__":
    main()
