"""`ckptcore` and `python -m ckptcore`."""

from __future__ import annotations

import os
import resource
import sys
from typing import NoReturn

from ckptcore.cli import run
from ckptcore.errors import InternalError


def main(argv: list[str] | None = None) -> int:
    """Runs one command; gives its exit code."""
    # A checkpoint may have thousands of files; the usual soft limit is 1024 open ones.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 16384 if hard == resource.RLIM_INFINITY else min(hard, 16384)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return run(sys.argv[1:] if argv is None else argv)


def entry() -> NoReturn:
    """Runs one command as a process of its own."""
    code = main()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:  # nobody reads any more
        os._exit(code)
    except OSError:  # the answer is lost: a full disk behind a redirection, say
        os._exit(code or InternalError.exit_code)
    if "torch" in sys.modules:
        # Taking torch down takes the interpreter as long as casting a gigabyte; everything that
        # must outlive the process is written, closed and synced by now.
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    entry()
