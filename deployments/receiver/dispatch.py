"""Turn rows of the inbox into flow runs, and ended runs into messages.

A row is taken, its run is started or inspected, and the row is scheduled for the next look. Each step can be
repeated: Prefect returns the existing run of an idempotency key, and a row changes in one transaction. So if
a process ends between two steps, the next round finishes its work, here or on another receiver.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol

from ckptcore.catalog.promotions import MOVED, REMOVED
from ckptcore.errors import CkptError, InternalError
from ckptcore.page.http_errors import RequestRefused
from ckptcore.redaction import beginning, redacted
from ckptcore.utils.isolation import attempt, for_each
from deployments.receiver.event import meta_of
from deployments.receiver.inbox import EventQueues, InboxEvent, Message, OutboxMessage
from deployments.receiver.run_request import flow_run_for
from deployments.receiver.settings import PREFECT, NotifyTarget, Sender
from tasks.attempts import given_up

LIMIT = 20  # rows of one round
LOOKS = (2, 5, 10, 20, 30)  # seconds until a run is inspected again
# Seconds until a start is retried, then hourly: an event fails after about two days.
DELAYS = (2, 5, 15, 60, 300, 900)
HOURLY = 3600
MAX_ATTEMPTS = 50
REASON = 300  # characters of an error
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
    message: for users. starts: how often the run was started. beat: the interval of its heartbeats.
    """

    kind: str
    since: datetime
    message: str
    starts: int = 0
    beat: timedelta = DEFAULT_BEAT


class PrefectError(Exception):
    """Prefect's answer cannot be used. The message says why, to users."""


class PrefectUnavailable(PrefectError):
    """Prefect does not answer. Nothing else should be tried in this round."""


class EventsWait(Exception):
    """Events have been waiting for a while because of an error, which may be past for the next one."""


class FlowRuns(Protocol):
    """The calls to Prefect.

    All raise `PrefectUnavailable` if it does not answer, and `PrefectError` for an odd answer.
    """

    def start(
        self, deployment: str, parameters: Mapping[str, Any], *, key: str, name: str, tags: Sequence[str]
    ) -> str:
        """Return the id of the run with this idempotency key; start it if there is none."""

    def states(self, ids: Sequence[str]) -> Mapping[str, RunState | CkptError]:
        """Return the states of runs by id, or why one is unknown.

        A run that Prefect no longer knows is missing.
        """

    def resume(self, id: str, why: str) -> None:
        """Resume a run that no worker processes."""

    def give_up(self, id: str, why: str) -> None:
        """Fail a run that was started too often."""

    def tell(self, event: str, uri: str, payload: Mapping[str, Any]) -> None:
        """Send Prefect an event about a checkpoint, which can trigger automations."""


def work(
    box: EventQueues,
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
        PrefectUnavailable: Prefect does not answer. The rows are scheduled for a retry.
    """
    dispatch_pass = _DispatchPass(box, runs, senders, targets, now or box.now())
    # Only events of these senders: to take another receiver's event and return it would count as a try.
    rows = box.take(dispatch_pass.now, LIMIT, list(senders))
    away: CkptError | None = None  # once Prefect does not answer, nobody asks again
    fresh = [row for row in rows if row.flow_run_id is None]
    running_rows, ended = [row for row in rows if row.flow_run_id is not None], 0
    states: Mapping[str, RunState | CkptError] | CkptError | None = None

    def handle(row: InboxEvent) -> None:
        nonlocal away, ended, states
        if row.flow_run_id is None:
            error = away or attempt(dispatch_pass.start, row)
            if error is not None:
                away = away or _of_away(error)
                dispatch_pass.postpone(row, error)
            return
        if states is None:
            ids = [running_row.flow_run_id or "" for running_row in running_rows]
            states = attempt(runs.states, ids) if away is None else away
        state = states if isinstance(states, CkptError) else states.get(row.flow_run_id)
        outcome: bool | CkptError
        if isinstance(state, CkptError):
            outcome = state
        else:
            outcome = attempt(dispatch_pass.look, row, state) if away is None else away
        if isinstance(outcome, CkptError):  # or it would be looked at only after its lease
            away = away or _of_away(outcome)
            dispatch_pass.look_later(row, outcome)
        else:
            ended += outcome

    for_each(handle, [*fresh, *running_rows])
    if away is not None:
        raise PrefectUnavailable(reason_of(away))
    return len(fresh) + ended


def _of_away(error: CkptError) -> CkptError | None:
    """Return the error if it is that Prefect does not answer."""
    return error if isinstance(error.__cause__, PrefectUnavailable) else None


def require_progress(box: EventQueues, senders: Mapping[str, Sender], now: datetime | None = None) -> int:
    """Raise `EventsWait` if events of these senders have been waiting for a while because of an error.

    The rows tell: a receiver that was restarted, or that tries again in an hour, says the same.
    """
    waiting = box.postponed(now or box.now(), list(senders))
    if waiting:
        raise EventsWait("; ".join(map(str, waiting)))
    return 0


def announce_aliases(
    box: EventQueues, runs: FlowRuns, targets: Mapping[str, NotifyTarget], now: datetime | None = None
) -> int:
    """Announce alias changes to the subscribed targets and to Prefect; return how many messages were handled.

    Targets get them from the outbox, like all notifications; the messages to Prefect are sent here.

    Raises:
        PrefectUnavailable: Prefect does not answer. Its messages are sent later.
    """
    now = now or box.now()
    subscriptions: dict[str, Collection[str]] = {name: target.events for name, target in targets.items()}
    count = 0
    away: CkptError | None = None

    def put() -> None:
        nonlocal count
        count += box.announce(now, subscriptions | {PREFECT: (MOVED, REMOVED)})

    def send_all() -> None:
        for_each(send, box.messages(now, LIMIT, [PREFECT]))

    def send(message: Message) -> None:
        nonlocal count, away
        error = away or attempt(_tell, runs, message)
        if error is None:
            box.sent(message, now)
            count += 1
            return
        away = away or _of_away(error)
        delay = timedelta(seconds=delay_after(message.tries))
        retry_at = None if message.tries >= MAX_ATTEMPTS else now + delay
        box.unsent(message, now, reason_of(error), retry_at)

    for_each(lambda step: step(), (put, send_all))
    if away is not None:
        raise PrefectUnavailable(reason_of(away))
    return count


def _tell(runs: FlowRuns, message: Message) -> None:
    data = message.body["data"]
    runs.tell(f"ckptcore.{message.type}", str(data.get("uri") or data["checkpoint"]), data)


def reason_of(error: CkptError) -> str:
    """Return why an event or a message is postponed, in one line: the code of an error, and what it says.

    >>> from ckptcore.errors import UsageError
    >>> reason_of(attempt(int, "x")), reason_of(UsageError("no such deployment"))
    ("ValueError: invalid literal for int() with base 10: 'x'", 'usage: no such deployment')
    """
    text = error.message if isinstance(error, InternalError) else f"{error.code}: {error.message}"
    if isinstance(error.__cause__, PrefectError):
        text = str(error.__cause__)
    return beginning(" ".join(text.split()), REASON)


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


def _about(row: InboxEvent, **extra_fields: Any) -> dict[str, Any]:
    """Return the fields of an event for JSON logs."""
    fields = {
        "sender": row.source,
        "event": row.id,
        "source": row.uri,
        "flow_run": row.flow_run_id,
        **extra_fields,
    }
    return {"ckptcore": {name: value for name, value in fields.items() if value}}


@dataclass(frozen=True, slots=True)
class _DispatchPass:
    box: EventQueues
    runs: FlowRuns
    senders: Mapping[str, Sender]
    targets: Mapping[str, NotifyTarget]
    now: datetime

    def start(self, row: InboxEvent) -> None:
        """Start the run of an event."""
        sender = self.senders[row.source]
        try:
            meta = meta_of(sender.dialect, row.body)
            request = flow_run_for(sender, row.uri, row.run, row.step, meta)
        except RequestRefused as refused:
            self.end(row, "failed", refused.reply["message"])
            return
        run = self.runs.start(
            request.deployment,
            request.parameters,
            key=f"ckptcore-inbox:{row.key}",
            name=f"{row.source} {'/'.join(redacted(request.uri).split('/')[-2:])}",
            tags=["webhook", f"source:{row.source}"],
        )
        self.box.running(row, run, self.now + timedelta(seconds=LOOKS[0]))
        log_fields = _about(row, flow_run=run, destination=request.parameters["destination"])
        _log.info("%s: event %s is run %s", row.source, row.id, run, extra=log_fields)
        self.tell("ckptcore.checkpoint.announced", row, {"flow_run_id": run, **request.parameters})

    def postpone(self, row: InboxEvent, error: CkptError) -> None:
        """Schedule another start of an event, or fail it after too many."""
        why, seconds = reason_of(error), delay_after(row.tries)
        if row.tries >= MAX_ATTEMPTS:
            self.end(row, "failed", f"gave up after {row.tries} tries: {why}")
            return
        self._warn(row, f"could not be started, next try in {seconds:.0f} s: {why}", error)
        self.box.later(row, self.now + timedelta(seconds=seconds), why)

    def look_later(self, row: InboxEvent, error: CkptError) -> None:
        """Schedule another look at the run of an event that could not be followed."""
        why = f"its run cannot be followed: {reason_of(error)}"
        self._warn(row, why, error)
        self.box.later(row, self._next_look(row), why)

    def _next_look(self, row: InboxEvent) -> datetime:
        # `tries` counts takes, which is near enough to the number of looks to space them.
        return self.now + timedelta(seconds=LOOKS[min(max(row.tries - 2, 0), len(LOOKS) - 1)])

    def _warn(self, row: InboxEvent, text: str, error: CkptError) -> None:
        # What nobody foresaw needs its traceback.
        trace = error.__cause__ if isinstance(error, InternalError) else None
        trace = None if isinstance(trace, PrefectError) else trace
        _log.warning("%s: event %s: %s", row.source, row.id, text, extra=_about(row), exc_info=trace)

    def look(self, row: InboxEvent, state: RunState | None) -> bool:
        """Inspect the run of an event, and return whether it has ended; the event ends with it."""
        assert row.flow_run_id is not None
        outcome = outcome_of(state, self.now)
        if outcome is None:
            if state is not None and is_overlooked(state, self.now):
                if state.starts >= MOST_BEGUN:
                    why = given_up(state.starts, state.message)
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
            waits_for = state.message if state is not None and state.kind == "SCHEDULED" else ""
            self.box.running(row, row.flow_run_id, self._next_look(row), waits_for)
            return False
        self.end(row, outcome, state.message if state is not None else "Prefect no longer knows the run")
        return True

    def end(self, row: InboxEvent, outcome: str, why: str) -> None:
        """End an event as done or failed, and put the notifications into the outbox."""
        type = f"conversion.{outcome}"
        destination = self._destination(row)
        outputs = attempt(self.box.outputs, row.flow_run_id, destination, row.uri)
        if isinstance(outputs, CkptError):
            if outputs.transient:
                raise outputs
            why, outputs = f"{why} (its outputs cannot be read: {reason_of(outputs)})", []
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
            OutboxMessage(target=name, key=f"{row.key}:{outcome}", type=type, body=body)
            for name, target in self.targets.items()
            if type in target.events
        ]
        if self.box.end(row, self.now, why if outcome == "failed" else None, news):
            log_fields = _about(row, destination=data["destination"])
            _log.info("%s: event %s %s: %s", row.source, row.id, outcome, why, extra=log_fields)
            self.tell(f"ckptcore.{type}", row, data)

    def _destination(self, row: InboxEvent) -> str:
        """Return where the configuration sends an event's output, or "" if it no longer allows the event."""
        try:
            request = flow_run_for(self.senders[row.source], row.uri, row.run, row.step)
        except RequestRefused:
            return ""
        return str(request.parameters["destination"])

    def tell(self, event: str, row: InboxEvent, payload: Mapping[str, Any]) -> None:
        """Send an event to Prefect, at most once. The outbox is the reliable way to learn of an end."""
        error = attempt(self.runs.tell, event, row.uri, payload)
        if error is not None:
            why = reason_of(error)
            _log.warning("%s: cannot send the event %s to Prefect: %s", row.source, event, why)
