"""Show values of the catalog as text: sizes, times, and names that may hold anything."""

from __future__ import annotations

import json
import math
import shlex
import unicodedata
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup, escape

from ckptcore.redaction import redacted
from ckptcore.utils.units import show_duration, show_size

MOST = 2000  # characters of a value on a page


def plain(value: object) -> str:
    r"""Return a text without characters that control a terminal or reorder what is beside them.

    >>> plain("a\x1b[31m\u202eb")
    'a\\x1b[31m\\u202eb'
    """
    text = redacted(str(value))
    if len(text) > MOST:
        text = f"{text[:MOST]}…"
    return "".join(c if _is_plain(c) else c.encode("unicode_escape").decode() for c in text)


def size(nbytes: int | None) -> str:
    """Return a number of bytes in binary units, or a dash."""
    return "-" if nbytes is None else show_size(int(nbytes))


def when(time: datetime | None) -> Markup:
    """Return a time as HTML, in UTC to the minute."""
    if time is None:
        return Markup("-")
    utc_time = time.astimezone(UTC)
    return Markup('<time datetime="{}">{}</time>').format(utc_time.isoformat(), f"{utc_time:%Y-%m-%d %H:%M}")


def took(start: datetime, end: datetime | None) -> str:
    """Return the time between two points, or a dash."""
    return "-" if end is None else show_duration((end - start).total_seconds())


def broken(text: object) -> Markup:
    """Return a name as HTML that may be broken after its separators."""
    parts = escape(plain(text))
    for mark in ("/", ".", "_"):
        parts = Markup(str(parts).replace(mark, f"{mark}<wbr>"))  # escaped above
    return parts


def shell(text: object) -> str:
    """Return a text as one word of a command line that can be copied.

    >>> shell("runs of ada"), shell("$(id)")
    ("'runs of ada'", "'$(id)'")
    """
    return shlex.quote(plain(text))


def pretty(value: Any) -> str:
    """Return a JSON value in lines."""
    return plain_lines(json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True))


def plain_lines(text: str) -> str:
    """Return `plain` text of several lines, also a long one."""
    return "\n".join(plain(line) for line in text.split("\n"))


def _is_plain(character: str) -> bool:
    return character == " " or unicodedata.category(character)[0] not in ("C", "Z")


def finite(value: Any) -> Any:
    """Return a JSON value with NaN and infinities as texts, which JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, list) else value
