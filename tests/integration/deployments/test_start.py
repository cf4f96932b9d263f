"""Start and notify: rows become runs, ended runs become messages, and nothing is lost or done twice."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import webhooks
from standardwebhooks import Webhook

from ckptcore.catalog import CheckpointFacts, ConversionFacts, open_catalog
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.conversions import record_verdict
from ckptcore.catalog.queues import inbox
from ckptcore.page.http_errors import RequestRefused
from deployments.receiver.dispatch import (
    MAX_ATTEMPTS,
    PrefectUnavailable,
    RunState,
    outcome_of,
    require_progress,
    work,
)
from deployments.receiver.event import Event
from deployments.receiver.inbox import LEASE, EventQueues
from deployments.receiver.serve import RootsRefresher, StepThread, send_due
from deployments.receiver.settings import NotifyTarget, Sender, flow_run_for, load

NOW = datetime.fromtimestamp(webhooks.NOW, UTC)
TARGETS = {
    "all": NotifyTarget(url="https://all.example/hook", secret="WHSEC"),
    "good": NotifyTarget(url="https://good.example/hook", secret="WHSEC", events=["conversion.succeeded"]),
}


class FakeRuns:
    """A fake of Prefect; runs by idempotency key."""

    def __init__(self) -> None:
        self.runs: dict[str, str] = {}
        self.given: list[dict[str, Any]] = []
        self.now: dict[str, RunState] = {}
        self.error: Exception | None = None
        self.sent_events: list[str] = []
        self.resumed: list[str] = []
        self.given_up: list[tuple[str, str]] = []

    def resume(self, id: str, why: str) -> None:
        self.resumed.append(id)

    def give_up(self, id: str, why: str) -> None:
        self.given_up.append((id, why))

    def start(
        self, deployment: str, parameters: Mapping[str, Any], *, key: str, name: str, tags: Sequence[str]
    ) -> str:
        if self.error is not None:
            raise self.error
        self.given.append({"deployment": deployment, "name": name, "tags": list(tags), **parameters})
        return self.runs.setdefault(key, f"run-{len(self.runs)}")

    def tell(self, event: str, uri: str, payload: Mapping[str, Any]) -> None:
        assert uri == webhooks.URI or uri.startswith("/elsewhere")
        self.sent_events.append(event)
        raise ConnectionError("events are away")  # which must not affect anything else

    def states(self, ids: Sequence[str]) -> Mapping[str, RunState]:
        return {id: self.now.get(id, RunState("SCHEDULED", NOW, "")) for id in ids}


@pytest.fixture
def runs() -> FakeRuns:
    return FakeRuns()


def event(id: str = "e1", source: str = "slurm") -> Event:
    return Event(source=source, event_id=id, type="", announces=True, uri=webhooks.URI, run="llama", step=7)


def state(url: str, columns: str = "state, flow_run_id, error_message") -> list[tuple[Any, ...]]:
    return webhooks.Rows(Path(url.removeprefix("sqlite:///")))(columns)


def outbox(url: str) -> list[tuple[str, str]]:
    connection = sqlite3.connect(url.removeprefix("sqlite:///"))
    found = connection.execute("SELECT endpoint, state FROM outbox ORDER BY id").fetchall()
    connection.close()
    return found


def test_an_event_becomes_one_run_and_its_end_two_messages(
    box: EventQueues, url: str, runs: FakeRuns, senders: dict[str, Sender]
) -> None:
    box.put([(event(), webhooks.URI, "{}")], NOW)
    assert work(box, runs, senders, TARGETS, NOW) == 1
    assert runs.given == [
        {
            "deployment": "arrived/arrived",
            "name": "slurm llama/step-7",
            "tags": ["webhook", "source:slurm"],
            "source": webhooks.URI,
            "destination": "/exports/llama/step-7",
            "root": "/runs",
            "run": "llama",
            "step": 7,
        }
    ]
    assert state(url) == [("waiting", "run-0", None)]
    assert work(box, runs, senders, TARGETS, NOW + timedelta(seconds=1)) == 0  # not due yet
    later = NOW + timedelta(seconds=10)
    assert work(box, runs, senders, TARGETS, later) == 0  # inspected: it still runs
    runs.now["run-0"] = RunState("COMPLETED", later, "all states completed")
    assert work(box, runs, senders, TARGETS, later + timedelta(seconds=60)) == 1
    assert state(url) == [("done", "run-0", None)]
    assert outbox(url) == [("all", "waiting"), ("good", "waiting")]
    assert work(box, runs, senders, TARGETS, later + timedelta(days=1)) == 0
    assert len(runs.given) == 1
    assert runs.sent_events == ["ckptcore.checkpoint.announced", "ckptcore.conversion.succeeded"]


def test_an_event_says_what_its_run_waits_for(
    box: EventQueues, url: str, runs: FakeRuns, senders: dict[str, Sender]
) -> None:
    """A checkpoint that is not there yet is no trouble of the receiver; its inbox says why and until when."""
    box.put([(event(), webhooks.URI, "{}")], NOW)
    work(box, runs, senders, TARGETS, NOW)
    why = "next try at 12:00:00 UTC: not-complete: .metadata is missing"
    runs.now["run-0"] = RunState("SCHEDULED", NOW, why)
    work(box, runs, senders, TARGETS, NOW + timedelta(minutes=1))
    assert state(url) == [("waiting", "run-0", f"its run waits: {why}")]
    assert require_progress(box, senders, NOW + timedelta(hours=1)) == 0
    runs.now["run-0"] = RunState("RUNNING", NOW, "")
    work(box, runs, senders, TARGETS, NOW + timedelta(hours=1))
    assert state(url) == [("waiting", "run-0", None)]


def test_a_failed_run_is_notified_to_subscribed_targets(
    box: EventQueues, url: str, runs: FakeRuns, senders: dict[str, Sender]
) -> None:
    box.put([(event(), webhooks.URI, "{}")], NOW)
    work(box, runs, senders, TARGETS, NOW)
    runs.now["run-0"] = RunState("FAILED", NOW, "damaged: 3 tensors are short")
    work(box, runs, senders, TARGETS, NOW + timedelta(minutes=1))
    assert state(url) == [("failed", "run-0", "damaged: 3 tensors are short")]
    assert outbox(url) == [("all", "waiting")]


def test_a_retried_event_gets_its_own_run_and_notification(
    box: EventQueues, url: str, runs: FakeRuns, senders: dict[str, Sender]
) -> None:
    box.put([(event(), webhooks.URI, "{}")], NOW)
    now = NOW
    for n, kind in enumerate(("FAILED", "FAILED", "COMPLETED")):
        work(box, runs, senders, TARGETS, now)
        assert state(url)[0][:2] == ("waiting", f"run-{n}")
        runs.now[f"run-{n}"] = RunState(kind, now, "the disk is full")
        now += timedelta(minutes=1)
        work(box, runs, senders, TARGETS, now)
        if kind == "FAILED":
            with open_catalog(url) as catalog, catalog.queueing() as conn:
                inbox.retry(conn, now, None)
    assert state(url) == [("done", "run-2", None)]
    assert [endpoint for endpoint, _ in outbox(url)] == ["all", "all", "all", "good"]


def test_a_retried_event_gets_the_full_number_of_tries(
    box: EventQueues, url: str, runs: FakeRuns, senders: dict[str, Sender]
) -> None:
    box.put([(event(), webhooks.URI, "{}")], NOW)
    runs.error, now = ConnectionError("refused"), NOW
    for times in range(2):
        for _ in range(MAX_ATTEMPTS):
            assert work(box, runs, senders, TARGETS, now) == 1
            now += timedelta(hours=1)
        assert state(url, "state, attempts") == [("failed", MAX_ATTEMPTS * (times + 1))]
        with open_catalog(url) as catalog, catalog.queueing() as conn:
            inbox.retry(conn, now, None)


@pytest.mark.parametrize("when", ["before the start", "before the row says so"])
def test_a_process_that_dies_loses_nothing(
    when: str, box: EventQueues, url: str, runs: FakeRuns, senders: dict[str, Sender]
) -> None:
    box.put([(event(), webhooks.URI, "{}")], NOW)

    class Killed(BaseException):
        """What nobody catches."""

    if when == "before the start":
        runs.error = Killed()  # type: ignore[assignment]
    else:
        box.running = lambda *_: (_ for _ in ()).throw(Killed())  # type: ignore[method-assign]
    with pytest.raises(Killed):
        work(box, runs, senders, TARGETS, NOW)
    runs.error = None

    other = EventQueues(url)
    assert work(other, runs, senders, TARGETS, NOW + LEASE / 2) == 0  # the lease of the dead one
    assert work(other, runs, senders, TARGETS, NOW + LEASE) == 1
    assert list(runs.runs.values()) == ["run-0"]
    assert state(url) == [("waiting", "run-0", None)]
    other.close()


def test_while_prefect_is_away_events_wait_and_the_last_failure_is_notified(
    box: EventQueues, url: str, runs: FakeRuns, senders: dict[str, Sender]
) -> None:
    box.put([(event(), webhooks.URI, "{}")], NOW)
    runs.error = ConnectionError("refused")
    now, waits = NOW, []
    for _ in range(MAX_ATTEMPTS - 1):
        assert work(box, runs, senders, TARGETS, now) == 1
        ((stage, run, why, due),) = state(url, "state, flow_run_id, error_message, due_at")
        assert (stage, run, why) == ("waiting", None, "ConnectionError: refused")
        before, now = now, datetime.fromisoformat(due).replace(tzinfo=UTC)
        waits.append((now - before).total_seconds())
    assert waits[:7] == [2, 5, 15, 60, 300, 900, 3600]
    assert sum(waits) > 86400
    work(box, runs, senders, TARGETS, now)
    assert state(url)[0][0] == "failed"
    assert outbox(url) == [("all", "waiting")]


def test_one_try_per_round_while_prefect_does_not_answer(
    box: EventQueues, url: str, runs: FakeRuns, senders: dict[str, Sender]
) -> None:
    box.put([(event(f"e{number}"), webhooks.URI, "{}") for number in range(5)], NOW)
    tries: list[str] = []

    def start(deployment: str, parameters: Mapping[str, Any], *, key: str, **_: Any) -> str:
        tries.append(key)
        raise PrefectUnavailable("Prefect does not answer")

    runs.start = start  # type: ignore[method-assign]
    with pytest.raises(PrefectUnavailable):
        work(box, runs, senders, TARGETS, NOW)
    assert len(tries) == 1
    assert state(url) == [("waiting", None, "Prefect does not answer")] * 5


def test_a_changed_configuration_applies_at_the_start(
    box: EventQueues, url: str, runs: FakeRuns, senders: dict[str, Sender]
) -> None:
    box.put([(event(), "/elsewhere/step-7", "{}")], NOW)
    assert work(box, runs, senders, {}, NOW) == 1
    assert runs.given == []
    assert state(url)[0][0] == "failed"
    assert "not below an allowed root" in state(url)[0][2]


def test_an_event_of_another_receivers_source_is_left_to_it(
    box: EventQueues, url: str, runs: FakeRuns, senders: dict[str, Sender]
) -> None:
    box.put([(event(), webhooks.URI, "{}")], NOW)
    others = {name: sender for name, sender in senders.items() if name != "slurm"}
    now = NOW
    for _ in range(2 * MAX_ATTEMPTS):
        assert work(box, runs, others, TARGETS, now) == 0
        now += timedelta(minutes=1)
    assert state(url, "state, flow_run_id, attempts, error_message") == [("waiting", None, 0, None)]
    assert work(box, runs, senders, TARGETS, now) == 1
    assert state(url)[0][:2] == ("waiting", "run-0")
    # The targets of its own receiver are notified of its end.
    runs.now["run-0"] = RunState("COMPLETED", now, "")
    assert work(box, runs, others, {}, now + timedelta(hours=1)) == 0
    assert work(box, runs, senders, TARGETS, now + timedelta(hours=1)) == 1
    assert outbox(url) == [("all", "waiting"), ("good", "waiting")]


@pytest.mark.parametrize(
    ("kind", "age", "expected"),
    [
        ("COMPLETED", 0, "succeeded"),
        ("FAILED", 0, "failed"),
        ("CANCELLED", 0, "failed"),
        ("CRASHED", 60, None),
        ("CRASHED", 3600, "failed"),
        ("RUNNING", 10**6, None),
        ("SCHEDULED", 0, None),
    ],
)
def test_the_outcome_of_a_run(kind: str, age: int, expected: str | None) -> None:
    assert outcome_of(RunState(kind, NOW - timedelta(seconds=age), ""), NOW) == expected
    assert outcome_of(None, NOW) == "failed"


def test_while_prefect_is_away_runs_are_inspected_soon(
    box: EventQueues, url: str, runs: FakeRuns, senders: dict[str, Sender], monkeypatch: pytest.MonkeyPatch
) -> None:
    box.put([(event(), webhooks.URI, "{}")], NOW)
    work(box, runs, senders, TARGETS, NOW)
    now = NOW + timedelta(minutes=1)

    def away(ids: Sequence[str]) -> Mapping[str, RunState]:
        raise PrefectUnavailable("the connection was refused")

    with monkeypatch.context() as patch:
        patch.setattr(runs, "states", away)
        with pytest.raises(PrefectUnavailable):
            work(box, runs, senders, TARGETS, now)
    runs.now["run-0"] = RunState("COMPLETED", now, "done")
    assert work(box, runs, senders, TARGETS, now + timedelta(seconds=5)) == 1
    assert state(url) == [("done", "run-0", None)]


@pytest.mark.parametrize(
    ("kind", "seconds", "begun", "resumed"),
    [
        ("CRASHED", 30, 1, False),
        ("CRASHED", 60, 1, True),
        ("PENDING", 100, 0, False),
        ("PENDING", 200, 0, True),
        ("RUNNING", 100, 1, False),
        ("RUNNING", 130, 1, True),
        ("SCHEDULED", 3000, 0, False),
    ],
)
def test_a_run_that_automations_missed_is_resumed(
    kind: str,
    seconds: int,
    begun: int,
    resumed: bool,
    box: EventQueues,
    url: str,
    runs: FakeRuns,
    senders: dict[str, Sender],
) -> None:
    box.put([(event(), webhooks.URI, "{}")], NOW)
    work(box, runs, senders, TARGETS, NOW)
    now = NOW + timedelta(hours=1)
    runs.now["run-0"] = RunState(kind, now - timedelta(seconds=seconds), "", begun, timedelta(seconds=30))
    work(box, runs, senders, TARGETS, now)
    assert runs.resumed == ["run-0"] * resumed
    assert state(url) == [("waiting", "run-0", None)]


@pytest.mark.parametrize("kind", ["CRASHED", "PENDING", "RUNNING"])
def test_a_run_that_keeps_dying_has_failed(
    kind: str, box: EventQueues, url: str, runs: FakeRuns, senders: dict[str, Sender]
) -> None:
    box.put([(event(), webhooks.URI, "{}")], NOW)
    work(box, runs, senders, TARGETS, NOW)
    now, states = NOW, []
    for started in range(1, 9):
        now += timedelta(hours=1)
        died = RunState(kind, now - timedelta(minutes=5), "exited with 1", started, timedelta(seconds=30))
        runs.now["run-0"] = died
        work(box, runs, senders, TARGETS, now)
        states.append(state(url)[0][0])
    assert states == ["waiting"] * 4 + ["failed"] * 4
    assert runs.resumed == ["run-0"] * 4
    ((given_up, why),) = runs.given_up
    assert given_up == "run-0"
    assert state(url) == [("failed", "run-0", why)]
    assert "after 5 starts" in why
    assert "exited with 1" in why
    assert outbox(url) == [("all", "waiting")]


def ended(box: EventQueues, runs: FakeRuns, senders: dict[str, Sender]) -> None:
    box.put([(event(), webhooks.URI, "{}")], NOW)
    work(box, runs, senders, TARGETS, NOW)
    runs.now["run-0"] = RunState("COMPLETED", NOW, "done")
    work(box, runs, senders, TARGETS, NOW + timedelta(minutes=1))


def test_messages_arrive_signed_and_once(
    box: EventQueues, url: str, runs: FakeRuns, senders: dict[str, Sender], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(box, runs, senders)
    got: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        got.append(request)
        return httpx.Response(204)

    now = datetime.now(UTC)
    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        assert send_due(box, TARGETS, client, webhooks.SECRETS, now) == 2
        assert send_due(box, TARGETS, client, webhooks.SECRETS, now + timedelta(days=9)) == 0
    for request in got:
        body = Webhook(webhooks.WHSEC).verify(request.content, dict(request.headers))
        assert body["type"] == "conversion.succeeded"
        assert body["data"]["uri"] == webhooks.URI
    assert sorted(request.url.host for request in got) == ["all.example", "good.example"]
    assert outbox(url) == [("all", "done"), ("good", "done")]


def test_watched_roots_are_allowed(box: EventQueues, url: str, tmp_path: Path) -> None:
    config = tmp_path / "receiver.toml"
    config.write_text("watched_roots = true\n" + webhooks.CONFIG.replace('["/runs", "s3://team/runs"]', "[]"))
    senders = load(config, webhooks.SECRETS)[1]
    watched = RootsRefresher(box, senders)
    with pytest.raises(RequestRefused):
        flow_run_for(senders["slurm"], webhooks.URI, "", None)
    with open_catalog(url) as catalog, catalog.writing() as conn:
        roots.add(conn, NOW, "llama", "/runs")
        roots.add(conn, NOW, "odd", "/odd%2froot")
        roots.add(conn, NOW, "paused", "/paused")
        roots.enable(conn, "paused", False)
    assert watched.refresh() == 0
    assert flow_run_for(senders["slurm"], webhooks.URI, "", None).parameters["root"] == "/runs"
    for uri in ("/paused/a", "/odd%2froot/a", "/elsewhere"):
        with pytest.raises(RequestRefused):
            flow_run_for(senders["slurm"], uri, "", None)
    with open_catalog(url) as catalog, catalog.writing() as conn:
        conn.exec_driver_sql("UPDATE watched_roots SET target = '{' WHERE name = 'odd'")  # a broken row
        roots.remove(conn, "llama")
    watched.refresh()
    assert senders["slurm"].roots == ["/runs"]  # inspected a moment ago
    watched._next = 0.0
    watched.refresh()
    assert senders["slurm"].roots == []


def test_the_loop_survives_failures_and_reports_them() -> None:
    done = threading.Event()
    calls: list[int] = []

    def step() -> int:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("database is away")
        done.set()
        return 0

    loop = StepThread({"start": step}, idle=0.05)
    loop.start()
    try:
        assert done.wait(120)
        while loop.trouble():
            pass
        assert len(calls) >= 2
    finally:
        loop.stop()


def test_bodies_are_stored_as_received(box: EventQueues, url: str) -> None:
    body = json.dumps({"text": "caf\u00e9 \u0000"})
    box.put([(event(), webhooks.URI, body)], NOW)
    assert state(url, "body") == [(body,)]


def test_the_end_of_a_run_is_announced_with_what_it_made(
    box: EventQueues, url: str, runs: FakeRuns, senders: dict[str, Sender], tmp_path: Path
) -> None:
    box.put([(event(), webhooks.URI, "{}")], NOW)
    work(box, runs, senders, TARGETS, NOW)
    files = [("model.safetensors", 8, "d" * 64)]
    with open_catalog(url) as catalog:
        for flow_run in (None, "run-0"):  # an earlier conversion by hand, which failed, and the run's own
            id = catalog.begin(
                {"verb": "export"},
                source_uri=webhooks.URI,
                destination_uri="/exports/llama/step-7",
                verb="export",
                tool_version="1",
                flow_run_id=flow_run,
            )
            if flow_run is None:
                catalog.fail(id, code="disk-full", message="no")
        source = CheckpointFacts(
            webhooks.URI, "dcp", "a" * 64, 8, [], [("f", 8, None)], 7, "llama", {}, "coverage"
        )
        made = CheckpointFacts(
            "/exports/llama/step-7",
            "safetensors",
            "b" * 64,
            8,
            [],
            files,
            7,
            "llama",
            {},
            "coverage",
            "f" * 64,
        )
        catalog.succeed(
            id, ConversionFacts("p" * 64, 8, 8, 1, {}, fingerprint="f" * 64), source=source, derived=made
        )
        with catalog.writing() as conn:
            record_verdict(
                conn, NOW, id, [("names", "ok", "fine"), ("values", "not-done", "the source is gone")]
            )
        checkpoint = catalog.at("/exports/llama/step-7")
    assert checkpoint is not None
    runs.now["run-0"] = RunState("COMPLETED", NOW, "")
    work(box, runs, senders, TARGETS, NOW + timedelta(minutes=1))
    bodies = [json.loads(text) for (text,) in outbox_of(url, "body")]
    assert len(bodies) == 2
    data = bodies[0]["data"]
    assert data["destination"] == "/exports/llama/step-7"
    assert data["outputs"] == [
        {
            "verb": "export",
            "state": "succeeded",
            "destination": "/exports/llama/step-7",
            "conversion": id,
            "checkpoint": checkpoint[0].id,
            "bytes": 8,
            "fingerprint": "f" * 64,
            "verified_level": "coverage",
            "error_code": None,
            "loadable": "unproven",
            "export_verdict": "unproven",
            "export_checks": {"names": "ok", "values": "not-done"},
        }
    ]
    # A second announcement converts nothing; its end names the output that exists.
    box.put([(event("e2"), webhooks.URI, "{}")], NOW)
    work(box, runs, senders, TARGETS, NOW + timedelta(minutes=2))
    runs.now["run-1"] = RunState(
        "COMPLETED", NOW, "/exports/llama/step-7 was made from this checkpoint before"
    )
    work(box, runs, senders, TARGETS, NOW + timedelta(minutes=3))
    assert json.loads(outbox_of(url, "body")[-1][0])["data"]["outputs"] == data["outputs"]


def outbox_of(url: str, columns: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(url.removeprefix("sqlite:///"))
    found = connection.execute(f"SELECT {columns} FROM outbox ORDER BY id").fetchall()
    connection.close()
    return found
