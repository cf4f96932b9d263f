"""Artifacts: what a run shows to people, where the server takes it.

A server that is away costs the picture and a line in the log, not the work. Credentials in URLs are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ckptcore.redaction import redacted_value
from tasks.logs import log

P = ParamSpec("P")
T = TypeVar("T")


def shown(create: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """What one of Prefect's functions answers that make or change an artifact; None when it fails.

    >>> shown(divmod, 7, 2), shown(divmod, 7, 0)
    ((3, 1), None)
    """
    try:
        return create(*redacted_value(args), **redacted_value(kwargs))
    except Exception as error:  # whatever ails the server, the bytes go on being written
        log.warning("an artifact is not shown: %s: %s", type(error).__name__, error)
        return None
