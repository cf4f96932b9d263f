"""Patience: a run that met something that passes goes on by itself, as it would after it was killed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ckptcore.errors import Busy
from tasks.logs import log
from tasks.retry import passes

T = TypeVar("T")

PAUSES: Sequence[float] = (
    5,
    15,
    30,
    60,
    120,
)  # seconds; a database or a server is back by then, or people know


def patiently(work: Callable[[], T]) -> T:
    """What `work` gives; done again from its beginning after an error that `passes`.

    For work that finds what it has done before. Raises what the last try raises, and `Busy` at once: whoever
    met another at work has waited already.
    """
    for pause in PAUSES:
        try:
            return work()
        except Busy:
            raise
        except Exception as error:
            if not passes(error):
                raise
            log.warning("once more in %d s, after %s: %s", pause, type(error).__name__, error)
            time.sleep(pause)
    return work()
