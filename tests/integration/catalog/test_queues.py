"""Inbox and outbox: one worker at a time processes each row, despite crashes, repeats and late workers."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from ckptcore.catalog import open_catalog, queues
from ckptcore.catalog.queues import NewEvent, inbox, outbox
from ckptcore.errors import UsageError

NOW = datetime(2026, 3, 1, tzinfo=UTC)
LEASE = timedelta(minutes=5)
PROCESSES = 4

ACCEPT = """
import sys
from datetime import UTC, datetime
from ckptcore.catalog import open_catalog
from ckptcore.catalog.queues import NewEvent, inbox
with open_catalog(sys.argv[1]) as catalog:
    for n in range(int(sys.argv[3])):
        with catalog.queueing() as conn:
            event, new = inbox.accept(conn, datetime.now(UTC), NewEvent("mlflow", f"e{n}", body=sys.argv[2]))
        print(n, event.id, int(new))
"""

TAKE = """
import sys
from datetime import UTC, datetime
from ckptcore.catalog import open_catalog
from ckptcore.catalog.queues import inbox
with open_catalog(sys.argv[1]) as catalog:
    while True:
        with catalog.queueing() as conn:
            taken = inbox.take(conn, datetime.now(UTC), limit=3)
        if not taken:
            break
        for event in taken:
            print(event.event_id)
            with catalog.queueing() as conn:
                assert inbox.done(conn, datetime.now(UTC), event, flow_run_id="f-" + event.event_id)
"""


@pytest.fixture
def queue(catalog):
    """Return a function that calls one of `inbox` or `outbox` in its own transaction."""

    def call(function, *given, **more):
        with catalog.queueing() as conn:
            return function(conn, *given, **more)

    return call


def accept(queue, *ids, now=NOW, **more):
    return [queue(inbox.accept, now, NewEvent("mlflow", name, **more))[0] for name in ids]


def test_an_event_is_accepted_once(queue):
    given = {"type": "run.done", "uri": "s3://b/run/step-10", "run": "llama", "step": 10, "body": '{"a": 1}'}
    first, new = queue(inbox.accept, NOW, NewEvent("mlflow", "e1", **given))
    assert new
    forged = NewEvent("mlflow", "e1", **(given | {"type": "forged", "body": "forged"}))
    second, new = queue(inbox.accept, NOW + LEASE, forged)
    assert (second, new) == (first, False)
    assert queue(inbox.accept, NOW, NewEvent("github", "e1"))[1]
    assert (first.source, first.event_id, first.state, first.attempts) == ("mlflow", "e1", "waiting", 0)
    assert {name: getattr(first, name) for name in given} == given
    assert queue(inbox.get, first.id) == first


def test_the_longest_due_is_taken_first_and_by_one_only(queue):
    accept(queue, "later", now=NOW + timedelta(seconds=9))
    accept(queue, "a", "b")
    assert [e.event_id for e in queue(inbox.take, NOW, limit=2)] == ["a", "b"]
    assert queue(inbox.take, NOW) == []
    assert [e.event_id for e in queue(inbox.take, NOW + timedelta(seconds=9))] == ["later"]


def test_rows_of_other_sources_are_neither_taken_nor_counted(queue):
    for source in ("mlflow", "slurm"):
        queue(inbox.accept, NOW, NewEvent(source, "e", uri="s3://b/e"))
    for endpoint in ("team", "others"):
        queue(outbox.put, NOW, endpoint, "c-1", type="t", body={})
    assert queue(inbox.take, NOW, limit=9, only=[]) == []
    assert [event.source for event in queue(inbox.take, NOW, limit=9, only=["slurm"])] == ["slurm"]
    assert [message.endpoint for message in queue(outbox.take, NOW, limit=9, only=["team"])] == ["team"]
    assert {(event.source, event.attempts) for event in queue(inbox.listed)} == {("mlflow", 0), ("slurm", 1)}
    assert {(message.endpoint, message.attempts) for message in queue(outbox.listed)} == {
        ("team", 1),
        ("others", 0),
    }


def test_an_expired_lease_lets_another_worker_take_the_row(queue):
    accept(queue, "a")
    [lost] = queue(inbox.take, NOW, lease=LEASE)
    assert queue(inbox.take, NOW + LEASE - timedelta(seconds=1)) == []
    [retaken] = queue(inbox.take, NOW + LEASE)
    assert (retaken.id, retaken.attempts, lost.attempts) == (lost.id, 2, 1)
    # The first worker was only slow: it cannot end the row that another worker has taken.
    assert not queue(inbox.done, NOW + LEASE, lost)
    assert not queue(inbox.later, lost, NOW + LEASE, "no")
    assert queue(inbox.get, lost.id).state == "taken"
    assert queue(inbox.done, NOW + LEASE, retaken, flow_run_id="f-1")
    ended = queue(inbox.get, lost.id)
    assert (ended.state, ended.flow_run_id, ended.ended_at) == ("done", "f-1", NOW + LEASE)
    assert not queue(inbox.failed, NOW + LEASE, retaken, "too late")


def test_later_failed_and_retry(queue):
    accept(queue, "a")
    [event] = queue(inbox.take, NOW)
    assert queue(inbox.later, event, NOW + timedelta(hours=1), "not complete: s3://me:secret@b/x")
    waiting = queue(inbox.get, event.id)
    assert (waiting.state, waiting.error_message) == ("waiting", "not complete: s3://b/x")
    assert queue(inbox.take, NOW + timedelta(minutes=59)) == []
    [event] = queue(inbox.take, NOW + timedelta(hours=1))
    assert queue(inbox.failed, NOW, event, "three times is enough")
    assert queue(inbox.take, NOW + timedelta(days=9)) == []
    assert queue(inbox.depth) == {"waiting": 0, "taken": 0, "done": 0, "failed": 1}
    assert queue(inbox.retry, NOW, event.id) == (event.id,)
    assert [(e.attempts, e.tries) for e in queue(inbox.take, NOW)] == [(3, 1)]
    with pytest.raises(UsageError, match="not a failed row of the inbox"):
        queue(inbox.retry, NOW, event.id)
    with pytest.raises(UsageError, match="no event nobody"):
        queue(inbox.get, "nobody")


def test_a_message_is_one_per_endpoint_and_key(queue, catalog):
    put = {"type": "conversion.succeeded", "body": {"uri": "s3://me:secret@b/out", "n": [1, None]}}
    first, new = queue(outbox.put, NOW, "team", "c-1", **put)
    assert new
    assert first.body == {"uri": "s3://b/out", "n": [1, None]}
    assert queue(outbox.put, NOW, "team", "c-1", type="other", body={}) == (first, False)
    assert queue(outbox.put, NOW, "other", "c-1", **put)[1]
    [one, two] = queue(outbox.take, NOW, limit=9)
    assert queue(outbox.done, NOW, one)
    assert queue(outbox.later, two, NOW + LEASE, "503")
    [two] = queue(outbox.take, NOW + LEASE)
    assert queue(outbox.failed, NOW, two, "410")
    assert queue(outbox.depth) == {"waiting": 0, "taken": 0, "done": 1, "failed": 1}
    assert queue(outbox.retry, NOW, two.id[:9]) == (two.id,)
    [back] = queue(outbox.listed)
    assert (back.state, back.attempts, back.tries, back.error_message) == ("waiting", 2, 0, "410")


def give_up(queue, *ids):
    accept(queue, *ids)
    for event in queue(inbox.take, NOW, limit=len(ids)):
        queue(inbox.done, NOW, event, flow_run_id="f-1")
    accept(queue, *(f"{name}-bad" for name in ids))
    taken = queue(inbox.take, NOW, limit=len(ids))
    for event in taken:
        queue(inbox.failed, NOW, event, "the disk is full")
    return [event.id for event in taken]


def test_a_retried_row_has_a_new_key_and_no_old_worker_can_end_it(queue):
    [public] = give_up(queue, "a")
    old = queue(inbox.get, public)
    assert old.key == public
    queue(inbox.retry, NOW, None)
    [event] = queue(inbox.take, NOW)
    assert (event.id, event.tries, event.flow_run_id) == (public, 1, None)
    assert event.key == f"{public}:1"  # a run under the old key would be the one that failed
    assert not queue(inbox.done, NOW, old)
    queue(inbox.failed, NOW, event, "once more")
    queue(inbox.retry, NOW, None)
    assert [e.key for e in queue(inbox.take, NOW)] == [f"{public}:2"]


def test_retry_selects_rows_by_id_or_prefix(queue):
    ids = give_up(queue, *(f"e{n}" for n in range(30)))
    assert [e.id for e in queue(inbox.listed, limit=2)] == [ids[-1], ids[-2]]
    assert {e.state for e in queue(inbox.listed, "done")} == {"done"}
    assert len(queue(inbox.listed, "done", 99)) == 30
    with pytest.raises(UsageError, match="unknown state"):
        queue(inbox.listed, "lost")
    first = next(digit for digit in "0123456789abcdef" if sum(i.startswith(digit) for i in ids) > 1)
    with pytest.raises(UsageError, match="prefix of several ids"):
        queue(inbox.retry, NOW, first)
    for nothing in ("%", "_", "", "nobody"):
        with pytest.raises(UsageError, match=r"is not a failed row|several"):
            queue(inbox.retry, NOW, nothing)
    assert queue(inbox.retry, NOW, ids[3]) == (ids[3],)
    assert queue(inbox.depth) == {"waiting": 1, "taken": 0, "done": 30, "failed": 29}
    assert queue(inbox.retry, NOW, None) == tuple(i for i in ids if i != ids[3])
    assert queue(inbox.retry, NOW, None) == ()


@pytest.mark.parametrize("begun", ["by its run", "by its end", "by its failure"])
def test_an_announcement_without_an_id_is_repeated_until_something_looks_at_its_place(queue, begun):
    announced = NewEvent("bearer", "digest", uri="s3://b/run/step-10", has_id=False)
    first, new = queue(inbox.accept, NOW, announced)
    assert new
    assert queue(inbox.accept, NOW, announced) == (first, False)
    [taken] = queue(inbox.take, NOW)
    assert queue(inbox.accept, NOW, announced)[0].id == first.id
    if begun == "by its run":
        queue(inbox.later, taken, NOW + LEASE, None, flow_run_id="run-1")
    else:
        queue(inbox.done, NOW, taken) if begun == "by its end" else queue(inbox.failed, NOW, taken, "no")
    second, new = queue(inbox.accept, NOW, announced)
    assert (new, second.event_id, second.state) == (True, "digest", "waiting")
    assert queue(inbox.accept, NOW, announced) == (second, False)
    assert {row.id for row in queue(inbox.listed, None)} | {first.id} == {first.id, second.id}
    assert queue(inbox.get, first.id).event_id == f"digest:{first.id}"


def test_of_two_receivers_one_accepts_a_second_announcement(queue):
    announced = NewEvent("bearer", "digest", uri="s3://b/run/step-10", has_id=False)
    queue(inbox.accept, NOW, announced)
    queue(inbox.done, NOW, queue(inbox.take, NOW)[0])
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: queue(inbox.accept, NOW, announced), range(16)))
    assert [new for _, new in found].count(True) == 1
    assert len({row.id for row, _ in found}) == 1


@pytest.mark.parametrize(
    "change", [{"uri": "s3://b/run/step-20"}, {"run": "mistral"}, {"step": 20}, {"step": None}]
)
def test_an_id_that_is_used_for_another_event_is_refused_aloud(queue, change):
    given = {"uri": "s3://b/run/step-10", "run": "llama", "step": 10}
    first, _ = queue(inbox.accept, NOW, NewEvent("mlflow", "e1", **given))
    for _ in range(2):
        refused, new = queue(inbox.accept, NOW, NewEvent("mlflow", "e1", **(given | change)))
        assert (new, refused.state) == (False, "failed")
        assert refused.event_id != "e1"
        for text in ("'e1'", "s3://b/run/step-10", repr(*change.values())):
            assert text in refused.error_message
    assert queue(inbox.get, first.id) == first
    [failed] = queue(inbox.listed, "failed")
    assert failed.id == refused.id
    # Whoever knows that it is an event of its own starts it.
    assert queue(inbox.retry, NOW, refused.id) == (refused.id,)
    assert {getattr(row, name) for row in queue(inbox.take, NOW, limit=9) for name in change} >= set(
        change.values()
    )


def test_old_ended_rows_are_deleted_and_repeats_are_recognised_until_then(queue):
    give_up(queue, "a")
    queue(outbox.put, NOW, "team", "k", type="t", body={})
    queue(outbox.done, NOW, queue(outbox.take, NOW)[0])
    accept(queue, "waits")
    assert queue(queues.forget, NOW + queues.KEEP) == 0
    assert not queue(inbox.accept, NOW + queues.KEEP, NewEvent("mlflow", "a"))[1]
    assert queue(queues.forget, NOW + queues.KEEP + timedelta(seconds=1)) == 3
    assert queue(inbox.depth) == {"waiting": 1, "taken": 0, "done": 0, "failed": 0}
    assert queue(outbox.depth)["done"] == 0
    assert queue(inbox.accept, NOW + queues.KEEP, NewEvent("mlflow", "a"))[1]


def test_a_rolled_back_message_is_not_sent(catalog):
    class Stopped(Exception):
        pass

    def put_and_stop():
        with catalog.writing() as conn:
            outbox.put(conn, NOW, "team", "c-1", type="t", body={})
            raise Stopped

    with pytest.raises(Stopped):
        put_and_stop()
    with catalog.queueing() as conn:
        assert outbox.take(conn, NOW) == []


def test_concurrent_repeats_of_an_event_make_one_row(url, forks, finish, rounds):
    outputs = finish(*[forks(ACCEPT, url, i, rounds) for i in range(PROCESSES)])
    lines = [line.split() for out in outputs for line in out.splitlines()]
    for n in range(rounds):
        results = [(public, new) for number, public, new in lines if int(number) == n]
        assert len({public for public, _ in results}) == 1
        assert sorted(new for _, new in results) == ["0"] * (PROCESSES - 1) + ["1"]


def test_many_workers_take_each_event_once(url, queue, forks, finish, rounds):
    events = [f"e{n}" for n in range(4 * rounds)]
    accept(queue, *events)
    outputs = finish(*[forks(TAKE, url) for _ in range(PROCESSES)])
    worked = [line for out in outputs for line in out.splitlines()]
    assert sorted(worked) == sorted(events)
    assert queue(inbox.depth)["done"] == len(events)


def test_locked_rows_are_skipped(postgres, upgraded):
    with postgres.database(upgraded) as url, open_catalog(url) as catalog, open_catalog(url) as other:
        with catalog.queueing() as conn:
            inbox.accept(conn, NOW, NewEvent("s", "a"))
            inbox.accept(conn, NOW, NewEvent("s", "b"))
        with catalog.queueing() as mine, other.queueing() as theirs:
            theirs.execute(sa.text("SET LOCAL lock_timeout = '2s'"))
            assert [e.event_id for e in inbox.take(mine, NOW)] == ["a"]
            assert [e.event_id for e in inbox.take(theirs, NOW, limit=2)] == ["b"]
        # A conversion that is being recorded does not block a queue either.
        with catalog.writing(), other.queueing() as conn:
            conn.execute(sa.text("SET LOCAL lock_timeout = '2s'"))
            assert inbox.accept(conn, NOW, NewEvent("s", "c"))[1]
