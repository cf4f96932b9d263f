"""`ckptcore` and `python -m ckptcore`."""

from __future__ import annotations

import resource
import sys

from ckptcore.cli import run


def main(argv: list[str] | None = None) -> int:
    """Runs one command; gives its exit code."""
    # A checkpoint may have thousands of files; the usual soft limit is 1024 open ones.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 16384)), hard))
    return run(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
