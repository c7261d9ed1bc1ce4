"""Capacity on paper: 10,000 requests per second for five ResNet-50 at 224 pixels, with and without a cascade.

Nothing is measured and nothing is judged here. The figures follow from the assumptions below; replace them by your own
measurements (`benchmarks/serve.py` and `benchmarks/cascade.py` measure the overhead of the service and the savings of a
cascade).
"""

from __future__ import annotations

import math

from _common import Results, parse_flags

REQUESTS_PER_S = 10_000
MEMBERS = 5
GFLOP_PER_PASS = 8.2  # ResNet-50 at 224 x 224: 4.1 billion multiply-adds
PARAMETERS_M = 25.6
GFLOPS_PER_CORE = 60.0  # fp32 with onnxruntime on a server core, about half of the peak of AVX2
OVERHEAD_MS = 0.6  # HTTP and batching, CPU time per request
DECODE_MS = 3.0  # a JPEG of about 100 KB
JPEG_KB, TENSOR_KB = 100, 4 * 3 * 224 * 224 / 1000
CORES_PER_NODE = 32
UTILIZATION = 0.7
CORES_PER_WORKER = 4
BASE_MB = 160  # a worker without weights
DOLLARS_PER_CORE_HOUR = 0.04
CASCADE_FACTOR = 1.84  # fewer member passes, as measured for four ResNets on CIFAR-10


def plan(results: Results, name: str, factor: float) -> None:
    """Add the figures of one variant."""
    compute_ms = 1000 * MEMBERS * GFLOP_PER_PASS / factor / GFLOPS_PER_CORE
    core_ms = compute_ms + OVERHEAD_MS + DECODE_MS
    cores = REQUESTS_PER_S * core_ms / 1000 / UTILIZATION
    results.add(f"{name}: CPU ms per request", core_ms)
    results.add(f"{name}: cores at {UTILIZATION:.0%} load", cores)
    results.add(f"{name}: nodes of {CORES_PER_NODE} cores", math.ceil(cores / CORES_PER_NODE))
    results.add(f"{name}: replicas of {CORES_PER_WORKER} cores", math.ceil(cores / CORES_PER_WORKER))
    results.add(f"{name}: dollars per hour", cores * DOLLARS_PER_CORE_HOUR)
    full_ms = (1000 * MEMBERS * GFLOP_PER_PASS / GFLOPS_PER_CORE) / CORES_PER_WORKER
    mean_ms = compute_ms / CORES_PER_WORKER
    # The mean wait of a queue with one server and constant service time (M/D/1).
    wait = UTILIZATION / (2 * (1 - UTILIZATION)) * mean_ms
    results.add(f"{name}: ms without a queue, slowest request", full_ms)
    results.add(f"{name}: ms of mean wait in the queue", wait)


def main() -> None:
    args = parse_flags(__doc__ or "")
    results = Results(args.quick, args.json)
    plan(results, "all members", 1.0)
    plan(results, "cascade", CASCADE_FACTOR)
    results.add("MB of one worker", BASE_MB + MEMBERS * PARAMETERS_M * 4)
    results.add("Gbit/s of JPEG files", REQUESTS_PER_S * JPEG_KB * 8 / 1e6)
    results.add("Gbit/s of FP32 tensors", REQUESTS_PER_S * TENSOR_KB * 8 / 1e6)
    share = (OVERHEAD_MS + DECODE_MS) / results.figures["all members: CPU ms per request"]
    results.add("share of HTTP, batching, and decoding", share)
    results.finish()


if __name__ == "__main__":
    main()
