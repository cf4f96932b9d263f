"""Crews: threads that share one piece of work, and end together, whatever ends them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context


def work_together(count: int, work: Callable[[], None], stop: Callable[[], object]) -> None:
    """Runs ``work`` in so many threads to its end.

    stop: makes every ``work`` end soon. It is called when this ends, also by Ctrl-C; then the threads are
    waited for.
    """
    # Each in a copy of the caller's context: who logs on behalf of a run says so there.
    threads = [
        threading.Thread(target=copy_context().run, args=(work,), name=f"ckptcore-{n}", daemon=True)
        for n in range(count)
    ]
    for t in threads:
        t.start()
    try:
        for t in threads:
            while t.is_alive():
                t.join(0.2)  # with a time-out, so that Ctrl-C is seen
    finally:
        stop()
        for t in threads:
            t.join()
