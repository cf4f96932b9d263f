"""Runs a script as on hosts with other clocks; argv: script, then for each host seconds and an argument."""

from __future__ import annotations

import datetime
import runpy
import sys
import time
from typing import Any

AHEAD = 0.0
_time, _datetime = time.time, datetime.datetime


class _Kind(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _datetime)


class _Shifted(_datetime, metaclass=_Kind):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        return _datetime.now(tz) + datetime.timedelta(seconds=AHEAD)


time.time = lambda: _time() + AHEAD
datetime.datetime = _Shifted  # type: ignore[misc]
_, script, *hosts = sys.argv
for seconds, argument in zip(hosts[::2], hosts[1::2], strict=True):
    AHEAD = float(seconds)
    sys.argv[:] = [script, argument]
    runpy.run_path(script, run_name="__main__")
