"""Keep a command independent of who reads its standard streams.

A reader that leaves (``| head``), a full disk behind a redirection and a closed stream must not end a
conversion half-way, nor give it an exit code that means something else, such as 1 of a damaged source.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

from ckptcore.errors import CkptError, DestinationUnwritable, DiskFull

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_FULL = (errno.ENOSPC, errno.EDQUOT)


class _Outlet(io.FileIO):
    """A standard stream that accepts everything, and keeps the first error of writing it."""

    failure: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        if self.failure is None:
            try:
                return super().write(data)
            except OSError as error:
                self.failure = error
        return memoryview(data).nbytes


def secure() -> None:
    """Open closed standard streams, and let no error of writing reach the command."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # The lowest free number is this one. Left free, an output file could get it, and messages of
            # libraries would be written into a checkpoint.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, open(number, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115
    sys.stdout, sys.stderr = _outlet(sys.stdout, 1), _outlet(sys.stderr, 2)


def lost_answer() -> CkptError | None:
    """Return the error of an answer that did not reach standard output; a reader that left wanted no more."""
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    failure = raw.failure if isinstance(raw, _Outlet) else None
    if failure is None or failure.errno == errno.EPIPE:
        return None
    kind = DiskFull if failure.errno in _FULL else DestinationUnwritable
    return kind(f"cannot write to standard output: {failure.strerror}", hint="redirect it to another place")


def _outlet(stream: TextIO, number: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(_Outlet(number, "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=number == 2 or stream.isatty(),
    )
