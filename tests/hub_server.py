"""A small Hugging Face Hub on the loopback interface: repositories, commits, large files, and downloads.

It has what `huggingface_hub` calls for `create_repo`, `create_commit`, `model_info`, and `hf_hub_download`. Weights
and graphs are uploaded as large files (LFS), as the real hub requires.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = (".onnx", ".safetensors")


class Hub:
    """The state of the server: files of every commit by repository, large files by SHA-256, and all requests."""

    def __init__(self) -> None:
        self.commits: dict[str, list[tuple[str, dict[str, bytes]]]] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.private: set[str] = set()
        self.url = ""

    def files(self, repo: str, revision: str = "main") -> tuple[str, dict[str, bytes]]:
        """Return a commit and its files."""
        commits = self.commits[repo]
        return commits[-1] if revision == "main" else next(each for each in commits if each[0] == revision)

    def commit(self, repo: str, files: dict[str, bytes]) -> str:
        """Add a commit with these files."""
        text = json.dumps([len(self.commits[repo]), *sorted(files)])
        sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        self.commits[repo].append((sha, files))
        return sha


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def _send(self, content: Any, status: int = 200, **headers: str) -> None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") == "chunked":
                parts = []
                while size := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def _handle(self) -> None:
            path, body = unquote(urlsplit(self.path).path), self._body()
            hub.requests.append(f"{self.command} {path}")
            for pattern, answer in ROUTES:
                if match := re.fullmatch(pattern, f"{self.command} {path}"):
                    try:
                        answer(self, body, *match.groups())
                    except (KeyError, IndexError, StopIteration):
                        self._send({"error": "not found"}, 404, X_Error_Code="RepoNotFound")
                    return
            self._send({"error": f"no route for {path}"}, 501)

        do_GET = do_POST = do_HEAD = do_PUT = _handle

        def create(self, body: bytes) -> None:
            tree = json.loads(body)
            repo = f"{tree['organization']}/{tree['name']}" if tree.get("organization") else tree["name"]
            if repo in hub.commits:
                self._send({"error": "exists", "url": f"{hub.url}/{repo}"}, 409)
                return
            hub.commits[repo] = []
            hub.commit(repo, {".gitattributes": b"*.onnx filter=lfs\n"})
            if tree.get("private") or tree.get("visibility") == "private":
                hub.private.add(repo)
            self._send({"url": f"{hub.url}/{repo}", "name": repo, "id": "1"})

        def preupload(self, body: bytes, repo: str, revision: str) -> None:
            listed = json.loads(body)["files"]
            modes = {each["path"]: "lfs" if each["path"].endswith(LARGE) else "regular" for each in listed}
            files = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
            self._send({"files": files})

        def lfs_batch(self, body: bytes, repo: str) -> None:
            objects = [
                {**each, "actions": {"upload": {"href": f"{hub.url}/upload/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            self._send({"objects": objects, "transfer": "basic"})

        def upload(self, body: bytes, oid: str) -> None:
            assert hashlib.sha256(body).hexdigest() == oid
            hub.large[oid] = body
            self._send({})

        def commit(self, body: bytes, repo: str, revision: str) -> None:
            files = dict(hub.files(repo)[1])
            for line in body.decode().splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    files[value["path"]] = hub.large[value["oid"]]
                elif entry["key"] == "deletedFile":
                    del files[value["path"]]
            sha = hub.commit(repo, files)
            self._send({"commitUrl": f"{hub.url}/{repo}/commit/{sha}", "commitOid": sha, "success": True})

        def info(self, body: bytes, repo: str, revision: str = "main") -> None:
            sha, files = hub.files(repo, revision)
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            self._send({"id": repo, "sha": sha, "siblings": siblings, "tags": [], "private": repo in hub.private})

        def tree(self, body: bytes, repo: str, revision: str) -> None:
            _, files = hub.files(repo, revision)
            self._send([{"type": "file", "path": n, "size": len(c), "oid": "0" * 40} for n, c in files.items()])

        def resolve(self, body: bytes, repo: str, revision: str, name: str) -> None:
            sha, files = hub.files(repo, revision)
            content = files[name]
            etag = hashlib.sha1(content, usedforsecurity=False).hexdigest()
            self._send(content, X_Repo_Commit=sha, ETag=f'"{etag}"', Content_Type="application/octet-stream")

    repo = r"([\w.-]+/[\w.-]+)"
    ROUTES: tuple[tuple[str, Any], ...] = (
        (r"POST /api/repos/create", Handler.create),
        (r"POST /api/validate-yaml", lambda self, body: self._send({"errors": [], "warnings": []})),
        (rf"POST /api/models/{repo}/preupload/([\w.-]+)", Handler.preupload),
        (rf"POST /{repo}\.git/info/lfs/objects/batch", Handler.lfs_batch),
        (r"PUT /upload/(\w+)", Handler.upload),
        (rf"POST /api/models/{repo}/commit/([\w.-]+)", Handler.commit),
        (rf"GET /api/(?:models|datasets)/{repo}", Handler.info),
        (rf"GET /api/(?:models|datasets)/{repo}/revision/([\w.-]+)", Handler.info),
        (rf"GET /api/(?:models|datasets)/{repo}/tree/([\w.-]+)", Handler.tree),
        (rf"(?:GET|HEAD) /(?:datasets/)?{repo}/resolve/([\w.-]+)/(.+)", Handler.resolve),
    )
    return Handler


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Run a hub on a free port of the loopback interface."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
