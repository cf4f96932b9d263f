"""Parse text that others wrote: JSON, TOML, dates, numbers. A parser returns a value or raises `InvalidText`.

Libraries have many ways to refuse a text, and their lists change: an error of recursion, of an index, of a
number's digits. So whatever a library raises becomes the one exception that callers handle, and what they
must bound themselves (depth, lone surrogates, the size of numbers) is bounded here. `plain_yaml` is the same
for YAML.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime
from typing import Any
from urllib.parse import SplitResult, urlsplit

from ckptcore.errors import CkptError

BOM = b"\xef\xbb\xbf"
MAX_DEPTH = 127  # containers in each other, as in serde_json; Python's own limit depends on who calls
_MAX_DIGITS = 308  # a longer integer fits no float
_FEW_DIGITS = 18  # fit 64 bits
_LONG_NUMBER = b"0" * (_MAX_DIGITS + 1)
_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_REASON = 200  # characters of a library's message


class InvalidText(ValueError):
    """A text is not what its reader parses, or is beyond its bounds."""


@contextmanager
def parsing(kind: str) -> Iterator[None]:
    """Turn every error of a library's parser, and of a form that is not as expected, into `InvalidText`.

    >>> with parsing("a number"):
    ...     int("x")
    Traceback (most recent call last):
    ckptcore.utils.foreign_text.InvalidText: not a number: invalid literal for int() with base 10: 'x'

    Args:
        kind: What the text must be, for the message.
    """
    try:
        yield
    except (InvalidText, CkptError):
        raise
    except Exception as error:  # any: a library's parser raises what its authors did not think of
        raise InvalidText(f"not {kind}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Return an error's message in one line of bounded length, or its name if it has none."""
    line = " ".join(str(error)[: 2 * _REASON].split())
    return line[:_REASON] or type(error).__name__


def decoded(data: bytes) -> str:
    """Return the text of UTF-8 bytes without a byte order mark."""
    if data.startswith(BOM):
        raise InvalidText("not UTF-8 without a byte order mark")
    with parsing("UTF-8"):
        return data.decode()


def load_json(
    data: bytes | str,
    *,
    finite: bool = False,
    unique: bool = False,
    encodable: bool = False,
    depth: int = MAX_DEPTH,
) -> Any:
    r"""Return the value of a JSON text.

    Integers have at most 308 digits.

    >>> load_json(b'{"a": [1, NaN]}'), load_json('"\\ud83d\\ude00"')
    ({'a': [1, nan]}, '😀')

    Args:
        data: The text; bytes in UTF-8 without a byte order mark.
        finite: Refuse NaN, infinities and numbers that are larger than a float. Python writes them.
        unique: Refuse objects with a name twice; else the last value counts.
        encodable: Refuse halves of surrogate pairs, which have no encoding. Programs that cut a text leave
            them, and file names that are not UTF-8 are spelled with them.
        depth: How deep containers may nest.

    Raises:
        InvalidText: It is no such text.
    """
    text = data if isinstance(data, str) else decoded(data)
    hooks: dict[str, Any] = {}
    if finite:
        hooks = {"parse_constant": _refused_constant, "parse_float": _finite_float}
    if "-0" in text or _has_long_number(text):
        hooks["parse_int"] = _bounded_integer
    with parsing("JSON"):
        value = _load_unique(text, hooks) if unique else json.loads(text, **hooks)
        require_depth(value, depth)
        # JSON spells a character outside of the basic plane as two, and half of one has no encoding.
        if encodable and ("\\ud" in text or "\\uD" in text):
            json.dumps(value, ensure_ascii=False).encode()
    return value


def load_json_object(data: bytes | str, **options: Any) -> dict[str, Any]:
    """Return the value of a JSON text that must be an object; see `load_json`."""
    value = load_json(data, **options)
    if not isinstance(value, dict):
        raise InvalidText(f"not a JSON object (got {type(value).__name__})")
    return value


def require_depth(value: Any, limit: int = MAX_DEPTH) -> None:
    """Raise `InvalidText` if lists and dicts of a value without shared parts nest deeper than a limit."""
    level = [value] if type(value) in (dict, list) else []
    for _ in range(limit):
        if not level:
            return
        level = [
            inside
            for container in level
            for inside in (container.values() if type(container) is dict else container)
            if type(inside) is dict or type(inside) is list
        ]
    if level:
        raise InvalidText(f"nested deeper than {limit} levels")


def load_toml(data: bytes | str) -> dict[str, Any]:
    """Return the value of a TOML text; raise `InvalidText`."""
    import tomllib

    text = data if isinstance(data, str) else decoded(data)
    with parsing("TOML"):
        value = tomllib.loads(text)
    require_depth(value)
    return value


def is_number(text: str) -> bool:
    """Report whether a text is a decimal number of at most 18 digits, without a sign.

    >>> is_number("007"), is_number("²"), is_number("9" * 5000), is_number("")
    (True, False, False, False)
    """
    return text.isascii() and text.isdigit() and len(text) <= _FEW_DIGITS


def parse_integer(text: str) -> int:
    """Return the integer of a text of decimal digits; raise `InvalidText`."""
    if len(text) > _MAX_DIGITS:
        raise InvalidText(f"an integer of more than {_MAX_DIGITS} digits")
    with parsing("an integer"):
        return int(text)


def parse_float(text: str) -> float:
    """Return the number of a text, which may be infinite or NaN; raise `InvalidText`."""
    if len(text) > 2 * _MAX_DIGITS:
        raise InvalidText(f"a number of more than {2 * _MAX_DIGITS} characters")
    with parsing("a number"):
        return float(text)


def parse_time(text: str) -> datetime:
    """Return the time of an ISO 8601 text, in UTC where it names no zone; raise `InvalidText`.

    >>> parse_time("2026-11-28T08:00:00Z"), parse_time("2026-11-28").tzinfo
    (datetime.datetime(2026, 11, 28, 8, 0, tzinfo=datetime.timezone.utc), datetime.timezone.utc)
    """
    with parsing("an ISO 8601 time"):
        time = datetime.fromisoformat(text)
        return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)


def parse_date(text: str) -> date:
    """Return the day of a text ``YYYY-MM-DD``; raise `InvalidText`."""
    with parsing("a date"):
        return datetime.strptime(text, "%Y-%m-%d").date()


def parse_http_time(text: str) -> datetime:
    """Return the time of an HTTP header, in UTC; raise `InvalidText`."""
    from email.utils import parsedate_to_datetime

    with parsing("an HTTP date"):
        time = parsedate_to_datetime(text)
        return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)


def parse_url(text: str) -> SplitResult:
    """Return the parts of a URL, its port included; raise `InvalidText`."""
    with parsing("a URL"):
        parts = urlsplit(text)
        _ = parts.port, parts.hostname  # both are parsed only when they are asked for
        return parts


def _has_long_number(text: str) -> bool:
    """Report whether a text may hold an integer that fits no float."""
    if len(text) <= _MAX_DIGITS:
        return False
    return _LONG_NUMBER in text.encode("ascii", "replace").translate(_DIGITS)


def _bounded_integer(text: str) -> int | float:
    # -0 is a float everywhere else: Rust's serde, JavaScript.
    return -0.0 if text == "-0" else parse_integer(text.removeprefix("-")) * (-1 if text[0] == "-" else 1)


def _refused_constant(name: str) -> Any:
    raise InvalidText(f"{name} is no JSON")


def _finite_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise InvalidText(f"{text[:40]} is larger than a float")
    return number


def _load_unique(text: str, hooks: dict[str, Any]) -> Any:
    """Parse JSON, and refuse an object with a name twice."""
    # Names are counted by their colons where that can be right, so that large headers are not built of pairs.
    if '\\"' not in text and (colons := text.count(":")) == text.count('":'):
        names = 0

        def count(value: dict[str, Any]) -> dict[str, Any]:
            nonlocal names
            names += len(value)
            return value

        value = json.loads(text, object_hook=count, **hooks)
        # A colon is behind a name, or inside a text. As many names as colons: none was there twice.
        if names == colons:
            return value
    return json.loads(text, object_pairs_hook=_once, **hooks)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise InvalidText("an object has a name twice")
    return value
