"""Let one process at a time write a destination on an object store.

A lease is a small object that is created only where there is none. Its holder renews it; a lease that was not
renewed in time, or whose process on this machine has ended, is taken over with a condition on its ETag, so
that one of several successors gets it. Each holder has a higher fencing number than the one before.

A process that was stopped past its lease may go on later. Three things keep it from harm: its successor
aborts or completes the uploads in the journal, whoever counts on the destination meanwhile ends the lease for
good (`Lease.require_ended`), and `Lease.require` is called before each change that readers see.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from ckptcore.errors import Busy, CkptError, DestinationUnwritable, SourceUnreadable
from ckptcore.store.objects import RECORD
from ckptcore.store.objects.client import S3Client
from ckptcore.store.objects.retry import Kind, kind_of
from ckptcore.utils import host, processes
from ckptcore.utils.foreign_text import InvalidText, load_json_object, parsing

TTL_S = 60.0
_SKEW_S = 15.0  # that clocks of machines may differ by
_HURRY_S = 3.0  # for which requests of a lease are repeated while an error waits to be reported
_log = logging.getLogger("ckptcore")
_RESERVED: set[str] = set()  # tokens of the leases that this process has, or is about to have


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lease.

    Attributes:
        token: Differs for every lease that was ever taken.
        fence: One more than that of the holder before.
        host: Name of the machine.
        process: The process, on its machine; see `ckptcore.utils.processes`.
        until: When the lease ends, seconds since 1970.
    """

    token: str
    fence: int
    host: str
    process: tuple[str, ...]
    until: float

    def is_alive(self, now: float, host: str) -> bool:
        """Report whether the lease is still valid, as far as a process of ``host`` can see."""
        # The clock of another machine may be behind this one by as much.
        if now > self.until + _SKEW_S:
            return False
        if self.host == host and processes.is_this(self.process):
            return self.token in _RESERVED  # of this process: it may have been unable to end it
        # Of a process on this machine it is known whether it has ended;
        # of another machine only the time counts.
        return self.host != host or not processes.has_ended(self.process)

    @property
    def name(self) -> str:
        """Return the holder for people."""
        return f"process {self.process[0]} on {self.host}"


class Arbiter(Protocol):
    """Decides which of several processes may write a destination, where its store cannot."""

    def take(self) -> None:
        """Take the destination, or raise `Busy`."""

    def renew(self) -> None:
        """Keep it, or raise `Busy` if another process took it meanwhile."""

    def release(self) -> None:
        """Give it back."""


class Lease:
    """The lease of one destination.

    Args:
        client: The store.
        key: Key of the lease object.
        destination: URL of what it protects, for messages.
        arbiter: Asked on stores without create-only requests.
        ttl_s: How long it is valid without being renewed; None for the default.
        clock: Seconds since 1970; None for that of this machine.
    """

    def __init__(
        self,
        client: S3Client,
        key: str,
        destination: str,
        arbiter: Arbiter | None = None,
        *,
        ttl_s: float | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        # Requests of the lease stop being repeated when an error waits (`hurry`).
        self._client, self._key, self._destination = client.unless(self._overdue), key, destination
        self._most_until: float | None = None  # on the clock of `host.monotonic`
        self._ttl_s, self._clock = TTL_S if ttl_s is None else ttl_s, clock or host.now
        self._arbiter, self._decides = arbiter, False
        self._proven = True  # False from creating the lease to `prove`
        self._mine: Holder | None = None
        self._etag: str | None = None
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._renewer: threading.Thread | None = None

    @property
    def holder(self) -> Holder | None:
        """Return this process as the holder, or None."""
        return self._mine

    def take(self, *, prove: bool = True) -> None:
        """Take the lease, and renew it in the background until `release`.

        Args:
            prove: Call `prove`, too. Otherwise the caller looks at the destination meanwhile, and changes
                nothing there before that.

        Raises:
            Busy: Another process has it.
            DestinationUnwritable: The store ignores create-only requests, and there is no arbiter.
        """
        self._most_until = None
        mine = self._new(1)
        # Before it is written: to another thread of this process an unreserved lease has ended.
        _RESERVED.add(mine.token)
        try:
            mine, etag = self._taken(mine)
        except BaseException:
            _RESERVED.discard(mine.token)
            raise
        with self._lock:
            self._mine, self._etag = mine, etag or None
        if prove:
            self.prove()
        self._stop.clear()
        self._renewer = threading.Thread(target=self._renewing, name="ckptcore-lease", daemon=True)
        self._renewer.start()

    def _taken(self, mine: Holder) -> tuple[Holder, str]:
        """Create the lease, or take it over; return it and its ETag."""
        self.require_free()  # looked at first: a store that ignores conditions would replace it
        try:
            etag = self._client.put(self._key, _packed(mine), create=True)
        except CkptError as error:
            if kind_of(error) is Kind.EXISTS:
                return self._taken_over(mine)
            if kind_of(error) is Kind.UNSUPPORTED:
                return self._decided(mine)
            raise
        self._proven = False
        return mine, etag

    def prove(self) -> bool:
        """Find out whether the store refuses to create the lease twice; if not, let the arbiter decide.

        Returns:
            Whether the arbiter has decided now: until then another run may have worked here.

        Raises:
            Busy: Another process has the destination.
            DestinationUnwritable: The store ignores create-only requests, and there is no arbiter.
        """
        with self._lock:
            holder = self._mine
        if self._proven or holder is None:
            return False
        try:
            if self._is_exclusive(holder):
                self._proven = True
                return False
            mine, etag = self._decided(holder)
        except BaseException:
            # Not removed: it may be another's by now, and ends by itself.
            with self._lock:
                self._mine = None
            _RESERVED.discard(holder.token)
            raise
        with self._lock:
            self._mine, self._etag = mine, etag or None
        self._proven = True
        return True

    def require_free(self) -> None:
        """Raise `Busy` if another process holds the lease."""
        stored_holder = self._stored_holder()
        if stored_holder is not None and stored_holder.is_alive(self._clock(), socket.gethostname()):
            raise self._busy(stored_holder)

    def require_ended(self) -> None:
        """Raise `Busy` if another process holds the lease, and remove one that has ended.

        Its holder may only have been stopped: it finds that it has lost the lease, and does not renew it.
        """
        if self._stored_holder() is None:
            return
        # The ETag first, then who has it: if it is renewed in between, the condition fails.
        lease_object = self._client.head(self._key)
        self.require_free()  # looked at between both requests: the condition is about what has ended
        if lease_object is None:
            return
        try:
            self._client.delete(self._key, match=lease_object.etag)
        except CkptError as error:
            if kind_of(error) is Kind.UNSUPPORTED:
                self._client.delete(self._key)
            # Without the right to delete, an entry that has ended takes its place.
            elif kind_of(error) is Kind.DENIED:
                self._client.put(
                    self._key, _packed(replace(self._new(0), until=0.0)), match=lease_object.etag
                )
            elif kind_of(error) is Kind.CHANGED:
                self.require_free()  # it was renewed, or another process took it
            else:
                raise

    def require(self) -> None:
        """Raise `Busy` unless this process still holds the lease."""
        # If the proof was postponed, it must be there before anything changes.
        self.prove()
        with self._lock:
            holder = self._mine
        # Renewals are a quarter of its life apart, so with less than that left one of them is missing.
        if holder is not None and self._clock() < holder.until - self._ttl_s / 4:
            return  # renewed a moment ago
        if self._decides:
            self.renew()
            return
        stored_holder = self._stored_holder()
        if holder is None or stored_holder is None or stored_holder.token != holder.token:
            raise self._lost(stored_holder)
        # What follows takes some requests: meanwhile it must not end on the clock of another machine.
        if self._clock() > stored_holder.until - self._ttl_s / 4:
            self.renew()

    def renew(self) -> None:
        """Extend the lease; raise `Busy` if another process has it."""
        with self._lock:
            holder, etag = self._mine, self._etag
            if holder is None:
                raise self._lost(None)
            later = replace(holder, until=self._clock() + self._ttl_s)
            # On stores without conditions the object only informs others; the claim is what counts.
            if self._decides:
                assert self._arbiter is not None  # it has decided
                try:
                    self._arbiter.renew()
                except Busy:
                    self._mine = None
                    raise
            try:
                new_etag = self._client.put(self._key, _packed(later), match=None if self._decides else etag)
            except CkptError as error:
                if kind_of(error) not in (Kind.CHANGED, Kind.MISSING):
                    raise
                # A refused condition may be the answer to a repeated request, whose first reply was lost.
                stored_holder = self._stored_holder()
                if stored_holder is None or stored_holder.token != holder.token:
                    self._mine = None
                    raise self._lost(stored_holder) from error
                # The reply to an earlier renewal was lost.
                lease_object = self._client.head(self._key)
                self._mine = stored_holder
                self._etag = lease_object.etag if lease_object is not None else None
                return
            self._mine, self._etag = later, new_etag or None

    def hurry(self) -> None:
        """Let `release` repeat requests for a few seconds only: an error is to be reported.

        A lease that could not be removed ends by itself; on this machine, with this process.
        """
        self._most_until = host.monotonic() + _HURRY_S

    def _overdue(self) -> bool:
        return self._most_until is not None and host.monotonic() > self._most_until

    def release(self) -> None:
        """End the lease, if this process still holds it."""
        # First the thread that renews it, which would write the removed lease anew.
        self._stop.set()
        if self._renewer is not None:
            self._renewer.join()
            self._renewer = None
        with self._lock:
            holder, self._mine = self._mine, None
        if holder is None:
            return
        _RESERVED.discard(holder.token)
        try:
            self._remove(holder)
        except CkptError as error:  # it ends by itself; what was done under it is done
            _log.warning("cannot end the lease of %s: %s", self._destination, error.message)
        finally:
            if self._decides and self._arbiter is not None:
                self._arbiter.release()

    def _remove(self, holder: Holder) -> None:
        """Remove the lease object if it is the holder's; without the right to delete, let it end now."""
        # Looked at now: a process that was stopped may have lost it since an earlier look.
        stored_holder = self._stored_holder()
        if stored_holder is None or stored_holder.token != holder.token:
            return
        try:
            self._client.delete(self._key)
        except CkptError as error:
            if kind_of(error) is not Kind.DENIED:
                raise
            self._client.put(self._key, _packed(replace(holder, until=0.0)))

    def _new(self, fence: int) -> Holder:
        until = self._clock() + self._ttl_s
        return Holder(uuid.uuid4().hex, fence, socket.gethostname(), processes.this_process(), until)

    def _stored_holder(self) -> Holder | None:
        """Return who holds the lease; raise `DestinationUnwritable` where its store cannot be asked."""
        try:
            data = self._client.fetch(self._key, RECORD)
        except SourceUnreadable as error:
            message = f"cannot reach the destination {self._destination}: {error.message}"
            raise DestinationUnwritable(message, hint=error.hint, **error.values) from error
        return None if data is None else _unpacked(data)

    def _is_exclusive(self, mine: Holder) -> bool:
        """Report whether the store refuses to create an object twice: some ignore that condition."""
        try:
            self._client.put(self._key, _packed(mine), create=True)
        except CkptError as error:
            if kind_of(error) is Kind.EXISTS:
                # Its own object is there, so the second creation was refused: the store knows the condition.
                return True
            raise
        return False

    def _taken_over(self, mine: Holder) -> tuple[Holder, str]:
        """Take the lease of a process that has ended."""
        # The ETag first: the condition below fails if the lease is renewed between both requests.
        lease_object = self._client.head(self._key)
        old_holder = self._stored_holder()
        if old_holder is None or lease_object is None:
            raise Busy(f"another process has just finished {self._destination}", hint="run the command again")
        # Created by this very request, sent twice.
        if old_holder.token == mine.token:
            return old_holder, lease_object.etag  # the reply was lost
        if old_holder.is_alive(self._clock(), mine.host):
            raise self._busy(old_holder)
        # Each successor has a higher number, so that what the one before wrote late can be recognised.
        mine = replace(mine, fence=old_holder.fence + 1)
        try:
            etag = self._client.put(self._key, _packed(mine), match=lease_object.etag)
        except CkptError as error:
            if kind_of(error) is Kind.UNSUPPORTED:
                return self._decided(mine)
            now = self._stored_holder() if kind_of(error) in (Kind.CHANGED, Kind.MISSING) else None
            if now is None or now.token != mine.token:
                raise (self._busy(now) if now is not None else error) from error
            etag = ""
        _log.info("the lease of %s ended with %s; it is taken over", self._destination, old_holder.name)
        return mine, etag or (self._client.head(self._key) or lease_object).etag

    def _decided(self, mine: Holder) -> tuple[Holder, str]:
        """Take the lease on a store without conditions: the arbiter decides, and the object only informs."""
        if self._arbiter is None:
            # It was created a moment ago, on a store that would have let anybody create it.
            with suppress(CkptError):  # the refusal says more; without that right the object ends by itself
                self._remove(mine)
            raise DestinationUnwritable(
                f"cannot write {self._destination}: its store ignores create-only requests, so two runs "
                "could write it at once",
                hint="record runs in a catalog that all of them share (--catalog URL): its claim decides",
                kind=Kind.UNSUPPORTED.value,
            )
        try:
            self._arbiter.take()
        except CkptError:
            with suppress(CkptError):  # it replaced the object of the one who has it, who writes it anew
                self._remove(mine)
            raise
        self._decides = True
        try:
            return mine, self._client.put(self._key, _packed(mine))
        except BaseException:
            self._arbiter.release()
            raise

    def _renewing(self) -> None:
        # Four times in its life: three renewals may fail before it ends.
        while not self._stop.wait(self._ttl_s / 4):
            try:
                self.renew()
            except Busy:
                return  # `require` finds that, too, before anything is published
            except CkptError as error:
                _log.warning("cannot renew the lease of %s: %s", self._destination, error.message)

    def _busy(self, holder: Holder) -> Busy:
        left = max(holder.until - self._clock(), 0)
        return Busy(
            f"{holder.name} is writing {self._destination} (its lease ends in {left:.0f} s, unless renewed)",
            holder=holder.name,
            until=holder.until,
        )

    def _lost(self, holder: Holder | None) -> Busy:
        by = f": {holder.name} has it" if holder is not None else ""
        return Busy(
            f"this run was stopped for longer than its lease of {self._destination}{by}",
            hint="run the same command again when no other run writes there",
        )


def _packed(holder: Holder) -> bytes:
    return json.dumps(asdict(holder), sort_keys=True).encode()


def _unpacked(data: bytes) -> Holder | None:
    with suppress(InvalidText), parsing("a lease"):
        form = load_json_object(data)
        process = tuple(map(str, form["process"]))
        # A record of another form is no lease of ours.
        if len(process) == 4:
            return Holder(
                str(form["token"]), int(form["fence"]), str(form["host"]), process, float(form["until"])
            )
    return None
