"""Run simulated processes one at a time, and let faults befall them, as a seed decides.

`FAULTS` is the table of what may happen; the page for operators shows it.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckptcore.errors import CkptError
from tests.simulation.crash_disk import CrashDisk
from tests.simulation.seam import DIE, FAILED, GO, HALF, HOSTS, LOST, PROCESSES, S3, THROTTLED, Seam, Shared

FILE_CALLS = {"rename", "replace", "link", "unlink", "mkdir", "rmdir", "fsync", "renameat2", "write"}
WRITES = {"PutObject", "CompleteMultipartUpload", "CopyObject", "DeleteObject"}  # what others see in a bucket
# Where a fault may befall a group of processes -> how often, and how many of these calls there are. A call
# shows if it changes a name that users see, and records if a record is in its place by it.
PLACES = {
    "shows": (34, 2),
    "records": (20, 9),
    "commit": (15, 5),
    "rename": (5, 8),
    "unlink": (16, 8),
    "fsync": (5, 26),
    "": (5, 80),
}
HIDDEN = re.compile(r"/\.[^/]+\.ckptcore")
# A fault at a call: its kind and turns, the call and its number, how many calls later, of which process.
AT_CALL = re.compile(
    r"(?P<kind>[a-z-]+)(~(?P<turns>\d+))?@(?P<call>\w+):(?P<at>\d+)"
    r"(\+(?P<behind>\d+))?(\*(?P<process>\d+))?"
)
MOST_CALLS = 5000  # of a process; more is an endless loop
DELAY_NS = 10**9
REAL_S = 120.0  # without a word from a process that has its turn


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        often: How many in a hundred groups of processes have it.
        means: What happens, for the page for operators.
        assumes: What is not simulated, because ckptcore counts on it.
    """

    often: int
    means: str
    assumes: str


FAULTS = {
    "kill": Kind(30, "a process ends before any of its calls, or in the middle of a write", "-"),
    "power": Kind(
        20,
        "all processes end; unsynced bytes are lost, torn or zero, unsynced names are undone, in each folder "
        "from some change on",
        "`fsync` of a file keeps its bytes, of a folder its names; a rename is complete in both folders",
    ),
    "catalog-power": Kind(
        50, "with `power`: commits of SQLite since the last flushed one are lost", "a flushed commit is kept"
    ),
    "error": Kind(
        15,
        "a file call fails with ENOSPC, EIO, EDQUOT or EROFS, and does nothing",
        "a call that returns was done",
    ),
    "lost-commit": Kind(
        10, "a commit is done, and reported as an error", "a commit is complete or not done at all"
    ),
    "pause": Kind(
        25, "a process gets no turn while others run, and a minute or up to a day passes on all clocks", "-"
    ),
    "jump": Kind(10, "the clock of a host jumps by up to a day, forwards or backwards", "-"),
    "failed-commit": Kind(
        5,
        "a transaction is undone instead of committed, and reported so: serialisation failed, or the "
        "connection was lost before",
        "a commit is complete or not done at all",
    ),
    "lost-reply": Kind(
        20, "a request to an object store is done, and its reply is lost", "a request is done or not done"
    ),
    "throttled": Kind(15, "an object store refuses some requests in turn: it is asked too often", "-"),
    "slow": Kind(
        10,
        "from some request on, each reply of an object store takes up to 7 s on all clocks",
        "a lease is not renewed meanwhile, and clocks differ by less than 15 s",
    ),
    "drift": Kind(10, "the clock of a host is up to 7 s fast or slow", "clocks differ by less than 15 s"),
    "hand": Kind(
        0,
        "another user writes to a source that a process removes, or to an output that it replaces, before it "
        "is moved away",
        "nobody writes through a descriptor that was open before",
    ),
}
# The faults of a group of processes, where a program says so -> how many of each kind.
PROFILES: dict[str, dict[str, tuple[int, ...]]] = {
    "setup": {},
    "calm": {},
    "kill": {"kill": (1,)},
    "power": {"power": (1,), "catalog-power": (0, 1)},
    "after": {"power": (1,), "catalog-power": (0, 1)},
    "error": {"error": (1, 1, 2)},
    "race": {"pause": (2, 3, 4)},
    "chaos": {"pause": (1, 2), "kill": (1,), "lost-commit": (0, 0, 1)},
    "hand": {"hand": (1, 2), "pause": (0, 1)},
    "database": {"failed-commit": (1, 2), "lost-commit": (0, 1), "pause": (0, 1)},
    "store": {"lost-reply": (1, 2), "throttled": (0, 1), "kill": (0, 1), "pause": (0, 1)},
    "slow": {"slow": (1, 2), "drift": (1, 2), "pause": (0, 1)},
}
PAUSES = ("pause", "stop", "delay")
LOCAL_ONLY = ("power", "catalog-power", "error", "hand")
BUCKET_ONLY = ("lost-reply", "throttled", "slow", "drift")
# What befalls processes that work on a bucket, where a program says what only a disk can do.
IN_A_BUCKET = {"power": "kill", "after": "kill", "error": "store"}


@dataclass(frozen=True)
class Fault:
    """A fault at a call of one of the processes that run at once.

    Attributes:
        kind: A row of `FAULTS`.
        at: It befalls the call of this number, of all or of one row of `PLACES`.
        number: Decides the rest.
        call: The row of `PLACES`, or the name of a call.
        behind: How many calls of this process later it happens.
        process: Which of the processes.
        turns: How many turns of others a pause takes; 0 for what ``number`` says.
    """

    kind: str
    at: int
    number: int
    call: str = ""
    behind: int = 0
    process: int = 0
    turns: int = 0


def drawn_faults(draw: random.Random, profile: str, *, local: bool) -> list[Fault]:
    """Return what befalls a group of processes.

    profile: a row of `PROFILES`; ``KIND[~TURNS]@CALL:N[+BEHIND][*PROCESS]`` for the N-th such call of a
    process, the first if none is named, and several of these with ``&`` (a stop is a pause of minutes, a
    delay one of about a minute); "" for anything, by the rates of `FAULTS`.
    """
    faults = []
    if "@" in profile:
        return [_at_call(text, draw.getrandbits(30)) for text in profile.split("&")]
    if not local:
        profile = IN_A_BUCKET.get(profile, profile)
    if profile:
        kinds = {kind: draw.choice(times) for kind, times in PROFILES[profile].items()}
    else:
        calm = draw.random() < 0.2
        kinds = {
            kind: draw.choice([1, 1, 2]) * (draw.random() * 100 < each.often and not calm)
            for kind, each in FAULTS.items()
            if not local or kind not in BUCKET_ONLY
        }
    for kind, times in kinds.items():
        for _ in range(0 if kind in (BUCKET_ONLY if local else LOCAL_ONLY) else times):
            at_end = kind == "power" and profile == "after"
            faults.append(Fault(kind, MOST_CALLS if at_end else 0, draw.getrandbits(30)))
    return [fault if fault.at else _placed(fault, draw) for fault in faults]


def _at_call(text: str, number: int) -> Fault:
    matched = AT_CALL.fullmatch(text)
    assert matched is not None, text
    behind, process, turns = (int(matched[name] or 0) for name in ("behind", "process", "turns"))
    return Fault(matched["kind"], int(matched["at"]), number, matched["call"], behind, process, turns)


def _placed(fault: Fault, draw: random.Random) -> Fault:
    """Place a fault anywhere, or at one of the calls that matter."""
    fault = replace(fault, process=draw.randrange(6))
    if fault.kind in ("lost-commit", "failed-commit"):
        return replace(fault, call="commit", at=draw.randint(1, PLACES["commit"][1]))
    if fault.kind == "hand" and draw.random() < 0.5:
        return replace(fault, call="shows", at=1)
    (call,) = draw.choices(list(PLACES), [often for often, _ in PLACES.values()])
    behind = draw.choice([0, 0, 0, 1, 1, 2, 3, 4])
    at = draw.randint(1, draw.randint(1, PLACES[call][1]))
    return replace(fault, call=call, at=at, behind=behind)


@dataclass
class Process:
    """A simulated process, as the scheduler sees it.

    Attributes:
        outcome: How it ended: ``done``, ``refused: CODE``, ``killed``, ``crashed: TRACEBACK``; "" until then.
        call: What it waits for, and the paths.
        wakes_ns: When it wants to go on, on the clock of the world.
        bare: Whether it has nothing to do with the catalog: it need not wait for a transaction of others.
        wrote: Whether it has written to a file.
        resting: How many turns of others it is paused for.
        asked_ns: When it began to wait for its turn.
        delayed: The number of its last call before which time had passed in turns of others.
        requests: Key -> number of its last call about it.
    """

    number: int
    home: int
    pid: int
    line: socket.socket
    bare: bool = False
    outcome: str = ""
    call: tuple[str, ...] = ()
    wakes_ns: int = 0
    resting: int = 0
    calls: int = 0
    in_transaction: bool = False
    wrote: bool = False
    asked_ns: int = 0
    delayed: int = 0
    requests: dict[str, int] = field(default_factory=dict)

    def kinds(self, root: Path | None) -> list[str]:
        """Return the rows of `PLACES` for the call that it waits for."""
        call, _, *paths = self.call
        if call == S3:
            operation, key = paths
            changes = operation in WRITES
            shows = changes and not HIDDEN.search(f"/{key}")
            records = changes and not shows and key.endswith(".json")
            return ["", operation, *(["shows"] if shows else []), *(["records"] if records else [])]
        below = [path[len(str(root)) :] for path in paths if root is not None and path.startswith(f"{root}/")]
        moves = call in ("rename", "renameat2", "replace", "link")
        shows = moves and any(not HIDDEN.search(path) for path in below)
        records = moves and bool(below) and below[-1].endswith(".json")
        return ["", call, *(["shows"] if shows else []), *(["records"] if records else [])]


@dataclass
class World:
    """The hosts, their clocks, and the disk.

    Attributes:
        root: The disk that all hosts share.
        catalog: The file of a SQLite catalog; None for another database.
        grave: An empty folder on the file system of the disk.
        log: Every call, if a list.
        inline: Run every work in this process, undisturbed: what it imports, no fork imports again.
        exchanges: Whether the file system exchanges two names in one step.
        hand: Lets another user write to what the process of this index works on; whether it has written to a
            file, and a number, follow.
        committed: Called with the number of a process that has committed; raises if something is wrong.
        requested: Called with the number of a process, and the key that it changes in a bucket where users
            see it, unless time has passed since it last looked at that key; raises if something is wrong.
        changed: Called behind any change of what users see in a bucket; raises, too.
        leased: Called with the number of a process that has written a lease; raises, too.
        writes: Called with the number of a process, and the file that it writes to; raises, too.
    """

    shared: Shared
    root: Path | None
    catalog: Path | None
    grave: Path
    log: list[str] | None = None
    inline: bool = False
    exchanges: bool = True
    hand: Callable[[int, bool, int], None] | None = None
    committed: Callable[[int], None] | None = None
    requested: Callable[[int, str], None] | None = None
    changed: Callable[[], None] | None = None
    leased: Callable[[int], None] | None = None
    writes: Callable[[int, str], None] | None = None
    count: int = 0
    processes: list[Process] = field(default_factory=list)
    cut: str = ""
    ctimes: dict[int, tuple[int, int]] = field(default_factory=dict)
    _slow_s: float = 0.0  # that a reply of the object store takes
    _throttled: int = 0  # requests that it still refuses
    _disk: CrashDisk | None = None
    _forgets: bool = False  # whether a power cut loses commits
    _commits: list[dict[str, bytes]] = field(default_factory=list)

    def run(
        self,
        works: Sequence[tuple[int, Callable[[], Any], bool]],
        faults: Sequence[Fault],
        draw: random.Random,
        observe: Callable[[], None],
    ) -> list[str]:
        """Run some works at once, each in a process, and return how they ended.

        Args:
            works: The host of each, what it does, and whether it has nothing to do with the catalog.
            faults: What befalls them.
            draw: Decides whose turn it is.
            observe: Called whenever a process has ended; raises if something is wrong.
        """
        if self.inline:
            return [_inline(work) for _, work, _ in works]
        powered = any(fault.kind == "power" for fault in faults) and self.root is not None
        grave = self.grave / str(self.count)
        if powered and self.root is not None:
            grave.mkdir()
            self._disk = CrashDisk(self.root, grave)
            self._commits = [self._catalog()]
        self.processes, self.cut, self._slow_s, self._throttled = [], "", 0.0, 0
        self._forgets = any(fault.kind == "catalog-power" for fault in faults)
        try:
            for home, work, bare in works:
                self.processes.append(self._begin(home, work, str(grave) if powered else "", bare))
                self._hear(self.processes[-1])
            self._turns({(f.process % len(works), f.call, f.at): f for f in faults}, draw, observe)
        finally:
            for process in self.processes:
                self._end(process, "killed")
            self._disk = None
            shutil.rmtree(grave, ignore_errors=True)
        return [process.outcome for process in self.processes]

    def _begin(self, home: int, work: Callable[[], Any], grave: str, bare: bool) -> Process:
        self.count += 1
        number = 1 + self.count % (PROCESSES - 1)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.shared.set_alive(number, True)
        seam = Seam(self.shared, theirs, number, home, grave, self.ctimes, self.exchanges)
        pid = os.fork()
        if not pid:
            ours.close()
            _live(seam, f"process {self.count}", work)
        theirs.close()
        ours.settimeout(REAL_S)
        return Process(number, home, pid, ours, bare)

    def _turns(
        self, faults: dict[tuple[int, str, int], Fault], draw: random.Random, observe: Callable[[], None]
    ) -> None:
        burst, current = draw.choice([1, 3, 10, 60]), self.processes[0]
        calls: Counter[tuple[int, str]] = Counter()
        while live := [process for process in self.processes if not process.outcome]:
            # Who has nothing to do with the catalog goes on while a transaction is paused.
            halted = current.resting and any(each.bare for each in live if each is not current)
            stays = current in live and (
                (current.in_transaction and not halted) or (draw.randrange(burst) and not current.resting)
            )
            if not stays or current.wakes_ns > self.shared.world_ns():
                current = self._chosen(live, draw)
            index = self.processes.index(current)
            kinds = [(index, kind) for kind in current.kinds(self.root)]
            calls.update(kinds)
            fault = next(filter(None, (faults.pop((*kind, calls[kind]), None) for kind in kinds)), None)
            if fault is not None and fault.behind:
                faults[index, "", calls[index, ""] + fault.behind] = replace(fault, behind=0)
            elif fault is not None and fault.kind in PAUSES and len(live) > 1:
                self._pause(current, fault)
                calls.subtract(kinds)  # it comes again
                continue
            elif fault is not None and self._befall(fault, current, draw):
                self._rest(live, observe)
                continue
            self._go(current, GO)
            self._rest(live, observe)
        if not self.cut and any(fault.kind == "power" for fault in faults.values()):
            self._cut(draw)  # right after the last has said that it is done
            observe()

    def _rest(self, live: Sequence[Process], observe: Callable[[], None]) -> None:
        """End a turn of one of the processes that live."""
        for process in live:
            process.resting = max(process.resting - 1, 0)
        if any(process.outcome for process in live):
            observe()

    def _pause(self, process: Process, fault: Fault) -> None:
        """Let a process wait while others have some turns, and time may pass."""
        number = fault.number
        self._note(f"-- pause {process.number} {number}")
        process.resting = fault.turns or (20, 60, 200, 200)[number % 4]
        seconds = (0, 0, 0, 70, 400, 90000)[number // 4 % 6]
        if fault.kind in ("stop", "delay"):  # until a lease of a minute has just ended, or is about to
            seconds = 400 if fault.kind == "stop" else 48 + number % 16
        self.shared.advance(seconds)

    def _chosen(self, live: list[Process], draw: random.Random) -> Process:
        holder = [process for process in live if process.in_transaction]
        if any(process.resting for process in holder):
            holder = [process for process in live if process.bare] or holder
        now = self.shared.world_ns()
        ready = [p for p in holder or live if p.wakes_ns <= now and not p.resting]
        ready = ready or [p for p in holder or live if p.wakes_ns <= now]
        if ready:
            return draw.choice(ready)
        first = min(holder or live, key=lambda process: process.wakes_ns)
        self.shared.advance((first.wakes_ns - now) / 1e9)
        return first

    def _befall(self, fault: Fault, process: Process, draw: random.Random) -> bool:
        """Let a fault happen; return whether the process has had its turn by it."""
        kind, number = fault.kind, fault.number
        call = process.call[0]
        self._note(f"-- {kind} {number}")
        if kind == "kill":
            self._go(process, HALF if call == "write" and number % 2 else DIE)
            return True
        if kind == "power" and self._disk is not None:
            self._cut(draw)
            return True
        if kind == "error" and call in FILE_CALLS:
            self._go(process, ("ENOSPC", "EIO", "EDQUOT", "EROFS")[number % 4])
            return True
        if kind == "lost-commit" and call == "commit":
            self._go(process, LOST)
            return True
        if kind == "failed-commit" and call == "commit":
            self._go(process, FAILED)
            return True
        if kind == "lost-reply" and call == S3:
            self._go(process, LOST)
            return True
        if kind == "throttled" and call == S3:
            self._throttled = number % 5
            self._go(process, THROTTLED)
            return True
        if kind == "slow":
            self._slow_s = (0.5, 2, 5, 7)[number % 4]
        if kind == "drift":
            self.shared.jump(process.home, (-7, -3, 3, 7)[number % 4])
        if kind in PAUSES:
            self._pause(process, fault)
        if kind == "hand" and self.hand is not None:
            self.hand(self.processes.index(process), process.wrote, number)
            if self._disk is not None:
                self._disk.look()
        if kind == "jump":
            self.shared.jump(process.home, (-86400, -600, 600, 86400)[number % 4])
        return False

    def _cut(self, draw: random.Random) -> None:
        """Let the power fail everywhere."""
        if self._disk is None:
            return
        for each in self.processes:
            self._end(each, "killed")
        self.cut = self._disk.cut(draw)
        for inode, (now, before) in self._disk.ctimes.items():
            # A file that nobody has touched since an earlier cut still has the time of before that one.
            earlier_now, earlier_before = self.ctimes.get(inode, (None, before))
            self.ctimes[inode] = (now, earlier_before if before == earlier_now else before)
        self._put_catalog(draw)
        for home in range(HOSTS):
            self.shared.boot(home, anew=True)

    def _go(self, process: Process, answer: str) -> None:
        """Let a process do what it waits for, and hear what it waits for next."""
        call, _, *paths = process.call
        changes_store = call == S3 and "shows" in process.kinds(None)
        if self.shared.passed_ns() - process.asked_ns > DELAY_NS:
            process.delayed = process.calls
        if call == S3:
            self.shared.advance(self._slow_s)
            if answer == GO and self._throttled:
                self._throttled, answer = self._throttled - 1, THROTTLED
            # Who was delayed between its look and its change asks for its lease before the next one.
            aware = not process.delayed or process.requests.get(paths[1], 0) > process.delayed
            if changes_store and aware and answer in (GO, LOST) and self.requested is not None:
                self.requested(process.number, paths[1])
            process.requests[paths[1]] = process.calls
        self._note(f"{process.number} {call} {' '.join(paths)} {'' if answer == GO else answer}")
        if self._disk is not None and call == "fsync" and answer == GO:
            self._disk.sync(paths[0])
        if call == "write" and self.writes is not None:
            self.writes(process.number, paths[0])
        process.line.send(answer.encode())
        self._hear(process)
        if changes_store and self.changed is not None:
            self.changed()
        if call == S3 and paths[0] in WRITES and paths[1].endswith("/lease.json") and self.leased is not None:
            self.leased(process.number)
        if call == "commit" and self.committed is not None:
            self.committed(process.number)
        if self._disk is not None:
            self._disk.look(*(paths if call in FILE_CALLS else ()))
            if call == "commit":
                self._commits = [*([] if paths[0] else self._commits), self._catalog()]

    def _hear(self, process: Process) -> None:
        try:
            heard = process.line.recv(65536).decode("utf-8", "surrogateescape").split("\0")
        except TimeoutError:
            self._end(process, "crashed: no word for minutes")
            return
        except ConnectionError:
            heard = [""]
        if heard[0] in ("", "end"):
            self._end(process, heard[1] if heard[0] else "killed")
            return
        process.call, process.in_transaction = tuple(heard), heard[1] == "+"
        process.calls += 1
        process.asked_ns = self.shared.passed_ns()
        process.wrote |= heard[0] == "write"
        if process.calls > MOST_CALLS:
            self._end(process, f"crashed: {MOST_CALLS} calls, the last {heard}")
        elif heard[0] == "sleep":
            process.wakes_ns = self.shared.world_ns() + round(float(heard[2]) * 1e9)

    def _end(self, process: Process, outcome: str) -> None:
        if process.outcome:
            return
        process.outcome, process.in_transaction = outcome, False
        with contextlib.suppress(OSError):  # it has ended
            process.line.shutdown(socket.SHUT_RDWR)  # if it waits for an answer, it ends
        process.line.close()
        if outcome.startswith("crashed: no word"):
            os.kill(process.pid, signal.SIGKILL)
        os.waitpid(process.pid, 0)
        self.shared.set_alive(process.number, False)
        self._note(f"{process.number} {outcome.partition(chr(10))[0]}")

    def _note(self, line: str) -> None:
        if self.log is not None:
            self.log.append(line)

    # The catalog of SQLite loses commits that were not flushed.

    def _catalog(self) -> dict[str, bytes]:
        if self.catalog is None:
            return {}
        files = [self.catalog, Path(f"{self.catalog}-wal")]
        return {str(file): file.read_bytes() for file in files if file.exists()}

    def _put_catalog(self, draw: random.Random) -> None:
        now = self._catalog()
        state = draw.choice([*self._commits, now]) if self._forgets else now
        if self.catalog is not None and state:
            for suffix in ("", "-wal", "-shm"):
                Path(f"{self.catalog}{suffix}").unlink(missing_ok=True)
            for path, data in state.items():
                Path(path).write_bytes(data)


def _inline(work: Callable[[], Any]) -> str:
    try:
        work()
    except CkptError as error:
        return f"refused: {error.code}"
    return "done"


def _live(seam: Seam, seed: str, work: Callable[[], Any]) -> None:
    """Live the life of a simulated process."""
    outcome = "crashed"
    try:
        seam.install(seed)
        seam.ask("start", "", "")
        work()
        outcome = "done"
    except CkptError as error:
        outcome = f"refused: {error.code}"
    except BaseException:
        outcome = f"crashed: {traceback.format_exc()}"
    finally:
        seam.tell("end", outcome)
        os._exit(0)
