"""Start: rows of the inbox become flow runs, and ended runs become messages.

A row is taken, its run is started or looked at, and the row goes back until the next look. Each step can be
repeated: Prefect gives the run of an idempotency key back instead of making a second one, and a row changes
in one transaction. So a process that ends between any two steps leaves nothing that the next round, here or
elsewhere, does not finish.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from ckptcore.redaction import beginning, redacted
from deployments.receiver.http_errors import RequestRefused
from deployments.receiver.inbox import InboxEvent, Mailbox, News
from deployments.receiver.run_request import order_of
from deployments.receiver.settings import NotifyTarget, Sender
from tasks.attempts import given_up

LIMIT = 20  # rows of one round
LOOKS = (2, 5, 10, 20, 30)  # seconds until a run is looked at again
# Seconds until a start is tried again, then hourly: an event is given up after about two days.
DELAYS = (2, 5, 15, 60, 300, 900)
HOURLY = 3600
MAX_ATTEMPTS = 50
# A crashed run may be taken up again by an automation; until then it has not failed.
CRASHED_FOR = timedelta(minutes=30)
# Automations are told by events. A server that is killed forgets those that it has not looked at; one that is
# started anew leaves for a quarter of an hour what follows on an event that it has not seen itself (Prefect,
# server/events/ordering). What automations should have noticed by then is taken up here.
OVERLOOKED = {"CRASHED": timedelta(seconds=45), "PENDING": timedelta(seconds=120)}
DEFAULT_BEAT = timedelta(seconds=180)  # Prefect's own; prefect.yaml has 30 s
BEATS = 4  # of a run that runs, and of which nothing was heard
MOST_BEGUN = 5  # as in flows/resume.py: a run that kills its process again and again has failed

_log = logging.getLogger("deployments.receiver")


@dataclass(frozen=True, slots=True)
class RunState:
    """How a run is.

    kind: Prefect's state type. since: of that state; of one that runs, its last sign of life. message: for
    people. begun: how often it was started. beat: between two signs of life.
    """

    kind: str
    since: datetime
    message: str
    begun: int = 0
    beat: timedelta = DEFAULT_BEAT


class Away(Exception):
    """Prefect does not answer: nothing else need be tried now."""


class FlowRuns(Protocol):
    """What is asked of Prefect; everything raises `Away` when it does not answer."""

    def start(
        self, deployment: str, parameters: Mapping[str, Any], *, key: str, name: str, tags: Sequence[str]
    ) -> str:
        """The id of the run that has this key, made if there was none."""

    def states(self, ids: Sequence[str]) -> Mapping[str, RunState]:
        """By id; a run that is no longer known is not there."""

    def resume(self, id: str, why: str) -> None:
        """Let a run go on that nobody works on."""

    def give_up(self, id: str, why: str) -> None:
        """Let a run be failed that was started often enough."""

    def tell(self, event: str, uri: str, payload: Mapping[str, Any]) -> None:
        """Make an event of Prefect, about a checkpoint, that automations can be triggered by."""


def work(
    box: Mailbox,
    runs: FlowRuns,
    senders: Mapping[str, Sender],
    targets: Mapping[str, NotifyTarget],
    now: datetime | None = None,
) -> int:
    """One round; how many rows were started, put back or ended. Raises `Away`, with the rows put back."""
    one = _Round(box, runs, senders, targets, now or datetime.now(UTC))
    # Others' events are theirs, with whom they tell; to take one and put it back would count as a try.
    rows = box.take(one.now, LIMIT, list(senders))
    fresh = [row for row in rows if row.flow_run_id is None]
    away: Away | None = None
    for row in fresh:
        try:
            if away is None:
                one.start(row)
        except Away as error:
            away = error
        if away is not None:
            one.postpone(row, str(away), delay_after(row.tries))
    if away is not None:
        raise away
    going = [row for row in rows if row.flow_run_id is not None]
    try:
        states = runs.states([row.flow_run_id or "" for row in going]) if going else {}
    except Away:
        for row in going:  # or nobody would look at them before their lease is over
            box.running(row, row.flow_run_id or "", one.now + timedelta(seconds=LOOKS[0]))
        raise
    return len(fresh) + sum(one.look(row, states.get(row.flow_run_id or "")) for row in going)


def outcome_of(state: RunState | None, now: datetime) -> str | None:
    """``succeeded`` or ``failed``; None while the run has not ended. state: None when it is not known."""
    if state is None:
        return "failed"
    if state.kind == "CRASHED":
        return "failed" if now - state.since > CRASHED_FOR else None
    return {"COMPLETED": "succeeded", "FAILED": "failed", "CANCELLED": "failed"}.get(state.kind)


def is_overlooked(state: RunState, now: datetime) -> bool:
    """Whether nobody works on a run, and nobody else has seen it."""
    patience = BEATS * state.beat if state.kind == "RUNNING" else OVERLOOKED.get(state.kind)
    return patience is not None and now - state.since > patience


def delay_after(attempts: int) -> float:
    """Seconds until the next try.

    >>> [delay_after(n) for n in (1, 6, 7, 49)]
    [2, 900, 3600, 3600]
    """
    return DELAYS[attempts - 1] if attempts <= len(DELAYS) else HOURLY


@dataclass(frozen=True, slots=True)
class _Round:
    box: Mailbox
    runs: FlowRuns
    senders: Mapping[str, Sender]
    targets: Mapping[str, NotifyTarget]
    now: datetime

    def start(self, row: InboxEvent) -> None:
        """Start the run of an event, or put the event back."""
        try:
            order = order_of(self.senders[row.source], row.uri, row.run, row.step)
        except RequestRefused as refused:
            self.end(row, "failed", refused.told["message"])
            return
        try:
            run = self.runs.start(
                order.deployment,
                order.parameters,
                key=f"ckptcore-inbox:{row.key}",
                name=f"{row.source} {'/'.join(redacted(order.uri).split('/')[-2:])}",
                tags=["webhook", f"source:{row.source}"],
            )
        except Away:
            raise
        except Exception as error:  # whatever ails Prefect, the event is kept
            self.postpone(row, beginning(f"{type(error).__name__}: {error}", 1000), delay_after(row.tries))
            return
        self.box.running(row, run, self.now + timedelta(seconds=LOOKS[0]))
        _log.info("%s: event %s is run %s", row.source, row.id, run)
        self.tell("ckptcore.checkpoint.announced", row, {"flow_run_id": run, **order.parameters})

    def postpone(self, row: InboxEvent, why: str, seconds: float) -> None:
        """Try again in some seconds; give the event up when that has been done often."""
        if row.tries >= MAX_ATTEMPTS:
            self.end(row, "failed", f"given up after {row.tries} tries: {why}")
            return
        _log.warning("%s: event %s could not be started, again in %d s: %s", row.source, row.id, seconds, why)
        self.box.later(row, self.now + timedelta(seconds=seconds), why)

    def look(self, row: InboxEvent, state: RunState | None) -> bool:
        """Whether the run of an event has ended; then the event has, too."""
        assert row.flow_run_id is not None
        outcome = outcome_of(state, self.now)
        if outcome is None:
            # Attempts are takes; how often one was looked at is near enough to space the looks.
            if state is not None and is_overlooked(state, self.now):
                if state.begun >= MOST_BEGUN:
                    why = given_up(state.begun, state.message)
                    self.runs.give_up(row.flow_run_id, why)
                    self.end(row, "failed", why)
                    return True
                _log.warning(
                    "%s: event %s: run %s is overlooked, it goes on", row.source, row.id, row.flow_run_id
                )
                self.runs.resume(
                    row.flow_run_id, f"{state.kind.lower()} and silent since {state.since:%H:%M:%S}"
                )
            pause = LOOKS[min(max(row.tries - 2, 0), len(LOOKS) - 1)]
            self.box.running(row, row.flow_run_id, self.now + timedelta(seconds=pause))
            return False
        self.end(row, outcome, state.message if state is not None else "Prefect no longer knows the run")
        return True

    def end(self, row: InboxEvent, outcome: str, why: str) -> None:
        """The event is done or has failed, and those who want to know are told."""
        type = f"conversion.{outcome}"
        data = {
            "uri": row.uri,
            "run": row.run,
            "step": row.step,
            "flow_run_id": row.flow_run_id,
            "event": row.id,
            "sender": row.source,
            "message": beginning(why, 2000),
        }
        body = {"type": type, "timestamp": self.now.isoformat(), "data": data}
        news = [
            News(target=name, key=f"{row.key}:{outcome}", type=type, body=body)
            for name, target in self.targets.items()
            if type in target.events
        ]
        if self.box.end(row, self.now, why if outcome == "failed" else None, news):
            _log.info("%s: event %s %s: %s", row.source, row.id, outcome, why)
            self.tell(f"ckptcore.{type}", row, data)

    def tell(self, event: str, row: InboxEvent, payload: Mapping[str, Any]) -> None:
        """An event of Prefect, at most once: who must not miss an end is a target of the outbox."""
        try:
            self.runs.tell(event, row.uri, payload)
        except Exception as error:
            _log.warning("%s: no event %s at Prefect: %s", row.source, event, error)
