"""Send requests in threads of their own, so that several are under way at once.

A thread is started when all others are at work, and stays for the next request. They end with the process,
which waits for none of them. A request whose future was cancelled, or whose work has failed
(`ckptcore.utils.workers.failed`), ends when it looks at that next.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from ckptcore.utils.workers import failed

K = TypeVar("K")
T = TypeVar("T")
GivenUp = Callable[[], bool]
_AT_ONCE = 16  # calls of `RequestThreads.each`, which may themselves wait for other threads of it


class RequestThreads:
    """Up to ``most`` threads; further requests wait for one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock, self._idle, self._count = threading.Lock(), threading.Semaphore(0), 0

    def start(self, call: Callable[[GivenUp], T]) -> Future[T]:
        """Run a call in a thread, and return at once.

        Args:
            call: What to do; its argument returns whether nobody waits for it any more.
        """
        future: Future[T] = Future()
        context = copy_context()
        self._queue.put(lambda: context.run(_settle, future, call))
        if self._idle.acquire(blocking=False):
            return future
        with self._lock:
            if self._count < self._most:
                self._count += 1
                name = f"ckptcore-request-{self._count}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
        return future

    def each(self, call: Callable[[K], T], items: Iterable[K]) -> list[T]:
        """Call a function with each item, several at once; see `ckptcore.store.objects.ObjectClient.each`."""
        found, flying = list[T](), deque[Future[T]]()
        try:
            for item in items:
                if len(flying) == _AT_ONCE:
                    found.append(flying.popleft().result())
                flying.append(self.start(partial(_ignoring, call, item)))
            while flying:
                found.append(flying.popleft().result())
        finally:
            wait(flying)
        return found

    def _work(self) -> None:
        waiting = self._queue
        while True:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                self._idle.release()
                job = waiting.get()
            job()
            del job  # the next one may be long in coming: nothing is kept alive meanwhile


def _ignoring(call: Callable[[K], T], item: K, given_up: GivenUp) -> T:
    return call(item)


def _settle(future: Future[Any], call: Callable[[GivenUp], Any]) -> None:
    if future.cancelled():
        return
    try:
        found = call(lambda: future.cancelled() or failed())
    except BaseException as error:  # whoever waits for it raises it
        with suppress(InvalidStateError):  # cancelled meanwhile
            future.set_exception(error)
    else:
        with suppress(InvalidStateError):
            future.set_result(found)
