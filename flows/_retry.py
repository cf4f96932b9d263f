"""Patience: a run that met something that passes goes on by itself, as it would after it was killed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_chain, wait_fixed

from ckptcore.errors import Busy
from tasks.logs import log
from tasks.retry import passes

T = TypeVar("T")

# Seconds; a database or a server is back by then, or people know.
PAUSES: Sequence[float] = (5, 15, 30, 60, 120)


def patiently(work: Callable[[], T]) -> T:
    """What `work` gives; done again from its beginning after an error that `passes`.

    For work that finds what it has done before. Raises what the last try raises, and `Busy` at once: whoever
    met another at work has waited already.
    """
    again = Retrying(
        wait=wait_chain(*map(wait_fixed, PAUSES)),
        stop=stop_after_attempt(len(PAUSES) + 1),
        retry=retry_if_exception(lambda error: passes(error) and not isinstance(error, Busy)),
        before_sleep=_say,
        reraise=True,
    )
    return again(work)


def _say(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    log.warning("once more in %d s, after %s: %s", state.upcoming_sleep, type(error).__name__, error)
