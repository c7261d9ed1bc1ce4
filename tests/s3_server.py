"""A server on loopback that speaks S3 (moto's), and one that fails at random as networks do."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing", "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}  # fmt: skip


class Flaky:
    """Passes requests on, and answers a share of them with an error: half of those after they were carried out."""

    def __init__(self, inner: Callable[..., Any], share: float) -> None:
        self.inner, self.share, self.chance = inner, share, random.Random(1)
        self.requests = self.failed = 0

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        self.requests += 1
        if "buckets" in environ.get("PATH_INFO", "") or self.chance.random() >= self.share:
            return self.inner(environ, start)
        self.failed += 1
        if self.chance.random() < 0.5:
            list(self.inner(environ, lambda *_: lambda _: None))
        start("503 Slow Down", [("Content-Type", "application/xml")])
        return [b"<Error><Code>SlowDown</Code><Message>reduce your request rate</Message></Error>"]


@contextmanager
def serving(share: float = 0.0) -> Iterator[Flaky]:
    """Serve S3 for a while, with a bucket called `bucket`; the environment names the server."""
    pytest.importorskip("moto.server", reason='no server to try S3 on: pip install "moto[server]"')
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    app = Flaky(DomainDispatcherApplication(create_backend_app), 0.0)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        s3fs.S3FileSystem.clear_instance_cache()
        with suppress(FileExistsError):  # the objects of one process outlive its servers
            s3fs.S3FileSystem().mkdir("bucket")
        app.share, app.requests = share, 0
        try:
            yield app
        finally:
            app.share = 0.0
            s3fs.S3FileSystem.clear_instance_cache()
            server.shutdown()
            thread.join()
            server.server_close()
