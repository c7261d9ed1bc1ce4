"""A process in the background: sending never waits, replies are counted, and it ends with its input."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from plateaux.distributed.background_process import BackgroundProcess, close_all

MODULE = """
import json, os, sys, time

def main():
    for line in sys.stdin:
        message = json.loads(line)
        if message.get("sleep"):
            time.sleep(message["sleep"])
        if message.get("exit"):
            os._exit(message["exit"])
        print(json.dumps({"got": message.get("n"), "size": len(line), "group": os.getpgid(0)}), flush=True)
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "answering.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_all_messages_are_handled_in_order_and_the_process_ends() -> None:
    process = BackgroundProcess("answering", limit=1000)
    assert all(process.send({"n": n, "text": "x" * 1000}) for n in range(500))  # more than a pipe holds
    assert process.close(time.monotonic() + 400)
    replies = process.replies()
    assert [reply["got"] for reply in replies] == list(range(500))
    assert {reply["group"] for reply in replies} == {process.pid}
    assert process.exit_code == 0
    assert not process.send({})


def test_messages_beyond_the_limit_are_refused_without_waiting() -> None:
    process = BackgroundProcess("answering", limit=3)
    assert process.send({"sleep": 600})
    assert [process.send({"text": "x" * 100_000}) for _ in range(4)] == [True, True, False, False]
    assert process.is_full
    assert process.send({}, force=True)
    assert close_all([process], 0.1) == [process]
    assert process.exit_code == -9


def test_a_process_that_ends_early_refuses_messages() -> None:
    process = BackgroundProcess("answering", limit=1000)
    process.send({"exit": 5})
    while process.send({}):
        time.sleep(0.01)
    assert process.close(time.monotonic() + 400)
    assert process.exit_code == 5
    assert process.replies() == []


def test_a_forked_child_does_not_keep_the_input_open() -> None:
    process = BackgroundProcess("answering", limit=10)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reader, 1)  # as long as the test lasts
        os._exit(0)
    try:
        process.send({"n": 1})
        assert process.close(time.monotonic() + 400)
        assert [reply["got"] for reply in process.replies()] == [1]
    finally:
        os.write(writer, b".")
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


def test_the_process_finds_modules_where_this_one_does(tmp_path: Path) -> None:
    code = "import json, sys\ndef main(): print(json.dumps({'path': sys.path, 'safe': sys.flags.safe_path}))"
    (tmp_path / "answering.py").write_text(code)
    process = BackgroundProcess("answering", limit=10)
    assert process.close(time.monotonic() + 400)
    (reply,) = process.replies()
    assert reply == json.loads(json.dumps({"path": [path or os.getcwd() for path in sys.path], "safe": True}))
