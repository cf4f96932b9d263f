"""Prefect answers oddly: who reads readyz, the metric, the inbox or the page learns of it, and why."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import uuid4

import pytest
import webhooks
from catalog_page import access
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient
from typer.testing import CliRunner

from ckptcore.catalog import open_catalog
from ckptcore.catalog.queues import InboxEvent, inbox
from ckptcore.cli.catalog import app as cli
from ckptcore.page.app import make_page
from deployments.metrics import ReceiverMetrics
from deployments.receiver.app import make_app
from deployments.receiver.dispatch import STUCK_SECONDS
from deployments.receiver.inbox import EventQueues
from deployments.receiver.serve import StepThread, steps_of
from deployments.receiver.settings import Sender

NOW = datetime.fromtimestamp(webhooks.NOW, UTC)
DAY = 86400
JSON = {"content-type": "application/json"}
HTML = {"content-type": "text/html"}
LOGIN = "<!doctype html><title>Log in</title>"
Answer = tuple[int, dict[str, str], str] | None  # None: the connection is closed


@dataclass
class Prefect:
    """A server that answers as Prefect's does, but for `odd`.

    odd: the answers to requests whose method and path begin so. runs: by id. asked: what was asked.
    """

    url: str = ""
    odd: dict[str, Answer] = field(default_factory=dict)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    deployment: dict[str, Any] = field(default_factory=dict)

    def answer(self, method: str, path: str, body: Any) -> Answer:
        self.asked.append(f"{method} {path}")
        for beginning, odd in self.odd.items():
            if f"{method} {path}".startswith(beginning):
                return odd
        if path == "/api/deployments/name/arrived/arrived":
            return 200, JSON, json.dumps(self.deployment)
        if path.endswith("/create_flow_run"):
            key = body["idempotency_key"]
            known = next((run for run in self.runs.values() if run["idempotency_key"] == key), None)
            run = known or self._begin(key)
            return 201, JSON, json.dumps(run)
        if path == "/api/flow_runs/filter":
            asked = body["flow_runs"]["id"]["any_"]
            return 200, JSON, json.dumps([self.runs[id] for id in asked if id in self.runs])
        if path.startswith("/api/flow_runs/") and path.rpartition("/")[2] in self.runs:
            return 200, JSON, json.dumps(self.runs[path.rpartition("/")[2]])
        if path.startswith("/api/deployments/") or path == "/api/events":
            return (200, JSON, json.dumps(self.deployment)) if method == "GET" else (204, {}, "")
        return 404, JSON, '{"detail": "Not Found"}'

    def _begin(self, key: str) -> dict[str, Any]:
        run = {"id": str(uuid4()), "flow_id": str(uuid4()), "name": "a", "idempotency_key": key}
        state = {"id": str(uuid4()), "type": "SCHEDULED", "name": "Scheduled", "timestamp": NOW.isoformat()}
        self.runs[run["id"]] = run | {"deployment_id": self.deployment["id"], "state": state}
        return self.runs[run["id"]]

    def end(self, kind: str) -> None:
        """Let all runs end."""
        for run in self.runs.values():
            run["state"] |= {"type": kind, "name": kind.title()}


@pytest.fixture(scope="module")
def server() -> Iterator[Prefect]:
    fake = Prefect()
    fake.deployment = {"id": str(uuid4()), "name": "arrived", "flow_id": str(uuid4())}
    names = ("source", "destination", "root", "run", "step")
    fake.deployment["parameter_openapi_schema"] = {"properties": {name: {} for name in names}}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", "0")))
            answer = fake.answer(self.command, self.path, json.loads(body) if body else None)
            if answer is None:
                self.close_connection = True
                return
            status, headers, text = answer
            self.send_response(status)
            for name, value in (headers | {"content-length": str(len(text.encode()))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.url = f"http://127.0.0.1:{server.server_address[1]}/api"
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield fake
    server.shutdown()
    thread.join()
    server.server_close()


@dataclass
class Running:
    """A receiver whose time is set, and that works only on request."""

    path: Path
    loop: StepThread
    now: list[datetime]
    client: TestClient
    page: TestClient
    registry: CollectorRegistry

    def announce(self, hook: webhooks.Hook) -> None:
        answer = self.client.post(hook.path, content=hook.body, headers=hook.headers)
        assert answer.json()["status"] == "accepted"

    def after(self, *seconds: float) -> list[str]:
        """Work at times after the start, as its threads do; return why no events are started, or ""."""
        found = []
        for each in seconds:
            self.now[0] = NOW + timedelta(seconds=each)
            self.loop.round()
            answer = self.client.get("/readyz")
            assert (answer.status_code, answer.json()["inbox"]) == (200, "ok")  # events are still accepted
            starting = str(answer.json()["starting"])
            metric = self.registry.get_sample_value("ckptcore_receiver_starting")
            assert metric == (1.0 if starting == "ok" else 0.0)
            found.append("" if starting == "ok" else starting)
        return found

    def rows(self, state: str | None = None) -> tuple[InboxEvent, ...]:
        with open_catalog(str(self.path)) as catalog, catalog.reading() as conn:
            return inbox.listed(conn, state)


@pytest.fixture(scope="module")
def receiver(
    server: Prefect, senders: dict[str, Sender], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    from deployments.receiver.prefect_runs import PrefectRuns

    now, path, registry = [NOW], tmp_path_factory.mktemp("answers") / "catalog.sqlite", CollectorRegistry()
    with temporary_settings({PREFECT_API_URL: server.url, PREFECT_CLIENT_MAX_RETRIES: 0}):
        runs, rows, box = PrefectRuns(), EventQueues(str(path)), EventQueues(str(path))
        loop = StepThread(steps_of(rows, runs, senders, {}, lambda: now[0]), clock=lambda: now[0].timestamp())
        ReceiverMetrics(registry, loop.trouble)
        app = make_app(senders, box, Silent(loop), clock=lambda: now[0].timestamp())
        with TestClient(app) as client, open_catalog(str(path)) as catalog:
            page = TestClient(make_page(catalog, access()), client=("127.0.0.1", 5000))
            yield Running(path, loop, now, client, page, registry)
        rows.close()
        runs.close()


class Silent:
    """Background work that does not begin by itself."""

    def __init__(self, loop: StepThread) -> None:
        self.trouble = loop.trouble

    def start(self) -> None:
        pass

    wake = stop = start


@pytest.fixture
def prefect(server: Prefect) -> Prefect:
    server.odd.clear()
    server.runs.clear()
    return server


@pytest.fixture
def running(receiver: Running, prefect: Prefect) -> Running:
    webhooks.Rows(receiver.path).clear()
    assert receiver.after(0) == [""]
    return receiver


def ok(text: str) -> Answer:
    return 200, JSON, text


DEPLOYMENT, CREATE, RUN, STATES = (
    "GET /api/deployments/name",
    "POST /api/deployments/",
    "GET /api/flow_runs/",
    "POST /api/flow_runs/filter",
)
WRONG_ID = json.dumps({"id": str(uuid4()), "flow_id": str(uuid4()), "name": "a"})
# What Prefect answers, and what the reason says.
ANSWERS: dict[str, tuple[dict[str, Answer], str]] = {
    "401": ({"": (401, JSON, '{"exception_message": "Unauthorized"}')}, "replied 401"),
    "403": ({"": (403, JSON, '{"detail": "Forbidden"}')}, "replied 403"),
    "404 for everything": ({"": (404, JSON, '{"detail": "Not Found"}')}, "has no deployment arrived/arrived"),
    "409 for a start": ({CREATE: (409, JSON, '{"detail": "Conflict"}')}, "replied 409"),
    "422 for a start": ({CREATE: (422, JSON, '{"detail": "no"}')}, "replied 422"),
    "429": ({"": (429, JSON | {"retry-after": "3600"}, "{}")}, "replied 429"),
    "500": ({"": (500, JSON, "{}")}, "replied 500"),
    "503 for maintenance": ({"": (503, JSON | {"prefect-maintenance": "true"}, "{}")}, "replied 503"),
    "302 to a login": (
        {"GET /login": (200, HTML, LOGIN), "": (302, {"location": "/login"}, "")},
        "text/html",
    ),
    "302 for ever": ({"": (302, {"location": "/api/again"}, "")}, "redirects"),
    "HTML": ({"": (200, HTML, LOGIN)}, "text/html instead of JSON"),
    "an empty body": ({"": ok("")}, "JSONDecodeError"),
    "another form": ({"": ok("[]")}, "validation error"),
    "a broken body": ({CREATE: (201, JSON, '{"id": "')}, "JSONDecodeError"),
    "a wrong id": ({CREATE: (201, JSON, WRONG_ID)}, "does not know it"),
    "no id": ({CREATE: (201, JSON, json.dumps({"id": "7", "flow_id": "8"}))}, "validation error"),
    "no answer": ({"": None}, "does not answer"),
    "401 for states": ({STATES: (401, JSON, "{}")}, "cannot be followed: Prefect replied 401"),
    "HTML for states": ({STATES: (200, HTML, LOGIN)}, "text/html instead of JSON"),
    "states of other runs": ({STATES: ok(f"[{WRONG_ID}]")}, "was asked for other runs"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_readyz_is_red_within_two_minutes_with_the_reason(
    name: str, prefect: Prefect, running: Running
) -> None:
    odd, reason = ANSWERS[name]
    prefect.odd |= odd
    running.announce(webhooks.HOOKS["bearer"])
    running.after(0, 8, 60)
    # From then on, also while nothing is tried, and as long as nobody cures it.
    assert [trouble for trouble in running.after(62, 120, 7200, 7210) if reason not in trouble] == []
    # Whoever looks at the inbox or the page reads it, too; the page may be another process.
    [row] = running.rows()
    assert reason in (row.error_message or "")
    page = html.unescape(running.page.get("/inbox").text)
    assert f"1 event waits since 2025-10-09 08:53 UTC, next try {row.due_at:%H:%M:%S}" in page
    assert page.count(reason) == 2
    # When Prefect answers well, the event is started, and nothing is in trouble.
    prefect.odd.clear()
    assert running.after(2 * DAY) == [""]
    prefect.end("COMPLETED")
    assert running.after(2 * DAY + 60) == [""]
    assert [row.error_message for row in running.rows("done")] == [None]
    assert len(prefect.runs) == 1


def test_the_command_says_that_events_wait(prefect: Prefect, running: Running) -> None:
    prefect.odd |= ANSWERS["401"][0]
    running.announce(webhooks.HOOKS["bearer"])
    running.after(0)
    listed = CliRunner().invoke(cli, ["inbox", "list", "--catalog", str(running.path)])
    assert "1 event waits since 2025-10-09 08:53 UTC, next try 08:53:22: Prefect replied 401" in listed.stderr


def test_a_moment_without_an_answer_is_no_trouble(prefect: Prefect, running: Running) -> None:
    running.announce(webhooks.HOOKS["bearer"])
    prefect.odd[CREATE] = (409, JSON, "{}")
    assert set(running.after(0, 2, 8, 20)) == {""}
    prefect.odd.clear()
    assert set(running.after(24, 62, 84, 120)) == {""}


def test_one_run_that_cannot_be_followed_leaves_the_others_alone(prefect: Prefect, running: Running) -> None:
    for step in range(5):
        running.announce(webhooks.HOOKS["bearer"].naming(f"/runs/llama/step-{step}"))
    running.after(0)
    odd = next(iter(prefect.runs.values()))
    prefect.end("COMPLETED")
    odd["state"] |= {"type": "ANOTHER"}  # of a newer server
    webhooks.Rows(running.path).change(
        f"UPDATE inbox SET flow_run_id = 'x' WHERE flow_run_id = '{list(prefect.runs)[1]}'"
    )
    [trouble] = running.after(62)
    assert len(running.rows("done")) == 3
    assert trouble.count("1 event waits") == 2
    for reason in ("cannot be followed: Prefect's answer cannot be used", "'x' is not the id of a run"):
        assert reason in trouble


def test_a_step_that_does_not_end_is_trouble(running: Running) -> None:
    troubles = []

    def step() -> int:
        for seconds in (STUCK_SECONDS - 1, STUCK_SECONDS + 1):
            running.now[0] = NOW + timedelta(seconds=seconds)
            troubles.append(loop.trouble())
        return 0

    loop = StepThread({"start": step}, clock=lambda: running.now[0].timestamp())
    loop.round()
    assert troubles == ["", f"start: it has not ended for {STUCK_SECONDS + 1:.0f} s"]
    assert loop.trouble() == ""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_ended_is_trouble() -> None:
    class Killed(BaseException):
        """What nobody catches."""

    def step() -> int:
        raise Killed

    loop = StepThread({"start": step})
    assert loop.trouble() == ""
    loop.start()
    loop._thread.join(60)
    assert loop.trouble() == "start: its thread has ended; restart the receiver"
    loop.stop()
    assert loop.trouble() == ""
