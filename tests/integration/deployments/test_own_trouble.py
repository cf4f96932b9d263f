"""One item's trouble stays its own: an error of one event, run or message leaves the others alone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import webhooks
from starlette.testclient import TestClient

from ckptcore.catalog import CheckpointFacts, open_catalog, promotions
from ckptcore.catalog.queues import inbox, outbox
from ckptcore.errors import CkptError, UsageError
from ckptcore.page.changes import set_alias
from ckptcore.utils import host
from deployments import release_runs
from deployments.receiver.app import make_app
from deployments.receiver.dispatch import RunState, announce_aliases, work
from deployments.receiver.event import Event
from deployments.receiver.inbox import EventQueues
from deployments.receiver.serve import send_due, steps_of
from deployments.receiver.settings import NotifyTarget, Sender

NOW = datetime.fromtimestamp(webhooks.NOW, UTC)
LATER = NOW + timedelta(hours=1)
TARGET = {"team": NotifyTarget(url="https://team.example/hook", secret="WHSEC")}
NAMES = ("a", "odd", "z")  # the one in the middle is in trouble


class Unforeseen(Exception):
    """What no list of exceptions has."""


class Runs:
    """Prefect, whose call of a name raises for the odd event. state: of all runs."""

    def __init__(self, raising: str) -> None:
        self.raising, self.state = raising, "SCHEDULED"
        self.started: list[str] = []
        self.sent: list[str] = []

    def start(self, deployment: str, parameters: Mapping[str, Any], **_: Any) -> str:
        self._raise("start", parameters["source"])
        self.started.append(parameters["source"])
        return f"run of {parameters['source']}"

    def states(self, ids: Sequence[str]) -> Mapping[str, RunState | CkptError]:
        found: dict[str, RunState | CkptError] = {id: RunState(self.state, NOW, "") for id in ids}
        if self.raising == "states":
            found = {id: UsageError("unknown") if "odd" in id else state for id, state in found.items()}
        return found

    def resume(self, id: str, why: str) -> None:
        self._raise("resume", id)

    def give_up(self, id: str, why: str) -> None:
        raise AssertionError

    def tell(self, event: str, uri: str, payload: Mapping[str, Any]) -> None:
        self._raise("tell", uri)
        self.sent.append(uri)

    def _raise(self, call: str, what: str) -> None:
        if self.raising == call and "odd" in what:
            raise Unforeseen("of this one")


def event(name: str) -> Event:
    return Event(source="slurm", event_id=name, type="", announces=True, uri="", run="", step=None)


@pytest.fixture
def filled(box: EventQueues) -> EventQueues:
    box.put([(event(name), f"/runs/{name}", "{}") for name in NAMES], NOW)
    return box


def rows(url: str, table: str = "inbox", columns: str = "state, error_message") -> list[tuple[Any, ...]]:
    with open_catalog(url) as catalog, catalog.reading() as conn:
        return [tuple(row) for row in conn.exec_driver_sql(f"SELECT {columns} FROM {table} ORDER BY id")]


def test_a_start(filled: EventQueues, url: str, senders: dict[str, Sender]) -> None:
    runs = Runs("start")
    assert work(filled, runs, senders, {}, NOW) == 3
    assert runs.started == ["/runs/a", "/runs/z"]
    assert [why for _, why in rows(url)] == [None, "Unforeseen: of this one", None]


@pytest.mark.parametrize(
    ("raising", "state", "why"),
    [("resume", "PENDING", "Unforeseen: of this one"), ("states", "COMPLETED", "usage: unknown")],
)
def test_a_look_at_a_run(
    raising: str, state: str, why: str, filled: EventQueues, url: str, senders: dict[str, Sender]
) -> None:
    runs = Runs(raising)
    work(filled, runs, senders, {}, NOW)
    runs.state = state
    work(filled, runs, senders, {}, LATER)
    good = ("waiting", None) if state == "PENDING" else ("done", None)
    assert rows(url) == [good, ("waiting", f"its run cannot be followed: {why}"), good]


def test_outputs_that_cannot_be_read(
    filled: EventQueues, url: str, senders: dict[str, Sender], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs("")
    work(filled, runs, senders, {}, NOW)
    runs.state = "COMPLETED"

    def outputs(run: str, destination: str, source: str) -> list[dict[str, Any]]:
        if "odd" in source:
            raise Unforeseen("of this one")
        return []

    monkeypatch.setattr(filled, "outputs", outputs)
    assert work(filled, runs, senders, TARGET, LATER) == 3
    assert rows(url) == [("done", None)] * 3  # the conversions are what they are
    messages = [json.loads(body)["data"]["message"] for (body,) in rows(url, "outbox", "body")]
    assert ["cannot be read: Unforeseen" in message for message in messages] == [False, True, False]


def test_an_announcement_of_an_alias(box: EventQueues, url: str) -> None:
    with open_catalog(url) as catalog:
        for name in NAMES:
            facts = CheckpointFacts(f"/out/{name}", "dcp", name.encode().hex().zfill(64), 8, [], [])
            catalog.record_validation(facts)
            set_alias(catalog, "ada", f"/out/{name}", f"best-{name}", None, True)
    runs, now = Runs("tell"), datetime.now(UTC)
    announce_aliases(box, runs, {}, now)
    assert runs.sent == ["/out/a", "/out/z"]
    assert [state for (state,) in rows(url, "outbox", "state")] == ["done", "waiting", "done"]


class OddRows(EventQueues):
    """A catalog that does not store one kind of change, of the odd row."""

    call = ""

    def _raise(self, call: str, row: Any) -> None:
        if call == self.call and "odd" in str(row):
            raise Unforeseen("of this one")

    def later(self, row: Any, *more: Any) -> None:
        self._raise("later", row)
        super().later(row, *more)

    def end(self, row: Any, *more: Any) -> bool:
        self._raise("end", row)
        return super().end(row, *more)

    def sent(self, message: Any, now: datetime) -> None:
        self._raise("sent", message)
        super().sent(message, now)

    def unsent(self, message: Any, *more: Any) -> None:
        self._raise("unsent", message)
        super().unsent(message, *more)


@pytest.fixture
def odd_rows(url: str) -> Iterator[OddRows]:
    made = OddRows(url)
    made.put([(event(name), f"/runs/{name}", "{}") for name in NAMES], NOW)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("call", "raising", "others"),
    [("later", "start", ["waiting", "waiting"]), ("later", "states", ["done", "done"])],
)
def test_a_change_of_an_event_that_is_not_stored(
    call: str, raising: str, others: list[str], odd_rows: OddRows, url: str, senders: dict[str, Sender]
) -> None:
    """The others are handled in the same round; the error is the step's trouble."""
    runs = Runs("" if raising == "states" else raising)
    if raising == "states":
        work(odd_rows, runs, senders, {}, NOW)
        runs.raising, runs.state = raising, "COMPLETED"
    odd_rows.call = call
    with pytest.raises(Unforeseen):
        work(odd_rows, runs, senders, {}, LATER)
    assert [state for state, _ in rows(url)] == [others[0], "taken", others[1]]


@pytest.mark.parametrize("status", [204, 500])
def test_a_change_of_a_message_that_is_not_stored(status: int, odd_rows: OddRows, url: str) -> None:
    targets = {name: NotifyTarget(url=f"https://{name}.example/", secret="WHSEC") for name in NAMES}
    with open_catalog(url) as catalog, catalog.queueing() as conn:
        for name in NAMES:
            outbox.put(conn, NOW, name, "k", type="t", body={"data": name})
    odd_rows.call = "sent" if status == 204 else "unsent"
    transport = httpx.MockTransport(lambda _: httpx.Response(status))
    with httpx.Client(transport=transport) as client, pytest.raises(Unforeseen):
        send_due(odd_rows, targets, client, webhooks.SECRETS, NOW)
    expected = "done" if status == 204 else "waiting"
    assert [state for (state,) in rows(url, "outbox", "state")] == [expected, "taken", expected]


def test_a_change_of_an_alias_that_cannot_be_announced(
    box: EventQueues, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_catalog(url) as catalog:
        for name in NAMES:
            facts = CheckpointFacts(f"/out/{name}", "dcp", name.encode().hex().zfill(64), 8, [], [])
            catalog.record_validation(facts)
            set_alias(catalog, "ada", f"/out/{name}", f"best-{name}", None, True)
    inner = promotions._data

    def data(conn: Any, change: Any) -> dict[str, Any]:
        if "odd" in str(change):
            raise Unforeseen("of this one")
        return inner(conn, change)

    monkeypatch.setattr(promotions, "_data", data)
    runs, now = Runs(""), datetime.now(UTC)
    with pytest.raises(Unforeseen):
        announce_aliases(box, runs, {}, now)
    assert runs.sent == ["/out/a", "/out/z"]
    monkeypatch.setattr(promotions, "_data", inner)
    announce_aliases(box, runs, {}, now)
    assert runs.sent == ["/out/a", "/out/z", "/out/odd"]


def test_a_run_that_cannot_be_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a worker that has ended: one that was deleted meanwhile leaves no other run to its heartbeat."""
    released = []

    class Client:
        """Prefect's, which does not know the odd run any more."""

        def read_flow_runs(self, **_: Any) -> list[Any]:
            return [SimpleNamespace(id=name, state=None, labels={release_runs.NAME: "w"}) for name in NAMES]

        def set_flow_run_state(self, name: str, *_: Any, **__: Any) -> None:
            if name == "odd":
                raise Unforeseen("of this one")
            released.append(name)

    monkeypatch.setattr(release_runs, "get_client", lambda **_: nullcontext(Client()))
    with pytest.raises(Unforeseen):
        release_runs.release("pool", "w")
    assert released == ["a", "z"]


@pytest.mark.parametrize("odd", ["the answer", "the body", "the secret"])
def test_a_notification(odd: str, box: EventQueues, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = {name: NotifyTarget(url=f"https://{name}.example/", secret="WHSEC") for name in NAMES}
    with open_catalog(url) as catalog, catalog.queueing() as conn:
        for name in NAMES:
            outbox.put(conn, NOW, name, "k", type="t", body={"data": name})
    if odd == "the secret":
        targets["odd"] = NotifyTarget(url="https://odd.example/", secret="GONE")
    if odd == "the body":
        dumps = json.dumps

        def raising(body: Any, **more: Any) -> str:
            if "odd" in str(body):
                raise Unforeseen("of this one")
            return dumps(body, **more)

        monkeypatch.setattr("deployments.receiver.serve.json.dumps", raising)

    def answer(request: httpx.Request) -> httpx.Response:
        if odd == "the answer" and request.url.host.startswith("odd"):
            raise Unforeseen("of this one")
        return httpx.Response(204)

    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        assert send_due(box, targets, client, webhooks.SECRETS, NOW) == 3
    assert [state for (state,) in rows(url, "outbox", "state")] == ["done", "waiting", "done"]


def test_an_event_of_a_batch(url: str, senders: dict[str, Sender], monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(EventQueues):
        """Stores no event about the odd place."""

        def put(self, events: Sequence[tuple[Event, str, str]], now: datetime | None = None) -> Any:
            if any("odd" in uri for _, uri, _ in events):
                raise Unforeseen("of this one")
            sizes.append(len(events))
            return super().put(events, now)

    sizes: list[int] = []
    monkeypatch.setattr("deployments.receiver.app.TOGETHER", 0.5)
    hook = webhooks.HOOKS["bearer"]
    app = make_app(senders, Odd(url), clock=lambda: webhooks.NOW)
    with TestClient(app) as client, ThreadPoolExecutor(3) as threads:

        def send(name: str) -> int:
            named = hook.naming(f"/runs/{name}")
            return client.post(hook.path, content=named.body, headers=hook.headers).status_code

        assert list(threads.map(send, NAMES)) == [202, 503, 202]
    assert sorted(uri for (uri,) in rows(url, columns="uri")) == ["/runs/a", "/runs/z"]


@pytest.mark.parametrize("minutes", [-10, 10])
def test_receivers_go_by_the_clock_of_the_catalog(
    minutes: int, url: str, senders: dict[str, Sender], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event is due by the one clock that all receivers share, whatever their hosts' say."""
    hosts = time.time
    monkeypatch.setattr(host, "now", lambda: hosts() + 60 * minutes)  # the clock of SQLite's catalogs alone
    box, runs = EventQueues(url), Runs("")
    steps = steps_of(box, runs, senders, {})
    hook = webhooks.HOOKS["bearer"].naming("/runs/a")
    with TestClient(make_app(senders, box)) as client:
        assert client.post(hook.path, content=hook.body, headers=hook.headers).status_code == 202
    steps["start"]()
    assert runs.started == ["/runs/a"]
    with open_catalog(url) as catalog, catalog.reading() as conn:
        [row] = inbox.listed(conn)
        assert abs(row.received_at - catalog.now()) < timedelta(minutes=5)
        assert abs(row.due_at - catalog.now()) < timedelta(minutes=5)
        # Another receiver, by the same clock: the row of the first one is not free.
        assert not inbox.postponed(conn, catalog.now())
    with catalog.queueing() as conn:
        assert not inbox.take(conn, catalog.now(), limit=1, lease=timedelta(minutes=1))
