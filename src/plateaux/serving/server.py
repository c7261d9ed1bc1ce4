"""Run the service: one or several worker processes on one port, with a bounded number of connections each.

Under overload a worker stops accepting connections: they wait in the listen backlog of the socket, where they cost
nothing, instead of being refused one by one in the event loop, which would starve the requests it has accepted.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from multiprocessing.connection import wait
from typing import Any
from typing import cast as as_type

import uvicorn

from plateaux.core.errors import RecipeError
from plateaux.distributed.subprocesses import protected_children
from plateaux.serving.app import Lifecycle, create_app
from plateaux.serving.metrics import FOLDER_VARIABLE, forget_worker
from plateaux.serving.settings import ServeSettings

BACKLOG = 1024
DRAIN_S = 30  # for requests in flight after SIGTERM
GRACE_S = 1.0  # after SIGTERM, in which requests that clients have sent are still read
KEEP_ALIVE_S = 30  # of idle connections
WATCH_S = 1.0  # between two looks at the workers
FAILED_START = 3  # the exit code of a worker that cannot start
MAX_FAILED_STARTS = 5
POLL_S = 0.005  # between two looks at the number of connections while none is accepted
logger = logging.getLogger(__name__)


class BoundedListener:
    """Accepts connections from a socket while fewer than a limit are open."""

    def __init__(
        self, listener: socket.socket, connect: Callable[[], Any], count: Callable[[], int], limit: int
    ) -> None:
        self._socket, self._connect, self._count, self._limit = listener, connect, count, limit
        self._task = asyncio.get_running_loop().create_task(self._accept())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        while True:
            while self._count() >= self._limit:
                await asyncio.sleep(POLL_S)
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError as error:  # the client has gone, or too many files are open
                logger.debug("accept: %s", error)
                await asyncio.sleep(POLL_S)
                continue
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.connect_accepted_socket(self._connect, connection)

    def close(self) -> None:
        """Stop accepting connections."""
        self._task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._task, return_exceptions=True)


class IdleConnections:
    """Closes connections on which no complete request arrives for some seconds.

    uvicorn closes a connection that is idle after a response, but not one on which a client sends nothing at all, or
    a few bytes now and then. Such clients would otherwise take all connections. One look at all connections per second
    costs less than a timer for every request.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # By connection, while the client is to send: its last request, whether its body is incomplete, since when.
        self._waiting: dict[Any, tuple[Any, bool, float]] = {}

    def close_idle(self, connections: Iterable[Any], now: float) -> int:
        """Close the connections that have waited too long, and return how many."""
        waiting, closed = dict[Any, tuple[Any, bool, float]](), 0
        for connection in connections:
            request = connection.cycle  # None before the first; a new object for every request
            is_body = request is not None and not request.response_complete
            if is_body and not request.more_body:
                continue  # the request is complete and is being answered
            *last, since = self._waiting.get(connection, (None, None, now))
            is_same = last[0] is request and last[1] is is_body
            waiting[connection] = (request, is_body, since if is_same else now)
            if now - waiting[connection][2] > self._timeout_s:
                connection.transport.close()
                closed += 1
        self._waiting = waiting
        return closed

    async def run(self, connections: Collection[Any]) -> None:
        """Look at the connections until this is cancelled."""
        while True:
            await asyncio.sleep(min(1.0, self._timeout_s / 2))
            self.close_idle(list(connections), time.monotonic())


class BoundedServer(uvicorn.Server):
    """A server of uvicorn that accepts a bounded number of connections, and closes those of slow clients."""

    def __init__(self, config: uvicorn.Config, settings: ServeSettings, lifecycle: Lifecycle) -> None:
        super().__init__(config)
        self.settings, self.lifecycle = settings, lifecycle
        self._idle: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(FAILED_START)
        state, config = self.server_state, self.config
        protocol: Any = config.http_protocol_class

        def connect() -> Any:
            return protocol(config=config, server_state=state, app_state=self.lifespan.state)

        listeners = [
            BoundedListener(each, connect, lambda: len(state.connections), self.settings.max_connections)
            for each in sockets or []
        ]
        self.servers = as_type("list[asyncio.base_events.Server]", listeners)  # has the methods that uvicorn calls
        idle = IdleConnections(self.settings.read_timeout_s)
        self._idle = asyncio.get_running_loop().create_task(idle.run(state.connections))
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what has been sent: uvicorn closes connections whose request it has not read yet."""
        self.lifecycle.is_draining = True
        await asyncio.sleep(GRACE_S)
        await super().shutdown(sockets)
        if self._idle is not None:
            self._idle.cancel()


def serve(settings: ServeSettings, *, host: str = "127.0.0.1", port: int = 8000, workers: int = 1) -> None:
    """Serve a bundle until SIGTERM or Ctrl-C. Requests in flight are answered before the end."""
    if workers < 1:
        raise RecipeError(f"workers = {workers}: give a number of at least 1")
    with _bind(host, port) as listener, tempfile.TemporaryDirectory(prefix="plateaux-metrics-") as folder:
        os.environ[FOLDER_VARIABLE] = folder
        logger.info("serving %s on http://%s:%d", settings.bundle, host, listener.getsockname()[1])
        if workers == 1:
            run_worker(settings, listener)
        else:
            Supervisor(settings, listener, workers).run()


def run_worker(settings: ServeSettings, listener: socket.socket) -> None:
    """Serve in this process until it is asked to stop."""
    for each in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises the signal again after it has drained
        signal.signal(each, _exit)
    lifecycle = Lifecycle()
    config = uvicorn.Config(
        partial(create_app, settings, lifecycle),
        factory=True,
        backlog=BACKLOG,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        http="httptools",
        ws="none",
        lifespan="on",
        log_level="warning",
        timeout_graceful_shutdown=DRAIN_S,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    BoundedServer(config, settings, lifecycle).run(sockets=[listener])


def _run_logged_worker(settings: ServeSettings, listener: socket.socket, level: int) -> None:
    """Serve in a new process, which does not inherit the handlers of the logger."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    messages = logging.getLogger("plateaux")
    messages.addHandler(handler)
    messages.setLevel(level)
    run_worker(settings, listener)


def _exit(*_: Any) -> None:
    raise SystemExit(0)


class Supervisor:
    """Keeps a number of worker processes running: one that ends is replaced."""

    def __init__(self, settings: ServeSettings, listener: socket.socket, workers: int) -> None:
        self._settings, self._listener, self._count = settings, listener, workers
        self._workers: list[Any] = []
        self._is_stopping = False

    def run(self) -> None:
        """Run until SIGTERM or Ctrl-C."""
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, self._stop)
        failures = 0
        while not self._is_stopping:
            while len(self._workers) < self._count and not self._is_stopping:
                self._workers.append(self._start())
            wait([worker.sentinel for worker in self._workers], timeout=WATCH_S)
            ended = [worker for worker in self._workers if not worker.is_alive()]
            for worker in ended:
                self._workers.remove(worker)
                forget_worker(worker.pid)
                if not self._is_stopping:
                    logger.warning("worker %d ended with exit code %s; a new one starts", worker.pid, worker.exitcode)
            failures = failures + 1 if any(worker.exitcode == FAILED_START for worker in ended) else 0
            if failures >= MAX_FAILED_STARTS:
                self._stop()
                raise RecipeError("The workers do not start; see the messages above")
        for worker in self._workers:
            worker.join(DRAIN_S + 5)
            if worker.is_alive():
                worker.kill()

    def _start(self) -> Any:
        context = multiprocessing.get_context("spawn")
        level = logging.getLogger("plateaux").getEffectiveLevel()
        worker = context.Process(target=_run_logged_worker, args=(self._settings, self._listener, level))
        with protected_children():
            worker.start()
        return worker

    def _stop(self, *_: Any) -> None:
        self._is_stopping = True
        for worker in self._workers:
            if worker.is_alive():
                worker.terminate()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise RecipeError(f"{host}:{port} cannot be used ({error.strerror}); choose another --port or --host") from None
    listener.listen(BACKLOG)
    listener.set_inheritable(True)
    return listener
