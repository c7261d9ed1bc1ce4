"""Memory of the partition: from scores of three members on disk to packed SAM sets on disk, up to 100 million samples.

A new process for every size reads the stored scores, applies the paper's rule, computes the summary, and writes the bit
arrays. Its peak memory is that of the whole process, including interpreter and libraries. Bits are then looked up by
batch.
"""

from __future__ import annotations

import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from _common import Results, at_most, parse_flags, seconds

from plateaux.data.partition.masks import lookup, write_sam_sets
from plateaux.data.partition.rules import get_rule
from plateaux.storage.local_store import LocalStore
from plateaux.storage.store import Store

MEMBERS, TOP_K, CHUNK = 3, 0.2, 1 << 18
SIZES = (10**5, 10**6, 10**7, 10**8)
QUICK_SIZES = SIZES[:2]


@dataclass(frozen=True)
class StoredScores:
    """Scores in a store."""

    store: Store
    samples: int
    members: int = MEMBERS
    key: int = 0

    def chunks(self) -> Iterator[np.ndarray]:
        arrays = [self.store.iter_array(f"sharpness/{i}", CHUNK) for i in range(self.members)]
        return map(np.stack, zip(*arrays, strict=True))


def write_scores(store: Store, samples: int, ties: int | None = None) -> None:
    """Write correlated log-normal scores, a tenth of them without a value; `ties` limits the distinct values."""
    rng = np.random.default_rng(0)
    with ExitStack() as stack:
        writers = [
            stack.enter_context(store.array_writer(f"sharpness/{i}", np.float32, samples)) for i in range(MEMBERS)
        ]
        for start in range(0, samples, CHUNK):
            count = min(CHUNK, samples - start)
            common, missing = rng.standard_normal(count, np.float32), rng.random(count, np.float32) < 0.1
            for write in writers:
                scores = np.exp(common + rng.standard_normal(count, np.float32))
                if ties:
                    scores = np.floor(scores * ties / 8).clip(0, ties).astype(np.float32)
                write(np.where(missing, np.float32(-1), scores))


def assign(store: Store, samples: int) -> dict[str, object]:
    """Assign the samples, from disk to disk."""
    with ExitStack() as stack:
        length = -(-samples // 8)
        writers = [stack.enter_context(store.array_writer(f"sam_sets/{i}", np.uint8, length)) for i in range(MEMBERS)]
        return write_sam_sets(StoredScores(store, samples), get_rule("paper", top_k=TOP_K), writers)


def assign_and_print(folder: str, samples: int) -> None:
    """Assign in this process and print its cost; called by `main` in a separate process."""
    store = LocalStore(folder)
    imports, begin = peak_memory(), time.process_time()
    took = seconds(lambda: assign(store, samples))
    found = {"seconds": took, "cpu": time.process_time() - begin, "peak": peak_memory(), "imports": imports}
    print(json.dumps({**found, "lookup": lookup_microseconds(store, samples)}))


def peak_memory() -> float:
    """Return the peak resident memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 if sys.platform == "linux" else 1024) / 1024


def lookup_microseconds(store: Store, samples: int) -> float:
    """Return the median time to look up 128 ids, with different ids every time."""
    bits = store.get_array("sam_sets/0")[1]
    batches = torch.randint(samples, (2000, 128), generator=torch.Generator().manual_seed(0)).unbind()
    return 1e6 * statistics.median(seconds(partial(lookup, bits, batch)) for batch in batches)


def wrong_bits(store: Store, samples: int) -> int:
    """Return how many bits differ from those that a full sort gives."""
    write_scores(store, samples, ties=100)
    assign(store, samples)
    table = np.stack([store.get_array(f"sharpness/{i}")[1] for i in range(MEMBERS)])
    high = np.zeros(table.shape, np.bool_)
    for row, found in zip(table, high, strict=True):
        trained = np.flatnonzero(row >= 0)
        order = np.argsort(-row[trained], kind="stable")
        found[trained[order[: int(len(trained) * TOP_K)]]] = True
    wrong = 0
    for i in range(MEMBERS):
        sam_set = np.delete(high, i, 0).any(0)
        packed = np.packbits(sam_set, bitorder="little")
        wrong += int(np.bitwise_count(packed ^ store.get_array(f"sam_sets/{i}")[1]).sum(dtype=np.int64))
    return wrong


def main() -> None:
    args = parse_flags(__doc__ or "")
    show = (lambda _: None) if args.json else print
    results = Results(args.quick, quiet=True)
    sizes, exact = (QUICK_SIZES, 10**5) if args.quick else (SIZES, 10**6)
    with tempfile.TemporaryDirectory() as folder:
        needed = sizes[-1] * (4 + 1 / 8) * MEMBERS
        if (free := shutil.disk_usage(folder).free) < 1.1 * needed:
            sys.exit(f"{folder} has {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB are needed; set TMPDIR elsewhere")
        show(f"{'samples':>13} {'seconds':>8} {'CPU seconds':>12} {'peak MB':>8} {'imports MB':>11} {'lookup, us':>11}")
        by_size: list[dict[str, float]] = []
        for samples in sizes:
            write_scores(LocalStore(folder, durable=False), samples)
            call = [sys.executable, __file__, "inner", folder, str(samples)]
            found = json.loads(subprocess.check_output(call, text=True).splitlines()[-1])
            by_size.append(found)
            show(
                f"{samples:13,} {found['seconds']:8.2f} {found['cpu']:12.2f} {found['peak']:8.0f} "
                f"{found['imports']:11.0f} {found['lookup']:11.1f}"
            )
            name = f"1e{len(str(samples)) - 1} samples"
            results.add(f"{name}: seconds", found["seconds"])
            results.add(f"{name}: peak memory, MB", found["peak"], full=at_most(400), quick=at_most(400))
            results.add(f"{name}: look up 128 ids, us", found["lookup"], full=at_most(50), quick=at_most(500))
        last, previous = by_size[-1], by_size[-2]
        show(f"{10 * sizes[-1]:13,} {last['seconds'] * 10:8.0f} {last['cpu'] * 10:12.0f}  extrapolated: ten times")
        results.add("ten times the samples: times the seconds", last["seconds"] / previous["seconds"])
        # Other load on the machine increases the wall-clock time of a long run more reliably than that of a short one,
        # but not its CPU time. At the sizes of the quick form, the tables of counts dominate.
        cpu = last["cpu"] / previous["cpu"]
        results.add("ten times the samples: times the CPU seconds", cpu, full=at_most(13))
        wrong = wrong_bits(LocalStore(folder, durable=False), exact)
        results.add("bits that differ from a full sort, many ties", wrong, full=at_most(0), quick=at_most(0))
    results.finish(members=MEMBERS, top_k=TOP_K)


if __name__ == "__main__":
    if sys.argv[1:2] == ["inner"]:
        assign_and_print(sys.argv[2], int(sys.argv[3]))
    else:
        main()
