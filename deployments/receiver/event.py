"""Event: what does a request that proved itself announce?

The body is parsed here, once, and bounded: strict JSON, no key twice, text that any database can keep. What
it says is a hint about a run and a place; it is never taken for the truth about a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from ckptcore.utils.text import short_repr
from deployments.receiver.http_errors import RequestRefused
from deployments.receiver.senders import CLOUDEVENTS_JSON, Dialect

MAX_TEXT = 255  # characters of an id, a type, a run's name
MAX_URI = 2048
MAX_STEP = 2**53  # what JSON numbers keep exactly, in all languages
_STEP = re.compile(r"[0-9]{1,16}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")  # databases keep neither NUL nor half characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One announcement.

    source: the name it is configured under. event_id: unique within the source; made of the body where the
    sender has none. type: what happened, "" where the sender does not say. wanted: whether that type
    announces a checkpoint. uri, run: "" where the event names none. step: None where it names none.
    """

    source: str
    event_id: str
    type: str
    wanted: bool
    uri: str
    run: str
    step: int | None


def read_event(
    dialect: Dialect,
    source: str,
    headers: Mapping[str, str],
    body: bytes,
    accepts: frozenset[str] | None = None,
) -> Event:
    """The event in a verified request; raises `RequestRefused`.

    headers: by lower-case name. accepts: types that announce a checkpoint, in place of the dialect's.
    """
    document = _document(dialect, headers, body)
    type = ".".join(_text_at(document, headers, place, "the type") for place in dialect.type).strip(".")
    allowed = dialect.accepts if accepts is None else accepts
    if allowed is not None and not type and "" not in allowed:
        raise RequestRefused("not-understood", f"it does not say what happened ({', '.join(dialect.type)})")
    return Event(
        source=source,
        event_id=_id(dialect, source, document, headers, body),
        type=type,
        wanted=allowed is None or type in allowed,
        uri=_first_text(document, headers, dialect.uri, "the URI", MAX_URI),
        run=_first_text(document, headers, dialect.run, "the run"),
        step=_step_number(_first_text(document, headers, dialect.step, "the step")),
    )


def parse(body: bytes) -> dict[str, Any]:
    """A JSON object; raises `RequestRefused`.

    >>> parse(b'{"a": [1]}')
    {'a': [1]}
    """
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_once)
    except UnicodeDecodeError as error:
        raise RequestRefused("malformed", "the body is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise RequestRefused("malformed", f"the body is not JSON: {short_repr(str(error), 120)}") from error
    if not isinstance(found, dict):
        raise RequestRefused("not-understood", "the body is not a JSON object")
    return found


def _document(dialect: Dialect, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    if dialect.envelope == "plain":
        return parse(body)
    if _media(headers) == CLOUDEVENTS_JSON:  # structured mode
        document = parse(body)
    else:  # binary mode: attributes are headers, percent-encoded; the body is the data
        document = {name[3:]: unquote(value) for name, value in headers.items() if name.startswith("ce-")}
        document["data"] = parse(body)
    if document.get("specversion") != "1.0":
        raise RequestRefused("not-understood", "not a CloudEvent of version 1.0")
    missing = [name for name in ("id", "source", "type") if not document.get(name)]
    if missing:
        raise RequestRefused("not-understood", f"a CloudEvent without {', '.join(missing)}")
    return document


def _media(headers: Mapping[str, str]) -> str:
    return headers.get("content-type", "").split(";")[0].strip().lower()


def _id(
    dialect: Dialect, source: str, document: dict[str, Any], headers: Mapping[str, str], body: bytes
) -> str:
    parts = [_text_at(document, headers, place, "the event's id", 2 * MAX_TEXT) for place in dialect.id]
    if parts and all(parts):
        joined = " ".join(parts)  # a CloudEvent's source is a URI: it holds no blank
        if len(joined) <= MAX_TEXT:
            return joined
        body = joined.encode()
    # Sent again, it is the same bytes from the same source; that is all that is known.
    return hashlib.sha256(source.encode() + b"\n" + body).hexdigest()


def _first_text(
    document: dict[str, Any],
    headers: Mapping[str, str],
    places: tuple[str, ...],
    what: str,
    most: int = MAX_TEXT,
) -> str:
    return next((t for place in places if (t := _text_at(document, headers, place, what, most))), "")


def _text_at(
    document: dict[str, Any], headers: Mapping[str, str], place: str, what: str, most: int = MAX_TEXT
) -> str:
    """The text or whole number at a place, as text; "" where there is none."""
    value: Any
    if place.startswith("@"):
        value = headers.get(place[1:])
    else:
        value = document
        for name in place.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RequestRefused("not-understood", f"{what} ({place}) is not a text")
    if isinstance(value, int) and abs(value) > MAX_STEP:
        raise RequestRefused("not-understood", f"{what} ({place}) is too large a number")
    text = str(value)
    if len(text) > most:
        raise RequestRefused("not-understood", f"{what} ({place}) is longer than {most} characters")
    if _CONTROL.search(text):
        raise RequestRefused("not-understood", f"{what} ({place}) holds characters that no name has")
    return text


def _step_number(text: str) -> int | None:
    if not text:
        return None
    if not _STEP.fullmatch(text) or int(text) > MAX_STEP:
        raise RequestRefused("not-understood", "the step is not a whole number")
    return int(text)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Two readers of one object with a key twice would see two different events.
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return found
