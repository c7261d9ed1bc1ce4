"""Cost of a SharpBalance step: `split` with SAM fractions of 1/4, 1/2, and 3/4, in plain steps.

All sides are the trainer's own step on the same batch and with the same resnet18 (width 64), because the memory
location of the weights affects the speed of a network. Each is measured between two plain steps, in a different order
every round; a plain step among them is the control. The figures are medians of the ratios of CPU time on one thread, in
fp32, which recipes train in by default and the limits are for, and in bf16 if the processor supports it natively. The
part `lookup` is the time to look up a batch in the SAM set, memory-mapped from disk, of 50,000 and of 100,000,000
samples. The quick form judges only the lookup: its steps of 16 samples do not resolve parts of a pass.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from _common import Results, at_most, budget, native_precision, paired, parse_flags, seconds

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
from plateaux.training.loop.state import StepOptions, TrainState
from plateaux.training.loop.step import step

PARTS = ("fp32", "bf16", "lookup")
SHARES = (0.25, 0.5, 0.75)
SPLITS = tuple(f"split, f = {share}" for share in SHARES)
ROUNDS = {"fp32": 5, "bf16": 3}  # on each of two networks
BASE, AGAIN = "plain", "plain, again"
LOSS = cross_entropy()


def member(method: Method, width: int) -> TrainState:
    """Return one resnet18 in training."""
    empty = InMemorySource(torch.empty(0, 3, 32, 32), torch.empty(0, dtype=torch.int64))
    data = DataSplits("noise", empty, empty, 10, (3, 32, 32))
    recipe = Recipe.from_dict({"data": {"name": "noise"}, "model": {"name": "resnet18", "width": width}})
    module = build_member(recipe, data, 0).to(memory_format=FORMATS["channels_last"]).train()
    params = dict(module.named_parameters())
    optimizer = torch.optim.SGD(params.values(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    return TrainState(0, module, method, optimizer, params, dict(module.named_buffers()), 0.01)


def sides(batch: Batch, width: int, precision: str) -> dict[str, Callable[[int], object]]:
    """Return one step of every kind, all on one network."""
    options, state = StepOptions(precision), member(deep_ensemble(LOSS), width)

    def side(method: Method, share: float | None) -> Callable[[int], object]:
        bits = torch.rand(len(batch), generator=torch.Generator().manual_seed(1)).argsort() < (share or 0) * len(batch)

        def take_step(_: int) -> object:
            state.method, state.sam_set = method, None if share is None else lambda index: bits[index]
            return step(SINGLE_PROCESS, [state], [batch], options)

        return take_step

    plain = deep_ensemble(LOSS)
    found = {BASE: side(plain, None), AGAIN: side(plain, None), "sam": side(sam(LOSS, rho=0.05), None)}
    for name, share in zip(SPLITS, SHARES, strict=True):
        found[name] = side(sharpbalance(LOSS, epochs=2, rho=0.05), share)
    return found


def lookup_seconds(folder: Path, samples: int) -> float:
    """Return the median time to look up a batch in a SAM set over this many samples."""
    store, name = LocalStore(folder), f"sam_sets/{samples}.safetensors"
    rng = np.random.default_rng(0)
    with store.array_writer(name, np.uint8, -(-samples // 8)) as write:
        for start in range(0, -(-samples // 8), 1 << 20):
            write(rng.integers(0, 256, min(1 << 20, -(-samples // 8) - start), dtype=np.uint8))
    bits = store.get_array(name)[1]
    batches = [torch.from_numpy(rng.integers(0, samples, 128)) for _ in range(200)]
    return float(np.median([seconds(partial(lookup, bits, ids)) for ids in batches]))


def random_batch(size: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 3, 32, 32, generator=generator).contiguous(memory_format=torch.channels_last)
    return Batch(x, torch.randint(0, 10, (size,), generator=generator), torch.arange(size))


def measure_steps(results: Results, batch: Batch, width: int, precision: str) -> None:
    """Compare steps of all kinds with plain steps."""
    found: dict[str, list[float]] = {}
    builds = 1 if results.quick else 2
    for _ in range(builds):
        within = budget(results.quick, 1 / builds)
        kinds = sides(batch, width, precision)
        for kind in kinds.values():
            kind(0)  # warm-up
        rounds, control = (1, None) if results.quick else (ROUNDS[precision], AGAIN)
        for name, ratios in paired(kinds.pop(BASE), kinds, rounds, control=control, within=within)[1].items():
            found.setdefault(name, []).extend(ratios)
    control = f"{precision}, {AGAIN} / plain"
    for name, ratios in found.items():
        share = dict(zip(SPLITS, SHARES, strict=True)).get(name)
        results.add(
            f"{precision}, {name} / plain",
            float(np.median(ratios)),
            full=at_most(1.05 * (1 + share)) if share and precision == "fp32" else None,
            control=control if share else None,
            is_control=name == AGAIN,
        )
        if not results.quiet:
            print(" " * 12, ", ".join(f"{each:.2f}" for each in ratios))


def measure_lookup(results: Results, batch: Batch, width: int) -> None:
    """Compare looking up a batch in the SAM set with a plain step."""
    plain = sides(batch, width, "fp32")[BASE]
    taken = [seconds(partial(plain, 0)) for _ in range(3)][1:]
    with tempfile.TemporaryDirectory() as folder:
        for samples in (50_000, 1_000_000 if results.quick else 100_000_000):
            share = lookup_seconds(Path(folder), samples) / float(np.median(taken))
            name = f"looking up the SAM set of {samples:,} samples / a plain step"
            results.add(name, share, full=at_most(0.01), quick=at_most(0.1))


def main() -> None:
    args = parse_flags(__doc__ or "", PARTS)
    results = Results(args.quick, args.json)
    configure_runtime(threads=1)
    size, width = (16, 8) if args.quick else (128, 64)
    batch = random_batch(size)
    for precision in ("fp32", "bf16"):
        # Without native support, bf16 is emulated, and its time says nothing about machines that have it.
        if precision in args.parts and precision in ("fp32", native_precision()):
            measure_steps(results, batch, width, precision)
    if "lookup" in args.parts:
        measure_lookup(results, batch, width)
    results.finish(parts=args.parts, precision=native_precision(), torch=torch.__version__)


if __name__ == "__main__":
    main()
