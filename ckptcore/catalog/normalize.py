"""Normalize text before it is stored: names, messages, digests and URLs.

Text from a checkpoint can be any string. Text from a user can contain a password.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ckptcore.errors import Finding
from ckptcore.redaction import bare_url, redacted
from ckptcore.utils.average_url import is_average, split_average, with_inputs
from ckptcore.utils.merged_url import is_merged, merged_url, split_merged

# Schemes of one file system of fsspec, which takes the options of all of them.
_ONE_STORE = (("s3", "s3a"), ("gs", "gcs"), ("abfs", "abfss", "az"))


def storable(text: str) -> str:
    r"""Return `text` with lone surrogates (file names that are not UTF-8) and NULs as escapes.

    Every database can store the result. Names, such as those of tensors, otherwise stay as they are.

    >>> storable("a\x00b"), storable("blocks.token=1")
    ('a\\x00b', 'blocks.token=1')
    """
    if text.isascii() and "\x00" not in text:
        return text
    return text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\x00", "\\x00")


def clean(text: str) -> str:
    """Return `text` as `storable`, without credentials: for messages and what people write.

    >>> clean("cannot read s3://me:secret@bucket/a")
    'cannot read s3://bucket/a'
    """
    return redacted(storable(text))


def storable_finding(reported: Finding) -> dict[str, Any]:
    """Return the columns of a finding, as every database can store them."""
    names = {
        name: None if text is None else storable(text)
        for name, text in (("fqn", reported.fqn), ("file", reported.file))
    }
    texts = {"message": clean(reported.message), "hint": clean(reported.hint)}
    return {"code": reported.code, "level": reported.level, "severity": reported.severity, **texts, **names}


def clean_json(value: Any) -> str:
    """Return `value` as canonical JSON, without credentials in URLs. Other objects become their `str`."""
    return json.dumps(_storable_tree(value), sort_keys=True, ensure_ascii=True, separators=(",", ":"))


def hex_digest(digest: str) -> str:
    """Return a digest in lower case, without the name of its function if that is plain BLAKE3.

    >>> hex_digest("blake3:AB12"), hex_digest("blake3-parts-16777216:ab12"), hex_digest("crc64nvme:AB12")
    ('ab12', 'blake3-parts-16777216:ab12', 'crc64nvme:ab12')
    """
    lower = digest.lower()
    return lower if lower.startswith(("blake3-parts-", "crc64nvme:")) else lower.rpartition(":")[2]


def normal_uri(uri: str) -> str:
    """Return the one spelling of a location: local paths absolute, links followed, no trailing slash.

    Credentials are removed: the same checkpoint, named by two people, is one row.

    >>> normal_uri("s3://bucket/run/step-10/")
    's3://bucket/run/step-10'
    >>> normal_uri("file:///nowhere/at/all/")
    '/nowhere/at/all'
    >>> normal_uri("file://localhost/nowhere"), normal_uri("~/runs") == os.path.expanduser("~/runs")
    ('/nowhere', True)
    >>> normal_uri("merged://[s3://me:secret@b/n1/,/nowhere/n0/]")
    'merged://[/nowhere/n0,s3://b/n1]'
    """
    if is_average(uri):
        return with_inputs(uri, [normal_uri(root) for root in split_average(uri)[0]])
    if is_merged(uri):
        roots, inner = split_merged(uri)
        return merged_url(map(normal_uri, roots)) + (f"/{storable(inner)}" if inner else "")
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme in ("file", "local"):
        path = rest if separator else uri
        if separator and path.startswith("localhost/"):  # this machine, as `ckptcore.store.local_path` has it
            path = path.removeprefix("localhost")
        try:
            # Stores open a name with ~ as it is: where one is there, it is that, and not the home folder.
            expanded = path if os.path.lexists(path) else os.path.expanduser(path)
            return storable(os.path.realpath(expanded))
        except ValueError:  # no file can have a name with a NUL, or with a surrogate that means no byte
            return storable(path)
    return storable(bare_url(f"{scheme}://{rest}").rstrip("/"))


def same_places(uri: str) -> tuple[str, ...]:
    """Return the normal spelling of a location, and those with other schemes that open the same place.

    A row keeps the spelling that it was recorded with, and is found under each. Two slashes in a row are
    another key of an object store.

    >>> same_places("s3a://bucket/run/"), same_places("/nowhere")
    (('s3a://bucket/run', 's3://bucket/run'), ('/nowhere',))
    """
    uri = normal_uri(uri)
    scheme, separator, rest = uri.partition("://")
    # A URL that fsspec chains (`zip://a::s3://b`) is compared as it is written.
    is_plain = separator and "::" not in uri
    aliases = next((schemes for schemes in _ONE_STORE if scheme in schemes), ()) if is_plain else ()
    return uri, *(f"{alias}://{rest}" for alias in aliases if alias != scheme)


def parents(uri: str) -> list[str]:
    """Return the folders that contain a normal URI, nearest first.

    >>> parents("s3://bucket/a/b")
    ['s3://bucket/a', 's3://bucket']
    >>> parents("/a/b")
    ['/a', '/']
    >>> parents("merged://[/node0/a,/node1/a]")
    []
    """
    if is_merged(uri):  # it is in several folders, and all of it in none
        return []
    scheme, separator, rest = uri.partition("://")
    head = scheme + separator if separator else ""
    path = rest if separator else uri
    above = []
    while "/" in path.rstrip("/"):
        path = path.rstrip("/").rpartition("/")[0] or "/"
        above.append(head + path)
        if path == "/":
            break
    return above


def _storable_tree(value: Any) -> Any:
    if isinstance(value, str):  # a pattern of names is not a secret, even if it looks like one
        return clean(value) if "://" in value else storable(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {storable(str(k)): _storable_tree(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_storable_tree(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_storable_tree(item) for item in value), key=repr)
    return clean(str(value))
