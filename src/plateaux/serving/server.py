"""Run the service with granian: worker processes on one port, which are replaced if they end."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from granian import Granian
from granian.constants import HTTPModes, Interfaces, Loops
from granian.http import HTTP1Settings
from granian.log import LogLevels
from starlette.applications import Starlette

from plateaux.core.errors import PlateauxError, RecipeError, RunError
from plateaux.deploy.bundle import Bundle
from plateaux.serving.app import Service, create_app
from plateaux.serving.metrics import FOLDER_VARIABLE
from plateaux.serving.settings import ServeSettings

GRACE_S = 1.0  # after SIGTERM, in which requests that clients have sent are still read
DRAIN_S = 30  # for requests in flight after SIGTERM
HEAD_BYTES = 1 << 16  # of the head of a request; a larger one is refused
SERVING, PROBLEM, END = "serving", "problem", "end"  # what the process that starts workers is told
logger = logging.getLogger(__name__)


def serve(settings: ServeSettings, *, host: str = "127.0.0.1", port: int = 8000, workers: int = 1) -> None:
    """Serve a bundle until SIGTERM or Ctrl-C. Requests in flight are answered before the end."""
    if workers < 1:
        raise RecipeError(f"workers = {workers}: give a number of at least 1")
    Bundle.open(settings.bundle, sha256=settings.sha256)  # its errors are raised before any process starts
    port = find_port(host, port)
    # A forked worker needs no imports, and no interpreter that prints a traceback if Ctrl-C interrupts its start.
    multiprocessing.set_start_method("fork", force=True)
    server: Any = Granian(
        "plateaux",
        address=host,
        port=port,
        interface=Interfaces.ASGI,
        loop=Loops.asyncio,
        http=HTTPModes.http1,
        websockets=False,
        workers=workers,
        http1_settings=HTTP1Settings(int(1000 * settings.read_timeout_s), max_buffer_size=HEAD_BYTES),
        workers_kill_timeout=DRAIN_S,
        log_level=LogLevels.error,
    )
    problems = list[str]()
    own, (reader, writer) = os.getpid(), multiprocessing.Pipe(duplex=False)

    def request_end(number: int, _: object) -> None:  # takes no lock, which the interrupted code could hold
        if os.getpid() == own and not server.interrupt_signal:
            writer.send((END, ""))
        elif os.getpid() != own and number == signal.SIGTERM:  # in a worker that has not begun to load
            os._exit(1)

    end, server.signal_handler_interrupt = server.signal_handler_interrupt, request_end
    where = f"{settings.bundle} on http://{f'[{host}]' if ':' in host else host}:{port}"
    handlers = {number: signal.signal(number, request_end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with tempfile.TemporaryDirectory(prefix="plateaux-metrics-") as folder:
            os.environ[FOLDER_VARIABLE] = folder
            follower = threading.Thread(target=_follow, args=(reader, server, end, where, problems), daemon=True)
            follower.start()
            try:
                server.serve(target_loader=partial(load_worker, settings, writer), wrap_loader=False)
            finally:
                writer.send(None)
                follower.join()  # it has read all that workers reported before they ended
    except SystemExit:
        if not server.interrupt_signal:
            reason = problems[-1] if problems else "its worker processes end again and again; see the messages above"
            raise RunError(f"The service has ended: {reason}") from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _follow(reader: Connection, server: Any, end: Callable[[], None], where: str, problems: list[str]) -> None:
    """Print which workers serve. Only after one did, those that end are replaced: before, it would be in vain."""
    for event, text in iter(reader.recv, None):
        if event == SERVING:
            server.respawn_failed_workers = True
            with suppress(OSError, SystemExit):  # standard error is closed
                logger.info("serving %s (%s)", where, text)
        elif event == PROBLEM:
            problems.append(text)
        else:
            server.respawn_failed_workers = False
            time.sleep(GRACE_S)
            end()
            return


def load_worker(settings: ServeSettings, writer: Connection) -> Starlette:
    """Return the application in a new worker process. What happens is sent to the process that started it."""
    # The other process asks all workers to end, also after Ctrl-C. Granian would replace a handler of the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def report(service: Service) -> None:
        writer.send((SERVING, f"worker {os.getpid()}, batches of {service.max_batch}"))

    try:
        return create_app(settings, report)
    except PlateauxError as problem:
        writer.send((PROBLEM, str(problem)))
        raise SystemExit(1) from None


def _end_with_parent() -> None:
    """End this worker if the process that started it was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(DRAIN_S)
    os._exit(1)


def find_port(host: str, port: int) -> int:
    """Return a port that no other process uses; 0: any. Workers share theirs, which would hide that it is in use."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            problem = f"{host}:{port} cannot be used ({error.strerror}); choose another --port or --host"
            raise RecipeError(problem) from None
        return int(probe.getsockname()[1])
