"""Parse the event in a verified request.

The body is parsed once, within bounds: strict JSON, no repeated keys, text that any database can store. The
event is only a hint about a run and a URI. It is never trusted about the checkpoint itself.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from ckptcore.catalog.training import read_facts
from ckptcore.page.http_errors import RequestRefused
from ckptcore.utils.foreign_text import InvalidText, load_json
from ckptcore.utils.text import short_repr
from deployments.receiver.senders import CLOUDEVENTS_JSON, Dialect

_log = logging.getLogger("deployments.receiver")

MAX_TEXT = 255  # characters of an id, a type, a run's name
MAX_URI = 2048
MAX_STEP = 2**53  # exact as a JSON number in all languages
_STEP = re.compile(r"[0-9]{1,16}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")  # databases store neither NULs nor lone surrogates


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One announcement.

    Attributes:
        source: the name of the configured source.
        event_id: unique within the source; a digest of the body if the sender gave none.
        has_id: whether the sender gave one.
        type: what happened, or "" if the sender has no types.
        announces: whether this type announces a checkpoint.
        uri: the URI of the checkpoint, or "".
        run: the name of the training run, or "".
        step: the training step, or None.
        meta: facts about the training, in the JSON form of `ckptcore.catalog.training`.
        left_out: which parts of these facts are not stored, and why.
    """

    source: str
    event_id: str
    has_id: bool = True
    type: str
    announces: bool
    uri: str
    run: str
    step: int | None
    meta: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def read_event(
    dialect: Dialect,
    source: str,
    headers: Mapping[str, str],
    body: bytes,
    accepts: frozenset[str] | None = None,
) -> Event:
    """Return the event of a verified request.

    Args:
        dialect: the format of the sender's events.
        source: the name of the configured source.
        headers: by lower-case name.
        body: as received.
        accepts: the types that announce a checkpoint, instead of the dialect's.

    Raises:
        RequestRefused: the request contains no such event.
    """
    document = _document(dialect, headers, body)
    type = ".".join(_text_at(document, headers, place, "the type") for place in dialect.type).strip(".")
    allowed = dialect.accepts if accepts is None else accepts
    if allowed is not None and not type and "" not in allowed:
        raise RequestRefused("not-understood", f"the event has no type ({', '.join(dialect.type)})")
    facts, left_out = read_facts(_meta(dialect, document))
    id = _sent_id(dialect, source, document, headers)
    return Event(
        source=source,
        # A repeat without an id has the same bytes, from the same source.
        event_id=id or _digest(source, body),
        has_id=bool(id),
        type=type,
        announces=allowed is None or type in allowed,
        uri=_first_text(document, headers, dialect.uri, "the URI", MAX_URI),
        run=_first_text(document, headers, dialect.run, "the run"),
        step=_step_number(_first_text(document, headers, dialect.step, "the step")),
        meta=facts.as_form(),
        left_out=left_out,
    )


def meta_of(dialect: Dialect, body: str) -> dict[str, Any]:
    """Return the facts about the training in a stored event; empty if it cannot be parsed any more."""
    try:
        document = parse(body.encode())
    except RequestRefused as refused:  # it was parsed when it arrived: its row was edited since
        _log.warning("an event has no facts about its training: %s", refused.why)
        return {}
    if dialect.envelope == "cloudevents" and "specversion" not in document:
        document = {"data": document}  # binary mode: the body is the data
    return read_facts(_meta(dialect, document))[0].as_form()


def parse(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises `RequestRefused`.

    >>> parse(b'{"a": [1]}')
    {'a': [1]}
    """
    try:
        document = load_json(body, finite=True, unique=True)
    except InvalidText as error:
        raise RequestRefused("malformed", f"the body: {short_repr(str(error), 120)}") from error
    if not isinstance(document, dict):
        raise RequestRefused("not-understood", "the body is not a JSON object")
    return document


def _meta(dialect: Dialect, document: Mapping[str, Any]) -> Any:
    """Return the facts about the training in an event: the first object at one of its places."""
    for place in dialect.meta:
        facts = _at(document, place)
        if facts is None:
            continue
        if dialect.meta_prefix and isinstance(facts, dict):
            return _of_tags(facts, dialect.meta_prefix)
        return facts
    return None


def _of_tags(tags: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the facts among tags whose names begin with a prefix; dots separate groups."""
    form: dict[str, Any] = {}
    for name, value in tags.items():
        if not name.startswith(prefix) or name == f"{prefix}uri":
            continue
        group, dot, rest = name.removeprefix(prefix).partition(".")
        if dot and group in ("metrics", "config"):
            form.setdefault(group, {})[rest] = value
        else:
            form[name.removeprefix(prefix)] = value
    return form


def _document(dialect: Dialect, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    if dialect.envelope == "plain":
        return parse(body)
    if media_of(headers) == CLOUDEVENTS_JSON:  # structured mode
        document = parse(body)
    else:  # binary mode: attributes are percent-encoded headers; the body is the data
        document = {name[3:]: unquote(value) for name, value in headers.items() if name.startswith("ce-")}
        document["data"] = parse(body)
    if document.get("specversion") != "1.0":
        raise RequestRefused("not-understood", "the event is not a CloudEvent of version 1.0")
    missing = [name for name in ("id", "source", "type") if not document.get(name)]
    if missing:
        raise RequestRefused("not-understood", f"the CloudEvent has no {', '.join(missing)}")
    return document


def media_of(headers: Mapping[str, str]) -> str:
    """Return the content type of a request, without its parameters."""
    return headers.get("content-type", "").split(";")[0].strip().lower()


def _sent_id(dialect: Dialect, source: str, document: dict[str, Any], headers: Mapping[str, str]) -> str:
    """Return the id that the sender gave an event, or its digest if it is long; "" if there is none."""
    parts = [_text_at(document, headers, place, "the event's id", 2 * MAX_TEXT) for place in dialect.id]
    if not parts or not all(parts):
        return ""
    joined = " ".join(parts)  # unambiguous: a CloudEvent's source is a URI, without blanks
    return joined if len(joined) <= MAX_TEXT else _digest(source, joined.encode())


def _digest(source: str, text: bytes) -> str:
    return hashlib.sha256(source.encode() + b"\n" + text).hexdigest()


def _first_text(
    document: dict[str, Any],
    headers: Mapping[str, str],
    places: tuple[str, ...],
    label: str,
    most: int = MAX_TEXT,
) -> str:
    return next((t for place in places if (t := _text_at(document, headers, place, label, most))), "")


def _text_at(
    document: dict[str, Any], headers: Mapping[str, str], place: str, label: str, most: int = MAX_TEXT
) -> str:
    """Return the text or whole number at a place as text, or ""."""
    value: Any
    value = headers.get(place[1:]) if place.startswith("@") else _at(document, place)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RequestRefused("not-understood", f"{label} ({place}) must be a string or a whole number")
    if isinstance(value, int) and abs(value) > MAX_STEP:
        raise RequestRefused("not-understood", f"{label} ({place}) is larger than 2**53")
    text = str(value)
    if len(text) > most:
        raise RequestRefused("not-understood", f"{label} ({place}) is longer than {most} characters")
    if _CONTROL.search(text):
        raise RequestRefused("not-understood", f"{label} ({place}) contains control characters")
    return text


def _at(document: Mapping[str, Any], place: str) -> Any:
    value: Any = document
    for name in place.split("/"):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _step_number(text: str) -> int | None:
    if not text:
        return None
    if not _STEP.fullmatch(text) or int(text) > MAX_STEP:
        raise RequestRefused("not-understood", f"the step must be a whole number from 0 to {MAX_STEP}")
    return int(text)
