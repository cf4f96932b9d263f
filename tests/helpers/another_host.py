"""Runs a script as on a host whose clock is some seconds ahead: argv: seconds, script, its arguments."""

from __future__ import annotations

import datetime
import runpy
import sys
import time
from typing import Any

AHEAD = float(sys.argv[1])
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
sys.argv[:] = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
