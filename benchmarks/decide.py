"""Memory of the partition: scores of three members from disk to packed masks on disk, up to 100 million samples.

A fresh process for every size reads arrays of the store, decides by the paper's rule, sums up, and writes bit arrays.
Its peak memory is that of the whole process, interpreter and libraries included; bits are then looked up by batch.
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
from _common import close, flags, seconds

from plateaux.data.partition.masks import lookup, write_sam_sets
from plateaux.data.partition.rules import get_rule
from plateaux.storage.local_store import LocalStore
from plateaux.storage.store import Store

MEMBERS, TOP, CHUNK = 3, 0.2, 1 << 18
SIZES = (10**5, 10**6, 10**7, 10**8)
QUICK = SIZES[:2]


@dataclass(frozen=True)
class Stored:
    """Scores as they lie in a store."""

    store: Store
    samples: int
    members: int = MEMBERS
    key: int = 0

    def chunks(self) -> Iterator[np.ndarray]:
        arrays = [self.store.iter_array(f"sharpness/{i}", CHUNK) for i in range(self.members)]
        return map(np.stack, zip(*arrays, strict=True))


def make_up(store: Store, samples: int, ties: int | None = None) -> None:
    """Write correlated log-normal scores, a tenth of the samples kept for validation; or only so many different."""
    random = np.random.default_rng(0)
    with ExitStack() as stack:
        writers = [
            stack.enter_context(store.array_writer(f"sharpness/{i}", np.float32, samples)) for i in range(MEMBERS)
        ]
        for start in range(0, samples, CHUNK):
            count = min(CHUNK, samples - start)
            common, out = random.standard_normal(count, np.float32), random.random(count, np.float32) < 0.1
            for write in writers:
                scores = np.exp(common + random.standard_normal(count, np.float32))
                if ties:
                    scores = np.floor(scores * ties / 8).clip(0, ties).astype(np.float32)
                write(np.where(out, np.float32(-1), scores))


def decide(store: Store, samples: int) -> dict[str, object]:
    """Decide from disk to disk."""
    with ExitStack() as stack:
        length = -(-samples // 8)
        writers = [stack.enter_context(store.array_writer(f"sam_sets/{i}", np.uint8, length)) for i in range(MEMBERS)]
        return write_sam_sets(Stored(store, samples), get_rule("paper", top_k=TOP), writers)


def inner(folder: str, samples: int) -> None:
    """Decide in this process and print what it took: the inner half of `main`."""
    store = LocalStore(folder)
    imports, begun = peak(), time.process_time()
    took = seconds(lambda: decide(store, samples))
    found = {"seconds": took, "processor": time.process_time() - begun, "peak": peak(), "imports": imports}
    print(json.dumps({**found, "look up": microseconds(store, samples)}))


def peak() -> float:
    """Return the peak resident memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 if sys.platform == "linux" else 1024) / 1024


def microseconds(store: Store, samples: int) -> float:
    """Return how long it takes to look up 128 ids, other ids every time."""
    bits = store.get_array("sam_sets/0")[1]
    batches = torch.randint(samples, (2000, 128), generator=torch.Generator().manual_seed(0)).unbind()
    return 1e6 * statistics.median(seconds(partial(lookup, bits, batch)) for batch in batches)


def differences(store: Store, samples: int) -> int:
    """Return how many bits differ from those found by sorting everything."""
    make_up(store, samples, ties=100)
    decide(store, samples)
    table = np.stack([store.get_array(f"sharpness/{i}")[1] for i in range(MEMBERS)])
    high = np.zeros(table.shape, np.bool_)
    for row, found in zip(table, high, strict=True):
        trained = np.flatnonzero(row >= 0)
        order = np.argsort(-row[trained], kind="stable")
        found[trained[order[: int(len(trained) * TOP)]]] = True
    wrong = 0
    for i in range(MEMBERS):
        careful = np.delete(high, i, 0).any(0)
        packed = np.packbits(careful, bitorder="little")
        wrong += int(np.bitwise_count(packed ^ store.get_array(f"sam_sets/{i}")[1]).sum(dtype=np.int64))
    return wrong


def main() -> None:
    args = flags(__doc__ or "")
    say = (lambda _: None) if args.json else print
    figures: dict[str, float] = {}
    limits: dict[str, tuple[str, float]] = {}
    sizes, exact = (QUICK, 10**5) if args.quick else (SIZES, 10**6)
    with tempfile.TemporaryDirectory() as folder:
        needed = sizes[-1] * (4 + 1 / 8) * MEMBERS
        if (free := shutil.disk_usage(folder).free) < 1.1 * needed:
            sys.exit(f"{folder} has {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB are needed; set TMPDIR elsewhere")
        say(
            f"{'samples':>13} {'seconds':>8} {'of processor':>13} {'peak MB':>8} {'of imports':>11} {'look up, us':>12}"
        )
        taken: list[dict[str, float]] = []
        for samples in sizes:
            make_up(LocalStore(folder, durable=False), samples)
            call = [sys.executable, __file__, "inner", folder, str(samples)]
            found = json.loads(subprocess.check_output(call, text=True).splitlines()[-1])
            taken.append(found)
            say(
                f"{samples:13,} {found['seconds']:8.2f} {found['processor']:13.2f} {found['peak']:8.0f} "
                f"{found['imports']:11.0f} {found['look up']:12.1f}"
            )
            name = f"1e{len(str(samples)) - 1} samples"
            figures[f"{name}: seconds"] = found["seconds"]
            figures[f"{name}: peak memory, MB"] = found["peak"]
            figures[f"{name}: look up 128 ids, us"] = found["look up"]
            limits[f"{name}: peak memory, MB"] = ("at most", 400)
            limits[f"{name}: look up 128 ids, us"] = ("at most", 50)
        last, once = taken[-1], taken[-2]
        say(f"{10 * sizes[-1]:13,} {last['seconds'] * 10:8.0f} {last['processor'] * 10:13.0f}  extrapolated: ten times")
        figures["ten times the samples: times the seconds"] = last["seconds"] / once["seconds"]
        # What else runs on the machine lengthens a long run more surely than a short one, but not its processor time.
        figures["ten times the samples: times the processor seconds"] = last["processor"] / once["processor"]
        if not args.quick:  # at small sizes the tables of counts weigh
            limits["ten times the samples: times the processor seconds"] = ("at most", 13)
        figures["bits that differ from a full sort, many ties"] = differences(LocalStore(folder, durable=False), exact)
        limits["bits that differ from a full sort, many ties"] = ("at most", 0)
    close(figures, limits, args.quick, members=MEMBERS, top=TOP)


if __name__ == "__main__":
    if sys.argv[1:2] == ["inner"]:
        inner(sys.argv[2], int(sys.argv[3]))
    else:
        main()
