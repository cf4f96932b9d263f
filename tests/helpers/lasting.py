"""Servers of several test files: started when the first test asks, ended behind the last one.

A fixture of the session would keep them until the end of all tests, and an idle server of Prefect's takes a
twentieth of a core.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Generic, TypeVar

import pytest

T = TypeVar("T")


class Lasting(Generic[T]):
    """What `make` gives, while tests below `folder` run one after the other."""

    def __init__(self, make: Callable[[], AbstractContextManager[T]], folder: Path) -> None:
        self._make, self._folder = make, folder
        self._open: tuple[T, ExitStack] | None = None

    def __call__(self) -> T:
        """It, running."""
        if self._open is None:
            ending = ExitStack()
            self._open = ending.enter_context(self._make()), ending
        return self._open[0]

    def leave(self, following: pytest.Item | None) -> None:
        """End it, unless the following test may ask for it."""
        if following is None or self._folder not in following.path.parents:
            self.close()

    def close(self) -> None:
        """End it."""
        running, self._open = self._open, None
        if running is not None:
            running[1].close()
