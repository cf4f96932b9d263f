"""`ckptcore` and `python -m ckptcore`."""

from __future__ import annotations

import resource
import sys

from ckptcore.cli import run


def main(argv: list[str] | None = None) -> int:
    """Runs one command; gives its exit code."""
    # A checkpoint may have thousands of files; the usual soft limit is 1024 open ones.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 16384 if hard == resource.RLIM_INFINITY else min(hard, 16384)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return run(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
