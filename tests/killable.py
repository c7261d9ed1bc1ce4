"""A small run to be killed, and a server that has torch imported already and forks a trainer in a tenth of a second.

    python -c "import killable; killable.serve()"

reads one request a line (JSON) and answers each with how the trainer ended. A request names the recipe and the run
folder, and maybe the death to die: `{"seconds": 0.2}` after so long, `{"event": 7}` at the seventh touch of storage,
`{"score": 3}` while the third batch is scored; `"signal": "SIGTERM"` makes it a polite one, `"group": true` lets the
loader's workers hear it too.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import plateaux
from plateaux.data.sources import DataSplits, from_dataset
from plateaux.training.partition import SharpnessScorer
from plateaux.training.train import train

SAMPLES, SIDE = 80, 8

RECIPE = """
members = 3
seed = 5

[data]
{data}
batch_size = 16
validation_split = 16
crop = 2
flip = true

[model]
name = "cnn"
channels = [4, 8]
norm = "batch"

[method]
name = "sam"
rho = [0.05, 0.1, 0.2]

[optimizer]
name = "SGD"
lr = 0.05
momentum = 0.9
weight_decay = 1e-3

[[lr_scheduler]]
name = "cosine"
interval = "step"

[train]
epochs = {epochs}
select = "best:accuracy"

[executor]
threads = 1

[run]
checkpoint_every_minutes = 0.0005
keep_checkpoints = "last"
log_every = 3
"""
IN_MEMORY = 'name = "arrays"\npath = "images.npz"\nroot = "{folder}"'
BY_WORKERS = 'name = "killable:noisy"\nnum_workers = 2'


def images(count: int, seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return images whose class is where they are bright."""
    chance = np.random.default_rng(seed)
    y = np.arange(count) % 3
    x = chance.integers(0, 120, (count, 3, SIDE, SIDE), dtype=np.uint8)
    for i, place in enumerate(y):
        x[i, :, 2 * place : 2 * place + 3] += 80
    return x, y.astype(np.int64)


def write_images(folder: Path) -> None:
    """Put the images where the recipe in memory finds them."""
    x, y = images(SAMPLES, 0)
    test_x, test_y = images(30, 1)
    np.savez(folder / "images.npz", x_train=x, y_train=y, x_test=test_x, y_test=test_y)


class Noisy:
    """The images with random noise of the data set's own, drawn when one is read."""

    def __init__(self, count: int, seed: int) -> None:
        self.x, self.y = images(count, seed)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        light = np.random.rand() + 0.5
        return torch.from_numpy(self.x[i]).float() / 255 * light + 0.1 * torch.randn(3, SIDE, SIDE), int(self.y[i])


@plateaux.dataset
def noisy() -> DataSplits:
    """Images that look different every time they are read."""
    return from_dataset(Noisy(SAMPLES, 0), Noisy(30, 1), classes=3, shape=(3, SIDE, SIDE))


def serve() -> None:
    """Fork a trainer for every request and answer with how it ended."""
    # Everything that is imported late is imported once, here; no thread may be running when the trainers are forked.
    for registry in (plateaux.method, plateaux.metric, plateaux.dataset, plateaux.executor, plateaux.model):
        registry.names()
    torch.optim.SGD([torch.zeros(1)], lr=1.0)
    groups = []
    for line in sys.stdin:
        request = json.loads(line)
        ears, mouth = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ears)
            _trainer(request, mouth)
        os.close(mouth)
        groups.append(pid)
        words = _see_to(pid, ears, request)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(status), "words": words}), flush=True)
    for group in groups:  # loader's workers that have not noticed yet
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _see_to(pid: int, ears: int, request: dict[str, Any]) -> str:
    """Kill the trainer when its time has come; return what it said."""
    said = os.read(ears, 1)  # it has begun
    if "seconds" in request and not select.select([ears], [], [], request["seconds"])[0]:
        os.kill(pid, signal.SIGKILL)
    while chunk := os.read(ears, 4096):
        said += chunk
    os.close(ears)
    return said[1:].decode()


def _trainer(request: dict[str, Any], mouth: int) -> None:
    os.setsid()
    os.register_at_fork(after_in_child=lambda: os.close(mouth))  # or the loader's workers hold the line
    torch.set_num_threads(1)
    if "event" in request:
        die_at(request["event"], signal.Signals[request.get("signal", "SIGKILL")], group=request.get("group", False))
    if "score" in request:
        die_while_scoring(request["score"])
    os.write(mouth, b".")
    code, words = 0, ""
    try:
        recipe = plateaux.Recipe.load(request["recipe"], request.get("set", ()))
        train(recipe, request["out"], trust=("killable",))
    except BaseException as problem:
        code, words = 1, f"{type(problem).__name__}: {problem}"
    os.write(mouth, words.encode())
    os._exit(code)


def die_while_scoring(batch: int) -> None:
    """Send SIGKILL when the n-th batch is being scored."""
    left, scores = batch, SharpnessScorer._score_batch

    def dying(*args: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return scores(*args)

    SharpnessScorer._score_batch = dying  # type: ignore[method-assign]


def die_at(event: int, number: signal.Signals, *, group: bool) -> None:
    """Send a signal at the n-th touch of storage: half a write, a whole one before its name, after it, or a delete."""
    left = event
    fsync, replace, unlink = os.fsync, os.replace, os.unlink

    def touch(prepare: Any = None) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            if prepare is not None and number == signal.SIGKILL:
                prepare()
            os.killpg(0, number) if group else os.kill(os.getpid(), number)

    def dying_fsync(handle: int) -> None:
        touch(lambda: os.ftruncate(handle, os.fstat(handle).st_size // 2))
        fsync(handle)

    def dying_replace(source: Any, target: Any, **options: Any) -> None:
        touch()
        replace(source, target, **options)
        touch()

    def dying_unlink(path: Any, **options: Any) -> None:
        touch()
        unlink(path, **options)

    os.fsync, os.replace, os.unlink = dying_fsync, dying_replace, dying_unlink  # type: ignore[assignment]
