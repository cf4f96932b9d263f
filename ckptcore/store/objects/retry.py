"""Repeat requests that failed for a moment, and explain those that failed for good.

This is the only layer that repeats a request to an S3 store: those of s3fs and botocore are off, since layers
multiply. A request is repeated until its deadline (60 s, or ``CKPTCORE_REQUEST_DEADLINE`` seconds) with waits
that grow and vary, and at least as long as the store asks for (``Retry-After``). It is not repeated when the
work that it belongs to has failed (`ckptcore.utils.workers.failed`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from enum import StrEnum
from typing import Any, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, wait_random_exponential

from ckptcore.errors import (
    CkptError,
    DestinationUnwritable,
    SourceChanged,
    SourceUnreadable,
    StorageTrouble,
    UsageError,
)
from ckptcore.redaction import GONE, redacted_of
from ckptcore.utils import host
from ckptcore.utils.foreign_text import is_number
from ckptcore.utils.workers import failed as work_failed

DEADLINE_VARIABLE = "CKPTCORE_REQUEST_DEADLINE"
_DEADLINE_S = 60.0
_LONGEST_WAIT_S = 10.0
_SHORTEST_SECRET = 4
_LOOK_S = 0.1  # between two looks at whether a request was given up
T = TypeVar("T")


class AnswerKind(StrEnum):
    """What an answer of the store, or its absence, means."""

    TROUBLE = "trouble"  # momentary: throttled, 5xx, reset, cut off, silent
    MISSING = "missing"
    DENIED = "denied"
    CREDENTIALS = "credentials"
    CHANGED = "changed"  # it has another ETag than the one asked for
    EXISTS = "exists"  # create-only, and there is one
    NO_UPLOAD = "no-upload"  # completed or aborted already, or never begun
    RANGE = "range"  # behind the end of the object
    UNSUPPORTED = "unsupported"  # by this store
    INVALID = "invalid"


Kind = AnswerKind

# Codes of S3's answers: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
_CODES = {
    "NoSuchKey": Kind.MISSING,
    "NoSuchBucket": Kind.MISSING,
    "NotFound": Kind.MISSING,
    "NoSuchVersion": Kind.MISSING,
    "NoSuchUpload": Kind.NO_UPLOAD,
    "AccessDenied": Kind.DENIED,
    "Forbidden": Kind.DENIED,
    "AllAccessDisabled": Kind.DENIED,
    "AccountProblem": Kind.DENIED,
    "InvalidObjectState": Kind.DENIED,  # archived
    "InvalidAccessKeyId": Kind.CREDENTIALS,
    "SignatureDoesNotMatch": Kind.CREDENTIALS,
    "ExpiredToken": Kind.CREDENTIALS,
    "InvalidToken": Kind.CREDENTIALS,
    "TokenRefreshRequired": Kind.CREDENTIALS,
    "RequestTimeTooSkewed": Kind.CREDENTIALS,
    "PreconditionFailed": Kind.CHANGED,
    "ConditionalRequestConflict": Kind.TROUBLE,  # of two at once; to be sent again
    "InvalidRange": Kind.RANGE,
    "NotImplemented": Kind.UNSUPPORTED,
    "SlowDown": Kind.TROUBLE,
    "SlowDownRead": Kind.TROUBLE,
    "SlowDownWrite": Kind.TROUBLE,
    "Throttling": Kind.TROUBLE,
    "ThrottlingException": Kind.TROUBLE,
    "RequestLimitExceeded": Kind.TROUBLE,
    "TooManyRequests": Kind.TROUBLE,
    "RequestTimeout": Kind.TROUBLE,
    "InternalError": Kind.TROUBLE,
    "ServiceUnavailable": Kind.TROUBLE,
    "OperationAborted": Kind.TROUBLE,
    "BadDigest": Kind.TROUBLE,  # what arrived is not what was sent
    "IncompleteBody": Kind.TROUBLE,
    "XAmzContentSHA256Mismatch": Kind.TROUBLE,
    "XAmzContentChecksumMismatch": Kind.TROUBLE,
}
_STATUSES = {
    401: Kind.CREDENTIALS,
    403: Kind.DENIED,
    404: Kind.MISSING,
    408: Kind.TROUBLE,
    409: Kind.CHANGED,
    412: Kind.CHANGED,
    416: Kind.RANGE,
    429: Kind.TROUBLE,
    501: Kind.UNSUPPORTED,
}
# Exceptions of clients, by the names of their classes and bases: some need not be installed.
_CLASSES = {
    "NoCredentialsError": Kind.CREDENTIALS,
    "PartialCredentialsError": Kind.CREDENTIALS,
    "CredentialRetrievalError": Kind.CREDENTIALS,
    "TokenRetrievalError": Kind.CREDENTIALS,
    "ProfileNotFound": Kind.CREDENTIALS,
    "ConfigNotFound": Kind.CREDENTIALS,
    "SSOError": Kind.CREDENTIALS,
    "SSLError": Kind.INVALID,
    "ProxyConnectionError": Kind.TROUBLE,
    "ParamValidationError": Kind.INVALID,
    "InvalidURL": Kind.INVALID,
    "InvalidEndpoint": Kind.INVALID,
    "HTTPClientError": Kind.TROUBLE,  # of botocore: connection, time-out, closed early
    "ConnectionError": Kind.TROUBLE,
    "IncompleteReadError": Kind.TROUBLE,
    "ResponseStreamingError": Kind.TROUBLE,
    "ResponseParserError": Kind.TROUBLE,  # an answer of a proxy, or cut off
    "ClientError": Kind.TROUBLE,  # of aiohttp; botocore's has a response
    "TimeoutError": Kind.TROUBLE,
    "OSError": Kind.TROUBLE,
}
_HINTS = {
    Kind.CREDENTIALS: "set the credentials of this store (AWS_PROFILE, AWS_ACCESS_KEY_ID, ...)",
    Kind.DENIED: "check the rights of these credentials in the bucket's policy",
    Kind.MISSING: "check the URL",
    Kind.UNSUPPORTED: "this store does not know that request",
}


class ShortBody(Exception):
    """A response ended before its last byte, and may be asked for again."""


def deadline_s() -> float:
    """Return how long one request is repeated, seconds; raises `UsageError` for a wrong variable."""
    text = os.environ.get(DEADLINE_VARIABLE, "")
    try:
        seconds = float(text or _DEADLINE_S)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86400:  # also not a number
        raise UsageError(f"{DEADLINE_VARIABLE} must be seconds from 0 to 86400 (got {text!r})")
    return seconds


def kind_of(error: BaseException) -> Kind | None:
    """Return what an exception of a client, or an error that came of one, means; None for a defect."""
    if isinstance(error, CkptError):
        kind = error.values.get("kind")
        return Kind(kind) if kind in set(Kind) else None
    if isinstance(error, ShortBody):
        return Kind.TROUBLE
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        code, status = _code(response), _status(response)
        return _CODES.get(code) or _STATUSES.get(status) or (Kind.TROUBLE if status >= 500 else Kind.INVALID)
    if isinstance(error, FileNotFoundError):
        return Kind.MISSING
    if isinstance(error, PermissionError):
        return Kind.DENIED
    names = [cls.__name__ for cls in type(error).__mro__]
    return next((_CLASSES[name] for name in names if name in _CLASSES), None)


def explained(
    error: Exception,
    url: str,
    *,
    writing: bool = False,
    attempts: int = 1,
    create: bool = False,
    secrets: Collection[str] = (),
) -> CkptError:
    """Return the error of ckptcore for an exception of a client.

    Args:
        error: The exception.
        url: The URL that was asked for.
        writing: Whether the request writes.
        attempts: Requests that were sent.
        create: Whether the request was create-only.
        secrets: Values that must not be in the message.
    """
    if isinstance(error, CkptError):
        return error
    kind = kind_of(error) or Kind.INVALID
    if create and kind is Kind.CHANGED:
        kind = Kind.EXISTS
    verb = "write" if writing else "read"
    tries = f" after {attempts} requests" if attempts > 1 else ""
    message = f"cannot {verb} {url}{tries}: {_reason(error)}"
    for secret in secrets:
        if len(secret) >= _SHORTEST_SECRET:
            message = message.replace(secret, GONE)
    message = redacted_of(message, url)
    values: dict[str, Any] = {"kind": kind.value, "attempts": attempts}
    if kind is Kind.TROUBLE:
        return StorageTrouble(message, **values)
    if kind is Kind.CHANGED and not writing:
        return SourceChanged(
            redacted_of(f"{url} was replaced while it was being read", url),
            hint="the source is being written; run again when writing has ended",
            **values,
        )
    cls = DestinationUnwritable if writing else SourceUnreadable
    return cls(message, hint=_HINTS.get(kind), **values)


def never() -> bool:
    """Return False: the caller waits for the request."""
    return False


def with_retries(
    call: Callable[[], T],
    url: str,
    *,
    writing: bool = False,
    create: bool = False,
    secrets: Collection[str] = (),
    deadline: float | None = None,
    given_up: Callable[[], bool] = never,
) -> T:
    """Send a request, and again after transient failures, until the deadline.

    Args:
        call: Sends the request once.
        url: The URL, for messages.
        writing: Whether the request writes.
        create: Whether it is create-only.
        secrets: Values that must not be in a message.
        deadline: Seconds; None for `deadline_s`.
        given_up: Whether nobody waits for it any more; then it is not repeated, and a wait for that ends.

    Raises:
        CkptError: What `explained` returns for the last failure.
    """
    limit = deadline_s() if deadline is None else deadline
    began, attempts = host.monotonic(), 0
    last_failure: Exception | None = None

    def is_useless() -> bool:
        return given_up() or work_failed()

    def send_once() -> T:
        nonlocal attempts, last_failure
        if last_failure is not None and is_useless():  # became so while this slept
            raise last_failure
        attempts += 1
        try:
            return call()
        except Exception as error:
            last_failure = error
            raise

    def sleep_while_useful(seconds: float) -> None:
        end = host.monotonic() + seconds
        while (left := end - host.monotonic()) > 0 and not is_useless():
            host.sleep(min(left, _LOOK_S))

    policy = Retrying(
        # A wait that would end behind the deadline is not begun.
        stop=lambda state: is_useless() or host.monotonic() - began + state.upcoming_sleep > limit,
        sleep=sleep_while_useful,
        wait=_Wait(),
        retry=retry_if_exception(lambda error: kind_of(error) is Kind.TROUBLE),
        reraise=True,
    )
    try:
        return policy(send_once)
    except Exception as error:
        raise explained(
            error, url, writing=writing, attempts=attempts, create=create, secrets=secrets
        ) from error


class _Wait:
    """Seconds until the next request: random, growing, and no less than the store asks for."""

    def __init__(self) -> None:
        self._grow = wait_random_exponential(multiplier=0.2, max=_LONGEST_WAIT_S)

    def __call__(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        return max(self._grow(state), _asked_wait(error))


def _asked_wait(error: BaseException | None) -> float:
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return 0.0
    headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    asked = str(headers.get("retry-after", ""))
    return float(asked) if is_number(asked) else 0.0  # a date is no reason to wait: clocks differ


def _reason(error: Exception) -> str:
    response = getattr(error, "response", None)
    if not isinstance(response, dict) or not _code(response):
        return str(error) or type(error).__name__
    message = str(response.get("Error", {}).get("Message", ""))
    answer = f"the store answered {_status(response) or ''} {_code(response)}".replace("  ", " ")
    return answer if message in ("", _code(response)) else f"{answer}: {message}"


def _code(response: dict[str, Any]) -> str:
    return str(response.get("Error", {}).get("Code", ""))


def _status(response: dict[str, Any]) -> int:
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status if isinstance(status, int) else 0
