"""`ckptcore` and `python -m ckptcore`."""

from __future__ import annotations

import sys

from ckptcore.cli import run


def main(argv: list[str] | None = None) -> int:
    """Runs one command; gives its exit code."""
    return run(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
