"""Remove credentials from texts and URLs.

A URL may carry a user and a password, or a signature that works for anybody; so may the message of a library
that was given one. `redacted` is for texts that people read: errors, logs, rows of the catalog, run names.
`bare_url` is for a URL that stays one: the place without its credentials, the same for every user.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any
from urllib.parse import unquote

GONE = "..."  # in place of a secret
_SHORTEST = 4  # characters of a secret that is searched for on its own

# Parts of the names of query parameters whose values grant access.
_OPENS = r"sig|token|secret|passw|pwd|passphrase|cred|auth|key|jwt|session|policy|accessid"
# Every repeat is bounded: a text of a million letters must not take quadratic time.
_QUERY = (
    rf"(?i)((?:[?&;]|%3F|%26)[\w.~\[\]%-]{{0,80}}?(?:{_OPENS})[\w.~\[\]-]{{0,80}}(?:=|%3D))"
    r"(?:(?!%26)[^&\s\"'<>;])+"
)
# The same outside of a URL, where common words must not match: connection strings, options, XML.
_NAMED = (
    r"(?:x-(?:amz|goog|oss|cos|ms)-(?:signature|credential|security-token|access-token)"
    r"|(?:aws|oss|google)?[_-]?access[_-]?(?:key[_-]?)?id|account[_-]?key"
    r"|shared[_-]?access[_-]?(?:signature|key)"
    r"|(?:aws[_-]?)?(?:secret|session|access|refresh|id|auth|bearer|sas|security|api)[_-]?(?:access[_-]?)?"
    r"(?:key|token)"
    r"|signature|sig|token|sas|secret|client[_-]?secret|(?:ssl)?password|passwd|passphrase|pwd"
    r"|private[_-]?key|credentials?|authkey|jwt)"
)
_ASSIGNED = rf"(?i)(?<![\w./-])({_NAMED}=)(?:\"[^\"]*\"|'[^']*'|[^&\s\"'<>;]+)"
_QUOTED = rf"(?i)((['\"]){_NAMED}\2\s{{0,9}}:\s{{0,9}})(?:b?\"[^\"]*\"|b?'[^']*')"
_TAGGED = rf"(?i)(<({_NAMED}|StringToSign|CanonicalRequest|SignatureProvided)>)[^<]*"
# A variable of a shell is no secret: people copy the command that it is in.
_HEADER = (
    r"(?i)(\bauthorization['\"]?\s{0,9}[:=]"
    r"(?!\s{0,9}(?:[\w-]{1,20} )?\$(?:\w{1,80}|\{\w{1,80}\})(?:['\"\r\n]|$))"
    r"\s{0,9}b?['\"]?(?:[\w-]{1,20} +)?)[^'\"\r\n]+"
    r"|((?-i:\bBearer)\s{1,9})[\w.~+/=-]{12,}"
)
# Keys with a known shape: AWS, Hugging Face, GitHub.
_SHAPED = r"\b((?:AKIA|ASIA)(?=[A-Z0-9]{16}\b)|hf_(?=\w{30})|gh[pousr]_(?=\w{36}))\w+"

# user:password@ of a URL. Users paste passwords with a slash or a question mark in them: everything up to the
# last @ of the word is removed, unless the colon is followed by the port of a host.
_USERINFO = (
    r"(?i)(?P<scheme>(?<![a-z0-9+.-])(?!merged://\[)[a-z][a-z0-9+.-]{0,30})"
    # A path turns two slashes into one.
    r"(?P<sep>://|%3A%2F%2F|:/(?=[^\s/:@]{1,512}:[^\s@]{1,2048}@))"
    r"(?P<user>[^\s/?#\"'<>]{0,2048}(?:@|%40)"
    r"|[^:/?#@\s\"'<>]{0,512}:(?!:)(?!\d{1,5}(?:[/?#\s,;'\")]|$))[^\s@]{0,2048}@)"
)
_NO_SECRET = r"(?i)[^:@]*:\*\*\*@"  # SQLAlchemy writes this
# Schemes where a user alone is a name, and not a key that grants access.
_CONTAINERS = r"(?i)(?:abfss?|wasbs?|adl|az)"  # Azure: container@account
_BY_NAME = rf"{_CONTAINERS}|(?:postgres|mysql|mariadb|ssh|sftp|scp|hdfs|webhdfs|smb|ftp)"

_STRICT_USERINFO = r"(?i)(?P<scheme>(?<![a-z0-9+.-])[a-z][a-z0-9+.-]{0,30}://)(?P<user>[^/@\s]+)@"
_MAY_HOLD = r"(?i):/|%3A%2F%2F|=|bearer|authorization|['\"]\s{0,9}:|<[a-z]|AKIA|ASIA|hf_|gh[pousr]_"


def redacted(text: str) -> str:
    """Return ``text`` without credentials: userinfo of URLs, signatures, tokens, passwords.

    >>> redacted("cannot read s3://me:my/secret@bucket/a")
    'cannot read s3://bucket/a'
    >>> redacted("403, url=URL('https://h/a?X-Amz-Date=1&X-Amz-Signature=abc')")
    "403, url=URL('https://h/a?X-Amz-Date=1&X-Amz-Signature=...')"
    >>> redacted("postgresql+psycopg://user@host/database"), redacted("http://host:9000/run@5")
    ('postgresql+psycopg://user@host/database', 'http://host:9000/run@5')
    """
    if not _compiled(_MAY_HOLD).search(text):
        return text
    text = _compiled(_USERINFO).sub(_without_user, text)
    text = _compiled(_QUERY).sub(rf"\1{GONE}", text)
    text = _compiled(_ASSIGNED).sub(rf"\1{GONE}", text)
    text = _compiled(_QUOTED).sub(rf"\1'{GONE}'", text)
    text = _compiled(_TAGGED).sub(rf"\1{GONE}", text)
    text = _compiled(_HEADER).sub(lambda found: f"{found[1] or found[2]}{GONE}", text)
    return _compiled(_SHAPED).sub(rf"\1{GONE}", text)


def beginning(text: str, length: int) -> str:
    """Return the first characters of a text, `redacted` before the cut: a cut URL is no longer one.

    >>> beginning("cannot read s3://me:secret@bucket/a", 24)
    'cannot read s3://bucket/'
    """
    return redacted(text)[:length]


def ending(text: str, length: int) -> str:
    """Return the last characters of a text, `redacted` before the cut.

    >>> ending("nope://me:secret@host/x", 8)
    '//host/x'
    """
    return redacted(text)[-length:]


def redacted_of(text: str, url: str) -> str:
    """Return ``text`` redacted, and without the credentials of ``url`` anywhere: libraries split URLs.

    >>> redacted_of('Invalid bucket name "me:secret@bucket"', "s3://me:secret@bucket/a")
    'Invalid bucket name "...bucket"'
    """
    found = {m["user"] for m in _compiled(_USERINFO).finditer(url)}
    found |= {m[0][len(m[1]) :] for m in _compiled(_QUERY).finditer(url)}
    found |= {user.removesuffix("@").partition(":")[2] for user in found}
    found |= {unquote(each) for each in found}
    for secret in sorted(found, key=len, reverse=True):
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, GONE)
    return redacted(text)


def redacted_value(value: Any) -> Any:
    """Return a plain value with every text in it `redacted`; other values stay as they are."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {k: redacted_value(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(redacted_value(v) for v in value)
    return value


def bare_url(url: str) -> str:
    """Return the place that a URL names, without credentials: one spelling for all users.

    Names in its path are kept, whatever they look like.

    >>> bare_url("s3://me:secret@bucket/token=1/a"), bare_url("https://h/a?part=1&sig=x")
    ('s3://bucket/token=1/a', 'https://h/a?part=1&sig=...')
    >>> bare_url("abfss://container@account.dfs.core.windows.net/a")
    'abfss://container@account.dfs.core.windows.net/a'
    """
    place, mark, query = _compiled(_STRICT_USERINFO).sub(_without_strict_user, url).partition("?")
    return place + _compiled(_QUERY).sub(rf"\1{GONE}", mark + query)


def holds_credentials(url: str) -> bool:
    """Report whether a URL has credentials in it. A user alone, as of ``ssh://me@host``, is none.

    >>> [*map(holds_credentials, ("s3://me:secret@b/a", "https://h/a?sig=x", "s3://b/a", "/a/token=1"))]
    [True, True, False, False]
    """
    return "://" in url and redacted(url) != url


def _without_strict_user(found: re.Match[str]) -> str:
    container = ":" not in found["user"] and _compiled(_CONTAINERS).match(found["scheme"])
    return found[0] if container else found["scheme"]


def _without_user(found: re.Match[str]) -> str:
    user = found["user"]
    named = ":" not in user and "%3a" not in user.lower() and _compiled(_BY_NAME).match(found["scheme"])
    kept = user if named or _compiled(_NO_SECRET).fullmatch(user) else ""
    return f"{found['scheme']}{found['sep']}{kept}"


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern on first use: all of them take 4 ms, and most commands need one."""
    return re.compile(pattern)
