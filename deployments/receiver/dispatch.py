"""Turn rows of the inbox into flow runs, and ended runs into messages.

A row is taken, its run is started or inspected, and the row is scheduled for the next look. Each step can be
repeated: Prefect returns the existing run of an idempotency key, and a row changes in one transaction. So if
a process ends between two steps, the next round finishes its work, here or on another receiver.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from ckptcore.catalog.promotions import MOVED, REMOVED
from ckptcore.errors import CkptError, InternalError
from ckptcore.page.http_errors import RequestRefused
from ckptcore.redaction import beginning, redacted
from ckptcore.utils.isolation import attempt, for_each
from deployments.receiver.event import meta_of
from deployments.receiver.inbox import EventQueues, InboxEvent, Message
from deployments.receiver.prefect_runs import (
    PrefectError,
    PrefectRuns,
    PrefectUnavailable,
    RunState,
    is_overlooked,
)
from deployments.receiver.settings import PREFECT, NotifyTarget, Sender, flow_run_for, is_plain
from tasks.retry import given_up

LIMIT = 20  # rows of one round
LOOKS = (2, 5, 10, 20, 30)  # seconds until a run is inspected again
# Seconds until a start is retried, then hourly: an event fails after about two days.
DELAYS = (2, 5, 15, 60, 300, 900)
HOURLY = 3600
MAX_ATTEMPTS = 50
REASON = 300  # characters of an error
# An automation may resume a crashed run; until then it has not failed.
CRASHED_FOR = timedelta(minutes=30)
IDLE = 2.0  # seconds between rounds without news; rows of other receivers are noticed then
STOP_SECONDS = 15.0
STUCK_SECONDS = 90.0  # for a step: more than three answers that take as long as they may
ROOTS_SECONDS = 15.0  # between two reads of the watched roots from the catalog
MOST_BEGUN = 5  # as in flows/resume.py: a run that kills its process repeatedly has failed

_log = logging.getLogger("deployments.receiver")


class EventsWait(Exception):
    """Events have been waiting for a while because of an error, which may be past for the next one."""


def work(
    box: EventQueues,
    runs: PrefectRuns,
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
    box: EventQueues, runs: PrefectRuns, targets: Mapping[str, NotifyTarget], now: datetime | None = None
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


def _tell(runs: PrefectRuns, message: Message) -> None:
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
    runs: PrefectRuns
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
        subscribed = [name for name, target in self.targets.items() if type in target.events]
        if self.box.end(row, self.now, why if outcome == "failed" else None, body, subscribed):
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


class StepThread:
    """A thread that repeats steps until it is stopped. A failed step is reported and repeated later."""

    def __init__(
        self,
        steps: Mapping[str, Callable[[], int]],
        idle: float = IDLE,
        beside: StepThread | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # beside: another loop that starts and stops with this one; `trouble` reports both. clock: returns
        # seconds that only grow.
        self._steps, self._idle, self._beside, self._clock = steps, idle, beside, clock
        self._now: tuple[str, float] | None = None  # the step that runs, and since when
        self._news, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"receiver-{'-'.join(steps)}", daemon=True)
        self._trouble: dict[str, str] = {}

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()
        if self._beside is not None:
            self._beside.start()

    def wake(self) -> None:
        """Run the steps now."""
        self._news.set()

    def stop(self) -> None:
        """Stop after the current step. The next process continues from the rows."""
        until = time.monotonic() + STOP_SECONDS
        loops = [self] if self._beside is None else [self, self._beside]
        for loop in loops:
            loop._end.set()
            loop._news.set()
        for loop in loops:
            if loop._thread.is_alive():
                loop._thread.join(max(0.0, until - time.monotonic()))

    def trouble(self) -> str:
        """Return the steps that failed in their last round, or do not end, with the reasons, or ""."""
        reasons = [f"{name}: {why}" for name, why in sorted(self._trouble.items())]
        running = self._now
        if running is not None and (seconds := self._clock() - running[1]) > STUCK_SECONDS:
            reasons.append(f"{running[0]}: it has not ended for {seconds:.0f} s")
        if self._thread.ident is not None and not self._thread.is_alive() and not self._end.is_set():
            reasons.append(f"{'-'.join(self._steps)}: its thread has ended; restart the receiver")
        beside_reasons = self._beside.trouble() if self._beside is not None else ""
        return "; ".join([*reasons, beside_reasons] if beside_reasons else reasons)

    def round(self) -> tuple[bool, bool]:
        """Run every step once. Return whether one had work, and whether one failed."""
        busy = failed = False
        for name, step in self._steps.items():
            if self._end.is_set():
                break
            self._now = (name, self._clock())
            try:
                busy = step() > 0 or busy
                self._trouble.pop(name, None)
            except EventsWait as waiting:  # the step itself is done
                self._report(name, waiting)
            except Exception as error:  # the thread must survive any error of the database or Prefect
                self._report(name, error)
                failed = True
            finally:
                self._now = None
        return busy, failed

    def _report(self, name: str, error: Exception) -> None:
        if name not in self._trouble:
            # An unreachable database or Prefect server needs no traceback.
            foreseen = isinstance(error, CkptError | PrefectError | EventsWait)
            _log.error("%s failed and is retried: %s", name, error, exc_info=not foreseen)
        text = str(error) if isinstance(error, EventsWait) else f"{type(error).__name__}: {error}"
        self._trouble[name] = beginning(text, 2000)

    def _run(self) -> None:
        while not self._end.is_set():
            self._news.clear()
            busy, failed = self.round()
            if failed:  # a new event does not repair it
                self._end.wait(self._idle)
            elif not busy:
                self._news.wait(self._idle)


class RootsRefresher:
    """Updates the senders' watched roots from the catalog, if the configuration wants that.

    One thread calls `refresh`; another one reads the senders.
    """

    def __init__(self, box: EventQueues, senders: Mapping[str, Sender]) -> None:
        self._box, self._next = box, 0.0
        self._senders = [sender for sender in senders.values() if sender.watches]

    def refresh(self) -> int:
        """Read the roots if it is time. Raises `CatalogError`; the earlier roots then stay allowed."""
        if self._senders and time.monotonic() >= self._next:
            watched_roots = self._box.watched()
            odd = [root for root in watched_roots if not is_plain(root)]
            if odd:
                _log.warning("watched roots that events cannot name: %s", ", ".join(odd))
            for sender in self._senders:
                sender.watched = tuple(root for root in watched_roots if root not in odd)
            self._next = time.monotonic() + ROOTS_SECONDS
        return 0
