"""Show values of the catalog as text: sizes, times, and names that may hold anything.

What the catalog stores in short is said in words: the options of a conversion, and codes of errors.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import unicodedata
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from datetime import UTC, datetime
from functools import cache
from typing import Any

from markupsafe import Markup, escape

from ckptcore.errors import FINDINGS, error_classes
from ckptcore.planning.options import HELP_OF_VERB, Options, options_of, request_field
from ckptcore.planning.request import Request
from ckptcore.redaction import redacted
from ckptcore.utils.units import show_duration, show_size

MOST = 2000  # characters of a value on a page
_CODE = re.compile(r"(?:^|[\s(])([a-z]+(?:-[a-z0-9]+)*)(?=:\s|$)")
# What a run waits for is tried without a command.
_RETRIED, _RERUN, _BY_ITSELF = "next try at ", ", then run the command again", "; it is tried again by itself"
_DISPLAYED_ABOVE = ("source", "destination", "verb")  # the page has them above


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
    text = json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True)
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


@dataclass(frozen=True, slots=True)
class StatedOption:
    """An option that is not at its default, as the command line calls it. effect: what it does."""

    name: str
    value: str
    effect: str


def stated(request: Mapping[str, Any]) -> list[StatedOption]:
    """Return the options of a conversion that are not at their defaults.

    >>> [(o.name, o.value) for o in stated({"verb": "export", "recover": True, "dtype": "bf16"})]
    [('--allow-incomplete', 'yes'), ('--dtype', 'bf16')]
    """
    defaults = {f.name: f.default for f in fields(Request) if f.default is not MISSING}
    names = {request_field(name): name for name in options_of(Options)}
    options = []
    for field, value in request.items():
        default = defaults.get(field)
        plain = tuple(map(_frozen, value)) if isinstance(value, list) else value
        if field in _DISPLAYED_ABOVE or plain == default or plain in (None, (), ""):
            continue
        name = names.get(field, field)
        effect = options_of(Options)[name][1].help if name in options_of(Options) else ""
        effect = HELP_OF_VERB.get(str(request.get("verb")), {}).get(name, effect)
        off = value is False
        options.append(
            StatedOption(f"--{'no-' if off else ''}{name.replace('_', '-')}", _rendered(value), effect)
        )
    return options


def next_step(text: str | None) -> str:
    """Return the next step for the first code of an error or a finding in a text; "" without one.

    >>> next_step("worker-lost: the process was ended")
    "check the workers' logs and memory, then run the command again: finished files are kept"
    >>> next_step("next try at 12:00:00 UTC: not-complete: .metadata is missing")
    'wait until the save has finished; it is tried again by itself'
    >>> next_step("all is well")
    ''
    """
    steps = _steps()
    codes = (match[1] for match in _CODE.finditer(str(text or "")))
    step = next((steps[code] for code in codes if code in steps), "")
    return step.replace(_RERUN, _BY_ITSELF) if _RETRIED in str(text) else step


@cache
def _steps() -> dict[str, str]:
    return {code: step for code, (_, _, step) in FINDINGS.items()} | {
        error.code: error.default_hint for error in error_classes()
    }


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _rendered(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(
            "=".join(map(str, element)) if isinstance(element, list) else str(element) for element in value
        )
    return str(value)
