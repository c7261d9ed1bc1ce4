"""Cost of the squared gradient norms of all samples of a batch, relative to one plain training step.

The plain step is what a user would write: `.train()`, forward, cross entropy, backward with the gradients of all
parameters. Both sides run in float32, channels first, on one thread, and alternate in one process; a second plain step
is the control. Memory is the peak increase in a separate process during its first pass. For comparison, the method of
the published code: vmap of the gradient over 16 samples at a time, all gradients in one matrix, squared and summed. The
quick form measures resnet8 with small batches and does not judge memory.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from _common import Results, at_most, budget, interleaved, parse_flags, ratio
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from plateaux.core.member import MemberModule
from plateaux.core.registry import model
from plateaux.core.types import Batch
from plateaux.optim.sample_scores import gradient_norm

# name, options, pixels, batch size, batch size of the quick form, limit of the time
NETS = {
    "resnet18": ("resnet18", {"width": 64}, 32, 128, 4, 1.15),
    "resnet8": ("resnet8", {"width": 16}, 32, 128, 16, 1.5),
    "vit_tiny": ("timm:vit_tiny_patch16_224", {}, 224, 32, 2, 1.15),
}
MEMORY = 1.5
Side = Callable[[int], Tensor]


def problem(net: str, quick: bool) -> tuple[nn.Module, Batch]:
    """Return a network and a batch of noise."""
    name, options, pixels, usual, small, _ = NETS[net]
    torch.manual_seed(0)
    module = model.get(name)(shape=(3, pixels, pixels), classes=10, **options)
    size = small if quick else usual
    return module, Batch(torch.randn(size, 3, pixels, pixels), torch.arange(size) % 10, torch.arange(size))


def plain(module: nn.Module, batch: Batch) -> Side:
    """Return one training step without the optimizer."""

    def step(_: int) -> Tensor:
        module.train()
        loss = F.cross_entropy(module(batch.x), batch.y)
        loss.backward()
        module.zero_grad()
        return loss.detach()

    return step


def scores(module: nn.Module, batch: Batch) -> Side:
    """Return one scoring of the batch."""
    output, member = gradient_norm(), MemberModule(module)

    def score(_: int) -> Tensor:
        module.eval()
        return output(member, batch)

    return score


def published(module: nn.Module, batch: Batch) -> Side:
    """Return one scoring of the batch by the method of the published code."""

    def loss(params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(module, {**params, **buffers}, x[None]), y[None])

    def score(_: int) -> Tensor:
        module.eval()
        params = {name: p.detach() for name, p in module.named_parameters()}
        found = []
        for start in range(0, len(batch), 16):
            rows = slice(start, start + 16)
            each = vmap(grad(loss), (None, None, 0, 0))(
                params, dict(module.named_buffers()), batch.x[rows], batch.y[rows]
            )
            found.append(torch.cat([g.flatten(1) for g in each.values()], 1).square().sum(1))
        return torch.cat(found)

    return score


SIDES = {"plain step": plain, "gradient_norm": scores, "published method": published}


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        import resource  # not available everywhere

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def print_memory(net: str, side: str, quick: bool) -> None:
    """Print the peak increase of memory in one pass of one side; called by `memory_in_process`."""
    torch.set_num_threads(1)
    module, batch = problem(net, quick)
    work = SIDES[side](module, batch)
    before, highest, finished = resident_bytes(), [0], threading.Event()

    def watch() -> None:
        while not finished.is_set():
            highest[0] = max(highest[0], resident_bytes())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    work(0)
    finished.set()
    watcher.join()
    print(max(highest[0], resident_bytes()) - before)


def measure(results: Results, net: str) -> None:
    """Compare time and memory of the scores of one network with those of a plain step."""
    *_, limit = NETS[net]
    module, batch = problem(net, results.quick)
    sides = {name: build(module, batch) for name, build in SIDES.items()}
    slow = {"published method": sides.pop("published method")}  # without a limit: fewer rounds, no warm-up
    sides["plain step, again"] = sides["plain step"]
    for side in sides.values():
        side(0)
    within = budget(results.quick, 0.8)
    times = interleaved(sides, 4 if results.quick else 8, control=("plain step", "plain step, again"), within=within)
    times |= interleaved(slow, 1 if results.quick else 2, within=budget(results.quick, 0.2))
    control = f"{net}: plain step / plain step, time"
    results.add(control, ratio(times["plain step"], times["plain step, again"]), is_control=True)
    name, value = f"{net}: gradient_norm / plain step, time", ratio(times["gradient_norm"], times["plain step"])
    results.add(name, value, full=at_most(limit), quick=at_most(4.0), control=control)
    memory = {name: memory_in_process(net, name, results.quick) for name in SIDES}
    name, value = f"{net}: gradient_norm / plain step, memory", memory["gradient_norm"] / memory["plain step"]
    results.add(name, value, full=at_most(MEMORY))
    median = {name: statistics.median(taken) for name, taken in times.items()}
    results.add(f"{net}: published method / plain step, time", median["published method"] / median["plain step"])
    results.add(f"{net}: published method / plain step, memory", memory["published method"] / memory["plain step"])
    if not results.quiet:
        for name in SIDES:
            took, rise = f"{1e3 * median[name]:7.0f} ms", f"{memory[name] / 2**20:6.0f} MB"
            print(f"{net:9} {name:16} batch {len(batch):4} {took} {rise}", flush=True)


def main() -> None:
    args = parse_flags(__doc__ or "", tuple(NETS))
    results = Results(args.quick, args.json)
    torch.set_num_threads(1)
    for net in args.parts:
        if net == "resnet8" or not args.quick or len(args.parts) == 1:
            measure(results, net)
    results.finish(parts=args.parts, plain_step="train mode, forward and backward", threads=1)


def memory_in_process(net: str, side: str, quick: bool) -> int:
    call = [sys.executable, __file__, "inner", net, side, str(int(quick))]
    return int(subprocess.check_output(call, text=True).splitlines()[-1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["inner"]:
        print_memory(sys.argv[2], sys.argv[3], sys.argv[4] == "1")
    else:
        main()
