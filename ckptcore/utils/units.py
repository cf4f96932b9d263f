"""Parse and format sizes and durations in human-readable units."""

from __future__ import annotations

import re

from ckptcore.errors import UsageError
from ckptcore.utils.text import short_repr

_SIZES = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
    "T": 1 << 40,
}
_BARE = 1 << 10  # bytes; below it a number without a unit is one whose unit was left out
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}

_MOST = float(1 << 63)  # the first size that file offsets and databases cannot hold
_LONGEST = 36525.0 * 86400  # seconds that clocks and calendars can add


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``1.5GiB``; raises `UsageError`.

    >>> parse_size("5GB"), parse_size("1GiB"), parse_size("1.5 MiB")
    (5000000000, 1073741824, 1572864)

    A small number without a unit is refused: ``--max-file-size 5`` is meant as 5 GB.
    """
    m = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if not m or m[2].upper() not in _SIZES:
        raise UsageError(
            f"size must be a number with a unit (got {short_repr(text)})", hint="try 512MiB, 1GiB or 5GB"
        )
    nbytes = float(m[1]) * _SIZES[m[2].upper()]
    if not m[2] and 0 < nbytes < _BARE:
        raise UsageError(
            f"size must be a number with a unit (got {short_repr(text)}, which is {show_size(nbytes)})",
            hint=f"try {m[1]}GB, {m[1]}GiB or {m[1]}B",
        )
    if nbytes >= _MOST:
        raise UsageError(
            f"size must be less than 8 EiB (got {short_repr(text)})", hint="try 512MiB, 1GiB or 5GB"
        )
    return int(nbytes)


def show_size(nbytes: float) -> str:
    """Return a number of bytes in binary units, as every message, table and report shows it.

    >>> show_size(1536), show_size(5_000_000_000)
    ('1.5 KiB', '4.7 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def show_duration(seconds: float) -> str:
    """Return a length of time as every message, table and report shows it.

    >>> show_duration(0.042), show_duration(200), show_duration(7500), show_duration(1e6)
    ('0.04 s', '3 min 20 s', '2 h 5 min', '11 d 13 h')
    """
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    rounded = round(seconds)
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60} s"
    if rounded < 48 * 3600:
        return f"{rounded // 3600} h {rounded % 3600 // 60} min"
    return f"{rounded // 86400} d {rounded % 86400 // 3600} h"


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as ``10m``; raises `UsageError`.

    >>> parse_duration("90"), parse_duration("10m"), parse_duration("1.5h")
    (90.0, 600.0, 5400.0)
    """
    m = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", text)
    if not m or m[2] not in _SECONDS:
        raise UsageError(
            f"duration must be a number with a unit (got {short_repr(text)})", hint="try 90s, 10m or 2h"
        )
    seconds = float(m[1]) * _SECONDS[m[2]]
    if seconds > _LONGEST:
        raise UsageError(
            f"duration must be at most 100 years (got {short_repr(text)})", hint="try 90s, 10m or 2h"
        )
    return seconds
