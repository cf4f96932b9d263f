"""Match untrusted regular expressions in a child process, which is killed when it takes too long.

Some expressions take practically forever, and nothing inside `re` can stop one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

_LONGEST = 10_000  # characters of an expression
_PROGRAM = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
patterns, texts = json.load(sys.stdin)
try:
    found = [[re.fullmatch(p, t) is not None for t in texts] for p in patterns]
except (re.error, RecursionError, OverflowError) as error:
    found = str(error)
json.dump(found, sys.stdout)
"""


class UnusablePattern(ValueError):
    """An invalid expression, or one that takes too long."""


def full_matches(
    patterns: Sequence[str], texts: Sequence[str], *, seconds: float = 10.0
) -> list[tuple[bool, ...]]:
    r"""Return for each pattern whether it matches each complete text, like `re.fullmatch`.

    >>> full_matches([r".*\.(q|v)_proj"], ["a.q_proj", "a.k_proj"])
    [(True, False)]

    Raises:
        UnusablePattern: An expression is invalid, is too long, or takes more than ``seconds``.
    """
    if not patterns or not texts:
        return [() for _ in patterns]
    if any(len(p) > _LONGEST for p in patterns):
        raise UnusablePattern(f"an expression must have at most {_LONGEST} characters")
    asked = json.dumps([list(patterns), list(texts)]).encode()
    try:
        run = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            input=asked,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UnusablePattern(f"matching took more than {seconds:g} s") from error
    if run.returncode:
        raise UnusablePattern("matching took more than 512 MiB of memory")
    answer = json.loads(run.stdout)
    if isinstance(answer, str):
        raise UnusablePattern(answer)
    return [tuple(row) for row in answer]
