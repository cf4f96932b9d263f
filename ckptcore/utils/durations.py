"""Durations: how do people write lengths of time?"""

from __future__ import annotations

import re

from ckptcore.errors import UsageError
from ckptcore.utils.text import shown

_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_LONGEST = 36525.0 * 86400  # what clocks and calendars can be asked to add


def parse_duration(text: str) -> float:
    """Seconds; raises `UsageError`.

    >>> parse_duration("90"), parse_duration("10m"), parse_duration("1.5h")
    (90.0, 600.0, 5400.0)
    """
    m = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", text)
    if not m or m[2] not in _UNITS:
        raise UsageError(f"{shown(text)} is not a length of time", hint="write 90s, 10m or 2h")
    seconds = float(m[1]) * _UNITS[m[2]]
    if seconds > _LONGEST:
        raise UsageError(
            f"cannot wait for {shown(text)}: that is longer than 100 years", hint="write 90s, 10m or 2h"
        )
    return seconds
