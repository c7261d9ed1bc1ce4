"""The command that serves a bundle over HTTP."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from plateaux.cli.common import Sha256


def serve(
    bundle: Annotated[Path, typer.Argument(help="A bundle that `plateaux export` wrote.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free port.")] = 8000,
    host: Annotated[str, typer.Option(help="0.0.0.0 listens on all interfaces.")] = "127.0.0.1",
    name: Annotated[str | None, typer.Option(help="Name of the model in URLs; by default that of the folder.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Number of processes that share the port.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each process.")] = 1,
    max_batch: Annotated[
        int | None, typer.Option(min=1, help="Rows of one call; by default the fastest, measured at the start.")
    ] = None,
    max_queue: Annotated[int, typer.Option(min=1, help="Rows that may wait; more are refused with 429.")] = 256,
    max_rows: Annotated[int, typer.Option(min=1, help="Rows of one request.")] = 128,
    max_bytes: Annotated[int, typer.Option(min=1, help="Bytes of one request.")] = 32 << 20,
    max_memory: Annotated[
        int, typer.Option(min=1, help="Bytes of bodies and decoded inputs of all requests of a process.")
    ] = 256 << 20,
    deadline: Annotated[float, typer.Option(help="Seconds in which a request is read and answered, or gets 504.")] = 10,
    read_timeout: Annotated[float, typer.Option(help="Seconds in which the head of a request must arrive.")] = 30,
    log_requests: Annotated[bool, typer.Option(help="Log one JSON line per request, without its inputs.")] = False,
    sha256: Sha256 = None,
) -> None:
    """Serve a bundle: Open Inference Protocol v2, /predict, /metrics, and a page to try it.

    The environment variable PLATEAUX_API_KEY sets a key that clients must send. TLS is left to the gateway.

    In Python: `plateaux.serving.server.serve(ServeSettings(bundle="bundle"), port=8000)`
    """
    # Ctrl-C before or after the service ends the process at once: an exception could be printed as a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from plateaux.core.imports import optional_import
    from plateaux.serving.settings import ServeSettings

    for library in ("starlette", "granian"):  # prometheus_client is imported later: it reads the environment then
        optional_import(library, extra="serve")
    settings = ServeSettings(
        bundle=str(bundle),
        name=name or bundle.resolve().name,
        threads=threads,
        max_batch=max_batch,
        max_queue=max_queue,
        max_rows=max_rows,
        max_bytes=max_bytes,
        max_memory=max_memory,
        deadline_s=deadline,
        read_timeout_s=read_timeout,
        log_requests=log_requests,
        sha256=sha256,
    )
    from plateaux.serving.server import serve as run_server

    run_server(settings, host=host, port=port, workers=workers)
