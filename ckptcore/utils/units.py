"""Sizes: how do people write numbers of bytes, and how are they shown?"""

from __future__ import annotations

import re

from ckptcore.errors import UsageError
from ckptcore.utils.text import shown

_UNITS = {
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

_MOST = float(1 << 63)  # what file offsets and databases count to


def parse_size(text: str) -> int:
    """Bytes of a size as people write it; raises `UsageError`.

    >>> parse_size("5GB"), parse_size("1GiB"), parse_size("1.5 MiB")
    (5000000000, 1073741824, 1572864)
    """
    m = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if not m or m[2].upper() not in _UNITS:
        raise UsageError(f"{shown(text)} is not a size", hint="write 512MiB, 1GiB or 5GB")
    nbytes = float(m[1]) * _UNITS[m[2].upper()]
    if nbytes >= _MOST:
        raise UsageError(f"{shown(text)} is not a size: no machine has as much", hint="write less than 8EiB")
    return int(nbytes)


def show_size(nbytes: float) -> str:
    """
    >>> show_size(1536), show_size(5_000_000_000)
    ('1.5 KiB', '4.7 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
