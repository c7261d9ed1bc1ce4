"""Real process groups on loopback, started once and reused, because a start takes seconds.

answers = mesh(2).run("laws.meshes:train_here", recipe.to_dict(), out)  # one answer from every process
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest.mock import patch

import processes

PATIENCE = 600.0  # seconds for one answer; a busy machine is slow
LATE = 2.0  # seconds that others have to say what went wrong with them, once one has


@cache
def mesh(world: int) -> Processes:
    """Return the processes of a group of so many, the same for every test of this session."""
    return Processes(world)


class Processes:
    """Processes of one group that all carry out the same function at the same time."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._workers: list[Any] = []
        self._lines: list[Connection] = []

    def run(self, function: str, *args: Any) -> list[Any]:
        """Call `module:function` with `args` in every process and return the answers by rank."""
        processes.count()
        if not self._workers:
            self._start()
        for line in self._lines:
            line.send((function, args))
        answers: dict[int, Any] = {}
        while len(answers) < self.world:
            waiting = [line for rank, line in enumerate(self._lines) if rank not in answers]
            ready = wait(waiting, PATIENCE)
            answers |= {self._lines.index(line): line.recv() for line in ready}
            if not ready or any(kind == "failed" for kind, _ in answers.values()):
                late = [line for rank, line in enumerate(self._lines) if rank not in answers]
                answers |= {self._lines.index(line): line.recv() for line in wait(late, LATE)}
                self._end()  # the others may be waiting for it inside a collective
                silent = [rank for rank in range(self.world) if rank not in answers]
                said = "".join(f"rank {rank}: {text}" for rank, (kind, text) in answers.items() if kind == "failed")
                raise AssertionError(f"{function}: no answer from {silent}, failures {said or 'none'}")
        return [answers[rank][1] for rank in range(self.world)]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        port = _free_port()
        for rank in range(self.world):
            mine, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(theirs, rank, self.world, port), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._lines.append(mine)

    def _end(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.join()
        self._workers, self._lines = [], []


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _work(line: Connection, rank: int, world: int, port: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    import torch
    import torch.distributed as dist

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # coverage would write once more, after the report
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    while True:
        try:
            function, args = line.recv()
        except EOFError:
            os.kill(os.getpid(), signal.SIGKILL)  # the tests are over, and what was covered is written
        module, _, name = function.partition(":")
        try:
            answer = "done", getattr(importlib.import_module(module), name)(*args)
        except BaseException:
            answer = "failed", traceback.format_exc()
        _write_coverage()
        line.send(answer)


def _write_coverage() -> None:
    """Write what was covered so far: the report is made before these processes end."""
    coverage = sys.modules.get("coverage")
    running = coverage.Coverage.current() if coverage else None
    if running is not None:
        running.save()


def train_here(tree: dict[str, Any], out: str, sabotage: str = "") -> None:
    """Train a recipe as one process of the mesh, with the engine broken in a named way if asked."""
    from cases import GIVEN

    from plateaux.config.recipe import Recipe
    from plateaux.training.train import train

    with broken(sabotage):
        train(Recipe.from_dict(tree), out, **GIVEN.keywords())


def problem_here(tree: dict[str, Any], out: str) -> str:
    """Train a recipe as one process of the mesh, and return what is wrong with it."""
    from plateaux.core.errors import PlateauxError

    try:
        train_here(tree, out)
    except PlateauxError as problem:
        return str(problem)
    return ""


def measure_here(root: str, copies: int, keep: str = "off") -> dict[str, dict[str, tuple[float, float | None]]]:
    """Measure a run as one process of the mesh, and return all numbers by measure and row."""
    from plateaux.evaluation.evaluate import evaluate

    found = evaluate(
        root,
        metrics=["all"],
        executor={"name": "mesh", "data_parallel": copies},
        cache_logits=keep,
    )
    return {each.metric: {name: (v.value, v.stderr) for name, v in each.rows.items()} for each in found}


@contextmanager
def broken(sabotage: str) -> Iterator[None]:
    """Break "own row live" in one of its halves for a while, or let one process plan when others have long begun."""
    if not sabotage:
        yield
        return
    if sabotage == "one plans late":
        with _planning_late():
            yield
        return
    from plateaux.distributed.executors import mesh
    from plateaux.training.loop.gradients import GradientComputer

    gather, losses = mesh._gather, GradientComputer.losses
    if sabotage == "others live":
        mesh._gather = _differentiable_gather  # type: ignore[assignment]
    elif sabotage == "own rows only":
        GradientComputer.losses = _only_mine(losses)  # type: ignore[method-assign]
    elif sabotage == "own row detached":
        mesh._gather = lambda mine, *args, **kw: _half_detached(gather(mine, *args, **kw), mine)  # type: ignore
    else:
        raise ValueError(sabotage)
    try:
        yield
    finally:
        mesh._gather, GradientComputer.losses = gather, losses  # type: ignore[method-assign]


@contextmanager
def _planning_late() -> Iterator[None]:
    train = importlib.import_module("plateaux.training.train")  # as an attribute it is the function of that name
    pending_jobs = train.pending_jobs

    def late(*args: Any, **options: Any) -> Any:
        time.sleep(0.3 * (int(os.environ["RANK"]) > 0))
        return pending_jobs(*args, **options)

    with patch.object(train, "pending_jobs", late):
        yield


def _differentiable_gather(mine: Any, group: Any, ranks: int, rank: int, *, axis: int) -> Any:
    """What looks natural: an all-gather through which gradients flow back to every process's rows."""
    import torch
    import torch.distributed as dist

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.size = x.shape[axis]
            blocks = [torch.empty_like(x) for _ in range(ranks)]
            dist.all_gather(blocks, x.detach().contiguous(), group=group)
            return torch.cat(blocks, axis)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            grad = grad.contiguous().clone()
            dist.all_reduce(grad, group=group)
            return grad.narrow(axis, rank * ctx.size, ctx.size)

    return Gather.apply(mine)


def _only_mine(losses: Any) -> Any:
    """Sum only the rows held here: what members do to each other's losses is forgotten."""

    def patched(self: Any, *args: Any) -> Any:
        import torch

        settled, held, mine = losses(self, *args)
        keep = torch.zeros(len(settled), 1, dtype=torch.bool)
        keep[mine] = True
        return torch.where(keep, settled, settled.detach()), held, mine

    return patched


def _half_detached(table: Any, mine: Any) -> Any:
    """Let gradients through for half of the classes only, so that something is left to train with."""
    import torch

    if not table.is_floating_point():
        return table
    live = torch.zeros(table.shape[-1], dtype=torch.bool)
    live[::2] = True
    return torch.where(live, table, table.detach())
