"""Verify: did the holder of a secret send exactly these bytes, and just now?

Nothing of the body is parsed before. Every live secret is tried, and every comparison is made to its end: how
long it takes says nothing about which secret, or which part of a signature, was right.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence

from deployments.receiver.http_errors import RequestRefused
from deployments.receiver.senders import Dialect

WINDOW = 300  # seconds that a signed time may be away from ours, as the Standard Webhooks library has it
MAX_SIGNATURES = 8  # a sender that changes its secret signs twice
BEARER = "bearer "
# No quotes, braces and blanks: what is signed is joined by dots, and a body must not be taken for an id.
_ID = re.compile(r"[A-Za-z0-9._:~/+=-]{1,255}")
_TIME = re.compile(r"[0-9]{1,11}")


def key_of(secret: str, kind: str) -> bytes:
    """The HMAC key of a secret; raises ValueError when it is not spelled as its kind demands.

    kind: ``text`` or ``whsec``.

    >>> key_of("whsec_YWJj", "whsec"), key_of("YWJj", "text")
    (b'abc', b'YWJj')
    """
    if kind == "text":
        return secret.encode()
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except binascii.Error as error:
        raise ValueError(
            f"a secret of this kind is base64, with or without whsec_ before it: {error}"
        ) from error
    return key


def sign(dialect: Dialect, key: bytes, body: bytes, *, id: str = "", time: str = "") -> str:
    """One signature as it stands in the header, prefix included."""
    assert dialect.signed is not None
    parts = {"id": id.encode(), "time": time.encode(), "body": body}
    message = b"".join(parts.get(part, part.encode()) for part in dialect.signed)
    digest = hmac.new(key, message, hashlib.sha256)
    encoded = (
        base64.b64encode(digest.digest()).decode() if dialect.encoding == "base64" else digest.hexdigest()
    )
    return dialect.prefix + encoded


def verify(
    dialect: Dialect,
    header: str,
    secrets: Sequence[bytes],
    headers: Mapping[str, str],
    body: bytes,
    now: float,
) -> None:
    """Raise `RequestRefused` unless one of the secrets proves the request.

    header: where the proof stands; a token's header may differ from its dialect's. secrets: keys or tokens.
    headers: by lower-case name. now: seconds since 1970.
    """
    given = headers.get(header, "")
    if not given:
        raise RequestRefused("unauthorized", f"no {header}")
    if dialect.signed is None:
        token = given[len(BEARER) :] if given[: len(BEARER)].lower() == BEARER else given
        candidates = [token.strip().encode()]
        expected = list(secrets)
    else:
        id, time = _signed_headers(dialect, headers, now)
        candidates = [one.encode() for one in given.split()[:MAX_SIGNATURES]]
        expected = [sign(dialect, key, body, id=id, time=time).encode() for key in secrets]
    # Made to the end: `any` over a generator would stop at the first that fits.
    # Of digests, because comparing what differs in length ends at once, and would tell the length of a token.
    fits = [hmac.compare_digest(_sha256(one), _sha256(other)) for one in candidates for other in expected]
    if not any(fits):
        raise RequestRefused("unauthorized", "no secret fits")


def _sha256(proof: bytes) -> bytes:
    return hashlib.sha256(proof).digest()


def _signed_headers(dialect: Dialect, headers: Mapping[str, str], now: float) -> tuple[str, str]:
    assert dialect.signed is not None
    id = time = ""
    if "id" in dialect.signed:
        id = headers.get(dialect.id[0].removeprefix("@"), "")
        if not _ID.fullmatch(id):
            raise RequestRefused("unauthorized", "the event's id is missing or cannot be one")
    if dialect.time is not None:
        time = headers.get(dialect.time, "")
        if not _TIME.fullmatch(time):
            raise RequestRefused("unauthorized", "the signed time is missing or is none")
        if abs(now - int(time)) > WINDOW:
            raise RequestRefused("unauthorized", f"signed at {time}, {now - int(time):+.0f} s from now")
    return id, time
