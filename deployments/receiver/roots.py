"""Check the URIs in events against the allowed roots, and derive the destinations of their conversions.

Only text is compared: the receiver need not see the file system. The flow checks again, with links resolved,
on the machine that has the files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ckptcore.page.http_errors import RequestRefused
from ckptcore.utils.text import short_repr

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
# Letters and digits of any script, and the usual characters in names of runs and steps. Excluded: what a URL
# would decode (%), cut off (? #), expand (* [ {) or chain (two colons, below).
_PLAIN = re.compile(r"[\w ./~+=@,:()!-]+")
_PART = re.compile(r"[\w+=@,:()!~.-]+")
_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class AllowedPlace:
    """An allowed checkpoint. uri: normalized. root: the allowed root. path: the URI relative to the root."""

    uri: str
    root: str
    path: str


def place_of(uri: str, roots: Sequence[str]) -> AllowedPlace:
    """Return the place of a URI below one of the roots. Raises `RequestRefused`.

    >>> place_of("file:///runs/llama/step-7/", ["/runs"])
    AllowedPlace(uri='/runs/llama/step-7', root='/runs', path='llama/step-7')
    >>> place_of("/runs-of-others/x", ["/runs"])
    Traceback (most recent call last):
    ckptcore.page.http_errors.RequestRefused: '/runs-of-others/x'
    """
    plain = normal(uri)
    for root in sorted(roots, key=len, reverse=True):
        inside = normal(root).rstrip("/") + "/"
        if plain.startswith(inside):
            return AllowedPlace(plain, normal(root), plain[len(inside) :])
    raise RequestRefused("forbidden-root", short_repr(uri, 120))


def normal(uri: str) -> str:
    """Return the one spelling of a path or URL. Raises `RequestRefused`.

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
    # An object store keeps empty and dotted parts, a file system resolves them.
    if any(part in ("", ".", "..") for part in parts[0 if scheme else 1 :]):
        raise RequestRefused("forbidden-root", f"{short_repr(uri, 120)} has parts that are empty or dots")
    return f"{scheme}://{'/'.join(parts)}" if scheme else "/".join(parts)


def filled(template: str, *, run: str, step: int | None, **fields: str) -> str:
    """Fill in a template with ``{run}``, ``{step}`` and `fields`.

    Raises `RequestRefused` for a run or step that is not a single part of a path.

    >>> filled("/out/{run}/{path}", run="llama", step=None, path="a/b")
    '/out/llama/a/b'
    """
    values = dict(fields)
    for name, value in (("run", run), ("step", "" if step is None else str(step))):
        if f"{{{name}}}" not in template:
            continue
        if not _PART.fullmatch(value) or value in (".", ".."):
            raise RequestRefused("not-understood", f"the {name} {short_repr(value)} cannot be part of a path")
        values[name] = value
    # In one pass: inserted values are not expanded.
    return _FIELD.sub(lambda match: values.get(match[1], match[0]), template)
