"""Verify the signature or the token of a request, and the age of a signature.

The body is not parsed before. Every valid secret is tried, and every comparison runs to its end. So the time
does not reveal which secret, or which part of a signature, was right.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence

from ckptcore.page.http_errors import RequestRefused
from deployments.receiver.senders import Dialect

WINDOW = 300  # seconds that a signed time may differ from the clock, as in the Standard Webhooks library
MAX_SIGNATURES = 8  # a sender that changes its secret signs twice
BEARER = "bearer "
# No quotes, braces and blanks: signed parts are joined by dots, and a body must not pass for an id.
_ID = re.compile(r"[A-Za-z0-9._:~/+=-]{1,255}")
_TIME = re.compile(r"[0-9]{1,11}")


def key_of(secret: str, kind: str) -> bytes:
    """Return the HMAC key of a secret. Raises `ValueError` if the secret is not valid for its kind.

    kind: ``text`` or ``whsec``.

    >>> key_of("whsec_YWJj", "whsec"), key_of("YWJj", "text")
    (b'abc', b'YWJj')
    """
    if kind == "text":
        return secret.encode()
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except binascii.Error as error:
        raise ValueError(f"the secret must be base64, with or without whsec_ before it: {error}") from error
    return key


def sign(dialect: Dialect, key: bytes, body: bytes, *, id: str = "", time: str = "") -> str:
    """Return one signature as in the header, including its prefix."""
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
    """Raise `RequestRefused` unless one of the secrets verifies the request.

    Args:
        dialect: the format of the sender.
        header: the header with the signature or token. A token's header can differ from its dialect's.
        secrets: HMAC keys or tokens.
        headers: by lower-case name.
        body: as received.
        now: seconds since 1970.
    """
    proof = headers.get(header, "")
    if not proof:
        raise RequestRefused("unauthorized", f"no {header}")
    if dialect.signed is None:
        token = proof[len(BEARER) :] if proof[: len(BEARER)].lower() == BEARER else proof
        candidates = [token.strip().encode()]
        expected = list(secrets)
    else:
        id, time = _signed_headers(dialect, headers, now)
        candidates = [candidate.encode() for candidate in proof.split()[:MAX_SIGNATURES]]
        expected = [sign(dialect, key, body, id=id, time=time).encode() for key in secrets]
    # A list: `any` over a generator would stop at the first match. Digests are compared, because comparing
    # different lengths ends at once and would reveal a token's length.
    fits = [
        hmac.compare_digest(_sha256(candidate), _sha256(expected_proof))
        for candidate in candidates
        for expected_proof in expected
    ]
    if not any(fits):
        raise RequestRefused("unauthorized", "no secret matches")


def _sha256(proof: bytes) -> bytes:
    return hashlib.sha256(proof).digest()


def _signed_headers(dialect: Dialect, headers: Mapping[str, str], now: float) -> tuple[str, str]:
    assert dialect.signed is not None
    id = time = ""
    if "id" in dialect.signed:
        id = headers.get(dialect.id[0].removeprefix("@"), "")
        if not _ID.fullmatch(id):
            raise RequestRefused("unauthorized", "the event's id is missing or not valid")
    if dialect.time is not None:
        time = headers.get(dialect.time, "")
        if not _TIME.fullmatch(time):
            raise RequestRefused("unauthorized", "the signed time is missing or not a time")
        if abs(now - int(time)) > WINDOW:
            raise RequestRefused("unauthorized", f"signed at {time}, {now - int(time):+.0f} s from now")
    return id, time
