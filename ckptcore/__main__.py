"""`ckptcore` and `python -m ckptcore`: how does one command begin and end as a process of its own?

Fast, both: a short conversion should cost what it does. Importing makes hardly anything but what stays,
so looking for garbage all the while is in vain, and taking the modules apart in the end is, too: that is a
sixth of the CPU time of `inspect` and of a small `consolidate` (decision 56 in DESIGN.md).
"""

from __future__ import annotations

import atexit
import gc
import os
import resource
import sys
from typing import NoReturn

from ckptcore.errors import InternalError
from ckptcore.utils import terminal

_GARBAGE = 200_000  # objects that came and stayed until garbage is looked for; the usual 700 take 0.1 s


def main(argv: list[str] | None = None) -> int:
    """Runs one command; gives its exit code."""
    from ckptcore.cli.main import run

    # A checkpoint may have thousands of files; the usual soft limit is 1024 open ones.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 16384 if hard == resource.RLIM_INFINITY else min(hard, 16384)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return run(sys.argv[1:] if argv is None else argv)


def entry() -> NoReturn:
    """Runs one command as a process of its own."""
    gc.set_threshold(_GARBAGE, 10, 10)
    terminal.guard()
    code = main()
    # Measured beside an ordinary exit, medians of 9 and 7 pairs of processes, CPU time: `inspect` 0.57 s
    # against 0.66 s, `consolidate` 0.95 s against 1.17 s. `os._exit` skips what libraries registered for the
    # end (event loops of stores, logs, temporary folders). Only `atexit` can run that: it has no public name.
    atexit._run_exitfuncs()  # an error in there is printed, and goes no further
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:  # nobody reads any more
        os._exit(code)
    except OSError:  # the answer is lost: a full disk behind a redirection, say
        os._exit(code or InternalError.exit_code)
    # Everything that must outlive the process is written, closed and synced by now.
    os._exit(code)


if __name__ == "__main__":
    entry()
