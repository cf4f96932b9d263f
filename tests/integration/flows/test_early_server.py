"""The temporary server that a command starts before it imports Prefect."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from paths import ROOT
from prefect.settings import PREFECT_API_URL, temporary_settings

from ckptcore.errors import UsageError
from flows import _command, _engine, _start


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (["python", "-m", "flows.convert", "a", "b"], True),
        (["python", "-P", "-X", "dev", "-mflows.export"], True),
        (["python", "-m", "flows.demo", "flows.convert"], False),
        (["python", "-m", "pytest", "flows.convert"], False),
    ],
)
def test_a_command_is_recognised_before_prefect_is_imported(
    command: list[str], found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = next(i for i, word in enumerate(command) if "." in word or word == "pytest")
    monkeypatch.setattr(sys, "orig_argv", command)
    monkeypatch.setattr(sys, "argv", ["-m", *command[module + 1 :]])
    assert _start.is_command() is found
    monkeypatch.setattr(sys, "argv", ["convert.py", *command[module + 1 :]])  # the module was found
    assert not _start.is_command()


@pytest.mark.parametrize(
    ("configured", "arguments", "files", "started"),
    [
        (False, ["a", "b"], {"pyproject.toml": "prefect"}, True),
        (True, ["a", "b"], {}, False),
        (False, ["--help"], {}, False),
        (False, ["a", "b"], {"prefect.toml": ""}, False),
        (False, ["a", "b"], {".env": "PREFECT_API_URL=http://prefect.example/api"}, False),
    ],
)
def test_a_server_is_started_early_only_where_the_run_needs_one(
    configured: bool,
    arguments: list[str],
    files: dict[str, str],
    started: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    real, seen = subprocess.Popen, []

    def popen(argv: list[str], **given: Any) -> subprocess.Popen[bytes]:
        seen.append((argv, given["env"]))
        return real(["sleep", "600"], **given)

    ended: list[Any] = []
    watched: list[int] = []
    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(_start, "_early", None)
    monkeypatch.setattr(_start, "start_quickly", lambda: None)
    monkeypatch.setattr(_start, "end_with_this_process", watched.append)
    monkeypatch.setattr(atexit, "register", lambda *call: ended.append(call))
    monkeypatch.setattr(sys, "argv", ["-m", *arguments])
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        Path(name).write_text(text)
    env = {"PREFECT_API_BLOCKS_REGISTER_ON_START": "true"}
    _start.start_command(configured, env)
    early = _start.early_server()
    assert (early is not None) is (len(seen) == 1) is started
    assert env.get("PREFECT_API_URL") == (early.api_url if early else None)
    if early is None:
        assert not watched
        assert not ended
        return
    assert watched == [early.process.pid]
    ((argv, given),) = seen
    assert Path(argv[2]) == ROOT / "flows" / "_server.py"
    assert given["PREFECT_API_BLOCKS_REGISTER_ON_START"] == "true"  # the user's own
    assert given["PREFECT_MEMOIZE_BLOCK_AUTO_REGISTRATION"] == "false"
    assert "PREFECT_API_URL" not in given
    for call, *rest in ended:  # as at the end of a run whose arguments were wrong
        call(*rest)
    assert early.process.poll() is not None


@pytest.mark.parametrize("answers", [False, True])
def test_where_the_early_server_does_not_start_prefect_starts_its_own(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Anew(Exception):
        pass

    def execve(program: str, argv: list[str], env: dict[str, str]) -> None:
        raise Anew(argv, env)

    def answer(listening: socket.socket) -> None:
        asking, _ = listening.accept()
        with asking:
            asking.recv(4096)
            asking.sendall(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: None)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "flows.convert", "a", "b"])
    with socket.create_server(("127.0.0.1", 0)) as listening, subprocess.Popen(["true"]) as ended:
        early = _start.EarlyServer(listening.getsockname()[1], ended, "server.log")
        monkeypatch.setenv("PREFECT_API_URL", early.api_url)
        if answers:
            threading.Thread(target=answer, args=(listening,), daemon=True).start()
        else:
            listening.close()  # as when the server's process ends
        with pytest.raises(Anew) as anew:
            _start.wait_for(early, 60)
    argv, env = anew.value.args
    assert argv[1:] == ["-m", "flows.convert", "a", "b"]
    assert "PREFECT_API_URL" not in env
    monkeypatch.setattr(_start, "_early", None)
    monkeypatch.setattr(_start, "start_quickly", lambda: None)
    monkeypatch.setattr(subprocess, "Popen", None)  # none is started
    _start.start_command(False, env)
    assert _start.early_server() is None
    assert _start.LATE not in env


def test_the_early_server_is_not_one_for_workers_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["true"]) as ended:
        early = _start.EarlyServer(4200, ended, "server.log")
    monkeypatch.setattr(_start, "_early", early)
    with temporary_settings({PREFECT_API_URL: early.api_url}):
        with (
            pytest.raises(UsageError, match="none is configured"),
            _engine._serving("dask", "tcp://10.0.0.1:8786"),
        ):
            pass
        with _engine._serving("dask", None) as env:
            assert env == {"PREFECT_API_URL": early.api_url}
    assert not _command._has_page(made_record(f"View at {early.address}/runs/flow-run/1"))
    assert _command._has_page(made_record("View at https://prefect.example/runs/flow-run/1"))


def made_record(text: str) -> logging.LogRecord:
    return logging.LogRecord("prefect.flow_runs", logging.INFO, __file__, 1, text, None, None)


def test_a_server_records_what_it_has_received_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.server.utilities.messaging.memory import MemoryMessage, Topic

    from flows import _server

    left = []

    async def shutdown(self: uvicorn.Server, sockets: object = None) -> None:
        left.append((len(self.server_state.tasks), subscription._queue.qsize()))

    async def consume(stream: asyncio.Event) -> None:
        await asyncio.sleep(0.05)
        stream.set()
        for _ in range(3):
            await asyncio.sleep(0.02)
            await subscription.get()

    async def sent(stream: asyncio.Event) -> None:
        await stream.wait()

    async def end() -> None:
        server, stream = _server.RecordingServer(uvicorn.Config("none")), asyncio.Event()
        sending = asyncio.create_task(sent(stream))  # a client whose stream is not read to its end
        server.server_state.tasks.add(sending)
        sending.add_done_callback(server.server_state.tasks.discard)
        for n in range(3):
            await topic.publish(MemoryMessage(str(n), {}))
        async with asyncio.TaskGroup() as group:
            group.create_task(consume(stream))
            await server.shutdown()

    monkeypatch.setattr(uvicorn.Server, "shutdown", shutdown)
    topic = Topic.by_name("a topic of a test")
    subscription = topic.subscribe()
    try:
        asyncio.run(end())
    finally:
        topic.unsubscribe(subscription)
    assert left == [(0, 0)]


def test_a_server_with_other_queues_ends_at_once_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from prefect.server.utilities.messaging.memory import Topic

    from flows import _server

    ended = []

    async def shutdown(self: uvicorn.Server, sockets: object = None) -> None:
        ended.append(self)

    monkeypatch.setattr(uvicorn.Server, "shutdown", shutdown)
    monkeypatch.delattr(Topic, "_topics")
    server = _server.RecordingServer(uvicorn.Config("none"))
    asyncio.run(server.shutdown())
    assert len(ended) == 1
    assert "cannot wait for the last events" in capsys.readouterr().err
