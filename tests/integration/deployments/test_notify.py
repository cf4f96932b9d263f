"""Notify: messages arrive signed, are tried again, are given up, and keep nobody waiting."""

from __future__ import annotations

import sqlite3
import threading
import time
from datetime import UTC, datetime, timedelta

import httpx
import pytest
import webhooks

from ckptcore.catalog import open_catalog
from ckptcore.catalog.queues import outbox as catalog_outbox
from deployments.receiver.inbox import LEASE, EventQueues
from deployments.receiver.serve import SCHEDULE, TIMEOUT, StepThread, send_due
from deployments.receiver.settings import NotifyTarget

TARGETS = {name: NotifyTarget(url=f"https://{name}.example/hook", secret="WHSEC") for name in ("all", "good")}


def put(url: str) -> None:
    """A message to each target."""
    body = {"type": "conversion.succeeded", "data": {"uri": webhooks.URI}}
    with open_catalog(url) as catalog, catalog.queueing() as conn:
        for name in TARGETS:
            now = datetime.fromtimestamp(webhooks.NOW, UTC)
            catalog_outbox.put(conn, now, name, "e1:succeeded", type=str(body["type"]), body=body)


def outbox(url: str, columns: str = "endpoint, state") -> list[tuple[str, str]]:
    connection = sqlite3.connect(url.removeprefix("sqlite:///"))
    found = connection.execute(f"SELECT {columns} FROM outbox ORDER BY id").fetchall()
    connection.close()
    return found


def test_failed_messages_are_retried_with_the_same_id(box: EventQueues, url: str) -> None:
    put(url)
    only = {"all": TARGETS["all"]}  # the other message belongs to another receiver
    ids, now = set(), datetime.now(UTC)
    answers: list[int | Exception] = [500, httpx.ConnectError("refused"), 302, 429, 200]

    def answer(request: httpx.Request) -> httpx.Response:
        ids.add(request.headers["webhook-id"])
        one = answers.pop(0)
        if isinstance(one, Exception):
            raise one
        return httpx.Response(one, headers={"location": "https://elsewhere.example"})

    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        for wait in (0, *SCHEDULE[:4]):
            now += timedelta(seconds=wait)
            send_due(box, only, client, webhooks.SECRETS, now)
    assert answers == []
    assert len(ids) == 1
    assert outbox(url) == [("all", "done"), ("good", "waiting")]


@pytest.mark.parametrize("broken", ["http://[::1", "silent", "no secret"])
def test_a_broken_or_silent_target_does_not_delay_others(broken: str, box: EventQueues, url: str) -> None:
    targets = {
        "all": NotifyTarget(url=broken if "[" in broken else "https://all.example", secret="WHSEC"),
        "good": TARGETS["good"],
    }
    if broken == "no secret":
        targets["all"] = targets["all"].model_copy(update={"secret": "NOWHERE"})
    put(url)
    good = threading.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "good.example":
            good.set()
        elif not good.wait(120):  # until the other target was notified, in the same round
            raise AssertionError("one after the other")
        else:
            raise httpx.ReadTimeout("silent")
        return httpx.Response(204)

    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        now = datetime.now(UTC)
        for tries in (1, 2):
            assert send_due(box, targets, client, webhooks.SECRETS, now) == 3 - tries
            now += timedelta(seconds=SCHEDULE[0])
    assert outbox(url) == [("all", "waiting"), ("good", "done")]
    (attempts, why), _ = outbox(url, "attempts, error_message")
    assert int(attempts) == 2
    assert why.split(":")[0] == {"silent": "ReadTimeout", "no secret": "KeyError"}.get(broken, "InvalidURL")


def test_a_round_of_messages_ends_before_its_lease() -> None:
    assert timedelta(seconds=3 * TIMEOUT) < LEASE  # to connect, to send, to be answered


@pytest.mark.parametrize(("status", "tries"), [(410, 1), (500, len(SCHEDULE) + 1)])
def test_messages_are_given_up(status: int, tries: int, box: EventQueues, url: str) -> None:
    put(url)
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        return httpx.Response(status)

    now = datetime.now(UTC)
    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        for _ in range(20):
            now += timedelta(days=2)
            send_due(box, TARGETS, client, webhooks.SECRETS, now)
    assert asked.count("all.example") == tries
    assert {row[1] for row in outbox(url)} == {"failed"}


def test_starts_do_not_wait_for_messages() -> None:
    silent, sending, started = threading.Event(), threading.Event(), threading.Event()

    def send() -> int:
        sending.set()
        silent.wait(300)
        raise OSError("no answer")

    def start() -> int:
        if sending.is_set():
            started.set()
        return 0

    loop = StepThread({"start": start}, idle=0.02, beside=StepThread({"notify": send}, idle=0.02))
    loop.start()
    try:
        assert sending.wait(120)
        assert started.wait(120)
        silent.set()
        while loop.trouble() != "notify: OSError: no answer":
            time.sleep(0.01)
    finally:
        silent.set()
        loop.stop()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("receiver-")]
