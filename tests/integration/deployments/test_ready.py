"""Readiness, and the replies to senders while events cannot be accepted."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest
from starlette.testclient import TestClient
from webhooks import HOOKS, NOW, Hook, Rows

from deployments.receiver import app as keeper
from deployments.receiver.app import make_app
from deployments.receiver.inbox import EventQueues
from deployments.receiver.settings import Sender


def send(client: TestClient, hook: Hook) -> httpx.Response:
    return client.post(hook.path, content=hook.body, headers=hook.headers)


def test_without_its_database_it_asks_for_a_retry(
    client: TestClient, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "FRESH", 0.0)
    assert client.get("/readyz").status_code == 200
    rows.change("ALTER TABLE inbox RENAME TO away")
    try:
        answer = send(client, HOOKS["bearer"])
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert answer.json()["message"] == "the inbox cannot store the event now; send it again"
        assert client.get("/readyz").status_code == 503
        assert client.get("/healthz").status_code == 200
    finally:
        rows.change("ALTER TABLE away RENAME TO inbox")
    assert send(client, HOOKS["bearer"]).json()["status"] == "accepted"


def test_readiness_checks_do_not_delay_events(
    senders: dict[str, Sender], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "FRESH", 300.0)  # with a stopped clock
    monkeypatch.setattr(keeper, "SECONDS", 300.0)
    asked: list[float] = []

    class Slow(EventQueues):
        def check(self) -> None:
            asked.append(time.monotonic())
            time.sleep(0.2)
            super().check()

    async def many() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://receiver") as client:
            ready = [asyncio.create_task(client.get("/readyz")) for _ in range(100)]
            await asyncio.sleep(0.05)
            hook = HOOKS["bearer"]
            answer = await client.post(hook.path, content=hook.body, headers=hook.headers)
            assert answer.status_code == 202
            assert len(asked) == 1  # the event waited for one check, not for a hundred
            assert {one.status_code for one in await asyncio.gather(*ready)} == {200}
            assert (await client.get("/readyz")).status_code == 200  # cached
            assert len(asked) == 1
            monkeypatch.setattr(keeper, "FRESH", 0.0)
            assert (await client.get("/readyz")).status_code == 200
            assert len(asked) == 2

    box = Slow(url)
    app = make_app(senders, box, clock=lambda: NOW)
    try:
        asyncio.run(many())
    finally:
        box.close()


def test_a_database_that_does_not_answer_is_not_waited_for(
    client: TestClient, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "SECONDS", 0.3)
    with rows.locked():
        assert send(client, HOOKS["bearer"]).status_code == 503
    monkeypatch.setattr(keeper, "SECONDS", 300.0)
    end = time.monotonic() + 120
    while not rows() and time.monotonic() < end:
        time.sleep(0.05)
    # It was written after all. The repeated event is a duplicate.
    assert send(client, HOOKS["bearer"]).json()["status"] == "duplicate"
    assert len(rows()) == 1
