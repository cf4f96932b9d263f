"""Run one `ckptcore` or `python -m ckptcore` command as a process of its own, with a fast start and end."""

from __future__ import annotations

import resource
import sys
from typing import NoReturn

from ckptcore.utils import standard_streams, terminal
from ckptcore.utils.command_process import leave, start_command


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    from ckptcore.cli.main import run

    # A checkpoint may have thousands of files; the usual soft limit is 1024 open ones.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 16384 if hard == resource.RLIM_INFINITY else min(hard, 16384)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return run(sys.argv[1:] if argv is None else argv)


def entry() -> NoReturn:
    """Run one command as a process of its own."""
    start_command()
    standard_streams.secure()
    terminal.guard()
    leave(main())


if __name__ == "__main__":
    entry()
