"""Start the process of a command quickly, and end it without taking its modules apart.

A short conversion should cost what it does. Imports make hardly any garbage, so collecting it during them is
useless, and so is taking the modules apart at the end: that is a sixth of the CPU time of `inspect` and of a
small `consolidate` (decision 56 in DESIGN.md). Whether a command shares its work among several processes is
decided here, too, without importing what would start them.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import sys
from typing import NoReturn

from ckptcore.errors import UsageError
from ckptcore.utils import standard_streams, terminal

# New objects before garbage is collected. What imports make (looking at it once takes 0.07 s) and what
# describes a checkpoint is none.
_GARBAGE = 1_000_000

VARIABLE = "CKPTCORE_PROCESSES"
LEAST_THREADS = 8  # of one process, from which several are faster
_BYTES_EACH = 2 << 30  # processes together take 0.3 s of processor time more, a gigabyte 0.3 to 0.8 s
LEAST_BYTES = 2 * _BYTES_EACH
THREADS_EACH = 2
_LEAST_MEMORY = 1 << 20  # bytes of the budget for each process
_ROOM_EACH = 512 << 20  # free bytes of the machine for each process beside the budget: torch takes 190 MiB


_exit_code: int | None = None  # of a process that `leave` ends
_commands: list[int] = []  # the processes that `start_command` was called in


def start_command() -> None:
    """Start the process of one command: see `start_quickly`."""
    _commands.append(os.getpid())
    start_quickly()


def is_command() -> bool:
    """Report whether this process is that of one command, and not of another program or service."""
    return os.getpid() in _commands


def process_count(threads: int, memory: int, nbytes: int, most: int) -> int:
    """Return how many processes should share some work; 1 for threads of this one.

    Several are used where ``CKPTCORE_PROCESSES`` says so. Without it, a command on 8 and more cores uses
    them for 4 GiB and more, and another program never does.

    Args:
        threads: Of all processes together.
        memory: Budget of all processes together.
        nbytes: That are moved or read.
        most: In how many pieces the work can be cut.

    Raises:
        UsageError: The variable is no number.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked:
        if not asked.isdecimal() or not int(asked):
            raise UsageError(f"{VARIABLE} must be at least 1 (got {asked!r})")
        return max(1, min(int(asked), most, memory // _LEAST_MEMORY))
    if not is_command() or threads < LEAST_THREADS or nbytes < LEAST_BYTES:
        return 1
    from ckptcore.utils.memory import available_memory  # imports numpy

    free = available_memory()
    room = most if free is None else max(0, free - memory) // _ROOM_EACH
    return max(1, min(threads // THREADS_EACH, nbytes // _BYTES_EACH, room, most))


def start_quickly() -> None:
    """Collect garbage rarely, and let numpy start no threads. Numpy must not be imported yet."""
    gc.set_threshold(_GARBAGE, 10, 10)
    # OpenBLAS starts a thread for each core when numpy is imported, a quarter of the CPU time of `inspect` on
    # 2 cores. Nothing here multiplies matrices of floating-point numbers.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def leave(code: int) -> NoReturn:
    """End this process with an exit code, without taking its modules apart.

    Threads that are no daemons are waited for. A success whose answer is lost is none.
    """
    # Measured beside an ordinary exit, medians of 9 and 7 pairs of processes, CPU time: `inspect` 0.57 s
    # against 0.66 s, `consolidate` 0.95 s against 1.17 s.
    global _exit_code
    _exit_code = code
    # The work has ended: Ctrl-C stops only the wait for what is left.
    signal.signal(signal.SIGINT, lambda *_: _finish())
    sys.exit(code)


def _finish() -> None:
    """End the process that called `leave`."""
    if _exit_code is None:  # it ends in another way
        return
    code = _exit_code
    logging.shutdown()
    lost = standard_streams.lost_answer()
    if lost is not None:
        terminal.line(f"{lost.code}: {lost.message}", err=True)
        terminal.line(f"  next: {lost.hint}", err=True)
        code = code or lost.exit_code
    sys.stderr.flush()
    # Everything that must outlive the process is written, closed and synced by now.
    os._exit(code)


# Exit functions run in reverse order: this one follows those of libraries that are imported later, such as
# event loops of stores, Prefect's last events, temporary folders.
atexit.register(_finish)
