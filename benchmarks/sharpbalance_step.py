"""Cost of a SharpBalance step: `split` with SAM fractions of 1/4, 1/2, and 3/4, in plain steps.

All sides are the engine's own step on the same batch and with the same resnet18 (width 64): of several networks one
would be faster for where its weights happen to lie. Each takes its turn between two plain steps, in another order every
round; a plain step among them shows how much is chance. The figures are medians of the ratios of processor seconds on
one thread, in fp32, which recipes train in by default and the limits are for, and in bf16 where the processor has units
for it. Then the time to look up a batch's notes, memory-mapped from disk, of 50,000 and of 100,000,000 samples.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from _common import beside, close, flags, precision_here, seconds

from plateaux.config.builders.model import build_member
from plateaux.config.recipe import Recipe
from plateaux.core.method import Method
from plateaux.core.runtime import FORMATS, configure_runtime
from plateaux.core.types import Batch
from plateaux.data.partition.masks import lookup
from plateaux.data.sources import DataSplits, InMemorySource
from plateaux.distributed.executors.local import SINGLE_PROCESS
from plateaux.methods.deep_ensemble import deep_ensemble
from plateaux.methods.sam import sam
from plateaux.methods.sharpbalance import sharpbalance
from plateaux.optim.losses import cross_entropy
from plateaux.storage.local_store import LocalStore
from plateaux.training.state import StepOptions, TrainState
from plateaux.training.step import step

SHARES = (0.25, 0.5, 0.75)
ROUNDS = {"fp32": 5, "bf16": 3}  # on each of two networks
BASE = "plain"
LOSS = cross_entropy()


def member(method: Method, width: int) -> TrainState:
    """Return one resnet18 in training."""
    nothing = InMemorySource(torch.empty(0, 3, 32, 32), torch.empty(0, dtype=torch.int64))
    data = DataSplits("noise", nothing, nothing, 10, (3, 32, 32))
    recipe = Recipe.from_dict({"data": {"name": "noise"}, "model": {"name": "resnet18", "width": width}})
    module = build_member(recipe, data, 0).to(memory_format=FORMATS["channels_last"]).train()
    params = dict(module.named_parameters())
    optimizer = torch.optim.SGD(params.values(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    return TrainState(0, module, method, optimizer, params, dict(module.named_buffers()), 0.01)


def sides(batch: Batch, width: int, precision: str) -> dict[str, Callable[[int], object]]:
    """Return one step of every kind, all on one network."""
    way, own = StepOptions(precision), member(deep_ensemble(LOSS), width)

    def side(method: Method, share: float | None) -> Callable[[int], object]:
        bits = torch.rand(len(batch), generator=torch.Generator().manual_seed(1)).argsort() < (share or 0) * len(batch)

        def go(_: int) -> object:
            own.method, own.sam_set = method, None if share is None else lambda index: bits[index]
            return step(SINGLE_PROCESS, [own], [batch], way)

        return go

    plain = deep_ensemble(LOSS)
    found = {BASE: side(plain, None), "plain, again": side(plain, None), "sam": side(sam(LOSS, rho=0.05), None)}
    for share in SHARES:
        found[f"split, f = {share}"] = side(sharpbalance(LOSS, epochs=2, rho=0.05, step="split"), share)
    found["shared, f = 0.5"] = side(sharpbalance(LOSS, epochs=2, rho=0.05, step="shared"), 0.5)
    return found


def look_up_seconds(folder: Path, samples: int) -> float:
    """Return the median time to look up a batch's notes among so many samples."""
    store, name = LocalStore(folder), f"sam_sets/{samples}.safetensors"
    chance = np.random.default_rng(0)
    with store.array_writer(name, np.uint8, -(-samples // 8)) as write:
        for start in range(0, -(-samples // 8), 1 << 20):
            write(chance.integers(0, 256, min(1 << 20, -(-samples // 8) - start), dtype=np.uint8))
    bits = store.get_array(name)[1]
    batches = [torch.from_numpy(chance.integers(0, samples, 128)) for _ in range(200)]
    return float(np.median([seconds(partial(lookup, bits, ids)) for ids in batches]))


def main() -> None:
    args = flags(__doc__ or "")
    configure_runtime(threads=1)
    size, width = (16, 8) if args.quick else (128, 64)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 3, 32, 32, generator=generator).contiguous(memory_format=torch.channels_last)
    batch = Batch(x, torch.randint(0, 10, (size,), generator=generator), torch.arange(size))
    figures: dict[str, float] = {}
    plain = 0.0
    for precision in dict.fromkeys(("fp32", precision_here())):
        rounds = ROUNDS[precision]
        found: dict[str, list[float]] = {}
        for _ in range(1 if args.quick else 2):
            kinds = sides(batch, width, precision)
            for kind in kinds.values():
                kind(0)  # warm-up
            times, ratios = beside(kinds.pop(BASE), kinds, 1 if args.quick else rounds)
            plain = plain or float(np.median(times))
            for name, some in ratios.items():
                found.setdefault(name, []).extend(some)
        figures |= {f"{precision}, {name}": float(np.median(some)) for name, some in found.items()}
        if not args.json:
            print(f"{precision}:", *(f"{name}: {', '.join(f'{x:.2f}' for x in some)}" for name, some in found.items()))
    limits = {f"fp32, split, f = {share}": ("at most", 1.05 * (1 + share)) for share in SHARES}
    if not args.json:
        print("| step | plain steps |\n|---|---:|\n| plain | 1.00 |")
        for name, value in figures.items():
            print(f"| {name} | {value:.2f} |")
    with tempfile.TemporaryDirectory() as folder:
        for samples in (50_000, 1_000_000 if args.quick else 100_000_000):
            name = f"looking up notes of {samples:,} samples, share of a plain step"
            figures[name] = look_up_seconds(Path(folder), samples) / plain
            limits[name] = ("at most", 0.01)
    close(figures, limits, args.quick, torch=torch.__version__)


if __name__ == "__main__":
    main()
