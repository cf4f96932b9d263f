"""Turn rows of the inbox into flow runs, and ended runs into messages.

A row is taken, its run is started or inspected, and the row is scheduled for the next look. Each step can be
repeated: Prefect returns the existing run of an idempotency key, and a row changes in one transaction. So if
a process ends between two steps, the next round finishes its work, here or on another receiver.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from ckptcore.catalog.promotions import MOVED, REMOVED
from ckptcore.redaction import beginning, redacted
from deployments.http_errors import RequestRefused
from deployments.receiver.event import meta_of
from deployments.receiver.inbox import InboxEvent, Mailbox, News
from deployments.receiver.run_request import order_of
from deployments.receiver.settings import PREFECT, NotifyTarget, Sender
from tasks.attempts import given_up

LIMIT = 20  # rows of one round
LOOKS = (2, 5, 10, 20, 30)  # seconds until a run is inspected again
# Seconds until a start is retried, then hourly: an event fails after about two days.
DELAYS = (2, 5, 15, 60, 300, 900)
HOURLY = 3600
MAX_ATTEMPTS = 50
# An automation may resume a crashed run; until then it has not failed.
CRASHED_FOR = timedelta(minutes=30)
# Automations react to events. A killed server loses the events that it has not processed. A restarted one
# ignores for a quarter of an hour events that follow on one that it has not seen (Prefect,
# server/events/ordering). Runs that automations should have noticed by then are resumed here.
OVERLOOKED = {"CRASHED": timedelta(seconds=45), "PENDING": timedelta(seconds=120)}
DEFAULT_BEAT = timedelta(seconds=180)  # Prefect's default; prefect.yaml sets 30 s
BEATS = 4  # missed heartbeats until a running run counts as overlooked
MOST_BEGUN = 5  # as in flows/resume.py: a run that kills its process repeatedly has failed

_log = logging.getLogger("deployments.receiver")


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a flow run.

    kind: Prefect's state type. since: the time of that state, or of the last heartbeat of a running run.
    message: for users. begun: how often the run was started. beat: the interval of its heartbeats.
    """

    kind: str
    since: datetime
    message: str
    begun: int = 0
    beat: timedelta = DEFAULT_BEAT


class Away(Exception):
    """Prefect does not answer. Nothing else should be tried in this round."""


class FlowRuns(Protocol):
    """The calls to Prefect. All raise `Away` if it does not answer."""

    def start(
        self, deployment: str, parameters: Mapping[str, Any], *, key: str, name: str, tags: Sequence[str]
    ) -> str:
        """Return the id of the run with this idempotency key; start it if there is none."""

    def states(self, ids: Sequence[str]) -> Mapping[str, RunState]:
        """Return the states of runs by id. A run that Prefect no longer knows is missing."""

    def resume(self, id: str, why: str) -> None:
        """Resume a run that no worker processes."""

    def give_up(self, id: str, why: str) -> None:
        """Fail a run that was started too often."""

    def tell(self, event: str, uri: str, payload: Mapping[str, Any]) -> None:
        """Send Prefect an event about a checkpoint, which can trigger automations."""


def work(
    box: Mailbox,
    runs: FlowRuns,
    senders: Mapping[str, Sender],
    targets: Mapping[str, NotifyTarget],
    now: datetime | None = None,
) -> int:
    """Run one round.

    Args:
        box: the inbox and the outbox.
        runs: the calls to Prefect.
        senders: the configured sources, by name.
        targets: the configured targets of notifications, by name.
        now: the current time.

    Returns:
        How many rows were started, postponed or ended.

    Raises:
        Away: Prefect does not answer. The rows are scheduled for a retry.
    """
    one = _Round(box, runs, senders, targets, now or datetime.now(UTC))
    # Only events of these senders: to take another receiver's event and return it would count as a try.
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
        for row in going:  # or they would be inspected only after their lease
            box.running(row, row.flow_run_id or "", one.now + timedelta(seconds=LOOKS[0]))
        raise
    return len(fresh) + sum(one.look(row, states.get(row.flow_run_id or "")) for row in going)


def announce_aliases(
    box: Mailbox, runs: FlowRuns, targets: Mapping[str, NotifyTarget], now: datetime | None = None
) -> int:
    """Announce alias changes to the subscribed targets and to Prefect; return how many messages were handled.

    Targets get them from the outbox, like all notifications; the messages to Prefect are sent here.

    Raises:
        Away: Prefect does not answer. Its messages are sent later.
    """
    now = now or datetime.now(UTC)
    wanted: dict[str, Collection[str]] = {name: target.events for name, target in targets.items()}
    count = box.announce(now, wanted | {PREFECT: (MOVED, REMOVED)})
    for message in box.messages(now, LIMIT, [PREFECT]):
        data = message.body["data"]
        try:
            runs.tell(f"ckptcore.{message.type}", str(data.get("uri") or data["checkpoint"]), data)
        except Exception as error:  # it is repeated, whatever Prefect's error
            retry_at = (
                None if message.tries >= MAX_ATTEMPTS else now + timedelta(seconds=delay_after(message.tries))
            )
            box.unsent(message, now, beginning(f"{type(error).__name__}: {error}", 500), retry_at)
            if isinstance(error, Away):
                raise
            continue
        box.sent(message, now)
        count += 1
    return count


def outcome_of(state: RunState | None, now: datetime) -> str | None:
    """Return ``succeeded`` or ``failed``, or None for a run that has not ended. state: None if unknown."""
    if state is None:
        return "failed"
    if state.kind == "CRASHED":
        return "failed" if now - state.since > CRASHED_FOR else None
    return {"COMPLETED": "succeeded", "FAILED": "failed", "CANCELLED": "failed"}.get(state.kind)


def is_overlooked(state: RunState, now: datetime) -> bool:
    """Return whether no worker processes a run, and no automation has noticed that."""
    patience = BEATS * state.beat if state.kind == "RUNNING" else OVERLOOKED.get(state.kind)
    return patience is not None and now - state.since > patience


def delay_after(attempts: int) -> float:
    """Return the seconds until the next try.

    >>> [delay_after(n) for n in (1, 6, 7, 49)]
    [2, 900, 3600, 3600]
    """
    return DELAYS[attempts - 1] if attempts <= len(DELAYS) else HOURLY


def _about(row: InboxEvent, **more: Any) -> dict[str, Any]:
    """Return the fields of an event for JSON logs."""
    known = {"sender": row.source, "event": row.id, "source": row.uri, "flow_run": row.flow_run_id, **more}
    return {"ckptcore": {name: value for name, value in known.items() if value}}


@dataclass(frozen=True, slots=True)
class _Round:
    box: Mailbox
    runs: FlowRuns
    senders: Mapping[str, Sender]
    targets: Mapping[str, NotifyTarget]
    now: datetime

    def start(self, row: InboxEvent) -> None:
        """Start the run of an event, or schedule a retry."""
        try:
            sender = self.senders[row.source]
            meta = meta_of(sender.dialect, row.body)
            order = order_of(sender, row.uri, row.run, row.step, meta)
        except RequestRefused as refused:
            self.end(row, "failed", refused.reply["message"])
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
        except Exception as error:  # the event is kept, whatever Prefect's error
            self.postpone(row, beginning(f"{type(error).__name__}: {error}", 1000), delay_after(row.tries))
            return
        self.box.running(row, run, self.now + timedelta(seconds=LOOKS[0]))
        about = _about(row, flow_run=run, destination=order.parameters["destination"])
        _log.info("%s: event %s is run %s", row.source, row.id, run, extra=about)
        self.tell("ckptcore.checkpoint.announced", row, {"flow_run_id": run, **order.parameters})

    def postpone(self, row: InboxEvent, why: str, seconds: float) -> None:
        """Schedule a retry in some seconds, or fail the event after too many tries."""
        if row.tries >= MAX_ATTEMPTS:
            self.end(row, "failed", f"gave up after {row.tries} tries: {why}")
            return
        _log.warning(
            "%s: event %s could not be started, next try in %d s: %s",
            row.source,
            row.id,
            seconds,
            why,
            extra=_about(row),
        )
        self.box.later(row, self.now + timedelta(seconds=seconds), why)

    def look(self, row: InboxEvent, state: RunState | None) -> bool:
        """Inspect the run of an event, and return whether it has ended; the event ends with it."""
        assert row.flow_run_id is not None
        outcome = outcome_of(state, self.now)
        if outcome is None:
            # `tries` counts takes, which is near enough to the number of looks to space them.
            if state is not None and is_overlooked(state, self.now):
                if state.begun >= MOST_BEGUN:
                    why = given_up(state.begun, state.message)
                    self.runs.give_up(row.flow_run_id, why)
                    self.end(row, "failed", why)
                    return True
                _log.warning(
                    "%s: event %s: resuming run %s, which no worker processes",
                    row.source,
                    row.id,
                    row.flow_run_id,
                    extra=_about(row),
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
        """End an event as done or failed, and put the notifications into the outbox."""
        type = f"conversion.{outcome}"
        destination = self._destination(row)
        outputs = self.box.outputs(row.flow_run_id, destination, row.uri)
        data = {
            "uri": row.uri,
            "destination": outputs[-1]["destination"] if outputs else destination,
            "outputs": outputs,
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
            about = _about(row, destination=data["destination"])
            _log.info("%s: event %s %s: %s", row.source, row.id, outcome, why, extra=about)
            self.tell(f"ckptcore.{type}", row, data)

    def _destination(self, row: InboxEvent) -> str:
        """Return where the configuration sends an event's output, or "" if it no longer allows the event."""
        try:
            order = order_of(self.senders[row.source], row.uri, row.run, row.step)
        except RequestRefused:
            return ""
        return str(order.parameters["destination"])

    def tell(self, event: str, row: InboxEvent, payload: Mapping[str, Any]) -> None:
        """Send an event to Prefect, at most once. The outbox is the reliable way to learn of an end."""
        try:
            self.runs.tell(event, row.uri, payload)
        except Exception as error:
            _log.warning("%s: cannot send the event %s to Prefect: %s", row.source, event, error)
