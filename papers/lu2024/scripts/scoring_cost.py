# A record, not run at HEAD. It ran at commit d5e3dc96679e: `git checkout d5e3dc96679e`, then `python studies/scoring_cost.py`.
"""What the scores of SharpBalance cost beside 200 epochs of SAM: claim 8 of the ledger.

    python studies/scoring_cost.py runs/scoring_cost            # a few minutes on one thread
    python studies/scoring_cost.py runs/scoring_cost --quick    # seconds, for a look

A plain pass is a forward and a backward pass in training mode; 200 epochs of SAM are 400 of them over every sample, and
the scores are taken once. Both run on the same batch of noise and take turns; what counts is processor time, which
other work on the machine changes little. The evidence is written to `evidence/` in that folder.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from plateaux.contrasts import repeated
from plateaux.exchange import View
from plateaux.ledger import Case, Evidence, write_evidence
from plateaux.offers import gradient_norm
from plateaux.registry import model
from plateaux.types import Batch

CLAIM = "08-one-percent-more-time"
PASSES = 400  # two for each of 200 epochs
ROUNDS = 8


def sides(width: int, size: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return a plain pass and a scoring of the same batch, as functions."""
    torch.manual_seed(0)
    module = model.get("resnet18")(shape=(3, 32, 32), classes=10, width=width)
    batch = Batch(torch.randn(size, 3, 32, 32), torch.arange(size) % 10, torch.arange(size))
    offer, view = gradient_norm(), View(module)

    def plain() -> None:
        module.train()
        F.cross_entropy(module(batch.x), batch.y).backward()
        module.zero_grad()

    def scored() -> torch.Tensor:
        module.eval()
        return offer(view, batch)

    return plain, scored


def seconds(work: Callable[[], Any]) -> float:
    """Return the processor time of some work."""
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true", help="a thin network, a small batch, few rounds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    plain, scored = sides(8, 16) if args.quick else sides(64, 128)
    plain(), scored()  # the first of each is slower
    ratios = []
    for number in range(3 if args.quick else ROUNDS):
        first, second = (plain, scored) if number % 2 else (scored, plain)
        times = {first: seconds(first), second: seconds(second)}
        ratios.append(times[scored] / times[plain])
        print(f"round {number}: the scores cost {ratios[-1]:.3f} passes", flush=True)
    share = repeated([100 * ratio / PASSES for ratio in ratios])
    took = round(time.monotonic() - began, 1)
    found = Evidence(claim=CLAIM, seconds=took, cases={"as stated": Case(primary=(share,))})
    print(f"{share.value:.4g} % of 200 epochs of SAM; written to {write_evidence(found, args.out / 'evidence')}")


if __name__ == "__main__":
    main()
