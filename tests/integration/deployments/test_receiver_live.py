"""Live receivers: two on one catalog, one that is killed, one that is stopped, one that must not start."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import live
import pytest
import webhooks

from ckptcore.errors import CatalogError, CkptError, UsageError

URI = webhooks.URI
pytestmark = pytest.mark.xdist_group("receiver")


def post(client: httpx.Client, url: str, key: str) -> httpx.Response:
    hook = webhooks.HOOKS["bearer"]
    return client.post(url + hook.path, content=hook.body, headers=hook.headers | {"idempotency-key": key})


@pytest.mark.soak  # test_queues lets processes take events at once
def test_two_receivers_take_an_event_once(tmp_path: Path) -> None:
    with live.receiver(tmp_path) as one, live.receiver(tmp_path) as two, httpx.Client() as client:

        def send(number: int) -> tuple[int, str, str]:
            url = (one.url, two.url)[number % 2]
            answer = post(client, url, f"event-{number // 8}")
            return answer.status_code, answer.json()["status"], answer.json()["id"]

        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(send, range(8 * 25)))
    assert {status for status, _, _ in answers} == {202}
    assert Counter(word for _, word, _ in answers) == {"accepted": 25, "duplicate": 7 * 25}
    assert len({id for _, _, id in answers}) == 25
    assert len(one.rows()) == 25


def kills(folder: Path, times: int) -> tuple[set[str], set[str]]:
    """The ids in replies and the ids of rows, after a receiver was killed several times."""
    given: set[str] = set()
    for attempt in range(times):
        with live.receiver(folder) as running, httpx.Client() as client:
            end = threading.Timer(0.3, running.process.kill)
            number = 0
            try:
                while True:
                    answer = post(client, running.url, f"{attempt}-{number}")
                    assert answer.status_code == 202
                    given.add(answer.json()["id"])
                    number += 1
                    if number == 1:  # a busy machine can take long until then
                        end.start()
            except httpx.TransportError:
                pass
            end.join()
    assert given
    return given, {row[0] for row in running.rows("uuid")}


@pytest.mark.soak
def test_a_killed_receiver_keeps_every_acknowledged_event(tmp_path: Path) -> None:
    given, kept = kills(tmp_path, 1)
    assert given <= kept
    assert len(kept - given) <= 1  # the one without a reply


@pytest.mark.soak
def test_a_receiver_killed_twenty_times_keeps_every_event(tmp_path: Path) -> None:
    given, kept = kills(tmp_path, 20)
    assert given <= kept


def test_sigterm_ends_it_in_order(tmp_path: Path) -> None:
    with live.receiver(tmp_path) as running, httpx.Client() as client:
        assert client.get(running.url + "/healthz").json() == {"status": "ok"}
        ready = client.get(running.url + "/readyz")
        assert (ready.status_code, ready.json()["inbox"]) == (200, "ok")
        post(client, running.url, "one")
        # Prefect is down: the receiver accepts events, and reports the problem.
        end = time.monotonic() + 240
        while not (error := running.rows("error_message")[0][0]) and time.monotonic() < end:
            time.sleep(0.1)
        assert error
        running.process.terminate()
        assert running.process.wait(240) == 0
    assert [row[6] for row in running.rows()] == ["waiting"]


@pytest.mark.soak
def test_a_missing_body_is_not_waited_for(tmp_path: Path) -> None:
    hook = webhooks.HOOKS["bearer"]
    with live.receiver(tmp_path) as running:
        host, port = running.url.removeprefix("http://").split(":")
        lines = [
            f"POST {hook.path} HTTP/1.1",
            "host: x",
            "content-type: application/json",
            "content-length: 9",
        ]
        head = "\r\n".join([*lines, "", "{"])
        with socket.create_connection((host, int(port)), timeout=60) as slow:
            slow.sendall(head.encode())
            assert b"408" in slow.recv(100)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("change", "expected", "code"),
    [
        ({"PREFECT_API_URL": ""}, "no Prefect server is configured", UsageError),
        ({"TOKEN": ""}, "TOKEN is not set", UsageError),
        ({"CKPTCORE_CATALOG_URL": "postgresql+psycopg://127.0.0.1:9/none"}, "catalog", CatalogError),
    ],
)
def test_an_invalid_receiver_does_not_start(
    change: dict[str, str], expected: str, code: type[CkptError], tmp_path: Path
) -> None:
    (tmp_path / "receiver.toml").write_text(webhooks.CONFIG)
    env = (
        os.environ
        | webhooks.SECRETS
        | {
            "CKPTCORE_CATALOG_URL": str(tmp_path / "catalog.sqlite"),
            "PREFECT_API_URL": live.NOWHERE,
            "PREFECT_HOME": str(tmp_path / "prefect"),
            "PREFECT_PROFILES_PATH": str(tmp_path / "none.toml"),
        }
    )
    done = subprocess.run(
        [sys.executable, "-m", "deployments.receiver", str(tmp_path / "receiver.toml"), "--port", "0"],
        cwd=live.ROOT,
        env=env | change,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    known = {code, *code.__subclasses__()}  # an unreachable catalog has its own code
    assert done.returncode in {one.exit_code for one in known}, done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert webhooks.NEW_TOKEN not in done.stderr


@pytest.mark.soak  # test_parameters does what it does
def test_the_configuration_can_be_checked_without_serving(tmp_path: Path) -> None:
    (tmp_path / "receiver.toml").write_text(webhooks.CONFIG)
    env = os.environ | webhooks.SECRETS | {"CKPTCORE_CATALOG_URL": str(tmp_path / "catalog.sqlite")}
    command = [sys.executable, "-m", "deployments.receiver", str(tmp_path / "receiver.toml"), "--check"]
    done = subprocess.run(
        command, cwd=live.ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
