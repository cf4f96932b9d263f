"""Roots: may an event name this place, and where does its conversion go?

Only text is looked at: the receiver need not see the file system. The flow asks again, with links resolved,
where the files are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ckptcore.utils.text import short_repr
from deployments.receiver.http_errors import RequestRefused

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
# Letters and digits of any script, and what names of runs and steps are made of. Not among them: what a URL
# would decode (%), cut off (? #), expand (* [ {) or chain (two colons, below).
_PLAIN = re.compile(r"[\w ./~+=@,:()!-]+")
_PART = re.compile(r"[\w+=@,:()!~.-]+")
_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class AllowedPlace:
    """An allowed place. uri: as flows get it. root: the allowed root. path: below the root."""

    uri: str
    root: str
    path: str


def place_of(uri: str, roots: Sequence[str]) -> AllowedPlace:
    """The place that a URI names, below one of the roots; raises `RequestRefused`.

    >>> place_of("file:///runs/llama/step-7/", ["/runs"])
    AllowedPlace(uri='/runs/llama/step-7', root='/runs', path='llama/step-7')
    >>> place_of("/runs-of-others/x", ["/runs"])
    Traceback (most recent call last):
    deployments.receiver.http_errors.RequestRefused: '/runs-of-others/x'
    """
    plain = normal(uri)
    for root in sorted(roots, key=len, reverse=True):
        inside = normal(root).rstrip("/") + "/"
        if plain.startswith(inside):
            return AllowedPlace(plain, normal(root), plain[len(inside) :])
    raise RequestRefused("forbidden-root", short_repr(uri, 120))


def normal(uri: str) -> str:
    """A path or URL without its ways of saying the same twice; raises `RequestRefused`.

    >>> normal("S3://bucket/a"), normal("file://localhost/a/")
    ('s3://bucket/a', '/a')
    """
    scheme, colon, rest = uri.partition("://")
    if not colon:
        scheme, rest = "", uri
    elif scheme.lower() == "file":
        scheme, rest = "", rest.removeprefix("localhost")
    scheme = scheme.lower()
    if (scheme and not _SCHEME.fullmatch(scheme)) or not _PLAIN.fullmatch(rest) or "::" in uri:
        raise RequestRefused("forbidden-root", f"{short_repr(uri, 120)} is not a plain path or URL")
    if not scheme and not rest.startswith("/"):
        raise RequestRefused("forbidden-root", f"{short_repr(uri, 120)} is not an absolute path")
    parts = rest.rstrip("/").split("/")
    # An object store keeps empty and dotted parts as they are, a file system folds them.
    if any(part in ("", ".", "..") for part in parts[0 if scheme else 1 :]):
        raise RequestRefused("forbidden-root", f"{short_repr(uri, 120)} has parts that are empty or dots")
    return f"{scheme}://{'/'.join(parts)}" if scheme else "/".join(parts)


def filled(template: str, *, run: str, step: int | None, **more: str) -> str:
    """A template with ``{run}``, ``{step}`` and ``more`` put in; raises `RequestRefused`.

    A run or step that would be more than one part of a path is refused.

    >>> filled("/out/{run}/{path}", run="llama", step=None, path="a/b")
    '/out/llama/a/b'
    """
    values = dict(more)
    for name, value in (("run", run), ("step", "" if step is None else str(step))):
        if f"{{{name}}}" not in template:
            continue
        if not _PART.fullmatch(value) or value in (".", ".."):
            raise RequestRefused("not-understood", f"the {name} {short_repr(value)} cannot be part of a path")
        values[name] = value
    # In one go: what was put in is not looked at again.
    return _FIELD.sub(lambda found: values.get(found[1], found[0]), template)
