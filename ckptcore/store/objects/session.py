"""Make clients of botocore with the options of s3fs, for threads that wait for their sockets.

s3fs has the user's credentials, profiles, endpoints and options, by its own conventions. Its own requests go
through asyncio and aiohttp, which copy every byte four times. botocore, below them, has the same signatures,
addresses and errors. Its own repeats and second checks are off: `retry` has the one layer.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import cache
from typing import Any

from ckptcore.errors import UsageError
from ckptcore.store import Buffer
from ckptcore.utils.foreign_text import InvalidText, parse_http_time, parsing

_STALLED_S = 15  # without a byte
_CONNECTIONS = 64
_SENT = 1 << 20  # bytes given to a socket at a time; each may take as long as a silent store
_SIGNER, _USUAL = "ckptcore-s3v4", ("v4", "s3v4")
# botocore's own repeats and checks are off: they would multiply, and cost a second pass over the bytes.
_CONFIG: Mapping[str, Any] = {
    "retries": {"mode": "standard", "total_max_attempts": 1},
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}
_DEFAULTS: Mapping[str, Any] = {"max_pool_connections": _CONNECTIONS, "read_timeout": _STALLED_S}
_NO_SESSION = object()
_KEYS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")


class S3Session:
    """The connections of this process for one file system of s3fs.

    Args:
        file_system: That of s3fs, or its options alone (`s3_options`).
    """

    def __init__(self, file_system: Any) -> None:
        self._fs = file_system
        self._lock, self._pid = threading.Lock(), 0
        self._client: Any = None

    def ask(self, method: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Send one request, and return its answer."""
        client = self.client()
        parameters = _members(client, method)
        # As s3fs does: its options say more (the requester pays, encryption), where the request knows that.
        arguments = {**self._fs.s3_additional_kwargs, **self._fs.req_kw, **asked}
        answer: dict[str, Any] = getattr(client, method)(
            **{name: value for name, value in arguments.items() if name in parameters and value is not None}
        )
        return answer

    def client(self) -> Any:
        """Return botocore's client, which a forked process makes anew: connections cannot be shared."""
        if self._pid != os.getpid():
            with self._lock:
                if self._pid != os.getpid():
                    self._client = _connected(self._fs)
                    self._pid = os.getpid()
        return self._client


class PartBody(io.BytesIO):
    """The bytes of a part as botocore signs them, and then sends them: never copied.

    Args:
        data: The bytes.
        given_up: Whether nobody waits for the request any more.
    """

    def __init__(self, data: Buffer | bytes, given_up: Callable[[], bool]) -> None:
        super().__init__()
        self._view, self._at, self._given_up = memoryview(data).cast("B"), 0, given_up

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes: a view of them, which is hashed like bytes."""
        count = len(self._view) if size is None or size < 0 else size
        piece = self._view[self._at : self._at + count]
        self._at += len(piece)
        return piece or b""  # type: ignore[return-value]

    def readinto(self, into: Any, /) -> int:
        """Fill ``into``."""
        target = memoryview(into).cast("B")
        piece = self.read(len(target))
        target[: len(piece)] = piece
        return len(piece)

    read1, readinto1 = read, readinto  # those of the base know nothing of these bytes

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move to a byte."""
        self._at = max(0, offset + (0, self._at, len(self._view))[whence])
        return self._at

    def tell(self) -> int:
        """Return the next byte's place."""
        return self._at

    def getbuffer(self) -> memoryview:
        """Return all bytes."""
        return self._view[:]

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes as they are given to a socket. The time-out of a socket is for one call."""
        for offset in range(0, len(self._view), _SENT):
            if self._given_up():
                raise ConnectionAbortedError("nobody waits for this request any more")
            yield self._view[offset : offset + _SENT]


def share_service_models(file_system: Any) -> None:
    """Let the sessions of this process share what botocore knows about services.

    That is a megabyte of JSON, which each session parses for itself: three quarters of the time until its
    first request.

    Args:
        file_system: That of s3fs, before its first request.
    """
    if getattr(file_system, "session", _NO_SESSION) is not None:
        return
    from aiobotocore.session import AioSession
    from botocore.exceptions import BotoCoreError

    try:
        session = AioSession(**file_system.kwargs)
        session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    except (BotoCoreError, TypeError):  # a wrong profile or option: s3fs reports it with its first request
        return
    file_system.session = session


def _connected(fs: Any) -> Any:
    """Return a client with the options of a file system, as `S3FileSystem.set_session` takes them."""
    from botocore import UNSIGNED
    from botocore.auth import AUTH_TYPE_MAPS, S3SigV4Auth
    from botocore.config import Config
    from botocore.handlers import add_expect_header
    from botocore.session import Session

    if fs.storage_options.get("session") is not None:
        raise UsageError(
            "the option session of s3fs cannot be used", hint="name a profile, or give key and secret"
        )
    session = Session(**fs.kwargs)
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_moment)
    client_options = {
        "aws_access_key_id": fs.key,
        "aws_secret_access_key": fs.secret,
        "aws_session_token": fs.token,
        "endpoint_url": fs.endpoint_url,
        "use_ssl": fs.use_ssl,
    }
    client_options = {
        name: value for name, value in client_options.items() if value is not None
    } | fs.client_kwargs
    # botocore makes the user agent twice for each request: an eighth of its time.
    config = {"connect_timeout": fs.connect_timeout, **_DEFAULTS, "user_agent": _user_agent(session)}
    config |= fs.config_kwargs | _CONFIG
    if fs.anon:
        client_options = {name: value for name, value in client_options.items() if name not in _KEYS}
        config["signature_version"] = UNSIGNED
    client = session.create_client("s3", config=Config(**config), **client_options)
    # awscrt signs, too, but reads a body in pieces of 4 KiB through Python: twice the time of its SHA-256.
    AUTH_TYPE_MAPS.setdefault(_SIGNER, S3SigV4Auth)
    events = client.meta.events
    events.register_first("choose-signer.s3", _signer)
    # Bodies are sent at once: waiting for "100 Continue" costs a round trip for each part.
    events.unregister("before-call.s3", add_expect_header)
    events.register("before-send.s3", _in_pieces)
    return client


def _user_agent(session: Any) -> str:
    """Return how requests name their sender, with the user's own mark."""
    mark = session.get_config_variable("user_agent_appid")
    return f"ckptcore {session.user_agent()}" + (f" app/{mark}" if mark else "")


def _moment(text: Any) -> datetime:
    """Return a time in an answer: dateutil, which botocore asks, takes 0.2 ms for each row of a list."""
    with suppress(InvalidText), parsing("a time"):
        moment = datetime.fromisoformat(text) if text[4:5] == "-" else parse_http_time(text)
        if moment.tzinfo is not None:
            return moment
    from botocore.utils import parse_timestamp

    with parsing("a time"):
        parsed_time: datetime = parse_timestamp(text)
    return parsed_time


def _signer(signature_version: Any, context: Mapping[str, Any], **_: Any) -> str | None:
    """Choose hashlib's SHA-256 for S3's usual signature, and leave every other to botocore."""
    chosen = context.get("auth_type") or signature_version
    return _SIGNER if chosen in _USUAL and not context.get("unsigned_payload") else None


def _in_pieces(request: Any, **_: Any) -> None:
    """Give a part's bytes to the socket in large pieces: files are read in pieces of 16 KiB."""
    if isinstance(request.body, PartBody):
        request.body = request.body.pieces()


class _Descriptions:
    """Reads botocore's files into plain dicts, in half of the time of its ordered ones."""

    _ENDINGS = (".json", open), (".json.gz", gzip.open)

    def exists(self, path: str) -> bool:
        """Report whether there is a file of this name, without its ending."""
        return any(os.path.isfile(path + ending) for ending, _ in self._ENDINGS)

    def load_file(self, path: str) -> Any:
        """Return the content of the file, or None if there is none."""
        for ending, opened in self._ENDINGS:
            with suppress(FileNotFoundError), opened(path + ending, "rb") as file:
                return json.loads(file.read())
        return None


@cache
def _loader(data_path: str | None) -> Any:
    from botocore.loaders import create_loader

    loader = create_loader(data_path)
    loader.file_loader = _Descriptions()
    return loader


def _members(client: Any, method: str) -> Any:
    """Return the parameters that a request knows."""
    name = client.meta.method_to_api_mapping[method]
    return client.meta.service_model.operation_model(name).input_shape.members
