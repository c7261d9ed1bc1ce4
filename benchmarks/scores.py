"""Cost of the squared gradient norms of all samples of a batch, relative to one plain training step.

The plain step is what a user would write: `.train()`, forward, cross entropy, backward with the gradients of all
parameters. Both sides run in float32, channels first, on one thread, and take turns in one process. Memory is the peak
of a process of its own, above where it stood before its first pass. Beside them stands the way of the released code:
vmap of the gradient over 16 samples at a time, all gradients laid into one matrix, squared and summed.
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
from _common import close, flags, interleaved, ratio
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from plateaux.core.member import MemberModule
from plateaux.core.registry import model
from plateaux.core.types import Batch
from plateaux.optim.sample_scores import gradient_norm

# name, options, pixels, batch, batch of the quick version, limit of the time
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
    """Return one training step without the optimiser."""

    def step(_: int) -> Tensor:
        module.train()
        loss = F.cross_entropy(module(batch.x), batch.y)
        loss.backward()
        module.zero_grad()
        return loss.detach()

    return step


def ours(module: nn.Module, batch: Batch) -> Side:
    """Return one scoring of the batch."""
    offer, view = gradient_norm(), MemberModule(module)

    def score(_: int) -> Tensor:
        module.eval()
        return offer(view, batch)

    return score


def released(module: nn.Module, batch: Batch) -> Side:
    """Return one scoring of the batch as the released code does it."""

    def loss(own: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(module, {**own, **buffers}, x[None]), y[None])

    def score(_: int) -> Tensor:
        module.eval()
        own = {name: p.detach() for name, p in module.named_parameters()}
        found = []
        for start in range(0, len(batch), 16):
            rows = slice(start, start + 16)
            each = vmap(grad(loss), (None, None, 0, 0))(own, dict(module.named_buffers()), batch.x[rows], batch.y[rows])
            found.append(torch.cat([g.flatten(1) for g in each.values()], 1).square().sum(1))
        return torch.cat(found)

    return score


SIDES = {"plain step": plain, "gradient_norm": ours, "released way": released}


def resident() -> int:
    """Return the bytes of memory this process holds."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        import resource  # not everywhere

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def peak(net: str, side: str, quick: bool) -> None:
    """Print how far memory rises in one pass of one side: run in a process of its own."""
    torch.set_num_threads(1)
    module, batch = problem(net, quick)
    work = SIDES[side](module, batch)
    before, highest, over = resident(), [0], threading.Event()

    def watch() -> None:
        while not over.is_set():
            highest[0] = max(highest[0], resident())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    work(0)
    over.set()
    watcher.join()
    print(max(highest[0], resident()) - before)


def main() -> None:
    args = flags(__doc__ or "")
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    limits: dict[str, tuple[str, float]] = {}
    for net in ["resnet8"] if args.quick else list(NETS):
        *_, most = NETS[net]
        module, batch = problem(net, args.quick)
        sides = {name: build(module, batch) for name, build in SIDES.items()}
        slow = {"released way": sides.pop("released way")}  # no limit hangs on it: less often, without a warm-up
        for side in sides.values():
            side(0)
        often = interleaved(sides, 2 if args.quick else 8) | interleaved(slow, 1 if args.quick else 2)
        risen = {name: measured(net, name, args.quick) for name in SIDES}
        figures[f"{net}: gradient_norm / plain step, time"] = ratio(often["gradient_norm"], often["plain step"])
        figures[f"{net}: gradient_norm / plain step, memory"] = risen["gradient_norm"] / risen["plain step"]
        limits[f"{net}: gradient_norm / plain step, time"] = ("at most", most)
        limits[f"{net}: gradient_norm / plain step, memory"] = ("at most", MEMORY)
        middle = {name: statistics.median(times) for name, times in often.items()}
        figures[f"{net}: released way / plain step, time"] = middle["released way"] / middle["plain step"]
        figures[f"{net}: released way / plain step, memory"] = risen["released way"] / risen["plain step"]
        if not args.json:
            for name in SIDES:
                took, rise = f"{1e3 * middle[name]:7.0f} ms", f"{risen[name] / 2**20:6.0f} MB"
                print(f"{net:9} {name:14} batch {len(batch):4} {took} {rise}", flush=True)
    close(figures, limits, args.quick, plain_step="train mode, forward and backward", threads=1)


def measured(net: str, side: str, quick: bool) -> int:
    call = [sys.executable, __file__, "inner", net, side, str(int(quick))]
    return int(subprocess.check_output(call, text=True).splitlines()[-1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["inner"]:
        peak(sys.argv[2], sys.argv[3], sys.argv[4] == "1")
    else:
        main()
