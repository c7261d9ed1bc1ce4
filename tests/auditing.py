"""Run commands of Plateaux in this process under an audit hook; print what they did as JSON.

python auditing.py COMMANDS ALLOWED    both JSON lists: of command lines, and of folders that may be written to
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {
    "os.mkdir": 1, "os.remove": 1, "os.rmdir": 1, "os.rename": 2, "os.symlink": 2, "os.link": 2, "os.truncate": 1,
    "os.chmod": 1, "os.chown": 1, "os.utime": 1, "shutil.rmtree": 1, "shutil.copyfile": 2, "shutil.move": 2,
}  # fmt: skip
PROCESSES = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty")
NETWORK = ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "urllib.Request")


class Auditor:
    """Collects the events of an audit hook."""

    def __init__(self, allowed: list[str]) -> None:
        self.here = os.path.realpath(os.getcwd()) + os.sep
        self.allowed = tuple(os.path.realpath(folder) + os.sep for folder in allowed)
        self.found: dict[str, set[str]] = {"writes": set(), "code": set(), "processes": set(), "network": set()}

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[2], int) and args[2] & WRITE:
            # A relative path may belong to an open folder, which the event does not name. The test compares all files.
            if not isinstance(args[0], int) and os.path.isabs(args[0]):
                self._write(args[0])
        elif event in CHANGES:
            for path in args[: CHANGES[event]]:
                if not isinstance(path, int) and os.path.isabs(path):
                    self._write(path)
        elif event == "exec" and self._is_here(getattr(args[0], "co_filename", "")):
            self.found["code"].add(args[0].co_filename)
        elif event in PROCESSES:
            self.found["processes"].add(f"{event} {args[:2]}")
        elif event in NETWORK:
            self.found["network"].add(f"{event} {args[1:]}")

    def _write(self, path: Any) -> None:
        place = os.path.realpath(os.fsdecode(path))
        if not (place + os.sep).startswith((*self.allowed, "/dev/")):
            self.found["writes"].add(place)

    def _is_here(self, file: str) -> bool:
        return os.path.exists(file) and os.path.realpath(file).startswith(self.here)


def main() -> None:
    commands, allowed = (json.loads(word) for word in sys.argv[1:3])
    auditor = Auditor(allowed)
    sys.addaudithook(auditor.hook)

    from typer.testing import CliRunner

    from plateaux.cli.main import app

    ended = []
    for words in commands:
        result = CliRunner().invoke(app, words)
        is_raised = result.exception is not None and not isinstance(result.exception, SystemExit)
        ended.append([result.exit_code, repr(result.exception) if is_raised else "", result.stderr[-300:]])
    found = {name: sorted(events) for name, events in auditor.found.items()}
    Path(sys.argv[3]).write_text(json.dumps({"ended": ended, **found}), encoding="utf-8")


if __name__ == "__main__":
    main()
