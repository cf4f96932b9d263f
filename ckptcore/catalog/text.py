"""Catalog texts: in which one spelling does a name, a digest or a URL stand in the database?

What comes from a checkpoint can be any string, and what comes from a user can hold a password.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

# user:password@ of any URL, and the parameters that make a signed URL work for anybody.
_USERINFO = re.compile(r"(?<=://)[^/@\s]+@")
_SIGNED = re.compile(
    r"(?i)\b(X-Amz-(?:Signature|Credential|Security-Token)|X-Goog-Signature|AWSAccessKeyId"
    r"|Signature|sig|token|password|secret)=[^&\s\"']+"
)


def clean(text: str) -> str:
    """`text` as every database can hold it, without credentials.

    Lone surrogates (file names that are not UTF-8) and NULs are written out as escapes.

    >>> clean("s3://me:secret@bucket/a")
    's3://bucket/a'
    >>> clean("a\\x00b")
    'a\\\\x00b'
    """
    # The names of tensors, by the hundred thousand: neither a URL nor a parameter is in them.
    if text.isascii() and "\x00" not in text and "://" not in text and "=" not in text:
        return text
    text = text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\x00", "\\x00")
    return _SIGNED.sub(r"\1=...", _USERINFO.sub("", text))


def clean_json(value: Any) -> str:
    """`value` as canonical JSON; credentials left out, what is not JSON as its `str`."""
    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=True, separators=(",", ":"))


def hex_digest(digest: str) -> str:
    """A digest without the name of its function, in lower case.

    >>> hex_digest("blake3:AB12")
    'ab12'
    """
    return digest.rpartition(":")[2].lower()


def normal_uri(uri: str) -> str:
    """One spelling per place: local paths absolute, links followed; no trailing slash.

    >>> normal_uri("s3://bucket/run/step-10/")
    's3://bucket/run/step-10'
    >>> normal_uri("file:///nowhere/at/all/")
    '/nowhere/at/all'
    """
    scheme, found, rest = uri.partition("://")
    if not found or scheme in ("file", "local"):
        return clean(os.path.realpath(os.path.expanduser(rest if found else uri)))
    return clean(f"{scheme}://{rest}".rstrip("/"))


def parents(uri: str) -> list[str]:
    """The folders that a normal URI lies in, nearest first.

    >>> parents("s3://bucket/a/b")
    ['s3://bucket/a', 's3://bucket']
    >>> parents("/a/b")
    ['/a', '/']
    """
    scheme, found, rest = uri.partition("://")
    head = scheme + found if found else ""
    path = rest if found else uri
    above = []
    while "/" in path.rstrip("/"):
        path = path.rstrip("/").rpartition("/")[0] or "/"
        above.append(head + path)
        if path == "/":
            break
    return above


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {clean(str(k)): _plain(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(item) for item in value), key=repr)
    return clean(str(value))
