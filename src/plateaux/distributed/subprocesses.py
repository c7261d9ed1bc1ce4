"""Start processes: the only module that does. No process that it starts imports code from the current folder.

`python -m` and `python -c` put the current folder on the Python path, so a file `torch.py` next to an untrusted recipe
would run in every process that a command starts. PYTHONSAFEPATH prevents this. It is an environment variable, so it
also holds for the processes that those processes start: workers of torchrun, multiprocessing, data loaders, and Ray.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from plateaux.core.process_info import num_cores

SAFE_PATH = {"PYTHONSAFEPATH": "1"}


def protect_children() -> None:
    """Keep all later processes of this process from importing code from the current folder."""
    os.environ.update(SAFE_PATH)


@contextmanager
def protected_children() -> Iterator[None]:
    """Keep processes that are started in this block from importing code from the current folder.

    For libraries that start processes themselves (multiprocessing, Ray), which take the environment of this process.
    """
    before = {name: os.environ.get(name) for name in SAFE_PATH}
    protect_children()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def run_torchrun(processes: int, arguments: Sequence[str], *, silent: bool = False) -> int:
    """Run `python -m plateaux` with these arguments in every process of a mesh, and return the exit code."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    threads = str(max(1, num_cores() // processes))
    env = {"OMP_NUM_THREADS": threads, **os.environ, **SAFE_PATH}
    return subprocess.call(
        [sys.executable, *start, "-m", "plateaux", *arguments], env=env, stdout=subprocess.DEVNULL if silent else None
    )
