"""Remove credentials from texts and URLs.

A URL may carry a user and a password, or a signature that works for anybody; so may the message of a library
that was given one. `redacted` is for texts that people read: errors, logs, rows of the catalog, run names.
`bare_url` is for a URL that stays one: the place without its credentials, the same for every user.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
# Names whose values grant access wherever people write them: options of programs, variables of an
# environment, headers, lines of a config. Tokens of a tokenizer are none.
_STRONG = (
    r"(?!(?:[a-z0-9]{1,30}[_-]){0,3}(?:bos|eos|pad|unk|cls|sep|mask|image|video|audio|start|end|begin|think|tool"
    r"|fim|eot|eod|special|stop|next|max|min|num)[_-])"
    r"(?:[a-z0-9]{1,30}[_-]){0,8}(?:token|secret|passw(?:or)?d|passphrase|pwd|credentials?|jwt"
    r"|(?:api|access|private|secret|account|auth|session|encryption|license|sas|ssh)[_-]?key)(?:[_-]id)?"
)
# No value of these: a variable, another option, a placeholder, a word or a small number.
_NONE = r"\$|-|<|\[|\{|\.\.\.|(?:\d{1,4}|true|false|none|null|yes|no|on|off)(?![\w-])"
_GIVEN = rf"(?:\"(?!{_NONE})[^\"\\]*\"|'(?!{_NONE})[^'\\]*'|(?!{_NONE})[^\s\"'<>;,\\]+)"
_OPTION = rf"(?i)(?<![\w./-])(--?{_STRONG}(?:=|\s{{1,9}}))(?:{_GIVEN})"
_VARIABLE = rf"(?i)(?<![\w./-])({_STRONG}=)(?:{_GIVEN})"
# As items of a list in JSON or Python: "--token", "abc".
_LISTED = rf"(?i)((['\"])--?{_STRONG}\2\s{{0,9}},\s{{0,9}})(?:\"(?!{_NONE})[^\"]*\"|'(?!{_NONE})[^']*')"
# In prose a name before a colon is a word: then its value must look like no word.
_RANDOM = r"(?=[^\s\"'<>;,\\]{0,200}\d)(?=[^\s\"'<>;,\\]{0,200}[a-z])"
_FIELD = rf"(?i)(?<![\w./-])({_STRONG}\s{{0,3}}:\s{{1,9}})(?!{_NONE}){_RANDOM}[^\s\"'<>;,\\]{{12,}}"
_PASSWORD = (
    r"(?i)(?<![\w./-])((?:[a-z0-9]{1,30}[_-]){0,8}(?:passw(?:or)?d|passphrase|pwd)\s{0,3}:\s{1,9})"
    rf"(?!{_NONE}){_RANDOM}[^\s\"'<>;,\\]{{6,}}"
)
# A key is most often no secret; what looks like one is hexadecimal, or mixes cases and digits.
_KEY = (
    r"(?<![\w./-])((?i:key)=)(?:[0-9a-fA-F]{32,}"
    r"|(?=[\w+/-]{0,200}[a-z])(?=[\w+/-]{0,200}[A-Z])(?=[\w+/-]{0,200}[0-9])[\w+/-]{16,}=*)(?![\w.])"
)
_KEY_HEADER = (
    r"(?i)\b((?:x-[a-z0-9-]{0,40})?(?:api-?key|(?:auth|access|vault|security|private)-token)\s{0,3}:\s{0,9})"
    rf"(?!{_NONE})[^\s\"'<>;,\\]+"
)
_COOKIE = r"(?i)(\b(?:set-)?cookie\s{0,3}:\s{0,9}[\w.-]{1,80}=)[^\s;\"']+"
# curl -u name:password. Two numbers are a user and a group.
_LOGIN = r"((?<!\S)(?:-u|--user)[=\s]\s{0,8}(?!\d{1,9}:\d{1,9}(?!\S))[^\s:\"'$]{1,80}:)(?!\$)[^\s\"']+"
_QUOTED = rf"(?i)((['\"]){_NAMED}\2\s{{0,9}}:\s{{0,9}})(?:b?\"[^\"]*\"|b?'[^']*')"
_TAGGED = rf"(?i)(<({_NAMED}|StringToSign|CanonicalRequest|SignatureProvided)>)[^<]*"
# A variable of a shell is no secret: people copy the command that it is in.
_HEADER = (
    r"(?i)(\bauthorization['\"]?\s{0,9}[:=]"
    r"(?!\s{0,9}(?:[\w-]{1,20} )?\$(?:\w{1,80}|\{\w{1,80}\})(?:['\"\r\n]|$))"
    r"\s{0,9}b?['\"]?"
    r"(?:(?:basic|bearer|digest|token|negotiate|ntlm|oauth|apikey|aws|[a-z0-9]{1,9}-hmac-[\w-]{1,9}) +)?)"
    r"[^'\"\r\n]+"
    r"|((?-i:\bBearer)\s{1,9})[\w.~+/=-]{12,}"
)
# Keys with a known shape: AWS, Hugging Face, GitHub, GitLab, OpenAI, Slack, Google, npm; tokens of JSON, PEM.
_SHAPED = (
    r"\b((?:AKIA|ASIA)(?=[A-Z0-9]{16}\b)|hf_(?=\w{30})|gh[pousr]_(?=\w{36})|github_pat_(?=\w{30})"
    r"|glpat-(?=[\w-]{20})|sk-(?=[\w-]{20})(?=[\w-]{0,80}\d)|xox[abeoprs]-(?=[\w-]{10})|AIza(?=[\w-]{35})"
    r"|npm_(?=\w{36})|eyJ(?=[\w-]{8,4000}\.eyJ[\w-]{8}))[\w.-]+"
)
_PEM = r"(-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----)[^-]*"

# user:password@ of a URL. Users paste passwords with a slash or a question mark in them: everything up to the
# last @ of the word is removed, unless the colon is followed by the port of a host.
_USERINFO = (
    r"(?i)(?P<scheme>(?<![a-z0-9+.-])(?!(?:merged|average)://\[)[a-z][a-z0-9+.-]{0,30})"
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
_MAY_HOLD = (
    r"(?i):/|%3A%2F%2F|=|bearer|authorization|['\"]\s{0,9}:|<[a-z]|AKIA|ASIA|hf_|gh[pousr]_|github_pat_|glpat-|sk-"
    r"|xox|AIza|npm_|eyJ|token|secret|passw|passphrase|pwd|credential|jwt|key|cookie|-u\s|--user"
)
# What is removed: a pattern, and what is left of it.
_REMOVED = (
    (_QUERY, rf"\1{GONE}"),
    (_ASSIGNED, rf"\1{GONE}"),
    (_VARIABLE, rf"\1{GONE}"),
    (_OPTION, rf"\1{GONE}"),
    (_LISTED, rf"\1\2{GONE}\2"),
    (_FIELD, rf"\1{GONE}"),
    (_PASSWORD, rf"\1{GONE}"),
    (_KEY, rf"\1{GONE}"),
    (_KEY_HEADER, rf"\1{GONE}"),
    (_COOKIE, rf"\1{GONE}"),
    (_LOGIN, rf"\1{GONE}"),
    (_QUOTED, rf"\1'{GONE}'"),
    (_TAGGED, rf"\1{GONE}"),
    (_HEADER, rf"\1\2{GONE}"),
    (_SHAPED, rf"\1{GONE}"),
    (_PEM, rf"\1{GONE}"),
)
_SECRET_OPTION = rf"(?i)--?{_STRONG}"
_SECRET_VALUE = rf"(?!{_NONE})[\s\S]+"


def redacted(text: str) -> str:
    """Return ``text`` without credentials: userinfo of URLs, signatures, tokens, passwords.

    >>> redacted("cannot read s3://me:my/secret@bucket/a")
    'cannot read s3://bucket/a'
    >>> redacted("403, url=URL('https://h/a?X-Amz-Date=1&X-Amz-Signature=abc')")
    "403, url=URL('https://h/a?X-Amz-Date=1&X-Amz-Signature=...')"
    >>> redacted("postgresql+psycopg://user@host/database"), redacted("http://host:9000/run@5")
    ('postgresql+psycopg://user@host/database', 'http://host:9000/run@5')
    >>> redacted("train --hf-token abc --max-tokens 512"), redacted("HF_TOKEN=abc MAX_TOKENS=512")
    ('train --hf-token ... --max-tokens 512', 'HF_TOKEN=... MAX_TOKENS=512')
    """
    if not _compiled(_MAY_HOLD).search(text):
        return text
    # URLs first: a pattern of a query would take the host with a password that looks like one.
    text = _compiled(_USERINFO).sub(_without_user, text)
    for pattern, left in _REMOVED:
        text = _compiled(pattern).sub(left, text)
    return text


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
    secrets = {m["user"] for m in _compiled(_USERINFO).finditer(url)}
    secrets |= {m[0][len(m[1]) :] for m in _compiled(_QUERY).finditer(url)}
    secrets |= {user.removesuffix("@").partition(":")[2] for user in secrets}
    secrets |= {unquote(secret) for secret in secrets}
    # The longest first: a password alone would leave the rest of user:password.
    for secret in sorted(secrets, key=len, reverse=True):
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
        return type(value)(redacted_value(v) for v in without_arguments(value))
    return value


def without_arguments(values: Sequence[Any]) -> Sequence[Any]:
    """Return the items of a command line without those that are the secret of the option before them.

    >>> without_arguments(["train.py", "--token", "abc", "--eos-token", "</s>"])
    ['train.py', '--token', '...', '--eos-token', '</s>']
    """
    return [
        GONE if isinstance(value, str) and _is_argument(before, value) else value
        for before, value in zip([None, *values], values, strict=False)
    ]


def _is_argument(before: Any, value: str) -> bool:
    if not isinstance(before, str) or not before.startswith("-"):
        return False
    option, secret = _compiled(_SECRET_OPTION), _compiled(_SECRET_VALUE)
    return option.fullmatch(before) is not None and secret.fullmatch(value) is not None


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


def _without_strict_user(match: re.Match[str]) -> str:
    container = ":" not in match["user"] and _compiled(_CONTAINERS).match(match["scheme"])
    return match[0] if container else match["scheme"]


def _without_user(match: re.Match[str]) -> str:
    user = match["user"]
    named = ":" not in user and "%3a" not in user.lower() and _compiled(_BY_NAME).match(match["scheme"])
    userinfo = user if named or _compiled(_NO_SECRET).fullmatch(user) else ""
    return f"{match['scheme']}{match['sep']}{userinfo}"


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern on first use: all of them take 4 ms, and most commands need one."""
    return re.compile(pattern)
